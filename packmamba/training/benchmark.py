"""Optimizer steps of several arms, timed turn by turn in one process on the same machine state."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning
from torch import Tensor

from packmamba import timing
from packmamba.config import Config, ConfigError, ModelConfig
from packmamba.data.datamodule import PackedDataModule, StepDataset
from packmamba.records import make_record
from packmamba.training.boundary import Keeping
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import name_of, recorded_config
from packmamba.training.runtime import configured_runtime

WARM_UP = 1
"""Rounds that are not kept, after the first step of each arm, which is the gate's."""


class Sample(NamedTuple):
    seconds: float
    tokens: int
    slots: int


class Arm:
    """A configuration's steps, as Lightning's trainer takes them on one device: its precision and loss scale."""

    def __init__(self, config: Config) -> None:
        data = PackedDataModule.from_config(config, progress=False)
        lightning.seed_everything(config.seed, verbose=False)
        self.config, self.corpus_hash, self.steps = config, data.corpora.corpus_hash, StepDataset(data.schedule())
        options: dict[str, Any] = {"accelerator": config.trainer.accelerator, "precision": config.trainer.precision}
        self.fabric = lightning.Fabric(**options, devices=1)
        if self.fabric.device.type == "cpu" and config.trainer.precision == "16-mixed":
            raise ConfigError("trainer.precision: expected bf16-mixed or 32-true on a CPU, got '16-mixed'")
        self.module = PackedLitModule.from_config(config, data.corpora.train.vocab_size).to(self.fabric.device)
        _, self.optimizer = self.fabric.setup(self.module, self.module.configure_optimizers())

    def step(self, number: int) -> tuple[Sample, Tensor]:
        """Step ``number``, from 0, timed without what prepares its batches, and its loss."""
        step, losses = self.steps[number].to(self.fabric.device), []

        def take() -> None:
            with self.fabric.autocast():
                losses.append(self.module.take_step(step, self.optimizer, number, self.fabric.backward))

        return Sample(timing.seconds(take, self.fabric.device), step.num_tokens, step.num_slots), losses[0]


def measure_throughput(
    configs: list[Config], rounds: int, output: str, progress: bool = True
) -> Iterator[dict[str, Any]]:
    """One record per configuration: in each round every arm in turn takes its next optimizer step (A B C A B C ...).

    A step is the one that trains (``PackedLitModule.take_step``), on one device and batches made beforehand. In matched mode all
    arms of a round compute the same documents. Records are those of an experiment called as the folder ``output``.

    Raises:
        RuntimeError: arms that must agree on the loss of the first step's documents do not.
    """
    # Of one whose code is compiled, if there is one: it may have shapes without end.
    with configured_runtime(max(configs, key=lambda config: config.model.compile)):
        yield from _measure(configs, rounds, output, progress)


def _measure(configs: list[Config], rounds: int, output: str, progress: bool) -> Iterator[dict[str, Any]]:
    arms = {config.name: Arm(config) for config in configs}
    losses: list[tuple[tuple[ModelConfig, str], str, float]] = []

    def gate(name: str) -> None:
        """Arms that neither leak nor carry have the same loss on the same documents, if they have the same weights."""
        arm = arms[name]
        loss = float(arm.step(0)[1])
        if arm.config.data.mode == "matched" and not arm.module.boundary.as_trained:
            alike = (arm.config.model, arm.corpus_hash)
            for those, other, expected in losses:
                if those == alike and abs(loss - expected) > 1e-4 * expected:
                    raise RuntimeError(
                        "nothing is timed: arms disagree on the loss of the same documents: "
                        f"{other} has {expected}, {name} has {loss}"
                    )
            losses.append((alike, name, loss))
        if arm.config.trainer.cuda_graphs and not isinstance(arm.module.boundary, Keeping):
            # A graph is captured once for each shape, and a run replays it for the rest.
            for turn in range(WARM_UP + rounds):
                arm.step(turn + 1)

    run = uuid.uuid4().hex
    others = timing.OtherPrograms()
    begun = time.perf_counter()
    samples = timing.take_turns(
        {name: lambda turn, arm=arm: arm.step(turn + 1)[0] for name, arm in arms.items()},  # type: ignore[misc]
        rounds, warm_up=WARM_UP, gate=gate, bar="interleaved steps" if progress else None,
    )  # fmt: skip
    wall_seconds, cores = time.perf_counter() - begun, others.cores()
    for name, arm in arms.items():
        seconds, tokens, slots = zip(*samples[name])
        yield make_record(
            kind="throughput",
            experiment=name_of(output),
            arm=name,
            config=recorded_config(arm.config) | {"run": run},
            seed=arm.config.seed,
            corpus_hash=arm.corpus_hash,
            metrics={
                "seconds_per_step_median": timing.median(seconds),
                "seconds_per_step_spread": timing.spread(seconds),
                "real_tokens_per_second": timing.median(n / taken for n, taken in zip(tokens, seconds)),
                "slots_per_second": timing.median(n / taken for n, taken in zip(slots, seconds)),
                "padding_fraction": 1 - sum(tokens) / sum(slots),
                "rounds": rounds,
                "cores_of_others": cores,
                "parameters": sum(parameter.numel() for parameter in arm.module.parameters()),
            },
            wall_seconds=wall_seconds,
        )
