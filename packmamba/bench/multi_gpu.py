"""Whole optimizer steps on several devices: DDP and FSDP2 through Lightning on packed rows, each as a torchrun of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from packmamba.bench.arms import Scheme
from packmamba.bench.speedup import Bench, SpeedupBenchConfig
from packmamba.bench.steps import STEPS, WARM_UP, Turn, step_config, take_turns
from packmamba.config import ConfigError, load_config
from packmamba.results.record import append_record, make_record, provenance
from packmamba.training.strategy import STRATEGIES, leave_process_group

# Of the summed loss over the targets of a step: what bfloat16's rounding makes of other orders of sums and of batches.
TOLERANCE = {"bf16-mixed": 2e-3, "32-true": 1e-5}


@dataclass
class MultiGpuBenchConfig:
    bench: str = "multi_gpu"
    """Which benchmark this is."""
    experiment: str = "speedup"
    """Records go to experiments/<experiment>/records."""
    model: str = "1.4b"
    """A size in configs/model."""
    overrides: list[str] = field(default_factory=list)
    """key=value of the run configuration, such as model.compile=true."""
    arms: list[str] = field(default_factory=lambda: ["ddp-1", "ddp-2", "ddp-4", "fsdp2-2", "fsdp2-4"])
    """strategy-devices each; the first is what the others are compared with."""
    scheme: str = "packed-16384-best_fit"
    """How documents become rows: an arm of the speedup bench."""
    distribution: str = "documents-2k"
    """Distribution of the documents' lengths."""
    documents: int = 4096
    """Synthetic documents."""
    slots: int = 16384
    """Slots of a step on each device."""
    same_steps: int = 3
    """First steps, on the same documents for every arm, whose losses must agree."""
    rounds: int = 5
    """Timed turns of four steps of ``slots`` slots a device."""
    precision: str = "bf16-mixed"
    """Lightning's."""
    accelerator: str = "gpu"
    """gpu, or cpu (gloo)."""
    timeout_seconds: int = 300
    """Longest time for one arm."""
    seed: int = 0
    """Of lengths, tokens and weights."""


Config = MultiGpuBenchConfig


def run(config: MultiGpuBenchConfig | Mapping[str, Any], records_path: Path, progress: bool = True) -> None:
    """Appends one multi_gpu record for each arm: first ``same_steps`` steps of the same documents on however many devices,
    then timed ones.

    Raises:
        ConfigError: a value is refused; nothing has been measured.
        RuntimeError: an arm failed, or its losses are not the first arm's; it is not recorded.
    """
    c = config if isinstance(config, MultiGpuBenchConfig) else MultiGpuBenchConfig(**config)
    arms = _check_config(c)
    provenance()
    expected: list[float] = []
    for strategy, devices in tqdm(arms, desc=c.model, unit="arm", disable=not progress):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            results = _launch(c, strategy, devices, Path(folder))
        expected = expected or results["losses"]
        errors = [abs(a - b) / abs(b) for a, b in zip(results["losses"], expected, strict=True)]
        if not max(errors) <= TOLERANCE[c.precision]:
            raise RuntimeError(
                f"{strategy} on {devices} devices: losses {results['losses']} of the same documents are not {expected}"
            )
        seconds = results["seconds"]
        median = statistics.median(seconds)
        metrics = {
            "seconds_per_step": median,
            "seconds_spread": float(np.subtract(*np.percentile(seconds, [75, 25]))),
            "real_tokens_per_second": sum(results["tokens"]) / len(seconds) / median,
            "slots_per_second": statistics.fmean(results["slots"]) / median,
            "peak_memory_bytes": results["peak_memory_bytes"],
            "loss_error": max(errors),
        }
        if progress:
            print(strategy, devices, {k: v and float(f"{v:.4g}") for k, v in metrics.items()}, flush=True)
        record = make_record(
            kind="multi_gpu",
            experiment=c.experiment,
            arm=f"{strategy}-{devices}",
            config={**asdict(c), "strategy": strategy, "devices": devices, **results["config"]},
            seed=c.seed,
            corpus_hash=results["corpus"],
            metrics=metrics,
            wall_seconds=time.perf_counter() - begun,
            curves={"loss": [{"step": i, "loss": loss} for i, loss in enumerate(results["losses"])]},
        )
        append_record(records_path, record)


def _check_config(c: MultiGpuBenchConfig) -> list[tuple[str, int]]:
    arms = []
    for arm in c.arms:
        strategy, _, devices = arm.partition("-")
        if strategy not in STRATEGIES or not devices.isdecimal() or int(devices) < 1:
            raise ConfigError(f"arms: expected strategy-devices, such as ddp-2, got {arm!r}")
        arms.append((strategy, int(devices)))
    if not arms:
        raise ConfigError("arms: expected at least one, got none")
    most = max(devices for _, devices in arms)
    if c.accelerator == "gpu" and torch.cuda.device_count() < most:
        raise ConfigError(f"arms: {most} devices need as many GPUs; PyTorch sees {torch.cuda.device_count()}")
    if c.precision not in TOLERANCE:
        raise ConfigError(f"precision: expected one of {', '.join(TOLERANCE)}, got {c.precision!r}")
    if min(c.same_steps, c.rounds) < 1:
        raise ConfigError("same_steps, rounds: expected at least 1")
    if Scheme.parse(c.scheme).peer:
        raise ConfigError(f"scheme: expected one of ours, got {c.scheme!r}")
    load_config(None, [f"model={c.model}", *c.overrides])
    return arms


def _launch(c: MultiGpuBenchConfig, strategy: str, devices: int, folder: Path) -> dict[str, Any]:
    most = max(int(arm.rpartition("-")[2]) for arm in c.arms)
    job = {"bench": asdict(c), "strategy": strategy, "devices": devices, "most": most, "folder": str(folder)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}",
        "-m", "packmamba.bench.multi_gpu", json.dumps(job),
    ]  # fmt: skip
    # torchrun sets one thread a process where nothing is said; PYTHONPATH finds this package wherever it was found.
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=c.timeout_seconds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    results = folder / "results.json"
    if done.returncode or not results.is_file():
        raise RuntimeError(f"{strategy} on {devices} devices failed:\n{done.stderr[-4000:]}")
    return json.loads(results.read_text())


def _work(job: dict[str, Any]) -> None:
    """One process of an arm; the first writes what it saw."""
    c = MultiGpuBenchConfig(**job["bench"])
    shared = SpeedupBenchConfig(
        overrides=c.overrides, distribution=c.distribution, documents=c.documents, slots=c.slots,
        precision=c.precision, seed=c.seed,
    )  # fmt: skip
    device = torch.device("cuda" if c.accelerator == "gpu" else "cpu")
    bench = Bench(shared, c.model, device, Path(), False)
    scheme, devices = Scheme.parse(c.scheme), job["devices"]
    keys = {"devices": devices, "strategy": job["strategy"], "accelerator": c.accelerator}
    # The same documents a step for every arm, as many as the largest takes at once; then as many as these devices take.
    configs = [
        step_config(bench, scheme, c.slots * count, job["folder"], **keys) for count in (job["most"], devices)
    ]  # fmt: skip
    try:
        turns = [Turn(0, c.same_steps, timed=False), Turn(1, WARM_UP, timed=False), *[Turn(1, STEPS)] * c.rounds]
        watch = take_turns(configs, turns)
        if int(os.environ["RANK"]) == 0:
            results = {
                "losses": watch.losses[0], "seconds": watch.seconds[1], "slots": watch.slots[1],
                "tokens": watch.tokens[1], "peak_memory_bytes": watch.peaks[1], "corpus": bench.corpus,
                "config": bench.sizes(),
            }  # fmt: skip
            (Path(job["folder"]) / "results.json").write_text(json.dumps(results))
    finally:
        leave_process_group()


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
