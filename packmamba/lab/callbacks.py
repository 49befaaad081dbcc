"""Callbacks of a training run."""

import logging
import math
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from packmamba.config import Config, TrainerConfig
from packmamba.data.batch import StepBatch
from packmamba.data.sources import open_source
from packmamba.data.tokenizer import Tokenizer, load_tokenizer
from packmamba.errors import ConfigError, UserError
from packmamba.evaluation.registry import EvalContext, EvalResult, default_max_slots, evaluate
from packmamba.files import replacing
from packmamba.isolation.probes import eager
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.testing import Found, LightningLeakCheck
from packmamba.training.lit_module import POSITION_EDGES

logger = logging.getLogger(__name__)


class SavedCallback(Callback):
    SAVED: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class RunMetrics(SavedCallback):
    """Count tokens, slots and seconds, keep curves, and stop at a loss that is not finite."""

    WARMUP_STEPS = 3  # of each process, not in ``timed``
    COUNTS = {"real_tokens": "num_tokens", "slots": "num_slots", "targets": "num_targets", "documents_behind": "num_behind",
              "tokens_behind": "tokens_behind"}  # fmt: skip
    SAVED = ("totals", "timed", "train", "validation", "by_position", "started_from", "peak_memory")

    def __init__(self, log_every: int) -> None:
        self.log_every, self.steps_here, self._clock = log_every, 0, 0.0
        self.totals: dict[str, float] = dict.fromkeys(("steps", "seconds", *self.COUNTS), 0)
        self.timed: dict[str, float] = {"real_tokens": 0, "slots": 0, "seconds": 0.0}
        self.train, self.validation, self.by_position = (list[dict[str, float]]() for _ in range(3))
        self.started_from: int | None = None
        self.peak_memory: int | None = None
        self.diverged: int | None = None
        self._unchecked_losses: list[Tensor] = []

    @property
    def state_key(self) -> str:
        return "History"  # the name in checkpoints since the first

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._count()
        yield
        self.on_train_start()

    def _count(self, wait: bool = True, **amounts: float) -> None:
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        amounts["seconds"], self._clock = now - self._clock, now
        for key, amount in amounts.items():
            self.totals[key] += amount
            if key in self.timed and self.steps_here > self.WARMUP_STEPS:
                self.timed[key] += amount

    def _point(self, loss: Tensor) -> dict[str, float]:
        steps, tokens, seconds = (self.totals[name] for name in ("steps", "real_tokens", "seconds"))
        return {"step": steps, "real_tokens": tokens, "seconds": seconds, "loss": float(loss)}

    def on_train_start(self, *_: Any) -> None:
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: StepBatch, _: int
    ) -> None:
        step = trainer.global_step
        logged = step % self.log_every == 0 or step in (1, trainer.max_steps)
        self.steps_here += 1
        amounts = {name: getattr(batch, of) for name, of in self.COUNTS.items()}
        self._count(logged or self.steps_here <= self.WARMUP_STEPS, steps=1, **amounts)
        self._unchecked_losses.append(outputs["loss"])
        if logged:
            self.train.append(self._point(outputs["loss"]))
            before, point = [{"real_tokens": 0, "seconds": 0.0}, *self.train][-2:]
            tokens, seconds = (point[name] - before[name] for name in ("real_tokens", "seconds"))
            rates = {
                "train/real_tokens": point["real_tokens"],
                "train/real_tokens_per_second": tokens / seconds,
            }
            module.log_dict(rates, on_step=True, on_epoch=False)
            self.check_finite(trainer, module)

    def check_finite(self, trainer: Trainer, module: Any) -> None:
        """Stop if a loss since the last check is not finite, unless a loss scale skips such steps."""
        finite = (
            torch.isfinite(torch.stack(self._unchecked_losses)).tolist() if self._unchecked_losses else []
        )
        self._unchecked_losses.clear()
        if not all(finite) and self.diverged is None and not module.scaled:
            self.diverged = int(self.totals["steps"]) - len(finite) + 1 + finite.index(False)
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn == "fit":
            self._count()
            self.on_train_end(trainer, module)

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        results = module.alone.compute()
        point = self._point(results["loss"]) | {"loss_start": float(results["loss_start"])}
        if module.as_trained.update_called:
            point["loss_as_trained"] = float(module.as_trained.compute()["loss"])
        # After a kill, a step may be validated again.
        self.validation = [p for p in self.validation if p["step"] != point["step"]] + [point]
        means, counts = results["by_position"].tolist(), results["counts"].tolist()
        buckets = zip(POSITION_EDGES, (*POSITION_EDGES[1:], 2**31), means, counts)
        self.by_position = [dict(zip(("start", "end", "loss", "count"), one)) for one in buckets if one[-1]]

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        self.on_train_start()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(module.device))


class ProgressBar(TQDMProgressBar):
    """Show losses, not the loggers' versions; end its line before an error is printed."""

    def get_metrics(self, trainer: Trainer, module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, module)
        return {name: value for name, value in metrics.items() if name != "v_num"}

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:
                bar.close()


class CheckpointFile(TorchCheckpointIO):
    """Write a checkpoint whole or not at all. Raises DiskFull."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file of Python's: torch does not say why its own cannot be written.
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)


class Stopped(UserError):
    def __init__(self, step: int, max_steps: int, signum: int) -> None:
        super().__init__(
            f"stopped after step {step} of {max_steps}, with a checkpoint; the same command resumes it"
        )
        self.step, self.status = step, 128 + signum if signum > 1 else 3  # 1: by ``stop``


class Checkpoint(LightningCheckpoint):
    """Save after validation; a signal or ``stop`` ends the run with a checkpoint."""

    def __init__(
        self, folder: Path, config: Config, metrics: RunMetrics, stop: Callable[[RunMetrics], bool]
    ) -> None:
        self.folder, self.options, self.metrics, self.stop = folder, config.trainer, metrics, stop
        self.stopped: Stopped | None = None
        self._signum = 0

    @contextmanager
    def signals(self) -> Iterator[None]:
        handlers: dict[signal.Signals, Any] = {}
        for signum in (
            (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        ):
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                handlers[signum] = signal.signal(signum, self._handle)
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: Any) -> None:
        if signum == self._signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._signum = signum

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.options.validate_every:
            self.on_validation_end(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.state.fn != "fit":
            return
        step = trainer.global_step
        signum = self._signum or int(self.stop(self.metrics))
        if trainer.world_size > 1:
            own, signum = torch.tensor(signum, device=trainer.strategy.root_device), 0
            if step % self.metrics.log_every == 0:
                signum = int(trainer.strategy.reduce(own, reduce_op="max"))
        last = step == trainer.max_steps
        if step % self.options.checkpoint_every and not last and not signum:
            return
        with self.metrics.paused():
            self.metrics.check_finite(trainer, module)
            if self.metrics.diverged is not None:
                return
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
            for old in checkpoints(self.folder)[:-2]:
                old.unlink(missing_ok=True)
        if signum and not last:
            self.stopped = Stopped(step, trainer.max_steps, signum)
            trainer.should_stop, trainer.limit_val_batches = True, 0


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step=*.ckpt"), key=step_of)


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        if (damaged := zipfile.ZipFile(path).testzip()) is not None:  # torch.load does not check CRCs
            raise ValueError(f"{damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: expected a checkpoint of this version, got {reason}; remove it") from None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that loads. Raises ConfigError if none of several does."""
    refused = None
    for path in reversed(checkpoints(folder)):
        try:
            read_checkpoint(path)
            return path
        except ConfigError as error:
            refused = ConfigError(f"runs_dir: no checkpoint loads: {error} to train from the beginning")
            logger.warning("%s; the run resumes from an older one", error)
    if refused:
        raise refused
    return None


class Average(SavedCallback):
    """Average the weights of steps spaced evenly over the last ``share`` of the run."""

    SAVED = ("taken", "mean")

    def __init__(self, steps: int, snapshots: int, share: float) -> None:
        first = max(steps - int(share * steps), 1)
        self.at = {
            round(first + i * (steps - first) / (snapshots - 1)) for i in range(snapshots) if snapshots > 1
        }
        self.taken, self.mean = 0, dict[str, Tensor]()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in self.at:
            self.taken += 1
            for name, weight in module.model.named_parameters():
                mean = self.mean[name].to(weight.device) if name in self.mean else weight.detach().clone()
                self.mean[name] = mean + (weight - mean) / self.taken


class LeakCheck(LightningLeakCheck):
    """Check a run's steps for leaks, outside of its clock; ``result`` is for its record."""

    def __init__(self, config: Config, metrics: RunMetrics) -> None:
        super().__init__(every=config.trainer.leakcheck_every or 0)
        self.config, self.metrics = config, metrics
        self.needless = why_unchecked(config.trainer)
        self.done = self.needless is not None

    def check_step(self, *arguments: Any) -> tuple[Found, str]:
        with self.metrics.paused():
            return super().check_step(*arguments)

    def settle(self, found: Found, line: str) -> None:
        if found is Found.LEAK:
            line = f"trainer.boundary={self.config.trainer.boundary}: step {self.step + 1}: {line}"
        super().settle(found, line)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Warn of nothing: the record and the last line say what was not checked."""

    def result(self) -> str:
        """Return "checked at step N", the last one, or "unchecked: why"."""
        if self.checked_at is None:
            return f"unchecked: {self.needless or self.unchecked}"
        options = {
            "trainer.cuda_graphs": self.config.trainer.cuda_graphs,
            "model.compile": self.config.model.compile,
        }
        used = " and ".join(name for name, is_used in options.items() if is_used)
        without = f", computed without {used}" if used else ""
        later = self.tried_at != self.checked_at
        failed = f"; unchecked at step {self.tried_at + 1}: {self.unchecked}" if later else ""
        return f"checked at step {self.checked_at + 1}{without}{failed}"


def why_unchecked(options: TrainerConfig) -> str | None:
    """Return why a run is not to be checked, or None."""
    if options.leakcheck_every is None:
        return "trainer.leakcheck_every=null"
    scheme = options.scheme()
    if scheme.stateful:
        return f"trainer.boundary={options.boundary} carries states between documents"
    layout = SequenceLayout.from_lengths([[1, 1]], row_length=2)
    if any(used != layout for used in scheme.layouts(layout)):
        return f"trainer.boundary={options.boundary} lets documents leak"
    return None


def evaluation_context(config: Config, name: str, **more: Any) -> EvalContext:
    more |= {"examples": config.evaluation_examples, "options": config.evaluation_options.get(name, {})}
    return EvalContext(config.data, key="evaluation_options", trainer=config.trainer, **more)


class Evaluations(SavedCallback):
    SAVED = ("points",)

    def __init__(self, config: Config, metrics: RunMetrics) -> None:
        self.config, self.metrics = config, metrics
        self.points: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step, every = trainer.global_step, self.config.trainer.evaluate_every
        if every is None or step % every or step == trainer.max_steps:
            return
        with self.metrics.paused():
            if trainer.is_global_zero:
                text = open_source(self.config.data).vocab_size is None
                tokenizer = load_tokenizer(self.config.data) if text else None
                with eager():
                    self.evaluate(trainer, module.model.eval(), tokenizer)
                module.model.train()
            trainer.strategy.barrier()

    def evaluate(
        self, trainer: Trainer, model: MambaLM, tokenizer: Tokenizer | None
    ) -> dict[str, EvalResult]:
        step, more = (trainer.global_step, {"tokenizer": tokenizer, "max_slots": default_max_slots(model)})
        contexts = {name: evaluation_context(self.config, name, **more) for name in self.config.evaluations}
        results = {name: evaluate(name, model, context) for name, context in contexts.items()}
        numbers = {
            f"{name}.{key}": value
            for name, result in results.items()
            for key, value in result.metrics.items()
        }
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        point = {
            "step": step,
            "real_tokens": self.metrics.totals["real_tokens"],
            **dict.fromkeys(numbers),
            **finite,
        }
        self.points = [other for other in self.points if other["step"] != step] + [point]
        for each in trainer.loggers:
            each.log_metrics({f"evaluation/{name}": value for name, value in finite.items()}, step - 1)
        return results
