"""Trials of sweeps: a launcher or a worker is killed, several launchers share one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import yaml
from kills import KILLS_IN_A_ROW, World, expect, same, whole_so_far

import run
from packmamba.records import read_records
from packmamba.training import pool
from packmamba.training.sweep import load_sweep
from packmamba.training.worker import Worker, main
from processes import fork, statuses
from runs import losses_of, write_config


def sweep(path: str, jobs: int) -> int:
    """In a child: the command, whose workers are forked, since starting one takes seconds."""
    pool.Worker = ForkedWorker  # type: ignore[misc]
    return run.main(["sweep", path, f"jobs={jobs}"])


class ForkedWorker(Worker):
    """A sweep's worker that is this process's fork instead of a new interpreter."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.pipe, other = Pipe()
        pid = os.fork()
        if not pid:
            os.setsid()
            os.environ.update(place.environment)
            self.pipe.close()
            try:
                main(other)
            finally:
                os._exit(0)
        other.close()
        self.process = Forked(pid)  # type: ignore[assignment]


class Forked:
    """What ``subprocess.Popen`` has, of a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.01)
        return self.returncode or 0


def killed_sweep(world: World, folder: Path, rng: random.Random, launchers: int = 1) -> int:
    """Kills of a sweep's launcher or of one of its workers; or several launchers of one sweep, one of which is killed."""
    expected = world._expected.get("sweep") or sweep_results(world, world.folder / "undisturbed" / "sweep", [])
    world._expected["sweep"] = expected
    kills = sweep_results(world, folder, expected, rng, launchers)
    return kills


def sweep_results(world: World, folder: Path, expected: Any, rng: Any = None, launchers: int = 1) -> Any:
    """Results by arm and seed of a sweep that is left alone; of one that is killed, how often."""
    folder.mkdir(parents=True, exist_ok=True)
    base = write_config(folder / "base.yaml", world.configs["packed"])
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({
        "output": str(folder / "sweep"), "base": str(base), "grid": {"seed": [0, 1]}, "throughput_rounds": 0,
        "arms": {"padded": {"data.strategy": "padded"}, "packed": {"data.strategy": "greedy"}},
    }))  # fmt: skip
    _, configs = load_sweep(path)
    output, jobs, kills = folder / "output.txt", 2 // launchers, 0
    for _ in range(KILLS_IN_A_ROW if rng else 0):
        begun = [fork(sweep, str(path), jobs, output=output) for _ in range(launchers)]
        time.sleep(rng.uniform(0.2, world.seconds["sweep"]))
        victims = [pid for process in begun if process.is_alive() for pid in [process.pid, *children(process.pid)]]
        if victims:
            os.kill(rng.choice(victims), signal.SIGKILL)
            kills += 1
        found = statuses(*begun, timeout=180)
        expect(set(found) <= {-9, 0, 1, 3}, "lost", f"launchers ended with {found}, see {output}")
        for config in configs:
            whole_so_far(config)
        if set(found) == {0}:
            break
    began = time.monotonic()
    status = max(map(abs, statuses(fork(sweep, str(path), 2, output=output), timeout=180)))
    world.seconds.setdefault("sweep", time.monotonic() - began)
    expect(status == 0, "lost", f"the last launcher ended with {status}, see {output}")
    records = read_records(folder / "sweep")
    found = {(record["arm"], record["seed"]): losses_of(record) for record in records}
    expect(len(found) == len(configs), "lost", f"{len(found)} of {len(configs)} records")
    expect(len(records) == len(found), "doubled", f"{len(records)} records of {len(found)} runs")
    if not rng:
        return found
    expect(same(list(found.values()), list(expected.values())), "lost", "other losses")
    return kills


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
