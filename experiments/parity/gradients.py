"""Gradients of the same step by several arms, from the same weights, at places along one run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.config import Config as Run
from packmamba.config import ConfigError, key, load_config, need
from packmamba.data.batch import StepBatch
from packmamba.errors import expect
from packmamba.lab.fit import check_accelerator, check_run, configured_runtime
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.lab.run_id import recorded_config
from packmamba.ops import BACKENDS
from packmamba.training.datamodule import PackedDataModule
from packmamba.training.lit_module import PackedLitModule

FOLDER = Path(__file__).parent
AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}


@dataclass
class Config:
    experiment: str = key("parity", "The question, which the records name.")
    base: str = key("train.yaml", "The run, a file of this folder.")
    keys: list[str] = key([], "What is changed of it, as key=value.")
    arms: dict[str, list[str]] = key(
        {}, "What each arm changes of it. The first trains.", check=("at least one arm", bool)
    )
    precisions: list[str] = key(["32-true"], "In which gradients are computed. The first trains.", choices=AUTOCAST)
    at: list[int] = key([0], "Optimizer steps, from 0, whose gradients are compared.")

    def of(self, arm: str) -> Run:
        return load_config(FOLDER / self.base, [*self.keys, *self.arms[arm], f"trainer.precision={self.precisions[0]}"])


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append one record per arm and precision: gradients of the steps in ``at``, from the weights
    of one model that trains.

    Each arm is compared with the first in the same precision, the first with its own in the first
    precision. The curve ``gradients`` has the norm of the difference over the norm, the same of the
    parameter where it is largest, and the difference of the loss; metrics are the largest over
    steps. RuntimeError if arms have other targets in a step.
    """
    provenance()
    begun = time.perf_counter()
    runs = {name: c.of(name) for name in c.arms}
    for name, config in list(runs.items()):
        check_accelerator(config)
        problem = _lacks(config)
        if problem and name == next(iter(runs)):
            raise ConfigError(f"arms.{name}: {problem}")
        if problem:
            print(f"left out, {name}: {problem}", file=sys.stderr)
            del runs[name]
        else:
            check_run(config)
    with configured_runtime(runs[next(iter(runs))]):
        for record in _measure(c, runs, begun, progress):
            append_record(records_path, record)


def _lacks(config: Run) -> str | None:
    """Why this machine does not have the run's backend."""
    backend = BACKENDS[config.ops.backend]
    if backend.missing:
        return f"needs {backend.missing[0]}, which is not installed"
    return None if backend.device in (None, _device(config).type) else f"needs a {backend.device} device"


def _device(config: Run) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and config.trainer.accelerator != "cpu" else "cpu")


def _measure(c: Config, runs: dict[str, Run], begun: float, progress: bool) -> Iterator[dict[str, Any]]:
    first, *_ = runs
    device = _device(runs[first])
    datas = {name: PackedDataModule.from_config(config, progress) for name, config in runs.items()}
    for data in datas.values():
        data.setup()
    hashes = {data.corpora.corpus_hash for data in datas.values()}
    need(len(hashes) == 1, "arms", "the same documents in every arm", f"{len(hashes)} corpora")
    torch.manual_seed(runs[first].seed)
    modules: dict[tuple[str, str], PackedLitModule] = {}  # their weights are the first arm's
    kinds = {name: (config.ops.backend, config.trainer.boundary) for name, config in runs.items()}
    for name, config in runs.items():
        if kinds[name] not in modules:
            modules[kinds[name]] = PackedLitModule.from_config(config, datas[name].corpora.train.vocab_size).to(device)
    module = modules[kinds[first]]
    optimizer = module.configure_optimizers()
    curves: dict[tuple[str, str], list[dict[str, float]]] = {(name, p): [] for p in c.precisions for name in runs}
    for number in tqdm(range(max(c.at) + 1), unit="step", disable=not progress):
        if number in c.at:
            for other in modules.values():
                other.load_state_dict(module.state_dict())
            arms = {name: (modules[kinds[name]], datas[name].steps[number].to(device)) for name in runs}
            _compare(c, arms, number, curves)
        with _autocast(c.precisions[0], device):
            module.take_step(datas[first].steps[number].to(device), optimizer, number, _backward)
    for (name, precision), points in curves.items():
        names = ("relative_difference", "largest_of_a_tensor", "loss_difference")
        told, corpus = {**recorded_config(runs[name])}, datas[name].corpora.corpus_hash
        told |= {"computed_in": precision, "against": against(c, runs, name, precision)}
        metrics = {metric: max(point[metric] for point in points) for metric in names}
        metrics |= {"parameters": sum(p.numel() for p in module.parameters())}
        taken = time.perf_counter() - begun
        of_run = (name, told, runs[name].seed, corpus, metrics, taken, {"gradients": points})
        yield make_record("gradients", c.experiment, *of_run)


def against(c: Config, runs: Iterable[str], arm: str, precision: str) -> str:
    """Name the arm that this one's gradients are compared with; empty: the reference of all others."""
    first, *others = runs
    if arm in others:
        return f"{first}, {precision}"
    return "" if precision == c.precisions[0] else f"{first}, {c.precisions[0]}"


def _compare(c: Config, arms: dict[str, tuple[PackedLitModule, StepBatch]], number: int, curves: Any) -> None:
    targets = {name: step.num_targets for name, (_, step) in arms.items()}
    expect(len(set(targets.values())) == 1, f"step {number}", "as many targets in every arm", targets, RuntimeError)
    references: list[tuple[float, list[Tensor]]] = []  # the first arm's, in each precision
    for precision in c.precisions:
        for name, (module, step) in arms.items():
            found = _gradients(module, step, precision)
            if name == next(iter(arms)):
                references.append(found)
            other = references[0] if found is references[-1] else references[-1]
            curves[name, precision].append({"step": number, **_apart(found, other)})


def _gradients(module: PackedLitModule, step: StepBatch, precision: str) -> tuple[float, list[Tensor]]:
    """The step's loss and the gradient of every parameter."""
    module.zero_grad()
    with _autocast(precision, step.batches[0].tokens.device):
        loss = module.accumulate(step, _backward)
    found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in module.parameters()]
    module.zero_grad()
    return float(loss), found


def _apart(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> dict[str, float]:
    differences = torch.stack([(a.double() - b.double()).norm() for a, b in zip(one[1], other[1])])
    norms = torch.stack([b.double().norm() for b in other[1]])
    nothing = torch.where(differences > 0, torch.inf, 0.0)
    of_tensors = torch.where(norms > 0, differences / norms.where(norms > 0, 1), nothing)
    return {
        "relative_difference": float(differences.norm() / norms.norm()),
        "largest_of_a_tensor": float(of_tensors.max()),
        "loss_difference": abs(one[0] - other[0]),
    }


def _autocast(precision: str, device: torch.device) -> torch.autocast:
    dtype = AUTOCAST[precision]
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def _backward(loss: Tensor) -> None:
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()
