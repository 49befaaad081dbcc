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

from experiments.speedup.arms import Scheme
from experiments.speedup.config import SpeedupBenchConfig, check
from experiments.speedup.steps import STEPS, WARM_UP, Turn, step_config, take_turns
from experiments.speedup.whole_models import Bench
from packmamba.config import ConfigError
from packmamba.records import append_record, make_record, provenance
from packmamba.training.strategy import STRATEGIES, leave_process_group

# Of the summed loss over the targets of a step: what bfloat16's rounding makes of other orders of sums and of batches.
TOLERANCE = {"bf16-mixed": 2e-3, "32-true": 1e-5}


@dataclass
class MultiGpuBenchConfig:
    bench: str = "multi_gpu"
    """Which benchmark this is."""
    experiment: str = "speedup"
    """The question, which the records name."""
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
        ConfigError: a value is refused, and nothing has been measured; or an arm takes longer than it may.
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
            config={
                **asdict(c),
                **Scheme.parse(c.scheme).fields(),
                "parallel": strategy,
                "devices": devices,
                **results["config"],
            },
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
    if twice := [arm for arm in c.arms if c.arms.count(arm) > 1]:
        raise ConfigError(f"arms: expected each once, got {twice[0]!r} {c.arms.count(twice[0])} times")
    if c.accelerator not in ("gpu", "cpu"):
        raise ConfigError(f"accelerator: expected gpu or cpu, got {c.accelerator!r}")
    most = max(devices for _, devices in arms)
    if c.accelerator == "gpu" and torch.cuda.device_count() < most:
        raise ConfigError(f"arms: {most} devices need as many GPUs; PyTorch sees {torch.cuda.device_count()}")
    if c.precision not in TOLERANCE:
        raise ConfigError(f"precision: expected one of {', '.join(TOLERANCE)}, got {c.precision!r}")
    if min(c.same_steps, c.rounds, c.timeout_seconds) < 1:
        raise ConfigError("same_steps, rounds, timeout_seconds: expected at least 1")
    try:
        scheme = Scheme.parse(c.scheme)
    except ConfigError as error:
        raise ConfigError(f"scheme: {error}") from None
    if scheme.peer or scheme.graph:
        raise ConfigError(f"scheme: expected one of ours, and not as a graph, got {c.scheme!r}")
    check(_shared(c), torch.device("cuda" if c.accelerator == "gpu" else "cpu"), "scheme")
    return arms


def _shared(c: MultiGpuBenchConfig) -> SpeedupBenchConfig:
    """The same for one model's steps on one device."""
    return SpeedupBenchConfig(
        models=[c.model], parts=["steps"], step_arms=[c.scheme], overrides=c.overrides, distribution=c.distribution,
        documents=c.documents, slots=c.slots, precision=c.precision, growth_model=c.model, seed=c.seed,
    )  # fmt: skip


def _launch(c: MultiGpuBenchConfig, strategy: str, devices: int, folder: Path) -> dict[str, Any]:
    most = max(int(arm.rpartition("-")[2]) for arm in c.arms)
    job = {"bench": asdict(c), "strategy": strategy, "devices": devices, "most": most, "folder": str(folder)}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}",
        "-m", "experiments.speedup.multi_gpu", json.dumps(job),
    ]  # fmt: skip
    # torchrun sets one thread for each of several processes where nothing is said, and so it is for one. PYTHONPATH finds this
    # package wherever it was found.
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        status, errors = _run(command, env, c.timeout_seconds)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"timeout_seconds: {strategy} on {devices} devices took longer than {c.timeout_seconds} s"
        ) from None
    results = folder / "results.json"
    if status or not results.is_file():
        raise RuntimeError(f"{strategy} on {devices} devices failed:\n{errors[-4000:]}")
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
    c = MultiGpuBenchConfig(**job["bench"])
    device = torch.device("cuda" if c.accelerator == "gpu" else "cpu")
    bench = Bench(_shared(c), c.model, device, Path(), False)
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
