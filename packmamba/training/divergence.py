"""Where a loss that is not finite began: the run's last steps are taken again, one operation after another, and looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from packmamba.config import Config
from packmamba.data.batching import PackedBatch, StepBatch
from packmamba.data.schedule import Schedule
from packmamba.training.boundary import Boundary
from packmamba.training.callbacks import step_of
from packmamba.training.checkpoint_file import newest_whole, read_checkpoint
from packmamba.training.module import RESET
from packmamba.training.start import start_from
from packmamba.training.throughput import Arm

DIVERGENCE = "divergence.txt"
"""Where a run's folder says it."""


class Origin(NamedTuple):
    """The first values that were not finite."""

    step: int
    """From 1."""
    what: str
    documents: list[int]
    """Those in which they lay, as the training corpus counts them; empty: they are no document's."""

    def __str__(self) -> str:
        others = f" and {len(self.documents) - 1} others of its batch" if len(self.documents) > 1 else ""
        where = f", in training document {self.documents[0]}{others}" if self.documents else ""
        return f"Taken again, step {self.step} has the first values that are not finite in {self.what}{where}."


def find_origin(config: Config, folder: Path, step: int) -> Origin | None:
    """Takes the steps from the run's last checkpoint to ``step`` again, on one device.

    Returns None where all is finite this time: a GPU's sums have another order.
    """
    config = copy.deepcopy(config)
    config.trainer.cuda_graphs = config.model.compile = False
    arm = Arm(config)
    first = 0
    if (path := newest_whole(folder / "checkpoints", arm.module)) is None:
        start_from(config, arm.module.model)
    else:
        state, first = read_checkpoint(path), step_of(path)
        arm.module.load_state_dict(state["state_dict"])
        arm.optimizer.load_state_dict(state["optimizer_states"][0])
        arm.module.boundary.load_state_dict(state["carry"][0], arm.fabric.device)
        torch.set_rng_state(state["rng"]["torch"])
    watch = _Watch(arm)
    weights = [(name, weight) for name, weight in arm.module.model.named_parameters() if _finite(weight)]
    for number in range(first, step):
        watch.batches = 0
        arm.step(number)
        if watch.found is None:
            bad = next((name for name, weight in weights if not _finite(weight)), None)
            watch.found = None if bad is None else (f"{bad} once the optimizer has changed it", 0, [])
        if watch.found is not None:
            what, batch, documents = watch.found
            return Origin(number + 1, what, _in_corpus(arm.steps.schedule, number, batch, documents))
    return None


class _Watch:
    """Looks at what each part of a model puts out, at its gradient, and at the loss. ``found`` is the first that is not finite:
    what, in which of the step's batches, in which of its documents."""

    def __init__(self, arm: Arm) -> None:
        self.found: tuple[str, int, list[int]] | None = None
        self.batches = 0
        self.batch: PackedBatch
        self.model = arm.module.model
        self._loss, self._accumulate = arm.module.loss, arm.module.accumulate
        arm.module.loss, arm.module.accumulate = self.loss, self.accumulate  # type: ignore[method-assign]
        for name, part in self.model.named_modules():
            part.register_forward_hook(partial(self._output, name or "the model"))

    def loss(self, batch: PackedBatch, boundary: Boundary = RESET) -> tuple[Tensor, Tensor]:
        self.batch, self.batches = batch, self.batches + 1
        total, losses = self._loss(batch, boundary)
        self._look("the loss", losses)
        return total, losses

    def accumulate(self, step: StepBatch, backward: Callable[[Tensor], Any], world_size: int = 1) -> Tensor:
        total = self._accumulate(step, backward, world_size)
        for name, weight in self.model.named_parameters():
            if self.found is None and weight.grad is not None and not _finite(weight.grad):
                self.found = f"the gradient of {name}", 0, []
        return total

    def _output(self, name: str, part: nn.Module, arguments: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor) and value.shape[:2] == self.batch.layout.shape and value.is_floating_point():
                self._look(f"the output of {name}", value)
                if value.requires_grad:
                    value.register_hook(partial(self._look, f"the gradient at the output of {name}"))

    def _look(self, what: str, value: Tensor | None) -> None:
        if self.found is None and value is not None and not _finite(value):
            documents = self.batch.layout.documents
            wrong = ~torch.isfinite(value).view(*documents.shape, -1).all(-1) & (documents >= 0)
            if found := documents[wrong].unique().tolist():
                self.found = what, self.batches - 1, found


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _in_corpus(schedule: Schedule, step: int, batch: int, documents: list[int]) -> list[int]:
    """The corpus's numbers of a batch's documents, of a step from 0 on one device."""
    arrangement, groups = schedule.step(step)
    plan = arrangement.plan
    pieces = np.concatenate([np.arange(*plan.row_offsets[row : row + 2]) for row in groups[batch]])
    return sorted({int(number) for number in arrangement.documents[plan.document[pieces[documents]]]})
