"""Where the runs of a sweep go side by side: free GPUs, or shares of the CPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from packmamba.config import Config
from packmamba.errors import ConfigError
from packmamba.training.process import LAUNCHED
from packmamba.training.worker import Place

BUSY_MIB = 1024
"""A GPU of which more memory is in use is not free."""
GPU_THREADS = 4
"""Most threads of a run on a GPU. Four such runs on one host of 64 cores trained at 2.09 million tokens/s with four threads each,
at 0.41 million with PyTorch's default for each."""
CPU_THREADS = 4
"""Threads of a run on a CPU under jobs=auto."""


class Gpu(NamedTuple):
    number: int
    uuid: str
    used_mib: int


@contextlib.contextmanager
def places(jobs: int | str, on_gpu: bool) -> Iterator[list[Place]]:
    """One place for each run of a sweep that goes at the same time. GPUs are kept from other sweeps with jobs=auto meanwhile.

    Args:
        jobs: how many, or ``auto``: one on each GPU that is free; without a GPU, one for each four cores.
        on_gpu: whether runs want a GPU if there is one.

    Raises:
        ConfigError: ``auto``, and no GPU is free.
    """
    gpus = visible_gpus() if on_gpu else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.ExitStack() as locks:
        free = [gpu for gpu in gpus if gpu.used_mib < BUSY_MIB and _keep(gpu, locks)]
        if jobs == "auto" and gpus and not free:
            used = ", ".join(f"GPU {gpu.number}: {gpu.used_mib} MiB in use" for gpu in gpus)
            raise ConfigError(
                f"jobs=auto: none of the {len(gpus)} GPUs is free ({used}); wait, or name how many runs at a time"
            )
        count = (len(free) or max(1, cores // CPU_THREADS)) if jobs == "auto" else int(jobs)
        share = max(1, cores // count)
        if not gpus:
            yield [Place(f"CPU {i}", _threads(share, share) | {"CUDA_VISIBLE_DEVICES": ""}) for i in range(count)]
            return
        order = [*free, *(gpu for gpu in gpus if gpu not in free)]
        chosen = [order[i % len(order)] for i in range(count)]
        yield [
            Place(f"GPU {gpu.number}", _threads(min(share, GPU_THREADS), share) | {"CUDA_VISIBLE_DEVICES": gpu.uuid})
            for gpu in chosen
        ]


def visible_gpus() -> list[Gpu]:
    """Those that nvidia-smi lists and CUDA_VISIBLE_DEVICES, if it is there, names; in its order."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    fields = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if line.strip()]
    gpus = [Gpu(int(number), uuid, int(used)) for number, uuid, used in fields]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    names = [name.strip() for name in named.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == str(gpu.number) or gpu.uuid.startswith(name)]


def _threads(threads: int, share: int) -> dict[str, str]:
    """What a run's environment says of threads, unless the user's does; compilers may use the run's whole share of the cores."""
    wanted = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": min(share, 32)}
    return {name: str(number) for name, number in wanted.items() if name not in os.environ}


def _keep(gpu: Gpu, locks: contextlib.ExitStack) -> bool:
    """Whether no other sweep has it; from now on this one has."""
    path = Path(tempfile.gettempdir()) / f"packmamba-{os.getuid()}-{gpu.uuid}.lock"
    file: IO[str] = locks.enter_context(open(path, "w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


NUMBERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK")
"""Where launchers say which of the processes one is: in all that are there the first is 0."""


def one_of_several(config: Config) -> bool:
    """Whether torchrun, SLURM or the like have started this process and others, which train the run together."""
    if not several_devices(config) or config.trainer.num_nodes > 1 or "LOCAL_RANK" in os.environ:
        return several_devices(config)
    counts = {name: os.environ.get(name, "1") for name in LAUNCHED if name != "MASTER_ADDR"}
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):  # a shell: its commands are not tasks
        counts.pop("SLURM_NTASKS")
    return any(count != "1" for count in counts.values())


def speaks(config: Config) -> bool:
    """Whether this process does what one of those that train a run together must do alone: it times and reports."""
    return not (one_of_several(config) and any(int(os.environ.get(name) or 0) for name in NUMBERS))


def several_devices(config: Config) -> bool:
    return config.trainer.devices * config.trainer.num_nodes > 1
