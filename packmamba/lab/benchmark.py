"""Time optimizer steps of several arms in turns.

A sweep's runs train apart, at other times or on other cards, so their speeds do not compare. Here
one process holds all arms and takes a step of each in turn: what disturbs the machine meets all
arms alike. Arms that read the same documents must first agree on their loss, or nothing is timed.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import numpy as np
import torch
from tqdm import tqdm

from packmamba.config import Config
from packmamba.data.batch import StepBatch
from packmamba.lab.fit import configured_runtime
from packmamba.lab.records import make_record
from packmamba.lab.run_id import name_of, recorded_config
from packmamba.training.datamodule import PackedDataModule, StepDataset
from packmamba.training.lit_module import PackedLitModule

WARM_UP = 1  # rounds that are dropped, after each arm's first step
TOLERANCE = 1e-4  # relative, between losses of the same documents in one precision


def now(device: torch.device | str) -> float:
    """Return the host's clock, once the device is idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Time a call, from an idle device to an idle device."""
    begun = now(device)
    call()
    return now(device) - begun


class Arm:
    """Take a configuration's optimizer steps on one device."""

    def __init__(self, config: Config) -> None:
        data = PackedDataModule.from_config(config, progress=False)
        lightning.seed_everything(config.seed, verbose=False)
        self.config = config
        self.corpus_hash = data.corpora.corpus_hash
        self.steps = StepDataset(data.schedule())
        precision: Any = config.trainer.precision
        self.fabric = lightning.Fabric(accelerator=config.trainer.accelerator, precision=precision, devices=1)
        self.module = PackedLitModule.from_config(config, data.vocab_size).to(self.fabric.device)
        _, self.optimizer = self.fabric.setup(self.module, self.module.configure_optimizers())

    def step(self, number: int) -> tuple[float, int, int]:
        """Take a step, from 0; return seconds, tokens and slots."""
        step = self.steps[number].to(self.fabric.device)
        return seconds(lambda: self.take(step, number), self.fabric.device), step.num_tokens, step.num_slots

    def take(self, step: StepBatch, number: int) -> None:
        """Take a step of the arm's training."""
        with self.fabric.autocast():
            self.loss = self.module.take_step(step, self.optimizer, number, self.fabric.backward)


def measure_throughput(configs: list[Config], rounds: int, output: str, progress: bool = True) -> Iterator[Any]:
    """Yield a record per configuration, whose steps alternate.

    Raises RuntimeError where losses of the same documents differ.
    """
    with configured_runtime(max(configs, key=lambda config: config.model.compile)):
        arms = {config.name: Arm(config) for config in configs}
        losses: dict[str, float] = {}
        turns = range(1, 1 + WARM_UP + rounds)
        for arm in arms.values():
            arm.step(0)
            _check_loss(arm, losses)
            if arm.config.trainer.cuda_graphs and not arm.module.boundary.stateful:
                for turn in turns:  # captures each shape's graph before anything is timed
                    arm.step(turn)

        run = uuid.uuid4().hex
        begun = time.perf_counter()
        samples: dict[str, list[Any]] = {name: [] for name in arms}
        for turn in tqdm(turns, desc="interleaved steps", unit="round", disable=not progress):
            for name, arm in arms.items():
                samples[name].append(arm.step(turn))
        wall_seconds = time.perf_counter() - begun
        for name, arm in arms.items():
            metrics = _metrics(samples[name][WARM_UP:]) | {"rounds": rounds}
            metrics["parameters"] = sum(parameter.numel() for parameter in arm.module.parameters())
            identity = (name_of(output), name, recorded_config(arm.config) | {"run": run}, arm.config.seed)
            yield make_record("throughput", *identity, arm.corpus_hash, metrics, wall_seconds)


def _check_loss(arm: Arm, losses: dict[str, float]) -> None:
    """Compare an arm's first loss with that of arms with its model and documents.

    Raises RuntimeError.
    """
    if arm.config.data.batching != "matched" or arm.module.boundary.as_trained:
        return
    loss = float(arm.loss)
    data = arm.config.data
    documents = (arm.corpus_hash, data.tokens_per_step, data.cut_at_steps, data.cut_documents, data.overlong)
    # Where rows cut documents, their length decides the pieces.
    decisive = (arm.config.model, arm.config.seed, documents, data.overlong != "error" and data.row_length)
    expected = losses.setdefault(repr(decisive), loss)
    if abs(loss - expected) > TOLERANCE * expected:
        raise RuntimeError(f"arms disagree on the loss of the same documents: {expected}, {loss} {arm.config.name}")


def _metrics(samples: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Return medians over rounds of an arm's seconds and of its tokens and slots per second."""
    times, tokens, slots = np.array(samples).T
    return {
        "seconds_per_step_median": np.median(times),
        "seconds_per_step_spread": np.subtract(*np.percentile(times, [75, 25])),
        "real_tokens_per_second": np.median(tokens / times),
        "slots_per_second": np.median(slots / times),
        "padding_fraction": 1 - tokens.sum() / slots.sum(),
    }
