"""What a run leaves behind as it goes: throughput, curves, checkpoints."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from torch.distributed.tensor import DTensor

from packmamba.data.batching import StepBatch
from packmamba.errors import ConfigError
from packmamba.training.curves import go_on_from, tell
from packmamba.training.metrics import POSITION_EDGES
from packmamba.training.optimizer import whole

logger = logging.getLogger(__name__)

STEPS_TO_A_TARGET = 10
"""After as many steps without one a run is refused."""
CHECKPOINT_NAME = re.compile(r"step=(\d+)\.ckpt")


class History(Callback):
    """Counts tokens, slots and seconds of training, and keeps the curves that the run's record holds.

    Seconds are those of whole optimizer steps with their data, without evaluations and checkpoints. The first steps of a process
    warm up: throughput leaves them out. Saved with checkpoints, so a resumed run has one history. ``shown`` is what the line of
    progress says of the last step that was logged; ``extremes`` has the least and the most tokens and targets of a step.
    """

    WARMUP_STEPS = 3

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self.totals: dict[str, float] = {"steps": 0, "real_tokens": 0, "slots": 0, "targets": 0, "seconds": 0.0}
        self.totals |= {"documents_behind": 0, "tokens_behind": 0}
        self.extremes: dict[str, float] = {}
        self.timed: dict[str, float] = {"real_tokens": 0, "slots": 0, "seconds": 0.0}
        self.train: list[dict[str, float]] = []
        self.validation: list[dict[str, float]] = []
        self.by_position: list[dict[str, float]] = []
        self.shown: dict[str, Any] = {}
        self.diverged: int | None = None
        """The step whose loss was not finite, after which the run ended."""
        self.started_from: int | None = None
        """A checksum of the weights that the run started from, if they were another run's."""
        self.peak_memory: int | None = None
        """Most bytes that a GPU held for training steps, without evaluations."""
        self._losses: list[torch.Tensor] = []
        """Of steps that nobody has looked at yet."""
        self._recent: list[tuple[int, int, float]] = []
        self._steps_here = 0
        self._clock = 0.0

    def state_dict(self) -> dict[str, Any]:
        names = ("totals", "extremes", "timed", "train", "validation", "by_position", "started_from", "peak_memory")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)
        for name in ("documents_behind", "tokens_behind"):
            self.totals.setdefault(name, math.nan)  # of a checkpoint from before they were counted

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.restart_clock()
        if trainer.global_step:
            go_on_from(trainer.loggers, trainer.global_step)

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.settle()
            self._look_at_memory(module)

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        self.restart_clock()

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._look_at_memory(module)

    def _look_at_memory(self, module: lightning.LightningModule) -> None:
        if module.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(module.device))

    def settle(self) -> None:
        """Adds the time that a GPU still takes for the steps so far, before something else is done."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._count(seconds=self._lap())

    def span(self, name: str) -> str:
        """Least and most of a step, one number if they are equal."""
        least, most = (self.extremes[f"{name}_per_step_{which}"] for which in ("least", "most"))
        return f"{least:.0f}" if least == most else f"{least:.0f}-{most:.0f}"

    def per_step(self) -> dict[str, list[dict[str, float]]]:
        """Tokens and targets of a step, least, mean and most: points of the record's curves."""
        totals = {"tokens": self.totals["real_tokens"], "targets": self.totals["targets"]}
        return {
            f"{name}_per_step": [
                {"mean": total / self.totals["steps"]}
                | {which: self.extremes.get(f"{name}_per_step_{which}", math.nan) for which in ("least", "most")}
            ]
            for name, total in totals.items()
        }

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    def _count(self, **amounts: float) -> None:
        for key, amount in amounts.items():
            self.totals[key] += amount
            if self._steps_here > self.WARMUP_STEPS:
                self.timed[key] += amount

    def restart_clock(self) -> None:
        """Leaves out what passed since the last step."""
        self._clock = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leaves out what took this long since the last step."""
        self._clock += seconds

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: Any,
        outputs: Any,
        batch: StepBatch,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        point = step % self.log_every == 0 or step == 1 or step == trainer.max_steps
        on_gpu = module.device.type == "cuda"
        # Steps between points are left to run behind: a wait, a number sent to the GPU to be logged, or one shown by Lightning's
        # progress bar, would leave it idle until the next step's kernels are launched. Their seconds are right in sum.
        if on_gpu and (point or self._steps_here < self.WARMUP_STEPS):
            torch.cuda.synchronize()
        seconds = self._lap()
        tokens, slots = batch.num_tokens, batch.num_slots
        self._steps_here += 1
        self.totals["steps"] = step
        self._count(real_tokens=tokens, slots=slots, seconds=seconds)
        self.totals["targets"] += batch.num_targets
        self.totals["documents_behind"] += batch.num_behind
        self.totals["tokens_behind"] += batch.tokens_behind
        if step in (STEPS_TO_A_TARGET, trainer.max_steps) and not self.totals["targets"]:
            raise ConfigError(
                f"data: expected something to predict, got none in {step} steps: rows may cut it off; see data.row_length, "
                "data.overlong and data.cut_documents"
            )
        for name, amount in (("tokens", tokens), ("targets", batch.num_targets)):
            for which, choose in (("least", min), ("most", max)):
                key = f"{name}_per_step_{which}"
                self.extremes[key] = choose(self.extremes.get(key, amount), amount)
        if step == 1 and not batch.num_behind and module.boundary.crosses_inside_rows and trainer.is_global_zero:
            logger.warning(
                "In the first step no row holds two documents: what trainer.boundary=%s lets cross between them cannot; that "
                "step trains as reset.", module.boundary.name,
            )  # fmt: skip
        self._recent = [*self._recent[-19:], (tokens, slots, seconds)]
        if point or not on_gpu:
            tokens, slots, seconds = (sum(amounts) for amounts in zip(*self._recent))
            rates = {"train/real_tokens_per_second": tokens / seconds, "train/slots_per_second": slots / seconds}
            self.shown = {
                "loss": float(outputs["loss"]),
                "real_tok/s": f"{tokens / seconds:.0f}",
                "tok/step": self.span("tokens"),
            }
        self._losses.append(outputs["loss"])
        if point:
            self.train.append(self._point(float(outputs["loss"])))
            norm = getattr(trainer.optimizers[0], "gradient_norm", None)
            tell(trainer.loggers, step, rates | {
                "train/loss": self.train[-1]["loss"],
                "train/learning_rate": module.learning_rate(step - 1),
                "data/padding_fraction": 1 - tokens / slots,
                **({} if norm is None else {"train/gradient_norm": whole(norm)}),
                **{f"train/{name}": float(value) for name, value in module.boundary.measures().items()},
            })  # fmt: skip
            self.look(trainer, module)

    def look(self, trainer: lightning.Trainer, module: Any) -> None:
        """Ends the run if a loss was not finite since the last look, for which a GPU is waited for."""
        finite = torch.isfinite(torch.stack(self._losses)).tolist() if self._losses else []
        self._losses.clear()
        # Under a loss scale such a step is left out, and the weights stay as they are.
        if not all(finite) and self.diverged is None and not module.scaled:
            self.diverged = int(self.totals["steps"]) - len(finite) + 1 + finite.index(False)
            trainer.should_stop = True

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: Any) -> None:
        results = module.alone.compute()
        point = self._point(float(results["loss"])) | {"loss_start": float(results["loss_start"])}
        logged = {f"val/{name}": point[name] for name in ("loss", "loss_start")}
        if module.as_trained.update_called:
            also = module.as_trained.compute()
            point["loss_as_trained"] = float(also["loss"])
            logged["val/loss_as_trained"], logged["val/loss_start_as_trained"] = (
                float(also["loss"]),
                float(also["loss_start"]),
            )
        tell(trainer.loggers, int(point["step"]), logged)
        # A run that stopped between an evaluation and its checkpoint evaluates that step again.
        self.validation = [p for p in self.validation if p["step"] != point["step"]] + [point]
        self.by_position = [
            {"start": start, "end": end, "loss": loss, "count": count}
            for start, end, loss, count in zip(
                POSITION_EDGES,
                (*POSITION_EDGES[1:], 2**31),
                results["by_position"].tolist(),
                results["counts"].tolist(),
            )
            if count
        ]

    def _point(self, loss: float) -> dict[str, float]:
        totals = self.totals
        return {
            "step": totals["steps"],
            "real_tokens": totals["real_tokens"],
            "seconds": totals["seconds"],
            "loss": loss,
        }


class Stopped(Exception):
    """A run was told to stop; it goes on from the checkpoint that it has just written."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class Checkpoints(LightningCheckpoint):
    """Saves every ``every`` optimizer steps and at the last, after that step's evaluation if it has one; keeps the two newest.

    A checkpoint appears whole or not at all, so a run may be killed at any moment. If the newest is damaged later, the run goes
    on from the one before.

    Args:
        stop: asked after each step whether the run shall stop there: it is saved and ends with Stopped.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        validate_every: int,
        history: History,
        stop: Callable[[History], bool] | None = None,
    ) -> None:
        self.folder = folder
        self.history = history
        self.every = every
        self.validate_every = validate_every
        self.stop = stop

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.is_global_zero and self.folder.is_dir():
            for cut_short in self.folder.glob("*.tmp"):
                cut_short.unlink(missing_ok=True)
            for path in checkpoints(self.folder):
                if step_of(path) > trainer.global_step:  # the run could not go on from it
                    path.rename(path.with_name(path.name + ".damaged"))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.validate_every != 0:
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: lightning.Trainer) -> None:
        step = trainer.global_step
        stop = self.stop is not None and self.stop(self.history) and step != trainer.max_steps
        if step % self.every and step != trainer.max_steps and not stop:
            return
        self.history.settle()
        self.history.look(trainer, trainer.lightning_module)
        if self.history.diverged is not None:
            return
        if weights_are_finite(trainer.lightning_module):  # else the next loss is not
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
            if trainer.is_global_zero:
                keep_newest(self.folder, 2)
            if stop:
                raise Stopped(step)
        self.history.restart_clock()


def weights_are_finite(module: torch.nn.Module) -> bool:
    """Weights in shards are left to the loss: of those a rank knows its own, and ranks save together."""
    whole: list[torch.Tensor] = [weight for weight in module.parameters() if not isinstance(weight, DTensor)]
    return not whole or bool(torch.stack(torch._foreach_norm(whole, torch.inf)).isfinite().all())


def checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if CHECKPOINT_NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint was written after."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint; 0 without one."""
    return max(map(step_of, checkpoints(folder)), default=0)


def keep_newest(folder: Path, count: int) -> None:
    """Removes older checkpoints."""
    for old in checkpoints(folder)[:-count]:
        old.unlink(missing_ok=True)
