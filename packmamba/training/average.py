"""The mean of a run's weights over its last steps: what is evaluated in place of the last weights."""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


def snapshot_steps(steps: int, snapshots: int, share: float) -> list[int]:
    """After which of ``steps`` optimizer steps, evenly spaced over the last ``share`` of them; the last is among them."""
    first = steps - int(share * steps)
    return (
        sorted(set(np.linspace(max(first, 1), steps, snapshots).round().astype(int).tolist())) if snapshots > 1 else []
    )


class Average(Callback):
    """Keeps the running mean of the weights after each of ``at`` steps. Saved with checkpoints, so a resumed run has the same."""

    def __init__(self, at: list[int]) -> None:
        self.at = set(at)
        self.taken = 0
        self.mean: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "mean": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken, self.mean = state_dict["taken"], state_dict["mean"]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step not in self.at:
            return
        self.taken += 1
        for name, weight in module.model.named_parameters():
            if self.taken == 1:
                self.mean[name] = weight.detach().clone()
            else:
                mean = self.mean[name] = self.mean[name].to(weight.device)
                mean += (weight - mean) / self.taken

    @torch.no_grad()
    def load_into(self, model: torch.nn.Module) -> None:
        """The mean becomes the model's weights."""
        for name, weight in model.named_parameters():
            weight.copy_(self.mean[name])
