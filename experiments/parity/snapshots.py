"""Average the weights of a few steps at a run's end: what parity's runs are judged by."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging


class Snapshots(WeightAveraging):
    """Average the weights of ``count`` steps, spaced evenly over the last ``share`` of the run.

    Until the first of them validation reads the trained weights: Lightning's average is a copy of
    the initial ones until then.
    """

    def __init__(self, count: int, share: float) -> None:
        super().__init__()
        self.count = count
        self.share = share
        self.steps: set[int] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Place the steps in the run."""
        super().setup(trainer, pl_module, stage)
        last = trainer.max_steps
        first = max(last - int(self.share * last), 1)
        self.steps = {round(first + i * (last - first) / (self.count - 1)) for i in range(self.count)}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the step, counted from 0, is one of them."""
        return step_idx is not None and step_idx + 1 in self.steps

    @property
    def has_begun(self) -> bool:
        """Return whether there is an average."""
        return self._average_model is not None and bool(self._average_model.n_averaged > 0)

    def on_validation_epoch_start(self, *arguments: Any) -> None:
        """Put the average in the weights' place, if there is one."""
        if self.has_begun:
            super().on_validation_epoch_start(*arguments)

    def on_validation_epoch_end(self, *arguments: Any) -> None:
        """Put the weights back."""
        if self.has_begun:
            super().on_validation_epoch_end(*arguments)

    def on_train_end(self, *arguments: Any) -> None:
        """Keep the average, if there is one: a run that diverged may end before."""
        if self.has_begun:
            super().on_train_end(*arguments)
