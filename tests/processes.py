"""Processes that tests start. Importing what a run needs takes seconds, so most are forked from one that has imported it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import run
from packmamba.training import worker
from packmamba.training.process import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
SPAWN = util.spawnv_passfds


def start_server() -> None:
    """Forks the server of later forks from this process as it is: a process that has computed gradients must not fork."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's start in the background ignores it
    resource_tracker.ensure_running()
    util.spawnv_passfds = _serve
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = SPAWN


def _serve(_: bytes, arguments: list[str], passed: list[int]) -> int:
    """What Python has a new interpreter do, in a fork instead."""
    if pid := os.fork():
        return pid
    util.spawnv_passfds = SPAWN
    forkserver._forkserver.__init__()  # whose lock is held here: a fork that runs pytest has a server of its own
    die_with_parent()
    atexit._clear()
    logging.root.handlers.clear()  # pytest's, as its standard streams are
    sys.stdout, sys.stderr = (open(stream, "w", 1, closefd=False) for stream in (1, 2))
    try:
        exec(arguments[-1])
    finally:
        os._exit(0)


def run_py(*arguments: Any, **kwargs: Any) -> subprocess.Popen:
    """``python run.py arguments``, as a user starts it."""
    command = [sys.executable, str(ROOT / "run.py"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


def fork(function: Callable, *arguments: Any, output: Path, **environment: str) -> multiprocessing.Process:
    """``function(*arguments)`` in a process and process group of its own, whose exit status is what it returns (None is 0);
    all it prints goes to the end of ``output``. Its environment is this process's, not that of the server's start."""
    process = FORKS.Process(target=_child, args=(function, arguments, output, {**os.environ, **environment}))
    process.start()
    return process


def _child(function: Callable, arguments: tuple, output: Path, environment: dict[str, str]) -> None:
    os.setsid()
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # loaders start their workers as anywhere else
    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def fork_ranks(count: int, function: Callable, *arguments: Any, output: Path) -> list[multiprocessing.Process]:
    """The same in each of ``count`` ranks, which find in their environment what torchrun says."""
    said = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    return [
        fork(function, *arguments, output=output, **said, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]


class ForkedWorker:
    """What ``subprocess.Popen`` is to a sweep's worker, forked from the sweep's own process, which must not have trained."""

    def __init__(self, command: list[str], env: dict[str, str], pass_fds: list[int], **_: Any) -> None:
        assert command[1:3] == ["-m", worker.__name__]
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
    worker.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": ForkedWorker})
    return run.main(["sweep", *arguments])


def kill(*processes: multiprocessing.Process) -> None:
    """SIGKILL to each process and to what it has started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def statuses(*processes: multiprocessing.Process, timeout: float = 300) -> list[int]:
    """Waits; -9 for one that had to be killed."""
    for process in processes:
        process.join(timeout)
    kill(*(process for process in processes if process.is_alive()))
    return [process.exitcode for process in processes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
