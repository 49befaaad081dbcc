"""Whole optimizer steps through Lightning with PackedDataModule, arms in turns: what training costs."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from experiments.speedup.model import STEPS, Arm, Model, feed, run_config
from packmamba import timing
from packmamba.config import Config
from packmamba.data.batch import StepBatch
from packmamba.data.datamodule import PackedDataModule, StepDataset, StepSampler
from packmamba.training.callbacks import RunMetrics
from packmamba.training.fit import disable_lightning_signals, make_strategy, quieten
from packmamba.training.lit_module import PackedLitModule

TURN_STEPS = 4
"""Steps of a turn: the device waits for the host at its start, as it does not in training."""
WARM_UP = 4
"""Steps before, in which everything is compiled; the timed ones begin with the same documents."""

Arms = dict[str, Arm]


def measure(model: Model) -> None:
    """Appends a speedup record, and a breakdown where it is wanted, for each arm that takes part in steps."""
    arms = model.c.taking_part(STEPS)
    # Graphs keep memory that the others would be counted with.
    for graphs in (False, True):
        group = {name: arm for name, arm in arms.items() if arm.graphs == graphs}
        if group:
            timing.free_memory()
            _measure(model, group)


def _measure(model: Model, arms: Arms) -> None:
    c = model.c
    mean_length = float(model.documents.lengths.mean())
    with tempfile.TemporaryDirectory() as folder:
        configs = []
        for arm in arms.values():
            tokens = c.slots
            if arm.strategy == "padded" and arm.row_length is not None:
                # As many documents as the others, in whole batches.
                rows = max(1, c.slots // arm.row_length)
                tokens = arm.row_length * rows * max(1, round(c.slots / mean_length / rows))
            configs.append(step_config(model, arm, tokens, folder, cuda_graphs=arm.graphs))
        # Single waits for the host whatever it does, but as graphs; the others' steps overlap.
        counts = [1 if arm.strategy == "single" and not arm.graphs else TURN_STEPS for arm in arms.values()]
        # What is captured for a shape is captured before: graphs warm up on all that is timed.
        warm_up = [max(WARM_UP, (c.rounds + 1) * count * arm.graphs) for count, arm in zip(counts, arms.values())]
        turns = [Turn(place, count, timed=False) for place, count in enumerate(warm_up)]
        turns += [Turn(place, count) for _ in range(c.rounds) for place, count in enumerate(counts)]
        watch = take_turns(configs, turns, model.progress)
    for i, (name, arm) in enumerate(arms.items()):
        padding = feed(model.documents, arm, c.slots).padding_fraction
        seconds, slots = watch.seconds[i], watch.slots[i]
        rates = [n / taken for n, taken in zip(slots, seconds)]
        metrics = {
            "seconds_per_batch": timing.median(seconds),
            "seconds_spread": timing.spread(seconds),
            "real_tokens_per_batch": sum(slots) / len(slots) * (1 - padding),
            "peak_memory_bytes": watch.peaks[i],
            "position_bytes": None,
            "loss_error": None,
            "leak_error": None,
            **model.speed(timing.median(rates) * (1 - padding), padding),
        }
        model.record("speedup", name, arm.fields(), STEPS, metrics)


def step_config(model: Model, arm: Arm, tokens_per_step: int, cache: str, **trainer: Any) -> Config:
    """A run's configuration: synthetic documents, arranged by the arm as they come."""
    c = model.c
    config = run_config(model.name, c.overrides)
    config.data = arm.data(
        source="synthetic", distribution=c.distribution, num_documents=c.documents, vocab_size=model.vocab_size,
        cache_dir=cache, validation_fraction=0.01, tokens_per_step=tokens_per_step,
        max_tokens_per_batch=c.slots, num_workers=c.num_workers,
    )  # fmt: skip
    config.seed = c.seed
    config.trainer.precision = c.precision
    config.trainer.accelerator = model.device.type
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


@dataclass(frozen=True)
class Turn:
    """Steps of one arm, one after another: timed as a whole, so that they overlap as in training."""

    arm: int
    steps: int
    timed: bool = True


class Turns(Dataset):
    """Item i: the next step of the arm whose turn it is."""

    def __init__(self, arms: list[StepDataset], turns: list[Turn]) -> None:
        self.arms = arms
        self.order: list[tuple[int, int]] = []
        taken = [0] * len(arms)
        for turn in turns:
            self.order += [(turn.arm, taken[turn.arm] + step) for step in range(turn.steps)]
            taken[turn.arm] += turn.steps * turn.timed

    def __getitem__(self, index: int) -> StepBatch:
        arm, step = self.order[index]
        return self.arms[arm][step]


class TurnsData(PackedDataModule):
    """The steps of several PackedDataModules, the first one's loader."""

    def __init__(self, configs: list[Config], turns: list[Turn]) -> None:
        super().__init__(configs[0].data, plugins=configs[0].plugins, progress=False)
        self.parts = [PackedDataModule.from_config(config, progress=False) for config in configs]
        self.turns = turns

    def setup(self, stage: str | None = None) -> None:
        assert self.trainer is not None
        world_size, rank = self.trainer.world_size, self.trainer.global_rank
        self.order = Turns([StepDataset(part.schedule(world_size), rank) for part in self.parts], self.turns)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.order, StepSampler(lambda: 0, len(self.order.order)))


class Watch(Callback):
    """By arm: seconds and slots of a step in each timed turn, and peak memory of the last."""

    def __init__(self, turns: list[Turn], configs: list[Config], progress: bool = False) -> None:
        arms = range(1 + max(turn.arm for turn in turns))
        self.graphs = [config.trainer.cuda_graphs for config in configs]
        self.seconds: list[list[float]] = [[] for _ in arms]
        self.slots: list[list[float]] = [[] for _ in arms]
        self.peaks: list[int | None] = [None for _ in arms]
        # The turn of each step, and whether it is the turn's first and last.
        self._place = [(turn, i == 0, i + 1 == turn.steps) for turn in turns for i in range(turn.steps)]
        self._slots = 0
        self._clock = 0.0
        self.bar = tqdm(total=len(self._place), desc="optimizer steps", unit="step", disable=not progress)

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._clock = timing.now(module.device)

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, index: int) -> None:
        turn, first, _ = self._place[index]
        module.cuda_graphs = self.graphs[turn.arm]
        if first:
            self._peak = timing.PeakMemory(module.device)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: StepBatch, index: int
    ) -> None:
        self.bar.update()
        turn, _, last = self._place[index]
        self._slots += batch.num_slots
        if not last:
            return
        taken = timing.now(module.device) - self._clock
        arm = turn.arm
        if turn.timed:
            self.seconds[arm].append(taken / turn.steps)
            self.slots[arm].append(self._slots / turn.steps)
            if not module.cuda_graphs:  # whose memory was taken before
                self.peaks[arm] = self._peak.bytes()
        self._slots = 0
        self._clock = timing.now(module.device)

    def on_exception(self, *_: Any) -> None:
        self.bar.close()


def take_turns(configs: list[Config], turns: list[Turn], progress: bool = False) -> Watch:
    """Trains one model on steps of several configurations in turns, by the first one's trainer."""
    quieten()
    turns = [*turns, Turn(turns[-1].arm, 1, timed=False)]  # the last step is logged, which takes milliseconds
    watch, steps = Watch(turns, configs, progress), sum(turn.steps for turn in turns)
    config = configs[0]
    options = config.trainer
    options.max_steps = steps
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=make_strategy(options),
        precision=options.precision,  # type: ignore[arg-type]
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RunMetrics(steps), watch],
    )
    disable_lightning_signals(trainer)
    torch.compiler.reset()
    lightning.seed_everything(config.seed, verbose=False)
    data = TurnsData(configs, turns)
    with trainer.strategy.root_device:
        module = PackedLitModule.from_config(config, config.data.vocab_size)
    try:
        trainer.fit(module, data)
    except SystemExit:  # how Lightning ends a run on Ctrl-C
        raise KeyboardInterrupt from None
    watch.bar.close()
    return watch
