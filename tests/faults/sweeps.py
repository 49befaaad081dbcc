"""Trials of sweeps: a launcher or a worker is killed, several launchers share one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import yaml
from kills import KILLS_IN_A_ROW, World, expect, same, whole_so_far

from packmamba.records import read_records
from packmamba.training.sweep import load_sweep
from processes import fork, statuses, sweep_with_forked_workers
from runs import losses_of, write_config


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
        begun = [fork(sweep_with_forked_workers, str(path), f"jobs={jobs}", output=output) for _ in range(launchers)]
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
    status = max(map(abs, statuses(fork(sweep_with_forked_workers, str(path), "jobs=2", output=output), timeout=180)))
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
