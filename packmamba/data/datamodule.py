"""The Lightning data module: from a configuration to batches, sized, seeded and resumable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from packmamba.config import Config, ConfigError
from packmamba.data.schedule import Schedule, arrange, arrange_as_trained, group
from packmamba.data.steps import EvaluationDataset, StepDataset, StepSampler, start_worker
from packmamba.data.token_store import Corpora, Corpus, evaluation_documents, load_corpora


class PackingDataModule(lightning.LightningDataModule):
    """Documents in rows, as ``config.data`` says; the strategy is one of its keys.

    Training gives one StepBatch per optimizer step. Validation gives PackedBatches: of whole documents, each from zero state, the
    same for every arm (packed, which changes nothing: docs/pui.md); and, for arms that train with leak or carry, a second loader
    with the same documents arranged as in training.

    Raises:
        ConfigError: naming the key, before any document is read where the configuration alone shows it.
    """

    def __init__(self, config: Config, progress: bool = True) -> None:
        super().__init__()
        self.config = config
        from packmamba.training.boundary import BOUNDARIES

        self.boundary = BOUNDARIES[config.trainer.boundary]
        self.progress = progress
        self._corpora: Corpora | None = None

    @property
    def corpora(self) -> Corpora:
        """Training and validation documents, prepared at first use."""
        if self._corpora is None:
            self._corpora = load_corpora(self.config.data, progress=self.progress)
        return self._corpora

    def prepare_data(self) -> None:
        _ = self.corpora

    def state_dict(self) -> dict[str, Any]:
        return {"corpus_hash": self.corpora.corpus_hash}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ConfigError where a run would go on with other documents than it began with."""
        if state_dict["corpus_hash"] != self.corpora.corpus_hash:
            raise ConfigError(
                "the documents have changed since this run was stopped; to train anew, remove its folder or give another runs_dir"
            )

    def setup(self, stage: str | None = None) -> None:
        world_size = self.trainer.world_size if self.trainer else 1
        rank = self.trainer.global_rank if self.trainer else 0
        self.steps = StepDataset(self.schedule(world_size), rank)
        self.evaluations = self._evaluations(world_size, rank)

    def check_targets(self) -> None:
        """Refuses to train on, or to be judged by, documents with nothing to predict. Raises ConfigError."""
        train, validation = self.corpora.train, self.corpora.validation
        documents = np.arange(train.num_documents), evaluation_documents(validation, self.config.data)
        for split, corpus, some in zip(("train", "validation"), (train, validation), documents):
            if len(some) and not has_target(corpus, some):
                raise ConfigError(
                    f"data: expected documents of {split} with something to predict, got none: each has one token, or marks none"
                )

    def schedule(self, world_size: int = 1) -> Schedule:
        """What each step consumes."""
        return Schedule(self.corpora.train, self.config.data, self.config.seed, self.boundary.continues, world_size)

    def _evaluations(self, world_size: int, rank: int) -> list[EvaluationDataset]:
        data, corpus = self.config.data, self.corpora.validation
        if corpus.num_documents == 0:
            raise ConfigError(
                f"data.validation_fraction={data.validation_fraction}: expected to hold out at least one document, got none; "
                "raise it"
            )
        documents = evaluation_documents(corpus, data)
        longest = int(corpus.lengths[documents].max())
        row_length = max(longest, data.slots_per_batch)
        alone = replace(data, strategy="best_fit", row_length=row_length, overlong="error", streams=1, stagger=False)
        arrangement = arrange(corpus, documents, alone)
        groups = group(arrangement, np.arange(arrangement.plan.num_rows), alone, carry=False)
        evaluations = [EvaluationDataset(arrangement, groups[rank::world_size], -(-len(groups) // world_size))]
        if self.boundary.as_trained:
            # Every rank evaluates all of it: carried states must meet their rows, and sums over ranks cancel in the mean.
            arrangement, groups = arrange_as_trained(corpus, documents, data, self.boundary.continues)
            evaluations.append(EvaluationDataset(arrangement, groups, len(groups)))
        return evaluations

    def train_dataloader(self) -> DataLoader:
        first = self.trainer.global_step if self.trainer else 0
        return self._loader(self.steps, StepSampler(first, self.config.trainer.max_steps))

    def val_dataloader(self) -> list[DataLoader]:
        return [self._loader(evaluation) for evaluation in self.evaluations]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device, non_blocking=True)  # from pinned memory, see _loader

    def _loader(self, dataset: Dataset, sampler: Sampler[int] | None = None) -> DataLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=self.config.data.num_workers,
            pin_memory=on_gpu,
            # Its own generator: a loader that is made again on resuming must not move the global one.
            generator=torch.Generator(),
            worker_init_fn=partial(start_worker, self.config.plugins),
        )


def has_target(corpus: Corpus, documents: np.ndarray) -> bool:
    """Whether any of these documents has a token after which something is to be said."""
    if corpus.targets is None:
        return bool(corpus.lengths[documents].max(initial=0) > 1)
    return any((answers >= 0).any() for answers in map(corpus.answers, documents.tolist()) if answers is not None)
