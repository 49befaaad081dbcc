"""A sweep of 40 runs on a made-up cluster that preempts ten and kills two: python tests/faults/cluster.py.

Every tenth run is trained, the others are stand-ins: jobs, claims, requeues and records are tried. Then one on two devices is.
It prints what happened, and exits with 1 unless there are 37 records and 3 reasons. ``record=yes`` writes records/cluster.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import fake_slurm
import submitit
from stand_in import FAILS, few_are_real
from test_sweeps import write_sweep

from packmamba.cli.status import sweep_status
from packmamba.errors import Unfinished
from packmamba.records import provenance, read_records
from packmamba.training import slurm
from packmamba.training.fit import fit
from packmamba.training.pool import Queue
from packmamba.training.sweep import load_sweep
from runs import losses_of

PLAN = {
    **dict.fromkeys((0, 1, 2, 3), ["usr2"]),
    **dict.fromkeys((4, 5, 10), ["term"]),
    **dict.fromkeys((6, 7, 20), ["both"]),
    8: ["timeout"],
    9: ["oom"],
}
KINDS = {
    "usr2": "job preempted, told by SIGUSR2",
    "term": "job preempted, told by SIGTERM, requeued by SLURM",
    "both": "job preempted, told by both",
    "timeout": "job killed at its time limit",
    "oom": "job killed for its memory",
}
KEYS = {"trainer.max_steps": 40, "trainer.checkpoint_every": 40, "trainer.validate_every": 20, "trainer.threads": 1}


def try_cluster(folder: Path) -> dict[str, dict[str, int]]:
    """The trials by kind; prints the table of the sweep at its end."""
    os.environ |= fake_slurm.install(folder / "cluster", PLAN)
    os.environ |= {"PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}", "FAKE_GRACE": "8"}
    slurm.POLL_SECONDS, submitit.SlurmJob._results_timeout_s = 0.2, 1
    arms = {"packed": {"data.strategy": "greedy"}}
    path = write_sweep(folder, throughput_rounds=0, grid={"seed": [*range(FAILS + 1)]}, arms=arms, common=KEYS)
    sweep, configs = load_sweep(path, ["launcher=slurm", "jobs=8", "slurm.time=2h"])
    queue = Queue(configs, progress=True)
    slurm.run_as_jobs(queue, slurm.slurm_executor(sweep.slurm, sweep.jobs, "sweep", sweep.output), 60, few_are_real)
    try:
        queue.check()
    except Unfinished as unfinished:
        print(unfinished)
    table = sweep_status(configs)
    print(table.text())
    lines = [line.split() for line in (folder / "cluster" / "log").read_text().splitlines()]
    requeues = Counter(int(line[2]) for line in lines if line[0] == "requeue")
    records = Counter(record["seed"] for record in read_records(sweep.output))
    whole = {n: losses_of(fit(load_sweep(path, [f"output={folder}/whole"])[1][n], progress=False)) for n in (0, 10, 20)}
    ended = {record["seed"]: losses_of(record) for record in read_records(sweep.output)}
    fails = {FAILS, *(n for n, happens in PLAN.items() if happens[0] in ("timeout", "oom"))}
    found: dict[str, dict[str, int]] = {}
    for number in range(len(configs)):
        kind = (
            KINDS[PLAN[number][0]] if number in PLAN else "a run that fails" if number == FAILS else "a job left alone"
        )
        counts = found.setdefault(kind, {"trials": 0, "lost": 0, "doubled": 0, "undetected": 0})
        counts["trials"] += 1
        counts["lost"] += number not in fails and (
            not records[number] or whole.get(number, ended[number]) != ended[number]
        )
        asked = 1 if PLAN.get(number, [""])[0] in ("usr2", "both") else 0
        counts["doubled"] += records[number] > 1 or requeues[number] != asked
        counts["undetected"] += number in fails and table.rows[number][-1].text == "-"
    return found


def try_two_devices(folder: Path) -> dict[str, dict[str, int]]:
    """One trained run on two devices, all of whose processes are told to go, compared with one that was left alone."""
    arms = {"packed": {"data.strategy": "greedy"}}
    keys = {**KEYS, "trainer.devices": 2, "trainer.strategy": "ddp", "trainer.log_every": 2}
    ended = []
    for name, plan in {"alone": {}, "told": {0: ["both"]}}.items():
        os.environ |= fake_slurm.install(folder / name, plan)
        path = write_sweep(folder, throughput_rounds=0, grid={"seed": [0]}, arms=arms, common=keys)
        sweep, configs = load_sweep(path, ["launcher=slurm", "slurm.gpus=0", f"output={folder}/{name}-sweep"])
        queue = Queue(configs, progress=True)
        slurm.run_as_jobs(queue, slurm.slurm_executor(sweep.slurm, 1, "sweep", sweep.output), 60)
        queue.check()
        ended.append([losses_of(record) for record in read_records(sweep.output)])
    lines = [line.split() for line in (folder / "told" / "log").read_text().splitlines()]
    counts = {"trials": 1, "lost": int(not ended[1] or ended[1][0] != ended[0][0]), "doubled": 0, "undetected": 0}
    counts["doubled"] = int(len(ended[1]) > 1 or [line[0] for line in lines].count("requeue") != 1)
    return {"job of a run on two devices preempted, told by both": counts}


def main() -> int:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = try_cluster(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        found |= try_two_devices(Path(folder))
    totals = {
        name: sum(counts[name] for counts in found.values()) for name in ("trials", "lost", "doubled", "undetected")
    }
    print(", ".join(f"{name} {count}" for name, count in totals.items()))
    if "record=yes" in sys.argv[1:]:
        made = {
            "campaign": "cluster",
            "commit": provenance()["commit"],
            "seconds": time.monotonic() - begun,
            "kinds": found,
        }
        (HERE / "records").mkdir(exist_ok=True)
        (HERE / "records" / "cluster.json").write_text(json.dumps(made, indent=1) + "\n")
    return int(any(count for name, count in totals.items() if name != "trials"))


if __name__ == "__main__":
    sys.exit(main())
