"""Whole optimizer steps through Lightning with PackingDataModule, arms in turns: what training costs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Set
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from packmamba.bench.arms import Scheme, feed
from packmamba.bench.breakdown import sort_kernels
from packmamba.config import Config, load_config
from packmamba.data.batching import StepBatch
from packmamba.data.datamodule import PackingDataModule, StepDataset, StepSampler
from packmamba.training.callbacks import History
from packmamba.training.fit import quieten
from packmamba.training.module import MambaLitModule
from packmamba.training.strategy import make_strategy

if TYPE_CHECKING:
    from packmamba.bench.speedup import Bench

WARMUP_ROUNDS = 2


def measure(bench: Bench) -> None:
    """Appends a speedup record, and for the breakdown's arms a breakdown, for each of the bench's step_arms."""
    c = bench.c
    schemes = [Scheme.parse(arm) for arm in c.step_arms]
    feeds = {scheme.name: feed(bench.documents, scheme, c.slots) for scheme in schemes}
    mean_length = float(bench.documents.lengths.mean())
    with tempfile.TemporaryDirectory() as folder:
        configs = []
        for scheme in schemes:
            tokens = c.slots
            if scheme.strategy == "padded" and scheme.row_length is not None:
                # As many documents as the others, in whole batches.
                rows = max(1, c.slots // scheme.row_length)
                tokens = scheme.row_length * rows * max(1, round(c.slots / mean_length / rows))
            configs.append(step_config(bench, scheme, tokens, folder))
        profiled = {i for i, scheme in enumerate(schemes) if scheme.name in c.breakdown_arms and "breakdown" in c.parts}
        rounds = range(WARMUP_ROUNDS + c.rounds)
        order = [(arm, step) for step in rounds for arm in range(len(schemes))] + [
            (arm, len(rounds)) for arm in profiled
        ]
        watch = take_turns(configs, order, profiled)
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
            bench.record_breakdown(scheme.name, "steps", metrics["seconds_per_batch"], *watch.profiles[i])


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


class Turns(Dataset):
    """Item i: which arm's turn it is, and its next step."""

    def __init__(self, arms: list[StepDataset], order: list[tuple[int, int]]) -> None:
        self.arms = arms
        self.order = order

    def __getitem__(self, index: int) -> StepBatch:
        arm, step = self.order[index]
        return self.arms[arm][step]


class TurnsData(lightning.LightningDataModule):
    """Steps of several PackingDataModules; ``order`` lists (arm, its step)."""

    def __init__(self, configs: list[Config], order: list[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = [PackingDataModule(config, progress=False) for config in configs]
        self.order = order

    def prepare_data(self) -> None:
        self.parts[0].prepare_data()

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None
        arms = [StepDataset(part.schedule(trainer.world_size), trainer.global_rank) for part in self.parts]
        workers = self.parts[0].config.data.num_workers
        return DataLoader(
            Turns(arms, self.order), batch_size=None, sampler=StepSampler(0, len(self.order)), num_workers=workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )  # fmt: skip


class Watch(Callback):
    """Seconds, slots, peak memory and losses of every step by arm; its first steps warm up."""

    def __init__(self, order: list[tuple[int, int]], profiled: set[int]) -> None:
        arms = range(1 + max(arm for arm, _ in order))
        self.order, self.profiled = order, profiled
        self.seconds: list[list[float]] = [[] for _ in arms]
        self.slots: list[list[int]] = [[] for _ in arms]
        self.tokens: list[list[int]] = [[] for _ in arms]
        self.losses: list[list[float]] = [[] for _ in arms]
        self.peaks: list[int | None] = [None for _ in arms]
        self.profiles: dict[int, Any] = {}
        self._profiler: profile | None = None
        self._clock = 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._clock = self._now(module)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: Any, index: int
    ) -> None:
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if index in self.profiled:
            gpu = module.device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: StepBatch, index: int
    ) -> None:
        now = self._now(module)
        arm, step = self.order[index]
        if step >= WARMUP_ROUNDS and index not in self.profiled:
            self.seconds[arm].append(now - self._clock)
            self.slots[arm].append(batch.num_slots)
            self.tokens[arm].append(batch.num_tokens)
            if module.device.type == "cuda":
                self.peaks[arm] = torch.cuda.max_memory_allocated()
        self.losses[arm].append(float(outputs["loss"]))
        if self._profiler is not None:
            self._profiler.stop()
            self.profiles[arm] = sort_kernels(self._profiler, module.device.type == "cuda")
            self._profiler = None
        self._clock = self._now(module)

    @staticmethod
    def _now(module: lightning.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def take_turns(configs: list[Config], order: list[tuple[int, int]], profiled: Set[int] = frozenset()) -> Watch:
    """Trains one model on steps of several configurations, (arm, its step) in this order, by the first one's trainer.

    ``profiled`` arms have their last step profiled, not timed.
    """
    quieten()
    last = dict(order)
    watch = Watch(order, {i for i, (arm, step) in enumerate(order) if arm in profiled and step == last[arm]})
    config = configs[0]
    options = config.trainer
    options.max_steps = len(order)
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=make_strategy(options),
        precision=options.precision,  # type: ignore[arg-type]
        max_steps=len(order),
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[History(10), watch],
    )
    torch.compiler.reset()
    lightning.seed_everything(config.seed, verbose=False)
    data = TurnsData(configs, order)
    with trainer.strategy.root_device:
        module = MambaLitModule(config, config.data.vocab_size)
    trainer.fit(module, data)
    return watch
