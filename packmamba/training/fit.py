"""Train one run, from a configuration to its record."""

import ctypes
import inspect
import logging
import math
import os
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import OmegaConf

from packmamba import records
from packmamba.config import (
    CONFIGURATION,
    Config,
    ConfigError,
    TrainerConfig,
    import_plugins,
    need,
    registry,
    to_dict,
)
from packmamba.data.datamodule import PackedDataModule
from packmamba.data.sources import open_source
from packmamba.data.token_store import evaluation_documents
from packmamba.data.tokenizer import write_tokenizer
from packmamba.errors import UserError
from packmamba.evaluation.load import load_model
from packmamba.evaluation.registry import check
from packmamba.nn import MambaLM
from packmamba.nn.pretrained import load_weights, read_pretrained, write_pretrained
from packmamba.ops.backends import backend_name
from packmamba.training import callbacks, run_id
from packmamba.training.lit_module import PackedLitModule

MAX_COMPILED_SHAPES = 256  # PyTorch's limit, 8, is soon reached


def fit(
    config: Config,
    progress: bool = True,
    stop: Callable[[callbacks.RunMetrics], bool] | None = None,
) -> dict[str, Any]:
    """Train and evaluate a run, or resume it; append its record, and return it.

    Raises Stopped, with a checkpoint, on a signal or where ``stop`` is true after a step.
    """
    folder = run_id.run_folder(config)
    new = not (folder / CONFIGURATION).exists()
    with configured_runtime(config), redirect_stdout(sys.stderr):
        try:
            return _fit(config, progress, stop)
        except UserError as error:
            if (
                new
                and not isinstance(error, run_id.Locked)
                and not callbacks.checkpoints(folder / "checkpoints")
            ):
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # it holds other runs
                    folder.parent.rmdir()
            raise
        except SystemExit:
            raise KeyboardInterrupt from None
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
                wandb.finish()  # else the next run joins this one


@contextmanager
def configured_runtime(config: Config) -> Iterator[None]:
    trainer, threads, strict = (
        config.trainer,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
    with suppress(AttributeError, OSError):  # large tensors reuse pages
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    torch.set_num_threads(trainer.threads or (1 if trainer.deterministic and on_cpu else threads))
    try:
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(True)
        if config.model.compile:
            torch.compiler.reset()  # earlier shapes decide how sums are split
            dynamo: Any = torch._dynamo.config
            dynamo.recompile_limit, dynamo.accumulated_recompile_limit = (
                MAX_COMPILED_SHAPES,
                4 * MAX_COMPILED_SHAPES,
            )
            dynamo.fail_on_recompile_limit_hit = True  # else the rest runs uncompiled
            torch._inductor.config.fx_graph_cache = not trainer.deterministic
            torch._functorch.config.enable_autograd_cache = not trainer.deterministic
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def _fit(
    config: Config, progress: bool, stop: Callable[[callbacks.RunMetrics], bool] | None
) -> dict[str, Any]:
    begun = time.perf_counter()
    records.provenance()
    import_plugins(config.plugins)
    check_run(config)
    check_accelerator(config)
    path, folder, options = run_id.record_path(config), run_id.run_folder(config), config.trainer
    records.check_writable(folder, "runs_dir")
    records.check_writable(path.parent, "output")
    data, saved = PackedDataModule.from_config(config, progress=progress), folder / "checkpoints"
    reached = max(map(callbacks.step_of, callbacks.checkpoints(saved)), default=0)
    lock, metrics = run_id.RunLock(folder), callbacks.RunMetrics(options.log_every)

    def stops(metrics: callbacks.RunMetrics) -> bool:
        lock.check()
        return stop is not None and stop(metrics)

    average = callbacks.Average(options.max_steps, options.average_snapshots, options.average_share)
    evaluations = callbacks.Evaluations(config, metrics)
    leakcheck = callbacks.LeakCheck(config, metrics)
    checkpoint = callbacks.Checkpoint(saved, config, metrics, stops)
    ours = [metrics, average, evaluations, leakcheck, checkpoint]
    trainer = make_trainer(config, folder, ours, progress, reached)
    with lock if trainer.is_global_zero else nullcontext():
        if (done := run_id.find_record(config)) is not None:
            same = done["corpus_hash"] == data.corpora.corpus_hash
            need(same, "data", "this run's documents", f"others; remove {path} and {folder}")
            if progress:
                print(f"already done, nothing is trained: {folder}")
            return done
        need(
            reached <= options.max_steps,
            "trainer.max_steps",
            f"at least {reached} of {folder}",
            options.max_steps,
        )
        lightning.seed_everything(config.seed, workers=True, verbose=False)
        module = PackedLitModule.from_config(config, data.vocab_size)
        check_run(config, len(module.model.lm_head.weight))
        if options.init_from is not None and not reached:
            metrics.started_from = load_initial_weights(module.model, config)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            records.write_whole(folder / CONFIGURATION, OmegaConf.to_yaml(to_dict(config)).encode())
            for each in () if reached else trainer.loggers:
                each.log_hyperparams(run_id.recorded_config(config))
        resume = callbacks.newest_checkpoint(saved)
        backend = backend_name(config.ops.backend, trainer.strategy.root_device)
        if progress and trainer.is_global_zero:
            train, held_out = data.corpora.train, data.corpora.validation.num_documents
            epochs = options.max_steps * config.data.tokens_per_step / train.num_tokens
            print(
                f"{train.num_documents:,} documents with {train.num_tokens:,} tokens; validation on "
                f"{min(held_out, config.data.validation_documents or held_out)} of {held_out} held out; "
                f"{sum(p.numel() for p in module.model.parameters()):,} parameters; backend {backend}; "
                f"{options.max_steps} steps, {epochs:.2g} epochs; run {folder}"
                + (f", from step {callbacks.step_of(resume)}" if resume else ""),
                flush=True,
            )
        with checkpoint.signals():
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        if checkpoint.stopped is not None:
            raise checkpoint.stopped
        if not metrics.validation or metrics.validation[-1]["step"] != trainer.global_step:
            trainer.validate(module, data, verbose=False)
        last = metrics.validation[-1]
        if metrics.diverged is None and not math.isfinite(last["loss"]):
            metrics.diverged = trainer.global_step
        if average.at and metrics.diverged is None:
            module.model.load_state_dict(average.mean, strict=False)
            trainer.validate(module, data, verbose=False)
            metrics.validation[-1]["loss_last_weights"] = last["loss"]
        record = training_record(config, data.corpora.corpus_hash, module, metrics)
        record["metrics"]["validation_documents"] = len(
            evaluation_documents(data.corpora.validation, config.data)
        )
        record["hardware"]["backend"] = backend
        record["leakcheck"] = leakcheck.result()
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            lock.check()
            if metrics.diverged is None:
                weights = {
                    k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")
                }
                write_pretrained(folder, dict(module.model.config), weights)
                if open_source(config.data).vocab_size is None:
                    write_tokenizer(
                        folder,
                        config.data.tokenizer,
                        config.data.begin_token,
                        config.data.end_token,
                    )
                if config.evaluations:
                    loaded = load_model(folder, str(trainer.strategy.root_device))
                    for name, result in evaluations.evaluate(
                        trainer, loaded.model, loaded.tokenizer
                    ).items():
                        records.write_items(
                            folder / "evaluation" / "items" / f"{name}.jsonl", result.items
                        )
                        record["curves"] |= {
                            f"{name}.{each}": points for each, points in result.curves.items()
                        }
                    record["metrics"] |= {
                        k: value for k, value in evaluations.points[-1].items() if "." in k
                    }
            else:
                callbacks.logger.warning("The loss was not finite at step %d.", metrics.diverged)
            if options.evaluate_every is not None:
                record["curves"]["evaluations"] = evaluations.points
            record["wall_seconds"] = time.perf_counter() - begun
            lock.check()
            records.append_record(path, record)
            for old in callbacks.checkpoints(saved)[:-1]:
                old.unlink()
    return record


def check_run(config: Config, vocab_size: int | None = None) -> None:
    config.trainer.scheme()
    for name in config.evaluations:
        check(name, callbacks.evaluation_context(config, name), vocab_size)


def check_accelerator(config: Config) -> None:
    key = "cuda_graphs" if config.trainer.cuda_graphs else "accelerator"
    needed = getattr(config.trainer, key) in (True, "gpu", "cuda")
    need(
        not needed or torch.cuda.is_available(),
        f"trainer.{key}",
        "a GPU that PyTorch can use",
        "none",
    )


def make_trainer(
    config: Config, folder: Path, own: list[Any], progress: bool, resumed_step: int
) -> lightning.Trainer:
    options = config.trainer
    own = [*own, *(instantiate(one, "trainer.callbacks") for one in options.callbacks)]
    if progress:
        own.append(TQDMProgressBar(refresh_rate=options.log_every))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in (
        "many workers",
        "litlogger",
        "LeafSpec",
        "`srun`",
        "GPU available",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    same = ("accelerator", "devices", "num_nodes", "precision", "max_steps")
    try:
        trainer = lightning.Trainer(
            **{name: getattr(options, name) for name in same},
            strategy=make_strategy(options),
            val_check_interval=options.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=min(options.log_every, options.max_steps),
            logger=[make_logger(one, folder, resumed_step) for one in options.loggers],
            callbacks=own,
            enable_progress_bar=progress,
            enable_model_summary=False,
            plugins=[callbacks.CheckpointFile()],
        )
        backend_name(config.ops.backend, trainer.strategy.root_device)
    except Exception as error:
        raise ConfigError(
            f"{'ops.' if str(error).startswith('backend') else 'trainer: '}{error}"
        ) from None
    wrong = trainer.strategy.root_device.type == "cpu" and options.precision == "16-mixed"
    need(not wrong, "trainer.precision", "bf16-mixed or 32-true on a CPU", "'16-mixed'")
    # Lightning's signal handlers, and its broadcasts (its issue 20806).
    loop = trainer.fit_loop.epoch_loop
    for part, name in (
        (trainer._signal_connector, "register_signal_handlers"),
        (loop, "_broadcast_sigterm_tensor"),
    ):
        assert hasattr(part, name), name
        setattr(part, name, lambda: None)
    return trainer


def make_strategy(options: TrainerConfig) -> Strategy | str:
    devices = options.devices * options.num_nodes
    if options.strategy == "fsdp2":
        return ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)
    if options.strategy == "auto" and devices == 1:
        return "auto"
    torch._dynamo.config.optimize_ddp = False
    return DDPStrategy(gradient_as_bucket_view=True)


def instantiate(spec: Any, key: str, **defaults: Any) -> Any:
    """Instantiate a class path, or ``class_path`` and ``init_args``, with ``defaults`` that it takes."""
    path, arguments = (
        (spec, {}) if isinstance(spec, str) else (spec["class_path"], spec.get("init_args", {}))
    )
    try:
        made = registry(":".join(path.rsplit(".", 1)))
        known = inspect.signature(made).parameters
        return made(
            **{name: value for name, value in defaults.items() if name in known} | dict(arguments)
        )
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: expected a class path, got {path}: {error}") from None


class TokenAxis(TensorBoardLogger):
    tokens = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.tokens = int(metrics.get("train/real_tokens", self.tokens))
        super().log_metrics(metrics, self.tokens)


def make_logger(spec: Any, folder: Path, resumed_step: int) -> Logger:
    if spec == "csv":
        return CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)
    if spec in ("tensorboard", "tensorboard_tokens"):
        kind, purged = (
            (TensorBoardLogger, resumed_step or None)
            if spec == "tensorboard"
            else (TokenAxis, None)
        )
        return kind(folder, spec, "", default_hp_metric=False, purge_step=purged)
    if spec == "wandb":
        return WandbLogger(
            folder.name, folder, id=folder.name, project=folder.parent.name or "packmamba"
        )
    return instantiate(spec, "trainer.loggers", save_dir=folder)


def load_initial_weights(model: MambaLM, config: Config) -> int:
    source, checksum = str(config.trainer.init_from), 0
    path = Path(source)
    if not path.is_dir():
        folder, _, arm = source.rpartition(":")
        runs = [
            r
            for r in run_id.records_of(folder or ".")
            if (r["arm"], r["seed"]) == (arm, config.seed)
        ]
        paths = {Path(folder) / "runs" / run_id.id_of(arm, record["config"]) for record in runs}
        expected = f"a model's folder, or <sweep>:<arm> with one run of seed {config.seed}"
        need(len(paths) == 1, "trainer.init_from", expected, f"'{source}', {len(paths)} runs")
        path = paths.pop()
    try:
        weights = read_pretrained(path)[1]
        load_weights(model, weights, path, "this run's keys of model")
    except (ValueError, FileNotFoundError, KeyError) as error:
        raise ConfigError(f"trainer.init_from: {error}") from None
    for name in sorted(weights):
        checksum = zlib.crc32(
            weights[name].contiguous().view(torch.uint8).numpy().tobytes(), checksum
        )
    return checksum


def training_record(
    config: Config, corpus_hash: str, module: Any, metrics: callbacks.RunMetrics
) -> dict[str, Any]:
    totals, last = metrics.totals, metrics.validation[-1]
    curves = {
        "train": metrics.train,
        "validation": metrics.validation,
        "loss_by_position": metrics.by_position,
    }
    timed = metrics.timed if metrics.timed["seconds"] else totals
    values = {
        **{name: totals[name] for name in ("steps", "real_tokens", "targets")},
        **{f"val_{name}": last.get(name) for name in ("loss", "loss_start", "loss_as_trained")},
        "real_tokens_per_second": timed["real_tokens"] / timed["seconds"],
        "slots_per_second": timed["slots"] / timed["seconds"],
        "padding_fraction": 1 - totals["real_tokens"] / totals["slots"],
        "documents_behind_another": totals["documents_behind"],
        "tokens_behind_another": totals["tokens_behind"],
        "train_seconds": totals["seconds"],
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "peak_memory_bytes": metrics.peak_memory,
        **module.boundary.measures(),
    }
    for name, value in (
        ("diverged_at_step", metrics.diverged),
        ("started_from_checksum", metrics.started_from),
        ("val_loss_last_weights", last.get("loss_last_weights")),
    ):
        values |= {} if value is None else {name: value}
    experiment = run_id.name_of(config.output) if config.output else run_id.run_id(config)
    identity = experiment, config.name, run_id.recorded_config(config), config.seed, corpus_hash
    return records.make_record("training", *identity, values, 0.0, curves)
