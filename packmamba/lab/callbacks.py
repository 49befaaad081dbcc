"""Callbacks of a training run: what it counts, saves, checks and evaluates.

Lightning calls them in the order of ``fit.make_trainer``'s list, but for ``Checkpoint``, which it
moves to the end, so that what a checkpoint holds is complete. What they hold between steps is saved
with it: a run that goes on counts on.
Checkpoints, evaluations and leak checks happen outside of the run's clock (``RunMetrics.paused``);
a speed that included them would compare how often runs were saved.
"""

import json
import logging
import math
import signal
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.throughput import _CUDA_FLOPS, get_available_flops
from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
from lightning.pytorch.callbacks import TQDMProgressBar, WeightAveraging
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from packmamba.config import Config, TrainerConfig
from packmamba.data.batch import StepBatch
from packmamba.data.corpus import Documents
from packmamba.data.sources import reads_text
from packmamba.data.token_store import evaluation_documents
from packmamba.data.tokenizer import Tokenizer, load_tokenizer
from packmamba.errors import ConfigError, UserError
from packmamba.evaluation import generate
from packmamba.evaluation.registry import EvalContext, EvalResult, default_max_slots, evaluate
from packmamba.files import replacing, write_whole
from packmamba.isolation.probes import eager
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.testing import Found, LightningLeakCheck, Saved
from packmamba.training.lit_module import POSITION_EDGES

logger = logging.getLogger(__name__)


def flops_per_token(model: MambaLM) -> int:
    """Return 6 operations for each parameter that a token is multiplied with, forward and backward.

    An embedding that is not the head, too, is only looked up. The scan's own operations are left
    out, as attention's are elsewhere.
    """
    looked_up = {model.backbone.embedding.weight} - {model.lm_head.weight}
    return 6 * sum(weight.numel() for weight in {*model.parameters()} - looked_up)


def peak_flops(trainer: Trainer) -> float | None:
    """Return the operations a second of all devices in the precision.

    None where Lightning knows none.
    """
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return None
    dtype = _plugin_to_compute_dtype(trainer.precision_plugin)
    # Lightning does not know this name, and has sparse products for an H200. Dense are an H100's.
    is_h200 = torch.cuda.get_device_name(device) == "NVIDIA H200"
    of_device = _CUDA_FLOPS["h100 sxm"].get(dtype) if is_h200 else get_available_flops(device, dtype)
    return of_device and of_device * trainer.world_size


class RunMetrics(Saved, Callback):
    """Count tokens, slots and seconds, keep curves, and stop at a loss that is not finite.

    ``totals`` are of the whole run; ``timed`` leaves out the first steps of each process, in which
    kernels and graphs are made. A curve is a list of points, losses in nats per target.
    """

    WARMUP_STEPS = 3
    COUNTS = ("steps", "real_tokens", "slots", "targets", "documents_behind", "tokens_behind")
    SAVED = ("totals", "timed", "train", "validation", "by_position", "started_from", "peak_memory")

    def __init__(self, log_every: int, axis: str = "steps") -> None:
        self.log_every = log_every
        self.axis = axis
        self.totals: dict[str, float] = dict.fromkeys((*self.COUNTS, "seconds"), 0)
        self.timed: dict[str, float] = {"real_tokens": 0, "slots": 0, "seconds": 0.0}
        self.train: list[dict[str, float]] = []
        self.validation: list[dict[str, float]] = []
        self.by_position: list[dict[str, float]] = []
        self.started_from: int | None = None
        self.peak_memory: int | None = None
        self.diverged: int | None = None
        self._steps_of_process = 0
        self._clock = 0.0
        self._unchecked_losses: list[Tensor] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the run's clock meanwhile."""
        self._count()
        yield
        self.on_train_start()

    def _count(self, wait: bool = True, **amounts: float) -> None:
        """Add amounts, and the seconds since the last look at the clock."""
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        amounts["seconds"] = now - self._clock
        self._clock = now
        for key, amount in amounts.items():
            self.totals[key] += amount
            if key in self.timed and self._steps_of_process > self.WARMUP_STEPS:
                self.timed[key] += amount

    def _point(self, loss: Tensor) -> dict[str, float]:
        steps, tokens, seconds = (self.totals[name] for name in ("steps", "real_tokens", "seconds"))
        return {"step": steps, "real_tokens": tokens, "seconds": seconds, "loss": float(loss)}

    def on_train_start(self, *_: Any) -> None:
        """Start the run's clock."""
        self._clock = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: StepBatch, _: int) -> None:
        """Count a step; every ``log_every`` steps log it and check its loss.

        Between these, neither the loss nor the clock waits for the GPU.
        """
        step = trainer.global_step
        logged = step % self.log_every == 0 or step in (1, trainer.max_steps)
        self._steps_of_process += 1
        counts = {"steps": 1, "real_tokens": batch.num_tokens, "slots": batch.num_slots}
        counts |= {"targets": batch.num_targets, "documents_behind": batch.num_behind}
        wait = logged or self._steps_of_process <= self.WARMUP_STEPS
        self._count(wait, **counts, tokens_behind=batch.tokens_behind)
        self._unchecked_losses.append(outputs["loss"])
        if logged:
            # The rate is of the steps since the last logged one, so that it shows a slow stretch.
            before = self.train[-1] if self.train else {"real_tokens": 0, "seconds": 0.0}
            point = self._point(outputs["loss"])
            self.train.append(point)
            rate = (point["real_tokens"] - before["real_tokens"]) / (point["seconds"] - before["seconds"])
            self.log_tokens(module)
            shown = {"train/real_tokens_per_second": rate}
            self.on_train_end(trainer, module)
            if self.peak_memory is not None:
                shown["train/peak_memory_gib"] = self.peak_memory / 2**30
            if (peak := peak_flops(trainer)) is not None:
                shown["train/mfu"] = rate * flops_per_token(module.model) / peak
            module.log_dict(shown, prog_bar=True, on_step=True, on_epoch=False)
            self.check_finite(trainer, module)

    def log_tokens(self, module: Any, **options: Any) -> None:
        """Log the tokens so far, as every logger's axis, too, if that is wanted."""
        # Lightning takes a metric named "step" for the place on the axis.
        names = ["train/real_tokens"] + ["step"] * (self.axis == "tokens")
        module.log_dict(dict.fromkeys(names, self.totals["real_tokens"]), **options)

    def check_finite(self, trainer: Trainer, module: Any) -> None:
        """Stop if a loss since the last check is not finite.

        A loss scale skips such steps: then they are no reason to stop.
        """
        losses = self._unchecked_losses
        finite = torch.isfinite(torch.stack(losses)).tolist() if losses else []
        self._unchecked_losses = []
        # The step is the first that was not finite, though others were taken since.
        if not all(finite) and self.diverged is None and not module.scaled:
            self.diverged = int(self.totals["steps"]) - len(finite) + 1 + finite.index(False)
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        """Stop the clock, and note the training's peak memory before validation has its own."""
        if trainer.state.fn == "fit":
            self._count()
            self.on_train_end(trainer, module)

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Add a point to the curve of validation losses, and keep the last losses by position."""
        results = module.alone.compute()
        point = self._point(results["loss"]) | {"loss_start": float(results["loss_start"])}
        self.log_tokens(module, sync_dist=True)
        if module.by_source is not None:
            point |= {f"loss.{name}": float(loss) for name, loss in module.by_source.compute().items()}
        if module.as_trained.update_called:
            point["loss_as_trained"] = float(module.as_trained.compute()["loss"])
        # A run that was killed after a validation does it again.
        self.validation = [other for other in self.validation if other["step"] != point["step"]] + [point]
        ends = (*POSITION_EDGES[1:], 2**31)
        columns = (POSITION_EDGES, ends, results["by_position"].tolist(), results["counts"].tolist())
        ranges = [dict(zip(("start", "end", "loss", "count"), values)) for values in zip(*columns)]
        self.by_position = [each for each in ranges if each["count"]]

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Start the clock again, and the peak of memory."""
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        self.on_train_start()

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        """Note the peak memory so far, in bytes; of the steps after the last logged one, too."""
        if module.device.type == "cuda":
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated(module.device))


# Tells after a step if the run is to stop.
Stop = Callable[[RunMetrics], bool]


class ProgressBar(TQDMProgressBar):
    """Show losses, speed, memory and MFU in short."""

    SHORT = {
        "train/real_tokens_per_second": ("tokens/s", "{:,.0f}"),
        "train/peak_memory_gib": ("memory", "{:.1f} GiB"),
        "train/mfu": ("MFU", "{:.1%}"),
    }

    def get_metrics(self, trainer: Trainer, module: Any) -> dict[str, Any]:
        """Return what the bar shows."""
        metrics = super().get_metrics(trainer, module)
        metrics.pop("v_num", None)  # the loggers' versions
        for name, (short, form) in self.SHORT.items():
            if name in metrics:
                metrics[short] = form.format(metrics.pop(name))
        return metrics


class CheckpointFile(TorchCheckpointIO):
    """Write a checkpoint whole or not at all. Raises DiskFull."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write to a temporary file, and rename it."""
        # A file of Python's: torch does not say why its own cannot be written.
        with replacing(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)


class Stopped(UserError):
    """A run was stopped after a step and has a checkpoint; by a signal, or (1) by ``stop``."""

    def __init__(self, step: int, max_steps: int, signum: int) -> None:
        super().__init__(f"stopped after step {step} of {max_steps}, with a checkpoint; the same command resumes it")
        self.step = step
        self.status = 128 + signum if signum > 1 else 3


class Checkpoint(LightningCheckpoint):
    """Save at a step's end, after its validation.

    A signal or ``stop`` ends the run with a checkpoint. The last two stay: the newest may be
    damaged, as by a disk, where its write was not interrupted.
    """

    def __init__(self, folder: Path, config: Config, metrics: RunMetrics, stop: Stop | None) -> None:
        self.folder = folder
        self.options = config.trainer
        self.metrics = metrics
        self.stop = stop
        self.stopped: Stopped | None = None
        self._signum = 0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the run at the next step's end; other handlers stay."""
        with ExitStack() as restored:
            # Python allows it in no other thread.
            if threading.current_thread() is threading.main_thread():
                for caught in (signal.SIGINT, signal.SIGTERM):
                    if signal.getsignal(caught) in (signal.SIG_DFL, signal.default_int_handler):
                        restored.callback(signal.signal, caught, signal.signal(caught, self._handle))
            yield

    def _handle(self, signum: int, frame: Any) -> None:
        if signum == self._signum == signal.SIGINT:  # a second Ctrl-C
            raise KeyboardInterrupt
        self._signum = signum

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        """Save, unless the step is validated first."""
        if trainer.global_step % self.options.validate_every:
            self.on_validation_end(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        """Save if it is time to, and stop if that is wanted."""
        if trainer.state.fn != "fit":
            return
        step = trainer.global_step
        signum = self._wanted_stop(trainer)
        last = step == trainer.max_steps or trainer.should_stop  # as EarlyStopping sets it
        if step % self.options.checkpoint_every and not last and not signum:
            return
        with self.metrics.paused():
            self.metrics.check_finite(trainer, module)
            if self.metrics.diverged is not None:
                return  # weights that are not finite are nothing to go on from
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
            for old in checkpoints(self.folder)[:-2]:
                old.unlink(missing_ok=True)
        if signum and not last:
            self.stopped = Stopped(step, trainer.max_steps, signum)
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # else Lightning validates once more before it ends

    def _wanted_stop(self, trainer: Trainer) -> int:
        """Return the signal to stop by, 1 for ``stop``, 0 for none, the same on all ranks.

        Ranks ask each other only at logged steps, since that waits for the slowest.
        """
        signum = self._signum or int(self.stop is not None and self.stop(self.metrics))
        if trainer.world_size == 1:
            return signum
        if trainer.global_step % self.metrics.log_every:
            return 0
        wanted = torch.tensor(signum, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(wanted, reduce_op="max"))


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(path.stem.removeprefix("step="))


def checkpoints(folder: Path) -> list[Path]:
    """Return a folder's checkpoints, the newest last."""
    return sorted(folder.glob("step=*.ckpt"), key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that loads. Raises ConfigError if none of several does.

    Others are damaged, or of another version.
    """
    refused = ""
    for path in reversed(checkpoints(folder)):
        try:
            damaged = zipfile.ZipFile(path).testzip()  # torch.load does not check CRCs
            if damaged is not None:
                raise ValueError(f"{damaged} is damaged")
            torch.load(path, map_location="cpu", weights_only=True)
            return path
        except Exception as error:
            reason = str(error).partition("\n")[0]
            refused = f"{path}: expected a checkpoint of this version, got {reason}; remove it"
            logger.warning("%s; the run resumes from an older one", refused)
    if refused:
        raise ConfigError(f"runs_dir: no checkpoint loads: {refused} to train from the beginning")
    return None


class LeakCheck(LightningLeakCheck):
    """Check a run's steps for leaks, outside of its clock; ``result`` is for its record."""

    def __init__(self, config: Config, metrics: RunMetrics) -> None:
        super().__init__(every=config.trainer.leakcheck_every or 0)
        self.config = config
        self.metrics = metrics
        self.needless = why_unchecked(config.trainer)
        self.done = self.needless is not None

    def check_step(self, *arguments: Any) -> tuple[Found, str]:
        """Check a step outside of the run's clock."""
        with self.metrics.paused():
            return super().check_step(*arguments)

    def settle(self, found: Found, line: str) -> None:
        """Name the boundary scheme and the step of a leak."""
        if found is Found.LEAK:
            line = f"trainer.boundary={self.config.trainer.boundary}: step {self.step + 1}: {line}"
        super().settle(found, line)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Warn of nothing: the record and the last line say what was not checked."""

    def result(self) -> str:
        """Return "checked at step N", the last one, or "unchecked: why"."""
        if self.checked_at is None:
            return f"unchecked: {self.needless or self.unchecked}"
        used = ["trainer.cuda_graphs"] * self.config.trainer.cuda_graphs
        used += ["model.compile"] * self.config.model.compile
        without = f", computed without {' and '.join(used)}" if used else ""
        later = self.tried_at != self.checked_at
        failed = f"; unchecked at step {self.tried_at + 1}: {self.unchecked}" if later else ""
        return f"checked at step {self.checked_at + 1}{without}{failed}"


def why_unchecked(options: TrainerConfig) -> str | None:
    """Return why a run is not to be checked, or None."""
    if options.leakcheck_every is None:
        return "trainer.leakcheck_every=null"
    scheme = options.scheme()
    if scheme.stateful:
        return f"trainer.boundary={options.boundary} keeps states between batches"
    layout = SequenceLayout.from_lengths([[1, 1]], row_length=2)
    if any(used != layout for used in scheme.layouts(layout)):
        return f"trainer.boundary={options.boundary} lets documents leak"
    return None


def evaluation_context(config: Config, name: str, **more: Any) -> EvalContext:
    """Return what an evaluation of a run reads; ``more``: further fields of EvalContext."""
    more |= {"key": "evaluation_options", "options": config.evaluation_options.get(name, {})}
    more |= {"names": "evaluations", "examples": config.evaluation_examples}
    return EvalContext(config.data, trainer=config.trainer, **more)


class Evaluations(Saved, Callback):
    """Evaluate the model every ``trainer.evaluate_every`` steps.

    ``points`` are the metrics by step.
    """

    SAVED = ("points",)

    def __init__(self, config: Config, metrics: RunMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.points: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        """Evaluate on rank 0, while the others wait; the last step is evaluated by ``fit``."""
        step = trainer.global_step
        every = self.config.trainer.evaluate_every
        if every is None or step % every or step == trainer.max_steps:
            return
        # Averages of weights stand in for the weights, as they do in validation.
        averages = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]  # type: ignore[attr-defined]
        with self.metrics.paused():
            for callback in averages:
                callback.on_validation_epoch_start(trainer, module)
            if trainer.is_global_zero:
                tokenizer = load_tokenizer(self.config.data) if reads_text(self.config.data) else None
                with eager():  # else each of its shapes would be compiled first
                    self.evaluate(trainer, module.model.eval(), tokenizer)
                module.model.train()
            for callback in averages:
                callback.on_validation_epoch_end(trainer, module)
            trainer.strategy.barrier()

    def evaluate(self, trainer: Trainer, model: MambaLM, tokenizer: Tokenizer | None) -> dict[str, EvalResult]:
        """Run all evaluations, add their point, and log it; return their results by name."""
        max_slots = default_max_slots(model)
        results: dict[str, EvalResult] = {}
        numbers: dict[str, float | None] = {}
        for name in self.config.evaluations:
            context = evaluation_context(self.config, name, tokenizer=tokenizer, max_slots=max_slots)
            with isolate_rng():  # the harness seeds, and a training that goes on keeps its bits
                results[name] = evaluate(name, model, context)
            for key, value in results[name].metrics.items():
                numbers[f"{name}.{key}"] = value if math.isfinite(value) else None
        step = trainer.global_step
        tokens = int(self.metrics.totals["real_tokens"])
        point = {"step": step, "real_tokens": tokens, **numbers}
        self.points = [other for other in self.points if other["step"] != step] + [point]
        finite = {f"evaluation/{name}": value for name, value in numbers.items() if value is not None}
        place = tokens if self.metrics.axis == "tokens" else step - 1
        for each in trainer.loggers:
            each.log_metrics(finite, place)
        return results


class Samples(Callback):
    """Continue the first tokens of validation documents at each validation.

    Continuations are the likeliest tokens.

    The texts are lines of ``samples.jsonl`` in the run's folder, and go to TensorBoard, W&B and
    MLflow. Nothing is drawn at random, so that the training keeps its bits.
    """

    PROMPT_TOKENS = 32
    NEW_TOKENS = 64

    def __init__(self, config: Config, path: Path) -> None:
        self.config = config
        self.path = path

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        """Write the samples of this step on rank 0.

        The clock stands still, and the model is in evaluation mode.
        """
        if not trainer.is_global_zero:
            return
        corpus = trainer.datamodule.corpora.validation  # type: ignore[attr-defined]
        tokenizer = load_tokenizer(self.config.data)
        chosen = evaluation_documents(corpus, self.config.data)[: self.config.trainer.samples]
        prompts = [self.prompt(corpus, number) for number in chosen.tolist()]
        with eager():
            limits: Any = {"stop_token": tokenizer.end_id, "max_slots": sum(map(len, prompts))}
            continuations = generate(module.model, prompts, self.NEW_TOKENS, **limits)
        step = trainer.global_step
        samples = []
        for prompt, new in zip(prompts, continuations):
            samples.append({"step": step, "prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(new)})
        # A run that was killed after a validation does it again.
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        lines = [line for line in lines if json.loads(line)["step"] < step]
        lines += [json.dumps(each) for each in samples]
        write_whole(self.path, "".join(f"{line}\n" for line in lines).encode())
        for each in trainer.loggers:
            self.log_texts(each, samples, step)

    def prompt(self, corpus: Documents, number: int) -> list[int]:
        """Return a document's tokens up to its first answer, or its first if all are trained on."""
        tokens, targets = corpus.read(number, start=0, length=int(corpus.lengths[number]), ends=True)
        # Half of a short document: its end token would end the prompt.
        length = min(self.PROMPT_TOKENS, (len(tokens) + 1) // 2)
        if corpus.has_answers:
            length = 1 + int((targets >= 0).argmax())
        return tokens[:length].tolist()

    def log_texts(self, logger: Any, samples: list[dict[str, Any]], step: int) -> None:
        """Write samples to a logger that takes texts."""
        # A bar ends the prompt.
        text = "\n\n".join(f"{each['prompt']}|{each['continuation']}" for each in samples)
        if hasattr(logger, "log_text"):  # W&B
            logger.log_text("val/samples", columns=[*samples[0]], data=[[*each.values()] for each in samples])
        elif hasattr(logger.experiment, "add_text"):  # TensorBoard
            # Rendered as Markdown: indented, it is a block of code.
            logger.experiment.add_text("val/samples", textwrap.indent(text, "    "), step - 1)
        elif hasattr(logger.experiment, "log_text"):  # MLflow
            logger.experiment.log_text(logger.run_id, text, f"samples/step={step}.txt")
