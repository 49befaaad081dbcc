"""Train the runs of a sweep: in this process, in a worker process for each device slot, or as jobs of SLURM."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from packmamba.config import Config, key, resolve, to_dict
from packmamba.errors import ConfigError, UserError
from packmamba.training.callbacks import Stopped
from packmamba.training.fit import fit
from packmamba.training.run_id import LEASE_SECONDS, Locked, RunLock, find_record, run_folder

PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
START_METHOD, CLUSTER = "spawn", "slurm"
STOP_SECONDS = 10.0
"""Time for a run that is told to stop to end its step and write a checkpoint."""
RETRY_SECONDS = 1.25 * LEASE_SECONDS
"""A run that another process has locked is tried again after all others, and waited for so long."""
BUSY_MIB = 1024
"""A GPU of which more memory is in use is not free."""
THREADS = 4
"""Maximum threads of a run on a GPU, and the threads of a run on a CPU under ``jobs=auto``."""


class Outcome(NamedTuple):
    """``state``: done, diverged, stopped (it continues from its checkpoint), locked (by another process), or failed."""

    state: str
    why: str = ""


Report = Callable[[Config, Optional[Outcome], str], None]
"""Called with a run and its place when it begins (no outcome), and when it has ended."""


def train(config: Config, progress: bool, stop: Callable[[], bool] = lambda: False, wait: float = 0.0) -> Outcome:
    """Train one run. An error in it is its outcome, with the traceback on stderr.

    Args:
        stop: called after each step; True stops the run there, with a checkpoint.
        wait: seconds to wait for another process that has locked the run.
    """
    try:
        if config.trainer.devices > 1:
            return _train_in_ranks(config, progress, stop)
        with RunLock(run_folder(config), wait):
            return _outcome(fit(config, progress, lambda _: stop()))
    except Locked as error:
        return Outcome("locked", str(error))
    except Stopped as stopped:
        if stopped.status > 128:  # by a signal to this process
            raise KeyboardInterrupt from None
        return Outcome("stopped", f"after step {stopped.step}")
    except UserError as error:
        return Outcome("failed", str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", " ".join(f"{type(error).__name__}: {error}".split())[:300])


def _outcome(record: dict[str, Any]) -> Outcome:
    metrics = record["metrics"]
    if "diverged_at_step" in metrics:
        return Outcome("diverged", f"its loss was not finite at step {metrics['diverged_at_step']:.0f}")
    return Outcome("done", f"validation loss {metrics['val_loss']:.4f}")


def _train_in_ranks(config: Config, progress: bool, stop: Callable[[], bool]) -> Outcome:
    """Train a run on several devices in a process of its own, in which Lightning starts the other ranks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SUBMITIT_"))}
    command = [sys.executable, "-m", __name__, json.dumps(to_dict(config)), str(int(progress)), str(os.getpid())]
    process = subprocess.Popen(command, env=environment | {"PYTHONPATH": PYTHONPATH}, start_new_session=True)
    try:
        while process.poll() is None and not stop():
            time.sleep(0.2)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if (record := find_record(config)) is not None:
        return _outcome(record)
    return Outcome("stopped" if stop() else "failed", f"its first rank ended with status {process.wait()}")


def _end_with(parent: int) -> None:
    """End this process, and its group, when its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _train_queue(
    queue: deque[tuple[Config, float]],
    train_one: Callable[[Config, float], Outcome],
    report: Report,
    place: str,
    last: float = float("inf"),
) -> None:
    """Train runs, each with how long to wait for its lock, until the time ``last``."""
    while queue and time.monotonic() < last:
        try:
            config, seconds = queue.popleft()
        except IndexError:  # another slot was faster
            return
        report(config, None, place)
        outcome = train_one(config, seconds)
        if outcome.state == "locked" and not seconds:
            queue.append((config, RETRY_SECONDS))
        else:
            report(config, outcome, place)


def run_here(configs: Iterable[Config], report: Report, progress: bool) -> None:
    """Train runs one after another in this process."""
    queue = deque((config, 0.0) for config in configs)
    _train_queue(queue, lambda config, seconds: train(config, progress, wait=seconds), report, "")


class Slot(NamedTuple):
    """A place for one run at a time: its name, its GPU's UUID or "", and threads."""

    name: str
    gpu: str
    threads: int


@contextlib.contextmanager
def device_slots(jobs: int | str, on_gpu: bool) -> Iterator[list[Slot]]:
    """Yield ``jobs`` slots on GPUs, free ones first, or on shares of the cores. Free GPUs are locked to this sweep.

    Args:
        jobs: number of slots; ``auto``: one on each free GPU, or without GPUs one for each four cores.
        on_gpu: whether runs use a GPU if there is one.

    Raises:
        ConfigError: ``auto``, and no GPU is free.
    """
    gpus, free = _gpus() if on_gpu else {}, []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.ExitStack() as locks:
        for gpu, used in gpus.items():
            with contextlib.suppress(Timeout):
                lock = FileLock(f"{tempfile.gettempdir()}/packmamba-{os.getuid()}-{gpu}.lock", timeout=0)
                if used < BUSY_MIB and locks.enter_context(lock):
                    free.append(gpu)
        if jobs == "auto" and gpus and not free:
            raise ConfigError(f"jobs: expected a number, as none of the {len(gpus)} GPUs is free, got auto")
        count = (len(free) or max(1, cores // THREADS)) if jobs == "auto" else int(jobs)
        threads = max(1, min(cores // count, THREADS if gpus else cores))
        order = [*free, *(gpu for gpu in gpus if gpu not in free)] or [""]
        chosen = [order[number % len(order)] for number in range(count)]
        names = [f"GPU {[*gpus].index(gpu)}" if gpu else f"CPU {number}" for number, gpu in enumerate(chosen)]
        yield [Slot(name, gpu, threads) for name, gpu in zip(names, chosen)]


def _gpus() -> dict[str, int]:
    """Return the UUID of each GPU that CUDA may use, with the MiB of its memory in use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    if visible == "" or shutil.which("nvidia-smi") is None:
        return {}
    query += [] if visible is None else ["-i", visible]
    listed = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return {uuid: int(used) for uuid, used in (line.split(", ") for line in listed if line.startswith("GPU-"))}


def run_in_slots(configs: Iterable[Config], slots: list[Slot], report: Report, deadline: float = float("inf")) -> None:
    """Train runs in order, each in the next free slot. A worker process that is killed fails its run alone.

    Args:
        deadline: of ``time.monotonic``; runs stop ``STOP_SECONDS`` earlier, with a checkpoint, and no other begins.
    """
    context, others = multiprocessing.get_context(START_METHOD), set(multiprocessing.active_children())
    stop, queue, last = context.Event(), deque((config, 0.0) for config in configs), deadline - STOP_SECONDS

    def work(slot: Slot) -> None:
        pools: list[ProcessPoolExecutor] = []

        def train_one(config: Config, seconds: float) -> Outcome:
            if not pools:
                pools.append(ProcessPoolExecutor(1, context, _start_worker, (slot, stop, os.getpid())))
            try:
                outcome = pools[0].submit(_train_in_worker, config, last, seconds).result()
            except BrokenProcessPool:
                outcome = Outcome("stopped" if stop.is_set() else "failed", "its process was killed")
            if outcome.state == "failed":  # the next run gets a fresh process
                pools.pop().shutdown(wait=False)
            return outcome

        _train_queue(queue, train_one, report, slot.name, last)

    threads, before = ThreadPoolExecutor(len(slots)), signal.signal(signal.SIGTERM, signal.default_int_handler)
    working = [threads.submit(work, slot) for slot in slots]
    try:
        wait(working, None if last == float("inf") else max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        stop.set()
        queue.clear()
        wait(working, STOP_SECONDS)
        raise
    finally:
        stop.set()
        queue.clear()
        signal.signal(signal.SIGTERM, before)
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        threads.shutdown()
    for each in working:
        each.result()  # raises what it raised


_stop: Any = None
"""In a worker process, the event that stops its run."""


def _start_worker(slot: Slot, stop: Any, parent: int) -> None:
    global _stop
    _stop = stop
    os.setsid()  # Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which SLURM sends to every process of a job
    _end_with(parent)
    os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpu
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(slot.threads))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(slot.threads)


def _train_in_worker(config: Config, last: float, wait: float) -> Outcome:
    """Train a run, which stops at the time ``last``. What it prints goes to ``output.txt`` in its folder."""
    run_folder(config).mkdir(parents=True, exist_ok=True)
    with open(run_folder(config) / "output.txt", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return train(config, False, lambda: _stop.is_set() or time.monotonic() > last, wait)


@dataclass
class SlurmConfig:
    partition: Optional[str] = key(None, "Partition of the jobs; null for the cluster's default.")
    time: str = key(
        "4h",
        "Time limit of a job, such as 30m, 12h or 2d; a run that needs longer is requeued.",
        check=("minutes, hours or days, such as 30m, 12h or 2d", re.compile(r"[1-9]\d*[mhd]").fullmatch),
    )
    gpus: int = key(1, "GPUs of a job for each of its run's trainer.devices.", low=0, high=1)
    cpus: int = key(4, "Cores of a job for each of its run's trainer.devices.", low=1)
    memory: Optional[str] = key(None, "Memory of each job, such as 32GB; null for the cluster's default.")
    grace: int = key(90, "Seconds before the time limit at which SLURM signals a job, which is requeued then.", low=1)
    setup: list[str] = key([], "Lines of shell that each job begins with, such as [module load cuda].")
    options: dict[str, Any] = key({}, "Further options of sbatch, such as {account: mine, qos: low}.")


class Job:
    """Train one run in a job of SLURM; submitit requeues a job that is preempted or at its time limit."""

    def __call__(self, config: Config) -> Outcome:
        return train(config, False, wait=RETRY_SECONDS)

    def checkpoint(self, config: Config) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, config)


def check_slurm() -> None:
    """Raise ConfigError where there is no submitit or no SLURM."""
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("launcher: slurm needs submitit, which is not installed; pip install 'packmamba[slurm]'")
    if CLUSTER == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("launcher: slurm needs a machine that submits jobs, and sbatch is not found here")


def run_as_jobs(configs: list[Config], slurm: SlurmConfig, jobs: int | str, output: str, report: Report) -> None:
    """Submit an array with a job for each run, and wait for all. Interrupted, jobs go on."""
    from submitit import AutoExecutor

    os.environ["PYTHONPATH"] = PYTHONPATH
    submitted = []
    for devices in sorted({config.trainer.devices for config in configs}):
        alike = [config for config in configs if config.trainer.devices == devices]
        executor = AutoExecutor(Path(output).absolute() / "jobs", CLUSTER, slurm_max_num_timeout=1000)
        executor.update_parameters(
            timeout_min=int(slurm.time[:-1]) * {"m": 1, "h": 60, "d": 24 * 60}[slurm.time[-1]],
            cpus_per_task=slurm.cpus * devices,
            gpus_per_node=slurm.gpus * devices or None,
            slurm_array_parallelism=len(alike) if jobs == "auto" else jobs,
            slurm_mem=slurm.memory,
            slurm_partition=slurm.partition,
            slurm_setup=slurm.setup,
            slurm_signal_delay_s=slurm.grace,
            slurm_additional_parameters=slurm.options,
        )
        submitted += zip(alike, executor.map_array(Job(), alike))
    for config, job in submitted:
        report(config, None, f"job {job.job_id}")
    for config, job in submitted:
        try:
            outcome = job.result()
        except Exception as error:  # of submitit: the job failed, or was cancelled
            outcome = Outcome("failed", str(error).strip().splitlines()[-1])
        report(config, outcome, f"job {job.job_id}")


if __name__ == "__main__":  # a rank of a run on several devices
    if "LOCAL_RANK" not in os.environ:
        _end_with(int(sys.argv[3]))
    fit(resolve(Config, [(OmegaConf.create(sys.argv[1]), "the sweep")]), bool(int(sys.argv[2])))
