"""Callbacks of a training run: metrics for the record, checkpoints, stopping, leakcheck, weight averaging, progress."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import signal
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from packmamba.config import Config
from packmamba.data.batch import PackedBatch, StepBatch
from packmamba.data.sources import open_source
from packmamba.data.tokenizer import Tokenizer, load_tokenizer
from packmamba.errors import ConfigError, UserError
from packmamba.evaluation.registry import EvalContext, EvalResult, default_max_slots, evaluate
from packmamba.isolation.probes import eager, moved, reseed, undisturbed
from packmamba.nn import MambaLM
from packmamba.training.boundary import Boundary
from packmamba.training.distributed import max_over_ranks
from packmamba.training.metrics import POSITION_EDGES

logger = logging.getLogger(__name__)


class RunMetrics(Callback):
    """Count tokens, slots and seconds of training, and keep the curves of the run's record.

    Seconds are those of optimizer steps and their data, without evaluations and checkpoints. Throughput leaves out each process's
    first steps. The state is saved in checkpoints, so a resumed run has the record of an uninterrupted one. Stops the run at a
    loss that is not finite; ``diverged`` is that step.
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
        self.started_from: int | None = None
        self.peak_memory: int | None = None
        self.diverged: int | None = None
        self._unchecked_losses: list[Tensor] = []
        self._recent: list[tuple[int, int, float]] = []
        self._steps_here = 0
        self._clock = 0.0

    @property
    def state_key(self) -> str:
        return "History"  # the name in checkpoints since the first

    def state_dict(self) -> dict[str, Any]:
        names = ("totals", "extremes", "timed", "train", "validation", "by_position", "started_from", "peak_memory")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value)
        for name in ("documents_behind", "tokens_behind"):
            self.totals.setdefault(name, math.nan)  # absent from old checkpoints

    def per_step(self) -> dict[str, list[dict[str, float]]]:
        """Return minimum, mean and maximum of a step's tokens and targets, as points of the record's curves."""
        totals = {"tokens": self.totals["real_tokens"], "targets": self.totals["targets"]}
        return {
            f"{name}_per_step": [
                {"mean": total / self.totals["steps"]}
                | {which: self.extremes.get(f"{name}_per_step_{which}", math.nan) for which in ("least", "most")}
            ]
            for name, total in totals.items()
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside; before, wait for the GPU and count its time."""
        self._synchronize()
        begun = time.perf_counter()
        yield
        self._clock += time.perf_counter() - begun

    def _synchronize(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._count(seconds=self._lap())

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    def _count(self, **amounts: float) -> None:
        for key, amount in amounts.items():
            self.totals[key] += amount
            if self._steps_here > self.WARMUP_STEPS:
                self.timed[key] += amount

    def _point(self, loss: float) -> dict[str, float]:
        totals = self.totals
        point = {"step": totals["steps"], "real_tokens": totals["real_tokens"], "seconds": totals["seconds"]}
        return point | {"loss": loss}

    def _update_peak_memory(self, module: lightning.LightningModule) -> None:
        if module.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(module.device))

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        point = step % self.log_every == 0 or step == 1 or step == trainer.max_steps
        # Between logged steps nothing waits for the GPU, which would idle until the next step's kernels are launched.
        if module.device.type == "cuda" and (point or self._steps_here < self.WARMUP_STEPS):
            torch.cuda.synchronize()
        seconds = self._lap()
        self._steps_here += 1
        self.totals["steps"] = step
        self._count(real_tokens=batch.num_tokens, slots=batch.num_slots, seconds=seconds)
        self.totals["targets"] += batch.num_targets
        self.totals["documents_behind"] += batch.num_behind
        self.totals["tokens_behind"] += batch.tokens_behind
        if step == trainer.max_steps and not self.totals["targets"]:
            raise ConfigError(f"data.row_length: expected rows with targets, got none in {step} steps; increase it")
        for name, amount in (("tokens", batch.num_tokens), ("targets", batch.num_targets)):
            for which, choose in (("least", min), ("most", max)):
                key = f"{name}_per_step_{which}"
                self.extremes[key] = choose(self.extremes.get(key, amount), amount)
        if step == 1 and not batch.num_behind and module.boundary.crosses_inside_rows and trainer.is_global_zero:
            logger.warning(
                "trainer.boundary=%s has no effect on the first step: no row holds two documents.", module.boundary.name
            )
        self._recent = [*self._recent[-19:], (batch.num_tokens, batch.num_slots, seconds)]
        self._unchecked_losses.append(outputs["loss"])
        if point:
            self.train.append(self._point(float(outputs["loss"])))
            tokens, slots, seconds = (sum(amounts) for amounts in zip(*self._recent))
            rates = {"train/real_tokens_per_second": tokens / seconds, "train/slots_per_second": slots / seconds}
            rates["data/padding_fraction"] = 1 - tokens / slots
            rates |= {f"train/{name}": float(value) for name, value in module.boundary.measures().items()}
            module.log_dict(rates, on_step=True, on_epoch=False)
            self.check_finite(trainer, module)

    def check_finite(self, trainer: lightning.Trainer, module: Any) -> None:
        """Stop the run if a loss since the last check is not finite. Waits for the GPU."""
        finite = torch.isfinite(torch.stack(self._unchecked_losses)).tolist() if self._unchecked_losses else []
        self._unchecked_losses.clear()
        # A loss scale skips such a step and leaves the weights alone.
        if not all(finite) and self.diverged is None and not module.scaled:
            self.diverged = int(self.totals["steps"]) - len(finite) + 1 + finite.index(False)
            trainer.should_stop = True

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._synchronize()
            self._update_peak_memory(module)

    def on_validation_epoch_end(self, trainer: lightning.Trainer, module: Any) -> None:
        results = module.alone.compute()
        point = self._point(float(results["loss"])) | {"loss_start": float(results["loss_start"])}
        if module.as_trained.update_called:
            point["loss_as_trained"] = float(module.as_trained.compute()["loss"])
        # A run killed between a validation and its checkpoint validates that step again.
        self.validation = [p for p in self.validation if p["step"] != point["step"]] + [point]
        edges = zip(POSITION_EDGES, (*POSITION_EDGES[1:], 2**31), results["by_position"].tolist(), results["counts"])
        self.by_position = [
            {"start": start, "end": end, "loss": loss, "count": int(count)}
            for start, end, loss, count in edges
            if count
        ]

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        self._clock = time.perf_counter()

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._update_peak_memory(module)


class CheckpointFile(TorchCheckpointIO):
    """Write Lightning's checkpoint to a temporary name, then rename it; load on the CPU with ``weights_only=True``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        try:
            torch.save(checkpoint, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True)


class Stopped(UserError):
    """A run was stopped before its last step, with a checkpoint that it resumes from."""

    def __init__(self, step: int, max_steps: int, signum: int = 0) -> None:
        super().__init__(f"stopped after step {step} of {max_steps}, with a checkpoint; the same command resumes it")
        self.step = step
        self.status = 128 + signum if signum else 3


class StopOnSignal(Callback):
    """Request a stop at the end of the step on SIGTERM and Ctrl-C; a second Ctrl-C interrupts at once.

    Handlers that are not Python's defaults stay. ``signum`` is the signal received, 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if (handler := signal.getsignal(signum)) in (signal.SIG_DFL, signal.default_int_handler):
                self._previous[signum] = handler
                signal.signal(signum, self._handle)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, module)

    def _handle(self, signum: int, frame: Any) -> None:
        if signum == self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum


class Checkpoint(LightningCheckpoint):
    """Save every ``trainer.checkpoint_every`` steps and at the last, after that step's validation; keep the two newest.

    A signal, or ``stop`` returning True after a step, stops the run with a checkpoint; ``stopped`` is then the exception to
    raise. Several ranks agree on a stop at logged steps.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        metrics: RunMetrics,
        signals: StopOnSignal,
        stop: Callable[[RunMetrics], bool] = lambda metrics: False,
    ) -> None:
        self.folder, self.metrics, self.signals, self.stop = folder, metrics, signals, stop
        self.every, self.validate_every = config.trainer.checkpoint_every, config.trainer.validate_every
        self.stopped: Stopped | None = None

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % self.validate_every != 0:
            self._save_if_due(trainer, module)

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._save_if_due(trainer, module)

    def _save_if_due(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        step = trainer.global_step
        signum = self.signals.signum or int(self.stop(self.metrics))
        if trainer.world_size > 1:  # agreeing waits for all ranks
            agree = step % self.metrics.log_every == 0
            signum = max_over_ranks(signum, trainer.strategy.root_device) if agree else 0
        stop = bool(signum) and step != trainer.max_steps
        if step % self.every and step != trainer.max_steps and not stop:
            return
        with self.metrics.paused():
            self.metrics.check_finite(trainer, module)
            if self.metrics.diverged is not None:
                return
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
            if trainer.is_global_zero:
                keep_newest(self.folder, 2)
        if stop:
            self.stopped = Stopped(step, trainer.max_steps, signum if signum > 1 else 0)
            trainer.should_stop, trainer.limit_val_batches = True, 0  # without a last validation


def checkpoints(folder: Path) -> list[Path]:
    """List a run's checkpoints, oldest first."""
    return sorted(folder.glob("step=*.ckpt"), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step="))


def newest_step(folder: Path) -> int:
    """Return the newest checkpoint's step; 0 without one."""
    return max(map(step_of, folder.glob("step=*.ckpt")), default=0)


def keep_newest(folder: Path, count: int) -> None:
    """Remove older checkpoints."""
    for old in checkpoints(folder)[:-count]:
        old.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint on the CPU, without running code. Raises ConfigError for a damaged file or one with other objects."""
    try:
        if (damaged := zipfile.ZipFile(path).testzip()) is not None:  # torch.load does not check CRCs
            raise ValueError(f"{damaged} is damaged")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{path}: expected a checkpoint that torch.load reads with weights_only=True, got: {reason}; remove it"
        ) from None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that loads, None without any; warn of those skipped. Raises ConfigError if none loads."""
    errors: list[ConfigError] = []
    for path in reversed(checkpoints(folder)):
        try:
            read_checkpoint(path)
        except ConfigError as error:
            errors.append(error)
            continue
        for error in errors:
            logger.warning("%s; the run resumes from %s", error, path.name)
        return path
    if errors:
        raise ConfigError(f"runs_dir: no checkpoint loads: {errors[0]} to train from the beginning")
    return None


def snapshot_steps(steps: int, snapshots: int, share: float) -> list[int]:
    """Space ``snapshots`` steps evenly over the last ``share`` of ``steps``, the last among them; none for one snapshot."""
    first = max(steps - int(share * steps), 1)
    return sorted(set(np.linspace(first, steps, snapshots).round().astype(int).tolist())) if snapshots > 1 else []


class Average(Callback):
    """Keep the running mean of the weights after ``snapshots`` steps over the last ``share`` of the run, saved in checkpoints."""

    def __init__(self, steps: int, snapshots: int, share: float) -> None:
        self.at = set(snapshot_steps(steps, snapshots, share))
        self.taken = 0
        self.mean: dict[str, Tensor] = {}

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
        """Replace the model's weights by the mean."""
        for name, weight in model.named_parameters():
            weight.copy_(self.mean[name])


class LeakError(UserError):
    """Documents leak in a run whose boundary scheme lets nothing cross."""


class LeakCheck(Callback):
    """Check a batch for leaks when training starts or resumes, and every ``every`` steps (0: only then)."""

    def __init__(self, every: int, metrics: RunMetrics) -> None:
        self.every, self.metrics = every, metrics
        self._started = False

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: StepBatch, batch_idx: int) -> None:
        if self._started and (self.every == 0 or trainer.global_step % self.every):
            return
        self._started = True
        # Carried states fit the step's first batch alone.
        batches = batch.batches[:1] if module.boundary.stateful else batch.batches
        packed = max(batches, key=lambda b: b.layout.num_documents - b.layout.shape[0], default=None)
        if packed is not None:
            with self.metrics.paused(), trainer.precision_plugin.forward_context():
                check_batch(module.model, module.boundary, packed, gradients=module.device_mesh is None)


def check_batch(model: MambaLM, boundary: Boundary, batch: PackedBatch, gradients: bool = True) -> None:
    """Change a document's last token, and compare the other documents' activations bit by bit; then check gradients.

    Random states, carried states and weights stay as they were. Costs about two forward passes and one backward pass.

    Raises:
        LeakError: something crosses where nothing must. Warns where nothing crosses and something should.
    """
    layout = batch.layout
    followed = (layout.rows[1:] == layout.rows[:-1]).nonzero().flatten()
    if not len(followed) and gradients:
        return  # ranks that share weights all compute
    leaks = any(used != layout for used in boundary.layouts(layout))
    first = int(followed[0]) if len(followed) else 0

    def hidden(tokens: Tensor) -> Tensor:
        reseed()
        return copy.deepcopy(boundary).hidden(model, replace(batch, tokens=tokens))

    with undisturbed([model]), eager():
        changed = batch.tokens.clone()
        last = int(layout.ends[first]) - 1 if layout.num_documents else 0
        vocab = model.backbone.embedding.weight.shape[0]
        changed.view(-1)[last] = (changed.view(-1)[last] + max(1, vocab // 2)) % vocab
        with torch.no_grad():
            slots = moved(hidden(changed), hidden(batch.tokens)).any(-1)
        crossing = (slots & (layout.documents != first) & (layout.documents >= 0)).flatten().nonzero().flatten()
        where = ""
        if leaks:
            if len(followed) and not len(crossing):
                warnings.warn(f"trainer.boundary={boundary.name}: no document changes the next one", stacklevel=2)
            return
        if len(crossing):
            number = int(layout.documents.flatten()[crossing[0]])
            where = f"the last token of document {first} of a batch changes document {number}"
        elif gradients and _gradient_crosses(model, lambda: hidden(batch.tokens), layout.documents == first + 1):
            where = f"the gradient of document {first + 1} of a batch reaches other documents"
    if where:
        raise LeakError(
            f"trainer.boundary={boundary.name} lets nothing cross, but {where}; trainer.leakcheck_every=null trains anyway"
        )


def _gradient_crosses(model: MambaLM, hidden: Callable[[], Tensor], own: Tensor) -> bool:
    """Differentiate the hidden vectors at the slots ``own`` (B, L) by the embedded tokens, and look at the other slots."""
    embedded: list[Tensor] = []
    hook = model.backbone.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    try:
        result = hidden()
    finally:
        hook.remove()
    (gradient,) = torch.autograd.grad(result[own].float().square().sum(), embedded[:1])
    return bool(gradient[~own].any())


Numbers = dict[str, float | None]


def evaluation_context(config: Config, name: str, **more: Any) -> EvalContext:
    """Return the context of one of the run's evaluations."""
    options = config.evaluation_options.get(name, {})
    more = {"tokenizer": None, "examples": config.evaluation_examples, "options": options} | more
    return EvalContext(config.data, key="evaluation_options", trainer=config.trainer, **more)


def evaluate_model(
    config: Config, model: MambaLM, tokenizer: Tokenizer | None
) -> tuple[Numbers, dict[str, EvalResult]]:
    """Run the configured evaluations; return numbers by ``<evaluation>.<metric>``, null where not finite, and the results."""
    shared: dict[str, Any] = {"tokenizer": tokenizer, "max_slots": default_max_slots(model)}
    results = {name: evaluate(name, model, evaluation_context(config, name, **shared)) for name in config.evaluations}
    metrics = {
        f"{name}.{metric}": value for name, result in results.items() for metric, value in result.metrics.items()
    }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}, results


class Evaluations(Callback):
    """Evaluate the model every ``trainer.evaluate_every`` steps before the last, without changing the training.

    The first rank evaluates, the others wait. Points are saved in checkpoints, so a resumed run has one curve.
    """

    def __init__(self, config: Config, metrics: RunMetrics) -> None:
        self.config, self.metrics = config, metrics
        self.points: list[dict[str, Any]] = []
        self.tokenizer = None if open_source(config.data).vocab_size is not None else load_tokenizer(config.data)

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % (self.config.trainer.evaluate_every or 1) or step == trainer.max_steps:
            return
        with self.metrics.paused():
            weights = model_weights(trainer.strategy.lightning_module_state_dict())  # gathered, on all ranks
            results: list[Any] = [None]
            try:
                if trainer.is_global_zero:
                    results = [self._evaluate(module, weights)]
            finally:  # the other ranks fail with the first
                if trainer.world_size > 1:
                    torch.distributed.broadcast_object_list(results, device=trainer.strategy.root_device)
            if results[0] is None:
                raise RuntimeError("an evaluation failed in the first rank")
            self.add(trainer, results[0])

    def _evaluate(self, module: Any, weights: dict[str, Tensor]) -> Numbers:
        """Evaluate a second model that shares the weights: neither compiled nor sharded."""
        with torch.device("meta"):
            model = MambaLM(**module.model.config)
        model.load_state_dict(weights, assign=True)
        return evaluate_model(self.config, model.to(module.device).eval(), self.tokenizer)[0]

    def add(self, trainer: lightning.Trainer, numbers: Numbers) -> None:
        """Add the numbers of this step to the curve, and log them."""
        step = trainer.global_step
        point = {"step": step, "real_tokens": self.metrics.totals["real_tokens"]} | numbers
        self.points = [other for other in self.points if other["step"] != step] + [point]
        logged = {f"evaluation/{name}": value for name, value in numbers.items() if value is not None}
        for each in trainer.loggers:
            each.log_metrics(logged, step - 1)

    def add_points_of(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """Add the last points of records, by step, of the same run with fewer steps."""
        every, known = self.config.trainer.evaluate_every or 1, {point["step"] for point in self.points}
        steps = [step for step in records if step not in known and step % every == 0]
        earlier = [p for step in steps for p in records[step]["curves"].get("evaluations", []) if p["step"] == step]
        self.points = sorted([*self.points, *earlier], key=lambda point: point["step"])


def model_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's weights of a Lightning module's state."""
    return {name.removeprefix("model."): weight for name, weight in state.items() if name.startswith("model.")}
