"""The Lightning data module: from documents to batches."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from packmamba.config import (
    Config,
    DataConfig,
    TrainerConfig,
    import_plugins,
    need,
    registry,
    resolve,
    validate,
)
from packmamba.data.batch import Rows, StepBatch
from packmamba.data.packing import Integers
from packmamba.data.schedule import Pieces, Schedule, arrange, arrange_as_trained, micro_batches
from packmamba.data.token_store import Corpora, evaluation_documents, load_corpora


class PackedDataModule(lightning.LightningDataModule):
    """Train on a StepBatch per optimizer step; validate and test on PackedBatches of whole documents, each from zero state.

    Where the boundary scheme leaks or carries, a second loader has the same documents arranged as in training.

    Args:
        config: the section ``data``; None: defaults.
        seed: of the order of documents.
        boundary: the boundary scheme; None: that of ``trainer.lightning_module``, else reset.
        plugins: modules that loader workers import first. ``progress``: show a bar while a corpus is prepared.
        keys: of the section ``data``, such as ``source="text"``.

    Raises ConfigError.
    """

    def __init__(
        self, config: DataConfig | None = None, *, seed: int = 0, boundary: Any = None, plugins: Sequence[str] = (),
        progress: bool = True, **keys: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        need(
            isinstance(config, DataConfig | None),
            "config",
            "DataConfig, or keys by name",
            repr(config),
        )
        layers = [
            ({"data": one}, type(self).__name__) for one in (vars(config or DataConfig()), keys)
        ]
        self.config = resolve(Config, layers).data
        self.seed, self.plugins, self.progress, self._boundary = (
            seed,
            list(plugins),
            progress,
            boundary,
        )

    @classmethod
    def from_config(cls, config: Config, progress: bool = True) -> PackedDataModule:
        """Build from a run's configuration."""
        boundary = registry("packmamba.training.boundary:BOUNDARIES")[config.trainer.boundary]
        return cls(
            config.data,
            seed=config.seed,
            boundary=boundary,
            plugins=config.plugins,
            progress=progress,
        )

    @cached_property
    def corpora(self) -> Corpora:
        return load_corpora(self.config, progress=self.progress)

    @property
    def vocab_size(self) -> int:
        """Return the tokenizer's number of ids."""
        return self.corpora.train.vocab_size

    @property
    def boundary(self) -> Any:
        """Return the Lightning module's scheme, or None."""
        return self._boundary or getattr(
            getattr(self.trainer, "lightning_module", None), "boundary", None
        )

    def prepare_data(self) -> None:
        """Tokenize the corpus, or find it in the cache."""
        _ = self.corpora

    def state_dict(self) -> dict[str, Any]:
        return {"corpus_hash": self.corpora.corpus_hash}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        same = state_dict["corpus_hash"] == self.corpora.corpus_hash
        need(same, "data", "the documents that this run began with", "others; remove its folder")

    def setup(self, stage: str | None = None) -> None:
        ranks, rank = (
            (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        )
        if self._boundary is None and self.boundary is not None:
            validate(
                Config(
                    data=self.config,
                    trainer=TrainerConfig(boundary=self.boundary.name, devices=ranks),
                )
            )
        self.steps = StepDataset(self.schedule(ranks), rank)
        self.evaluations = self._evaluations(ranks, rank)  # rows, and their numbers batch by batch

    def schedule(self, world_size: int = 1) -> Schedule:
        continues = getattr(self.boundary, "continues", False)
        return Schedule(self.corpora.train, self.config, self.seed, continues, world_size)

    def _evaluations(self, world_size: int, rank: int) -> list[tuple[Rows, list[Integers]]]:
        data, corpus = self.config, self.corpora.validation
        documents = evaluation_documents(corpus, data)
        row_length = max(int(corpus.lengths[documents].max()), data.max_tokens_per_batch)
        alone = replace(
            data, strategy="best_fit_decreasing", row_length=row_length, streams=1, stagger=False
        )
        rows = arrange(corpus, Pieces.of(corpus, documents), alone)
        groups = micro_batches(rows, np.arange(len(rows)), alone, world_size=world_size)
        evaluations = [(rows, groups[rank::world_size])]
        if getattr(self.boundary, "as_trained", False):
            # All of it on every rank: carried states must meet their rows.
            evaluations.append(arrange_as_trained(corpus, documents, data, self.boundary.continues))
        return evaluations

    def train_dataloader(self) -> DataLoader:
        """Load steps from the Trainer's own on; an epoch is ``max_steps`` or, with ``max_epochs``, all documents."""
        trainer = self.trainer
        if trainer is None:
            return self._loader(
                self.steps, StepSampler(lambda: 0, self.steps.schedule.epoch_steps())
            )
        accumulated = (
            trainer.accumulate_grad_batches
        )  # by a module that does not step with each StepBatch
        last = trainer.max_steps * accumulated if trainer.max_steps > 0 else sys.maxsize
        whole = trainer.max_steps > 0 and trainer.max_epochs in (-1, None)
        epoch = last if whole else self.steps.schedule.epoch_steps()
        return self._loader(
            self.steps, StepSampler(lambda: trainer.global_step * accumulated, epoch, last)
        )

    def val_dataloader(self) -> list[DataLoader]:
        return [
            self._loader(of, StepSampler(lambda: 0, len(of)), rows.batch)
            for rows, of in self.evaluations
        ]

    test_dataloader = val_dataloader

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return batch.to(device, non_blocking=True)

    def _loader(
        self, dataset: Any, sampler: StepSampler, make: Callable[[Any], Any] | None = None
    ) -> DataLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        options: dict[str, Any] = {
            "num_workers": self.config.num_workers,
            "pin_memory": on_gpu,
            "collate_fn": make,
        }
        # A loader made on resuming must not move the global generator.
        options |= {
            "worker_init_fn": partial(_start_worker, self.plugins),
            "generator": torch.Generator(),
        }
        return DataLoader(dataset, batch_size=None, sampler=sampler, **options)


@dataclass
class StepDataset(Dataset):
    """Hold the StepBatch of each optimizer step for one rank."""

    schedule: Schedule
    rank: int = 0

    def __getitem__(self, step: int) -> StepBatch:
        rows, groups = self.schedule.step(step)
        own = groups[self.rank :: self.schedule.world_size]
        return StepBatch(
            [rows.batch(numbers, self.schedule.turn(numbers)) for numbers in own],
            *rows.count(groups),
        )


class StepSampler(DistributedSampler):
    """Yield ``length`` numbers from ``first()`` on, below ``last``; Lightning replaces no DistributedSampler."""

    def __init__(self, first: Callable[[], int], length: int, last: int = sys.maxsize) -> None:
        self.first, self.length, self.last = first, length, last

    def __iter__(self) -> Iterator[int]:
        first = self.first()
        return iter(range(first, min(first + self.length, self.last)))

    def __len__(self) -> int:
        return self.length  # of a whole epoch: Lightning counts from its first step


def _start_worker(plugins: list[str], worker: int) -> None:
    # Signals reach workers too, which training needs to end its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))
    import_plugins(plugins)  # a worker that is not forked has imported nothing
