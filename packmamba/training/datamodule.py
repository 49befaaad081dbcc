"""The Lightning data module: from documents to batches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from packmamba.config import Config, DataConfig, TrainerConfig, import_plugins, need, resolve, validate
from packmamba.data.batch import PackedBatch, StepBatch, count_step, make_batch
from packmamba.data.corpus import Corpus
from packmamba.data.schedule import StepPlan, StepSchedule, arrange, arrange_as_trained, micro_batches, pieces_of
from packmamba.data.token_store import Corpora, evaluation_documents, load_corpora
from packmamba.ops.context_parallel import ContextParallel
from packmamba.training.boundary import BOUNDARIES


class PackedDataModule(lightning.LightningDataModule):
    """Train on a StepBatch per optimizer step; validate, test and predict on PackedBatches.

    A PackedBatch outside training holds whole documents, each from zero state. Where the boundary
    scheme leaks or carries, validation and test have a second loader of the same documents,
    arranged as in training.

    Args:
        config: the section ``data``; None: defaults.
        seed: of the order of documents.
        boundary: a key of BOUNDARIES; None: the scheme of ``trainer.lightning_module``, else reset.
        plugins: modules that loader workers import first.
        progress: show a bar while a corpus is prepared.
        context_parallel: consecutive ranks that share each row (``trainer.context_parallel``).
        keys: of the section ``data``, such as ``source="text"``.

    Raises ConfigError.
    """

    def __init__(
        self, config: DataConfig | None = None, *, seed: int = 0, boundary: str | None = None,
        plugins: Sequence[str] = (), progress: bool = True, context_parallel: int = 1, **keys: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        need(isinstance(config, DataConfig | None), "config", "DataConfig, or keys by name", repr(config))
        # First the given section, then keys over it; ``resolve``
        # checks both, and that the scheme fits them.
        trainer = {} if boundary is None else {"boundary": boundary}
        sections = (vars(config or DataConfig()), keys)
        layers = [({"data": section, "trainer": trainer, "seed": seed}, type(self).__name__) for section in sections]
        self.config = resolve(Config, layers).data
        # The class will do: before there is a module, only its attributes are read.
        self._boundary = None if boundary is None else BOUNDARIES[boundary]
        self.seed, self.plugins, self.progress = (seed, list(plugins), progress)
        self.context_parallel = context_parallel
        self.context: ContextParallel | None = None

    @classmethod
    def from_config(cls, config: Config, progress: bool = True) -> PackedDataModule:
        """Build from a run's configuration."""
        trainer = config.trainer
        more: Any = {"plugins": config.plugins, "context_parallel": trainer.context_parallel}
        return cls(config.data, seed=config.seed, boundary=trainer.boundary, progress=progress, **more)

    @cached_property
    def corpora(self) -> Corpora:
        """Load the splits' tokens from the cache, or tokenize them first."""
        return load_corpora(self.config, progress=self.progress)

    @property
    def vocab_size(self) -> int:
        """Return the tokenizer's number of ids."""
        return self.corpora.train.vocab_size

    @property
    def boundary(self) -> Any:
        """Return the boundary scheme: the class that was named, else the Lightning module's instance.

        None where neither is there. Only attributes that class and instance share may be read.
        """
        module = getattr(self.trainer, "lightning_module", None)
        return self._boundary or getattr(module, "boundary", None)

    def prepare_data(self) -> None:
        """Tokenize the corpus, or find it in the cache."""
        _ = self.corpora

    def state_dict(self) -> dict[str, Any]:
        """Return the documents' hash and what decides their order, for checkpoints."""
        return {"corpus_hash": self.corpora.corpus_hash, "seed": int(self.seed), **StepSchedule.order_of(self.config)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ConfigError if a checkpoint was trained on other documents, or in another order."""
        same = state_dict["corpus_hash"] == self.corpora.corpus_hash
        need(same, "data", "the documents that this run began with", "others; remove its folder")
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return  # an evaluation reads no training documents
        # In another order some documents would be trained on twice, and others never.
        for name, value in self.state_dict().items():
            need(value == state_dict.get(name, value), name, f"{state_dict.get(name)}, as this run began", value)

    def setup(self, stage: str | None = None) -> None:
        """Plan this rank's steps, and the rows of the documents to evaluate."""
        ranks, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        sharing = self.context_parallel
        # The scheme came with the Lightning module: check only now that it fits the data.
        if self._boundary is None and self.boundary is not None:
            module = getattr(self.trainer, "lightning_module", None)
            keys: Any = {"devices": ranks, "context_parallel": sharing}
            keys["mean_over"] = getattr(module, "mean_over", "targets")
            # A graph's batch of fixed shape has no documents that cross from rank to rank.
            keys["cuda_graphs"] = sharing > 1 and getattr(module, "cuda_graphs", False)
            validate(Config(data=self.config, trainer=TrainerConfig(boundary=self.boundary.name, **keys)))
        # Ranks that share rows read the same batches, and each takes its columns of them.
        fits = sharing in range(1, ranks + 1) and ranks % sharing == 0
        need(fits, "context_parallel", f"a divisor of {ranks} devices", repr(sharing))
        self.ranks = ranks // sharing
        self.rank = rank // sharing
        if sharing > 1 and self.context is None:
            device = cast(lightning.Trainer, self.trainer).strategy.root_device.type
            self.context = ContextParallel(init_device_mesh(device, (self.ranks, sharing)).get_group(mesh_dim=1))
        self.steps = StepDataset(self.schedule(self.ranks), self.rank)
        if stage in (None, "fit"):
            first = self.steps[0]  # a strategy that overfills rows is refused here
            need(first.num_targets, "data.row_length", "rows with targets", "none in the first step; raise it")
        self.evaluations = self._evaluations(self.corpora.validation)

    def schedule(self, world_size: int = 1) -> StepSchedule:
        """Return the schedule of training steps, shared by ``world_size`` ranks."""
        continues = getattr(self.boundary, "continues", False)
        return StepSchedule(self.corpora.train, self.config, self.seed, continues, world_size)

    def _evaluations(self, corpus: Corpus) -> list[StepPlan]:
        """Arrange documents to evaluate: alone, and where the boundary asks for it as trained."""
        evaluations = [self._alone(corpus, "best_fit_decreasing")]
        if getattr(self.boundary, "as_trained", False):
            # All of it on every rank: carried states must meet their rows.
            documents = evaluation_documents(corpus, self.config)
            evaluations.append(arrange_as_trained(corpus, documents, self.config, self.boundary.continues))
        return evaluations

    def _alone(self, corpus: Corpus, strategy: str) -> StepPlan:
        """Arrange whole documents in rows, for this rank's batches."""
        data = self.config
        documents = evaluation_documents(corpus, data)
        # Wide enough for every document, and for several short ones in a row.
        row_length = max(int(corpus.lengths[documents].max()), data.max_tokens_per_batch)
        alone = replace(data, strategy=strategy, row_length=row_length, streams=1, stagger=False)
        rows = arrange(pieces_of(corpus, documents), alone)
        batches = micro_batches(rows, np.arange(len(rows)), alone, world_size=self.ranks)
        return StepPlan(corpus, rows, batches[self.rank :: self.ranks])

    def train_dataloader(self) -> DataLoader[StepBatch]:
        """Load a StepBatch for each of the Trainer's steps, from its own on.

        An epoch is ``max_steps`` or, with ``max_epochs``, all documents.
        """
        trainer = self.trainer
        if trainer is None:
            return self._loader(self.steps, len(self.steps))
        has_steps = trainer.max_steps > 0 and trainer.max_epochs in (-1, None)
        # A module with automatic optimisation may accumulate several StepBatches into one step. All
        # documents are counted only if asked for: that waits for a streamed corpus.
        epoch = trainer.max_steps * trainer.accumulate_grad_batches if has_steps else len(self.steps)
        # StepBatches are numbered from 0 over all epochs. Those that were trained on are counted,
        # and not optimizer steps, of which a module may take any number in one. A function, since
        # one loader serves all epochs.
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        return self._loader(self.steps, epoch, first=lambda: progress.total.processed)

    def val_dataloader(self) -> list[DataLoader[PackedBatch]]:
        """Load the validation documents; a second loader, if any, has them as trained."""
        return [self._evaluation_loader(plan) for plan in self.evaluations]

    def test_dataloader(self) -> list[DataLoader[PackedBatch]]:
        """Load the test documents as ``val_dataloader`` does validation's.

        Without a test split load validation's, with a warning.
        """
        return [self._evaluation_loader(plan) for plan in self._evaluations(self._test_corpus("test"))]

    def predict_dataloader(self) -> DataLoader[PackedBatch]:
        """Load the test documents, in the corpus's order.

        Without a test split load validation's, as ``test_dataloader``.
        """
        need(self.context_parallel == 1, "context_parallel", "1 in trainer.predict", self.context_parallel)
        return self._evaluation_loader(self._alone(self._test_corpus("predict"), "next_fit"))

    def _test_corpus(self, action: str) -> Corpus:
        if self.corpora.test is not None:
            return self.corpora.test
        got = "neither; it reads the validation documents."
        rank_zero_warn(f"data.test_fraction, data.test_path: expected one for trainer.{action}, got {got}")
        return self.corpora.validation

    def _evaluation_loader(self, plan: StepPlan) -> DataLoader[PackedBatch]:
        make = partial(make_batch, plan.corpus, plan.rows)
        return self._loader(plan.micro_batches, len(plan.micro_batches), make=make)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a step or batch, without waiting for the copy.

        Of rows that ranks share only this rank's columns are moved.
        """
        if self.context is not None:
            batch = batch.shard(self.context)
        return batch.to(device, non_blocking=True)

    def _loader(self, dataset: Any, length: int, first: Any = lambda: 0, make: Any = None) -> Any:
        """Load ``length`` items from ``first()`` on; ``make`` makes a batch of one."""
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        options: dict[str, Any] = {"num_workers": self.config.num_workers, "pin_memory": on_gpu, "collate_fn": make}
        # A loader made on resuming must not move the global generator.
        options |= {"worker_init_fn": partial(_start_worker, self.plugins), "generator": torch.Generator()}
        # Batches are made whole by the dataset, hence ``batch_size=None``.
        return StepLoader(dataset, batch_size=None, sampler=StepSampler(first, length), **options)


class StepLoader(DataLoader):
    """Tell Lightning that a resumed training goes on where it stopped.

    The state is for Lightning to see: ``StepSampler`` begins at the Trainer's own count of batches,
    which the checkpoint restores.
    """

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next StepBatch."""
        # With ``overfit_batches`` Lightning takes a sampler of its own, which begins at 0.
        return {"next_step": getattr(self.sampler, "first", lambda: 0)()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the Trainer's count decides."""


@dataclass
class StepDataset(Dataset):
    """Hold the StepBatch of each optimizer step for one rank."""

    schedule: StepSchedule
    rank: int = 0

    def __getitem__(self, step: int) -> StepBatch:
        plan = self.schedule.step(step)
        # Micro-batch i belongs to rank i modulo the number of ranks.
        of_rank = plan.micro_batches[self.rank :: self.schedule.world_size]
        batches = [make_batch(plan.corpus, plan.rows, rows, turn=self.schedule.turn(rows)) for rows in of_rank]
        return replace(count_step(plan.corpus, plan.rows, plan.micro_batches), batches=batches)

    def __len__(self) -> int:
        """Return the steps of an epoch; there are more, of later ones."""
        return self.schedule.epoch_steps()


class StepSampler(DistributedSampler):
    """Yield ``length`` numbers from ``first()`` on; Lightning replaces no DistributedSampler."""

    def __init__(self, first: Callable[[], int], length: int) -> None:
        self.first = first
        self.length = length

    def __iter__(self) -> Iterator[int]:
        first = self.first()
        return iter(range(first, first + self.length))

    def __len__(self) -> int:
        return self.length  # of a whole epoch: Lightning counts from its first step


def _start_worker(plugins: list[str], worker: int) -> None:
    # Signals reach workers too, which training needs to end its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Training has 20 seconds to end its step, for which it needs its workers' batches.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))
    import_plugins(plugins)  # a worker that is not forked has imported nothing
