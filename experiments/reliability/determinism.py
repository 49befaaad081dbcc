"""One run with other numbers of cores, workers, jobs and ranks: which give the same bits, and if not, how far apart are the
weights?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.config import Config as Run
from packmamba.config import ConfigError, at_least, key, load_config, some, to_dict
from packmamba.errors import Unfinished
from packmamba.experiments import CHECKOUT
from packmamba.nn.pretrained import read_pretrained
from packmamba.records import append_record, make_record, provenance, read_records
from packmamba.training.checks import check_accelerator, check_run
from packmamba.training.runs import run_folder


@dataclass
class Arm:
    keys: list[str] = key([], "What it changes of the run, as key=value.")
    cores: Optional[int] = key(
        None, "How many threads PyTorch would take (OMP_NUM_THREADS); null: this machine's.", at_least(1)
    )
    jobs: Optional[int] = key(
        None, "It is trained by a sweep of two seeds, so many at a time; null: it is one run.", at_least(1)
    )


@dataclass
class Config:
    experiment: str = key("reliability", "The question, which the records name.")
    keys: list[str] = key([], "The training run, as key=value.")
    arms: dict[str, Arm] = key({}, "The first is what the others are compared with.", some("arm"))
    folder: Optional[str] = key(None, "Where runs lie meanwhile; null for the system's folder for such.")

    def problems(self) -> Iterator[str]:
        for name, arm in self.arms.items():
            try:
                load_config(None, [*self.keys, *arm.keys])
            except ConfigError as error:
                yield f"arms.{name}: {error}"


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record for each arm. Each trains in a process of its own, from the same seed on the same documents.

    metrics, against the first arm: weights_that_differ, a count of tensors; weights_relative_difference, the norm of the
    difference of all weights over their norm; loss_relative_difference, of the last step's loss; first_step_that_differs, null if
    none does; steps, parameters. The curve ``losses`` has each step's relative difference.

    Raises:
        ConfigError: this machine cannot run an arm.
        Unfinished: a run ended with an error; it is not recorded.
    """
    provenance()
    for arm in c.arms.values():
        config = load_config(None, [*c.keys, *arm.keys])
        check_accelerator(config)
        check_run(config)
    with tempfile.TemporaryDirectory(prefix="determinism-", dir=c.folder) as name:
        first: tuple[dict[str, Any], dict[str, Tensor]] | None = None
        for arm_name, arm in tqdm(c.arms.items(), unit="run", disable=not progress):
            folder = Path(name) / str(arm_name)
            config = load_config(None, [*c.keys, *arm.keys, f"data.cache_dir={name}/corpora", f"runs_dir={folder}"])
            begun = time.perf_counter()
            record, weights = train(config, arm, folder)
            first = first or (record, weights)
            metrics, losses = compare(first, (record, weights))
            made = make_record(
                kind="determinism",
                experiment=c.experiment,
                arm=str(arm_name),
                config={**asdict(arm), "run": c.keys},
                seed=config.seed,
                corpus_hash=record["corpus_hash"],
                metrics=metrics,
                curves={"losses": losses},
                wall_seconds=time.perf_counter() - begun,
            )
            append_record(records_path, made)


def train(config: Run, arm: Arm, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The run's record and its weights."""
    folder.mkdir()
    path = folder / "run.yaml"
    path.write_text(json.dumps(to_dict(config)))
    command = ["train", str(path)]
    if arm.jobs is not None:
        sweep = {
            "base": "run.yaml",
            "output": str(folder / "sweep"),
            "arms": {config.name: {}},
            "grid": {"seed": [config.seed, 77]},
        }
        (folder / "sweep.yaml").write_text(json.dumps(sweep | {"throughput_rounds": 0}))
        command = ["sweep", str(folder / "sweep.yaml"), f"jobs={arm.jobs}"]
        config.output, config.runs_dir = str(folder / "sweep"), str(folder / "sweep" / "runs")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.pop(name, None)
        if arm.cores is not None:
            environment[name] = str(arm.cores)
    command = [sys.executable, str(CHECKOUT / "run.py"), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Unfinished(f"the run in {folder} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    place = folder / "sweep" if arm.jobs is not None else run_folder(config)
    (record,) = [record for record in read_records(place) if record["seed"] == config.seed]
    _, weights = read_pretrained(run_folder(config))
    return record, weights


def compare(
    first: tuple[dict[str, Any], dict[str, Tensor]], other: tuple[dict[str, Any], dict[str, Tensor]]
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """The metrics, and each step's relative difference of the losses."""
    losses = [
        {"step": a["step"], "relative_difference": abs(b["loss"] - a["loss"]) / abs(a["loss"])}
        for a, b in zip(first[0]["curves"]["train"], other[0]["curves"]["train"], strict=True)
    ]
    pairs = [(weight.double(), other[1][name].double()) for name, weight in first[1].items()]
    apart = (
        torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
        / torch.stack([a.square().sum() for a, _ in pairs]).sum()
    )
    return {
        "steps": first[0]["metrics"]["steps"],
        "parameters": first[0]["metrics"]["parameters"],
        "weights_that_differ": sum(not torch.equal(a, b) for a, b in pairs),
        "weights_relative_difference": float(apart.sqrt()),
        "loss_relative_difference": losses[-1]["relative_difference"],
        "first_step_that_differs": next((point["step"] for point in losses if point["relative_difference"]), None),
    }, losses
