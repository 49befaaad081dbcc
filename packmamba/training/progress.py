"""How a run says where it is: one line that changes, on a terminal; in a file, about ten lines."""

from __future__ import annotations

import sys
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from packmamba.training.callbacks import History


class Lines(Callback):
    """Loss, evaluation and real tokens per second, after a step's evaluation if it has one."""

    def __init__(self, label: str, max_steps: int, validate_every: int, history: History) -> None:
        self.label = label
        self.every = max(1, max_steps // 10)
        self.validate_every = validate_every
        self.history = history

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step % self.validate_every:
            self._say(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._say(trainer)

    def _say(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        if trainer.is_global_zero and (step % self.every == 0 or step == trainer.max_steps):
            shown = self.history.shown
            if self.history.validation:
                shown = shown | {"validation": self.history.validation[-1]["loss"]}
            said = [
                f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}"
                for name, value in shown.items()
            ]
            print(f"{self.label}: step {step}/{trainer.max_steps}", *said, sep=", ", file=sys.stderr, flush=True)


class Bar(TQDMProgressBar):
    """The same on a terminal, at every step."""

    def __init__(self, label: str, history: History) -> None:
        super().__init__(leave=False)
        self.label = label
        self.history = history

    def init_train_tqdm(self) -> Tqdm:
        place = {"total": self.trainer.max_steps, "initial": self.trainer.global_step}  # of a run that goes on
        return Tqdm(desc=self.label, unit="step", dynamic_ncols=True, file=sys.stderr, **place)

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(desc=f"{self.label} evaluates", leave=False, file=sys.stderr)

    def on_train_epoch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(self.label)

    def get_metrics(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, Any]:
        found = super().get_metrics(trainer, module)
        evaluated = {"validation": found["val/loss"]} if "val/loss" in found else {}
        return self.history.shown | evaluated


def progress_of(label: str, max_steps: int, validate_every: int, history: History) -> Callback:
    return Bar(label, history) if sys.stderr.isatty() else Lines(label, max_steps, validate_every, history)
