"""The Lightning module: a loss over real targets and the step that trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from packmamba.config import Config, ConfigError
from packmamba.data.batching import PackedBatch, StepBatch
from packmamba.nn.loss import linear_cross_entropy
from packmamba.training.boundary import BOUNDARIES, Boundary, Inside, Keeping, Reset
from packmamba.training.carry import flat, like
from packmamba.training.checks import make_model
from packmamba.training.graphs import BatchGraphs
from packmamba.training.metrics import LossByPosition
from packmamba.training.optimizer import learning_rate, make_optimizer
from packmamba.training.run_id import schedule_steps
from packmamba.training.strategy import shard, without_sync

RESET = Reset()


def shares_of_rows(mask: Tensor) -> Tensor:
    """(B, L) for a pass's mask of targets (B, L): with them its sum of losses is the mean over rows of each row's mean, so many
    times as there are targets."""
    of_row = mask.sum(1, keepdim=True)
    rows = (of_row > 0).sum().clamp(min=1)
    return (of_row.sum() / rows / of_row.clamp(min=1)).expand(mask.shape)


class MambaLitModule(lightning.LightningModule):
    """Trains a MambaLM on StepBatches; knows nothing of how they were packed.

    The gradient of a step is that of the summed loss over its real targets divided by their number, over all its batches
    and ranks, however they are arranged. Optimisation is manual: one optimizer step per StepBatch.

    Args:
        config: sections model, optimizer, trainer.boundary and ops.
        vocab_size: of the corpus; at most ``config.model.vocab_size`` if that is given.

    Raises:
        ConfigError: naming the key.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        trainer = config.trainer
        self.boundary, self.evaluation_boundary = (
            BOUNDARIES[trainer.boundary](**trainer.boundary_options) for _ in range(2)
        )
        self.optimizer_config = config.optimizer
        self.schedule_steps = schedule_steps(config)
        self.cuda_graphs = trainer.cuda_graphs
        self.mean_over = trainer.mean_over
        self._graphs: BatchGraphs | None = None
        self.scaled = trainer.precision == "16-mixed"
        self.model = make_model(config, vocab_size)
        self.compiled = config.model.compile
        if self.compiled:
            self.model.compile_blocks()
        self.alone = LossByPosition()
        self.as_trained = LossByPosition()

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def loss(self, batch: PackedBatch, boundary: Boundary = RESET) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy, and without gradient (B, L) that at each slot, zero where there is no target.

        Where a mean is over rows, the sum is so many times it as there are targets: the same denominator serves both.
        """
        layout = batch.layout
        hidden = boundary.hidden(self.model, batch)
        slots = layout.token_slots if layout.num_tokens < layout.num_slots else None
        weight = self.model.lm_head.weight
        shares = shares_of_rows(batch.loss_mask) if self.mean_over == "rows" else None
        return linear_cross_entropy(hidden, weight, batch.targets, batch.loss_mask, slots, self.compiled, shares)

    def losses(self, batch: PackedBatch, boundary: Boundary = RESET) -> Tensor:
        """(B, L) cross-entropy at each slot, without gradient; zero where there is no target."""
        return self.loss(batch, boundary)[1]

    def accumulate(self, step: StepBatch, backward: Callable[[Tensor], Any], world_size: int = 1) -> Tensor:
        """Adds the step's gradients, batch by batch; returns its loss on this rank's targets over all targets.

        Ranks average their gradients where the loss wants their sum, hence ``world_size``. They meet once per step, during the
        backward pass of its last batch.
        """
        if self.cuda_graphs:
            return self._replay(step)
        strategy = self._trainer.strategy if self._trainer is not None else None
        total = torch.zeros((), dtype=torch.float32, device=step.batches[0].tokens.device)
        for i, batch in enumerate(step.batches):
            last = i + 1 == len(step.batches)
            with nullcontext() if last else without_sync(strategy, self.model):
                loss = self.loss(batch, self.boundary)[0] / max(step.num_targets, 1)
                backward(loss * world_size)
            total = total + loss.detach()
        return total

    def on_fit_start(self) -> None:
        self._graphs = None  # of parameters that may have been moved since

    def on_fit_end(self) -> None:
        self._graphs = None

    def _replay(self, step: StepBatch) -> Tensor:
        """``accumulate`` by graphs, on one GPU."""
        if self._graphs is None:
            self._graphs = BatchGraphs(self.loss_between, list(self.model.parameters()))
        losses, count = [], len(step.batches)
        for i, batch in enumerate(step.batches):
            scheme = self.boundary
            offered = scheme.offered(self.model, batch) if isinstance(scheme, Keeping) else []
            total, _, *left = self._graphs(
                batch, max(step.num_targets, 1), first=i == 0, last=i + 1 == count, inputs=flat(offered)
            )
            losses.append(total.clone())
            if isinstance(scheme, Keeping):
                scheme.keep_rows(batch, like(offered, [part.clone() for part in left]))
        return torch.stack(losses).sum()

    def loss_between(self, batch: PackedBatch, *offered: Tensor) -> tuple[Tensor, ...]:
        """``loss`` as a graph replays it: of a keeping scheme from what rows are offered to what they leave, which follows it."""
        scheme = self.boundary
        if not isinstance(scheme, Keeping):
            return self.loss(batch, scheme)
        inside = Inside(scheme, like(self.model.start_states(0), offered))
        return *self.loss(batch, inside), *flat(inside.left)

    def take_step(
        self,
        step: StepBatch,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        number: int,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        world_size: int = 1,
    ) -> Tensor:
        """The step that trains and is timed: gradients, then the optimizer, which clips; returns ``accumulate``'s loss.

        Args:
            optimizer: ``configure_optimizers``'s, or a wrapper of it; it clips as it steps.
            number: of the step, from 0.
            backward: what computes gradients of a loss, such as one that scales it.
        """
        for parameters in optimizer.param_groups:
            parameters["lr"] = self.learning_rate(number)
        self.boundary.step = number
        optimizer.zero_grad()
        loss = self.accumulate(step, backward, world_size)
        optimizer.step()
        return loss

    def training_step(self, step: StepBatch, step_index: int) -> Tensor:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        loss = self.take_step(step, optimizer, self.global_step, self.manual_backward, self.trainer.world_size)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(loss)  # the strategy's reduce has all ranks wait for each other
        return loss

    def validation_step(self, batch: PackedBatch, batch_index: int, dataloader_idx: int = 0) -> None:
        boundary, metric = (RESET, self.alone) if dataloader_idx == 0 else (self.evaluation_boundary, self.as_trained)
        losses = self.losses(batch, boundary)
        metric.update(losses, batch.loss_mask, batch.layout.position_indices)

    def on_validation_epoch_start(self) -> None:
        self.evaluation_boundary.reset()
        self.alone.reset()
        self.as_trained.reset()

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", self.alone.compute()["loss"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Fused: each parameter is read and written once. Under a loss scale it would unscale by itself, after clipping.
        fused = self.device.type in ("cpu", "cuda") and not self.scaled
        return make_optimizer(self.model, self.optimizer_config, fused)

    def learning_rate(self, number: int) -> float:
        """Of a step, from 0."""
        return learning_rate(self.optimizer_config, number, self.schedule_steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        carried = [self.boundary.state_dict()]
        if self.trainer.world_size > 1:
            carried = [{} for _ in range(self.trainer.world_size)]
            torch.distributed.all_gather_object(carried, self.boundary.state_dict())
        checkpoint["carry"] = carried
        drawn: Any = np.random.get_state()  # noqa: NPY002, what user code may draw from
        kind, numbers, *place = drawn
        checkpoint["rng"] = {
            "python": random.getstate(),
            "numpy": (kind, numbers.tolist(), *place),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        carried = checkpoint["carry"]
        if len(carried) != self.trainer.world_size:
            raise ConfigError(
                f"trainer.devices: the checkpoint is of {len(carried)} processes, this run has {self.trainer.world_size}"
            )
        self.boundary.load_state_dict(carried[self.trainer.global_rank], self.device)
        rng = checkpoint["rng"]
        random.setstate(rng["python"])
        np.random.set_state(rng["numpy"])  # noqa: NPY002
        torch.set_rng_state(rng["torch"].cpu())
        if rng["cuda"]:
            torch.cuda.set_rng_state_all([state.cpu() for state in rng["cuda"]])
