"""Whole optimizer steps through Lightning with PackingDataModule, arms in turns: what training costs."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from experiments.speedup.arms import Feed, Scheme, feed
from experiments.speedup.breakdown import Breakdown, sort_kernels
from packmamba.config import Config, load_config
from packmamba.data.batching import StepBatch
from packmamba.data.datamodule import PackingDataModule, StepDataset, StepSampler
from packmamba.training.callbacks import History
from packmamba.training.module import MambaLitModule
from packmamba.training.strategy import make_strategy, stop_together
from packmamba.training.trainer import quieten

if TYPE_CHECKING:
    from experiments.speedup.whole_models import Bench

STEPS = 4
"""Of a turn: the device waits for the host at its start, as it does not in training."""
WARM_UP = 4
"""Steps before, in which everything is compiled; the timed ones begin with the same documents."""


def measure(bench: Bench) -> None:
    """Appends a speedup record, and for the breakdown's arms a breakdown, for each of the bench's step_arms."""
    c = bench.c
    schemes = [Scheme.parse(arm) for arm in c.step_arms]
    feeds = {scheme.name: feed(bench.documents, scheme, c.slots) for scheme in schemes}
    mean_length = float(bench.documents.lengths.mean())
    # Graphs keep memory that the others would be counted with.
    for graph in (False, True):
        group = [scheme for scheme in schemes if scheme.graph == graph]
        if group:
            _measure_what_fits(bench, group, feeds, mean_length)


def free_memory() -> None:
    """Gives back what nobody refers to any more: a Trainer, its module and optimizer refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measure_what_fits(bench: Bench, schemes: list[Scheme], feeds: dict[str, Feed], mean_length: float) -> None:
    """In turns, or one after the other if they do not fit into memory together; without those that do not fit alone."""
    free_memory()
    fit = True
    try:
        _measure(bench, schemes, feeds, mean_length)
    except torch.OutOfMemoryError:
        fit = False  # what comes next needs the memory that the exception's frames still hold here
    if fit:
        return
    names = ", ".join(scheme.name for scheme in schemes)
    if len(schemes) == 1:
        print(f"left out, {bench.name}, {names}, steps: does not fit into memory", file=sys.stderr)
        return
    print(f"one after the other, {bench.name}, {names}, steps: do not fit into memory together", file=sys.stderr)
    for scheme in schemes:
        _measure_what_fits(bench, [scheme], feeds, mean_length)


def _measure(bench: Bench, schemes: list[Scheme], feeds: dict[str, Feed], mean_length: float) -> None:
    c = bench.c
    with tempfile.TemporaryDirectory() as folder:
        configs = []
        for scheme in schemes:
            tokens = c.slots
            if scheme.strategy == "padded" and scheme.row_length is not None:
                # As many documents as the others, in whole batches.
                rows = max(1, c.slots // scheme.row_length)
                tokens = scheme.row_length * rows * max(1, round(c.slots / mean_length / rows))
            configs.append(step_config(bench, scheme, tokens, folder, cuda_graphs=scheme.graph))
        # Single waits for the host whatever it does, but as graphs; the others' steps overlap.
        counts = [1 if scheme.strategy == "single" and not scheme.graph else STEPS for scheme in schemes]
        # What is captured for a shape is captured before: graphs warm up on all that is timed.
        warm_up = [max(WARM_UP, (c.rounds + 1) * count * scheme.graph) for count, scheme in zip(counts, schemes)]
        turns = [Turn(arm, count, timed=False) for arm, count in enumerate(warm_up)]
        turns += [Turn(arm, count) for _ in range(c.rounds) for arm, count in enumerate(counts)]
        if "breakdown" in c.parts:
            some = [arm for arm, scheme in enumerate(schemes) if scheme.name in c.breakdown_arms]
            turns += [Turn(arm, counts[arm], timed=False, profiled=True) for arm in some]
        watch = take_turns(configs, turns, bench.progress)
    for i, scheme in enumerate(schemes):
        padding = feeds[scheme.name].padding_fraction
        seconds, slots = watch.seconds[i], watch.slots[i]
        rates = [n / taken for n, taken in zip(slots, seconds)]
        metrics = {
            "seconds_per_batch": statistics.median(seconds),
            "seconds_spread": float(np.subtract(*np.percentile(seconds, [75, 25]))),
            "real_tokens_per_batch": statistics.fmean(slots) * (1 - padding),
            "peak_memory_bytes": watch.peaks[i],
            "position_bytes": None,
            "loss_error": None,
            "leak_error": None,
            **bench.speed(statistics.median(rates) * (1 - padding), padding),
        }
        bench.record("speedup", scheme.name, "steps", metrics)
        if i in watch.profiles:
            bench.record_breakdown(
                scheme.name, "steps", metrics["seconds_per_batch"] * counts[i], watch.profiles[i], counts[i]
            )


def step_config(bench: Bench, scheme: Scheme, tokens_per_step: int, cache: str, **trainer: Any) -> Config:
    """A run's configuration: synthetic documents, arranged by the scheme as they come."""
    c, vocab_size = bench.c, bench.config.model.vocab_size
    config = load_config(None, [f"model={bench.name}", *c.overrides])
    data = scheme.data(
        source="synthetic", distribution=c.distribution, num_documents=c.documents, vocab_size=vocab_size,
        corpus_seed=c.seed, cache_dir=cache, validation_fraction=0.01, tokens_per_step=tokens_per_step,
        slots_per_batch=c.slots, num_workers=2,
    )  # fmt: skip
    config.data = type(config.data)(**asdict(data))
    config.seed = c.seed
    config.trainer.precision = c.precision
    config.trainer.accelerator = bench.device.type
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


@dataclass(frozen=True)
class Turn:
    """Steps of one arm, one after another: timed as a whole, so that they overlap as in training."""

    arm: int
    steps: int
    timed: bool = True
    profiled: bool = False


class Turns(Dataset):
    """Item i: the next step of the arm whose turn it is."""

    def __init__(self, arms: list[StepDataset], turns: list[Turn]) -> None:
        self.arms = arms
        self.order: list[tuple[int, int]] = []
        taken = [0] * len(arms)
        for turn in turns:
            self.order += [(turn.arm, taken[turn.arm] + step) for step in range(turn.steps)]
            taken[turn.arm] += turn.steps * (turn.timed or turn.profiled)

    def __getitem__(self, index: int) -> StepBatch:
        arm, step = self.order[index]
        return self.arms[arm][step]


class TurnsData(PackingDataModule):
    """The steps of several PackingDataModules, the first one's loader."""

    def __init__(self, configs: list[Config], turns: list[Turn]) -> None:
        super().__init__(configs[0], progress=False)
        self.parts = [PackingDataModule(config, progress=False) for config in configs]
        self.turns = turns

    def setup(self, stage: str | None = None) -> None:
        assert self.trainer is not None
        world_size, rank = self.trainer.world_size, self.trainer.global_rank
        self.order = Turns([StepDataset(part.schedule(world_size), rank) for part in self.parts], self.turns)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.order, StepSampler(0, len(self.order.order)))


class Watch(Callback):
    """By arm: seconds, slots and tokens of a step in each timed turn, peak memory of the last, and every step's loss."""

    def __init__(self, turns: list[Turn], configs: list[Config], progress: bool = False) -> None:
        arms = range(1 + max(turn.arm for turn in turns))
        self.graphs = [config.trainer.cuda_graphs for config in configs]
        self.seconds: list[list[float]] = [[] for _ in arms]
        self.slots: list[list[float]] = [[] for _ in arms]
        self.tokens: list[list[float]] = [[] for _ in arms]
        self.losses: list[list[float]] = [[] for _ in arms]
        self.peaks: list[int | None] = [None for _ in arms]
        self.profiles: dict[int, Breakdown] = {}
        # The turn of each step, and whether it is the turn's first and last.
        self._place = [(turn, i == 0, i + 1 == turn.steps) for turn in turns for i in range(turn.steps)]
        self._seen: list[tuple[StepBatch, torch.Tensor]] = []
        self._profiler: profile | None = None
        self._clock = 0.0
        self.bar = tqdm(total=len(self._place), desc="optimizer steps", unit="step", disable=not progress)

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._clock = self._now(module)

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, index: int) -> None:
        turn, first, _ = self._place[index]
        module.cuda_graphs = self.graphs[turn.arm]
        if first and module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if first and turn.profiled:
            gpu = module.device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])
            self._profiler.start()
            self._clock = self._now(module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: StepBatch, index: int
    ) -> None:
        self.bar.update()
        turn, _, last = self._place[index]
        self._seen.append((batch, outputs["loss"]))
        if not last:
            return
        taken = self._now(module) - self._clock
        arm = turn.arm
        if turn.timed:
            self.seconds[arm].append(taken / turn.steps)
            self.slots[arm].append(sum(step.num_slots for step, _ in self._seen) / turn.steps)
            self.tokens[arm].append(sum(step.num_tokens for step, _ in self._seen) / turn.steps)
            if module.device.type == "cuda" and not module.cuda_graphs:  # whose memory was taken before
                self.peaks[arm] = torch.cuda.max_memory_allocated()
        self.losses[arm] += [float(loss) for _, loss in self._seen]
        if self._profiler is not None:
            self._profiler.stop()
            self.profiles[arm] = sort_kernels(self._profiler, module.device.type == "cuda", taken)
            self._profiler = None
        self._seen = []
        self._clock = self._now(module)

    def on_exception(self, *_: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
        self.bar.close()

    @staticmethod
    def _now(module: lightning.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


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
        callbacks=[History(steps), watch],
    )
    stop_together(trainer, steps)
    torch.compiler.reset()
    lightning.seed_everything(config.seed, verbose=False)
    data = TurnsData(configs, turns)
    with trainer.strategy.root_device:
        module = MambaLitModule(config, config.data.vocab_size)
    try:
        trainer.fit(module, data)
    except SystemExit:  # how Lightning ends a run on Ctrl-C
        raise KeyboardInterrupt from None
    watch.bar.close()
    return watch
