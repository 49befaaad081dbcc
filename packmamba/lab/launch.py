"""Train a sweep's runs: here, or in a process for each device slot.

A run that fails ends with a status and a sentence; it takes no other with it. A slot is a GPU, or a
share of the cores, and has one worker process for run after run, since a process that imports
PyTorch costs seconds. Only a failed run's worker is replaced: what it left on the GPU goes with it.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch

from packmamba.config import Config
from packmamba.errors import UserError
from packmamba.lab.callbacks import Stopped
from packmamba.lab.fit import fit
from packmamba.lab.run_id import Locked, RunLock, run_folder

START_METHOD = "spawn"
STOP_SECONDS = 10.0  # for a step and a checkpoint
THREADS = 4  # at most, of a run on a GPU; at least, of one on a CPU under jobs=auto


class Status(NamedTuple):
    """Say what becomes of a run, and why.

    It begins, or is done, stopped, locked (by another process) or failed.
    """

    state: str
    why: str = ""


def train(config: Config, progress: bool, stop: Callable[[], bool] = lambda: False) -> Status:
    """Train a run, which ``stop`` may stop after each step.

    Raises KeyboardInterrupt where a signal stopped it, and no other exception.
    """
    try:
        with RunLock(run_folder(config)):
            metrics = fit(config, progress, lambda _: stop())["metrics"]
    except Locked as error:
        return Status("locked", str(error))
    except Stopped as stopped:
        # 128 + a signal's number: this process was told to stop, and not the run alone.
        if stopped.status > 128:
            raise KeyboardInterrupt from None
        return Status("stopped", f"after step {stopped.step}")
    except UserError as error:
        return Status("failed", " ".join(str(error).split()))
    except Exception as error:
        traceback.print_exc()
        return Status("failed", " ".join(f"{type(error).__name__}: {error}".split())[:300])
    if "diverged_at_step" in metrics:
        return Status("done", f"diverged at step {metrics['diverged_at_step']}")
    return Status("done", f"validation loss {metrics['val_loss']:.4f}")


def run_here(configs: Iterable[Config], report: Callable[..., None], progress: bool) -> None:
    """Train runs one after another in this process."""
    for config in configs:
        report(config, Status("begins"))
        report(config, train(config, progress))


class Slot(NamedTuple):
    """Hold where a worker's runs train; ``gpu`` is their CUDA_VISIBLE_DEVICES, empty on a CPU."""

    name: str
    gpu: str
    threads: int


def device_slots(jobs: int | str, on_gpu: bool) -> list[Slot]:
    """Return slots on the visible GPUs, in turn, or on cores."""
    count = torch.cuda.device_count() if on_gpu else 0
    # Names of GPUs are those of the variable, so that a worker can be given one of them.
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # As many runs as GPUs; without one, as many as get THREADS cores each.
    number = (count or max(1, cores // THREADS)) if jobs == "auto" else int(jobs)
    threads = max(1, min(cores // number, THREADS if gpus else cores))
    if gpus:
        return [Slot(f"GPU {gpus[i % count]}", gpus[i % count], threads) for i in range(number)]
    return [Slot(f"CPU {i}", "", threads) for i in range(number)]


def run_in_slots(configs: Iterable[Config], slots: list[Slot], report: Callable[..., None]) -> None:
    """Train runs in order, each in the next free slot.

    They stop with a checkpoint where this process gets SIGINT or SIGTERM.
    """
    context = multiprocessing.get_context(START_METHOD)
    queue = deque(configs)
    stop = context.Event()

    def work(slot: Slot) -> None:
        pool = None
        while queue and not stop.is_set():
            config = queue.popleft()
            report(config, Status("begins"), slot.name)
            # Made with the first run, and again after a failed one.
            pool = pool or ProcessPoolExecutor(1, context, _start_worker, (slot, stop))
            try:
                status = pool.submit(_train_in_worker, config).result()
            except BrokenProcessPool:
                status = Status("stopped" if stop.is_set() else "failed", "its process was killed")
            if status.state == "failed":  # a fresh process: what the run holds on the GPU must go
                pool.shutdown(wait=False)
                pool = None
            report(config, status, slot.name)
        if pool is not None:
            pool.shutdown()

    # SIGTERM raises KeyboardInterrupt below, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    threads = ThreadPoolExecutor(len(slots))
    running = [threads.submit(work, slot) for slot in slots]
    try:
        wait(running)
    except KeyboardInterrupt:
        stop.set()
        wait(running, STOP_SECONDS)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        stop.set()
        # Workers that have not stopped by now.
        for child in multiprocessing.active_children():
            child.kill()
    for future in running:
        future.result()  # raises what a thread raised


_stop: Any = None  # a worker's event, which its parent sets


def _start_worker(slot: Slot, stop: Any) -> None:
    """Prepare a worker process for its slot; it ends when its parent does."""
    global _stop
    _stop = stop
    os.setsid()  # Ctrl-C is the parent's
    # A cluster sends it to every process of a job; the parent stops runs.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    # A parent that was killed cannot stop its workers, which would hold their GPUs.
    def end_with_parent() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpu
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(slot.threads))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(slot.threads)


def _train_in_worker(config: Config) -> Status:
    """Train a run whose output goes to ``output.txt`` in its folder."""
    folder = run_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output.txt", "a") as file:
        # By descriptor, so that what compiled libraries print is in the file, too.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return train(config, progress=False, stop=_stop.is_set)
