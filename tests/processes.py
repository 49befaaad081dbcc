"""Processes that tests start: as a user does, or forked from a server that has imported what a run
needs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
FORKS.set_forkserver_preload(["lightning", "torchmetrics", "packmamba.cli", "packmamba.lab.fit"])


def fork(function: Callable, *arguments: Any, output: Path, **environment: str) -> multiprocessing.Process:
    """Start ``function(*arguments)`` in a process and process group of its own, its exit status
    what it returns (None: 0).

    Its standard streams are appended to ``output``; ``environment`` is added to this process's.
    """
    process = FORKS.Process(target=_child, args=(function, arguments, output, {**os.environ, **environment}))
    process.start()
    return process


def _child(function: Callable, arguments: tuple, output: Path, environment: dict[str, str]) -> None:
    import torch

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)  # an abort says where
    os.environ.clear()
    os.environ.update(environment)
    # data loaders' workers start as anywhere else
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def fork_ranks(count: int, function: Callable, *arguments: Any, output: Path) -> list[multiprocessing.Process]:
    """Start ``function(*arguments)`` in ``count`` ranks with torchrun's environment variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [fork(function, *arguments, output=output, **common, **each) for each in own]


def run_ranks(count: int, function: Callable, *arguments: Any, output: Path) -> None:
    """Run ``function(*arguments)`` in ``count`` ranks; where one fails, say what all have said."""
    ended = statuses(*fork_ranks(count, function, *arguments, output=output))
    assert ended == [0] * count, output.read_text()


def kill(*processes: multiprocessing.Process) -> None:
    """Send SIGKILL to each process and to what it has started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def statuses(*processes: multiprocessing.Process, timeout: float = 300) -> list[int]:
    """Wait for the processes' exit statuses; -9 for one that had to be killed after ``timeout``
    seconds.
    """
    for process in processes:
        process.join(timeout)
    kill(*(process for process in processes if process.is_alive()))
    return [process.exitcode for process in processes]


def hold(folder: Path) -> multiprocessing.Process:
    """Start a process that locks a run's folder until it is killed."""
    locked = FORKS.Event()
    process = FORKS.Process(target=_hold, args=(folder, locked))
    process.start()
    assert locked.wait(60)
    return process


def _hold(folder: Path, locked: Any) -> None:
    from packmamba.lab.run_id import RunLock

    with RunLock(folder):
        locked.set()
        signal.pause()


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the system refuse longer files, as a full disk does: Python ignores the signal that comes
    with it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
