"""Processes that tests start: as a user does, or forked from a server that has imported what a run needs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lightning", "torchmetrics", "packmamba.cli", "packmamba.training.fit"])


def run_py(*arguments: Any, **kwargs: Any) -> subprocess.Popen:
    """Start ``python run.py arguments``."""
    command = [sys.executable, str(ROOT / "run.py"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def fork(function: Callable, *arguments: Any, output: Path, **environment: str) -> multiprocessing.Process:
    """Start ``function(*arguments)`` in a process and process group of its own, its exit status what it returns (None: 0).

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
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # data loaders' workers start as anywhere else
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def fork_ranks(count: int, function: Callable, *arguments: Any, output: Path) -> list[multiprocessing.Process]:
    """Start ``function(*arguments)`` in ``count`` ranks with torchrun's environment variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        fork(function, *arguments, output=output, **common, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(count)
    ]


def kill(*processes: multiprocessing.Process) -> None:
    """Send SIGKILL to each process and to what it has started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def statuses(*processes: multiprocessing.Process, timeout: float = 300) -> list[int]:
    """Wait for the processes' exit statuses; -9 for one that had to be killed after ``timeout`` seconds."""
    for process in processes:
        process.join(timeout)
    kill(*(process for process in processes if process.is_alive()))
    return [process.exitcode for process in processes]


class ForkedWorker:
    """What ``subprocess.Popen`` is to a sweep's worker, forked from the sweep's own process, which must not have trained."""

    def __init__(self, command: list[str], env: dict[str, str], pass_fds: list[int], **_: Any) -> None:
        assert command[1:3] == ["-m", "packmamba.training.worker"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            edges = [2, *pass_fds, os.sysconf("SC_OPEN_MAX")]
            for low, high in zip(edges, edges[1:]):
                os.closerange(low + 1, high)
            os.environ.clear()
            os.environ.update(env)
            from packmamba.training import worker

            worker.main(Connection(int(command[3])))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(0.005)
        return self.returncode


def sweep_with_forked_workers(*arguments: str) -> int:
    """``run.py sweep arguments``, for a fork."""
    import types

    import run
    from packmamba.training import worker

    worker.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker})
    return run.main(["sweep", *arguments])
