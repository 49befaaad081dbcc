"""Whole optimizer steps on several devices: DDP and FSDP2 through Lightning on packed rows, each as a torchrun of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from tqdm import tqdm

from experiments.speedup import config
from experiments.speedup.arms import Arm as Rows
from packmamba import timing
from packmamba.config import ConfigError, key
from packmamba.data.packing import STRATEGIES
from packmamba.records import append_record, make_record, provenance

# Of the summed loss over the targets of a step: what bfloat16's rounding makes of other orders of sums and of batches.
TOLERANCE = {"bf16-mixed": 2e-3, "32-true": 1e-5}


@dataclass
class Arm:
    """What the table compares; its record holds these fields."""

    parallel: str = key("ddp", "Lightning's strategy.", choices=("ddp", "fsdp2"))
    devices: int = key(1, "How many.", low=1)


@dataclass
class Config:
    experiment: str = key("speedup", "The question, which the records name.")
    model: str = key("1.4b", "A size in configs/model.")
    overrides: list[str] = key([], "key=value of the run configuration, such as model.compile=true.")
    arms: dict[str, Arm] = key(
        {}, "By name; the first is what the others are compared with.", check=("at least one arm", bool)
    )
    strategy: str = key(
        "best_fit",
        "How documents become rows, for every arm.",
        choices=tuple(name for name in STRATEGIES if name != "split"),
    )
    row_length: Optional[int] = key(16384, "Slots of a row; see the arms of the speedup bench.", low=1)
    distribution: str = key("documents-2k", "Distribution of the documents' lengths.", choices=config.DISTRIBUTION)
    documents: int = key(4096, "Synthetic documents.", low=1)
    slots: int = key(16384, "Slots of a step on each device.", low=1)
    same_steps: int = key(3, "First steps, on the same documents for every arm, whose losses must agree.", low=1)
    rounds: int = key(5, "Timed turns of four steps of ``slots`` slots a device.", low=1)
    precision: str = key("bf16-mixed", "Lightning's.", choices=TOLERANCE)
    accelerator: str = key("gpu", "gpu, or cpu (gloo).", choices=("gpu", "cpu"))
    num_workers: int = key(2, "Processes of each device that prepare its batches.", low=0)
    timeout_seconds: int = key(300, "Longest time for one arm.", low=1)
    seed: int = key(0, "Of lengths, tokens and weights.", low=0)

    @property
    def rows(self) -> Rows:
        return Rows(self.strategy, self.row_length)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.accelerator == "gpu" else "cpu")

    @property
    def most(self) -> int:
        """Devices of the largest arm."""
        return max(arm.devices for arm in self.arms.values())


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one multi_gpu record for each arm: first ``same_steps`` steps of the same documents on however many devices,
    then timed ones.

    Raises:
        ConfigError: there are not as many GPUs, and nothing has been measured; or an arm takes longer than it may.
        RuntimeError: an arm failed, or its losses are not the first arm's; it is not recorded.
    """
    if c.accelerator == "gpu" and torch.cuda.device_count() < c.most:
        raise ConfigError(f"arms: {c.most} devices need as many GPUs; PyTorch sees {torch.cuda.device_count()}")
    provenance()
    settings = {name: value for name, value in asdict(c).items() if name not in ("experiment", "arms", "seed")}
    expected: list[float] = []
    for name, arm in tqdm(c.arms.items(), desc=c.model, unit="arm", disable=not progress):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            results = _launch(c, name, arm, Path(folder))
        expected = expected or results["losses"]
        errors = [abs(a - b) / abs(b) for a, b in zip(results["losses"], expected, strict=True)]
        if not max(errors) <= TOLERANCE[c.precision]:
            raise RuntimeError(f"{name}: losses {results['losses']} of the same documents are not {expected}")
        seconds = results["seconds"]
        median = timing.median(seconds)
        metrics = {
            "seconds_per_step": median,
            "seconds_spread": timing.spread(seconds),
            "real_tokens_per_second": sum(results["tokens"]) / len(seconds) / median,
            "slots_per_second": sum(results["slots"]) / len(seconds) / median,
            "peak_memory_bytes": results["peak_memory_bytes"],
            "loss_error": max(errors),
        }
        if progress:
            print(name, {k: v and float(f"{v:.4g}") for k, v in metrics.items()}, flush=True)
        record = make_record(
            kind="multi_gpu",
            experiment=c.experiment,
            arm=name,
            config={**settings, "sorted_by_length": False, **asdict(arm), **results["config"]},
            seed=c.seed,
            corpus_hash=results["corpus"],
            metrics=metrics,
            wall_seconds=time.perf_counter() - begun,
            curves={"loss": [{"step": i, "loss": loss} for i, loss in enumerate(results["losses"])]},
        )
        append_record(records_path, record)


def _launch(c: Config, name: str, arm: Arm, folder: Path) -> dict[str, Any]:
    job = {"bench": asdict(c), "arm": asdict(arm), "folder": str(folder)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arm.devices}",
        "-m", "experiments.speedup.multi_gpu", json.dumps(job),
    ]  # fmt: skip
    # torchrun sets one thread for each of several processes where nothing is said, and so it is for one. PYTHONPATH finds this
    # package wherever it was found.
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        status, errors = _run(command, env, c.timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"timeout_seconds: {name} took longer than {c.timeout_seconds} s") from None
    results = folder / "results.json"
    if status or not results.is_file():
        raise RuntimeError(f"{name} failed:\n{errors[-4000:]}")
    return json.loads(results.read_text())


def _run(command: list[str], env: dict[str, str], timeout_seconds: float) -> tuple[int, str]:
    """torchrun's status and errors. One that takes too long is told to end, and ends its ranks: killed, it would leave them."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    ) as process:  # fmt: skip
        try:
            _, errors = process.communicate(timeout=timeout_seconds)
        except BaseException:
            process.terminate()
            process.communicate()
            raise
        return process.returncode, errors


def _work(job: dict[str, Any]) -> None:
    """One process of an arm; the first writes what it saw."""
    from experiments.speedup.model import Model  # imports Lightning: a wrong key is refused before
    from experiments.speedup.steps import TURN_STEPS, WARM_UP, Turn, step_config, take_turns

    arm = Arm(**job["arm"])
    c = Config(**job["bench"] | {"arms": {name: Arm(**fields) for name, fields in job["bench"]["arms"].items()}})
    shared = config.Config(
        models=[c.model], overrides=c.overrides, distribution=c.distribution, documents=c.documents, slots=c.slots,
        precision=c.precision, num_workers=c.num_workers, seed=c.seed,
    )  # fmt: skip
    model = Model(shared, c.model, c.device, Path(), False)
    keys = {"devices": arm.devices, "strategy": arm.parallel, "accelerator": c.accelerator}
    # The same documents a step for every arm, as many as the largest takes at once; then as many as these devices take.
    configs = [
        step_config(model, c.rows, c.slots * count, job["folder"], **keys) for count in (c.most, arm.devices)
    ]  # fmt: skip
    try:
        turns = [Turn(0, c.same_steps, timed=False), Turn(1, WARM_UP, timed=False), *[Turn(1, TURN_STEPS)] * c.rounds]
        watch = take_turns(configs, turns)
        if int(os.environ["RANK"]) == 0:
            results = {
                "losses": watch.losses[0], "seconds": watch.seconds[1], "slots": watch.slots[1],
                "tokens": watch.tokens[1], "peak_memory_bytes": watch.peaks[1], "corpus": model.corpus,
                "config": model.sizes(),
            }  # fmt: skip
            (Path(job["folder"]) / "results.json").write_text(json.dumps(results))
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
