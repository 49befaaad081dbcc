"""What a process that trains is told before PyTorch starts. Imports nothing that takes time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Iterator

LAUNCHED = ("MASTER_ADDR", "SLURM_NTASKS", "JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE")
"""What those who start a process on every device say, each in its way."""


def limit_spinning() -> None:
    """Lets OpenMP's threads, before PyTorch starts them, spin for 60 us at most where they wait for each other, and then sleep.

    GNU's spin for milliseconds. On a busy machine that is time which the thread that they wait for needs: the demo's steps took
    six times as long on two cores beside three busy programs.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def keep_freed_memory() -> None:
    """Tells glibc to keep what is freed.

    Else it gives large tensors back to the system, which finds and clears the same pages again for the next ones: 47 thousand
    a step of two million parameters, 3 us each on a virtual machine. Other C libraries are left as they are.
    """
    trim_threshold, mmap_max = -1, -4
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, -1)
        libc.mallopt(mmap_max, 0)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Imports make no garbage: nobody looks for it here, nor later in what was imported, which takes half a second a time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent() -> None:
    """Has Linux kill this process when the one that started it ends, however that ends."""
    set_parent_death_signal = 1
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
