"""Train one run, from a configuration to its record.

    configuration -> check -> corpus -> module, trainer -> steps -> weights, evaluations -> record

A run is a folder, named by a hash of what decides its result. The same configuration finds the
same folder: a run that has a record is not repeated, one that has checkpoints goes on from the
newest that loads. Everything a user can have got wrong is checked before the corpus is read, and a
folder that held nothing before is removed again if a check fails. One process at a time holds the
folder; under several ranks rank 0 writes.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from omegaconf import OmegaConf

from packmamba.config import CONFIGURATION, Config, TrainerConfig, import_plugins, need, registry, to_dict
from packmamba.data.sources import reads_text
from packmamba.data.sources.records import find_chat_template, write_tokenizer_of
from packmamba.data.token_store import evaluation_documents
from packmamba.data.tokenizer import TOKENIZER, load_tokenizer, read_tokenizer
from packmamba.errors import UserError, expect, refusing
from packmamba.evaluation.load import load_model
from packmamba.evaluation.registry import check
from packmamba.files import space_for
from packmamba.lab import callbacks, records, run_id
from packmamba.nn import MambaLM
from packmamba.nn.mixers import MIXERS
from packmamba.nn.pretrained import load_weights, read_pretrained, write_pretrained
from packmamba.ops.backends import backend_name
from packmamba.training.datamodule import PackedDataModule
from packmamba.training.lit_module import PackedLitModule

MLFLOW_RUN = "mlflow_run_id"  # a file in the run's folder
# Arguments that decide what weights compute, and that no weight's shape shows.
UNSEEN = "norm_epsilon d_state ngroups headdim dt_limit norm_eps A_floor decay".split()
MAX_COMPILED_SHAPES = 256  # PyTorch's limit, 8, is soon reached


def fit(config: Config, progress: bool = True, stop: callbacks.Stop | None = None) -> dict[str, Any]:
    """Train and evaluate a run, or resume it; append its record, and return it.

    Raises UserError; Stopped, with a checkpoint, on a signal or where ``stop`` is true after a
    step.
    """
    folder = run_id.run_folder(config)
    is_new = not (folder / CONFIGURATION).exists()
    with configured_runtime(config), redirect_stdout(sys.stderr):
        try:
            with space_for(folder):
                return _Run(config, progress, stop).record()
        except UserError as error:
            # A request that was wrong leaves no folder that looks like a run which can be resumed.
            has_begun = bool(callbacks.checkpoints(folder / "checkpoints"))
            if is_new and not has_begun and not isinstance(error, run_id.Locked):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        except SystemExit:  # as Lightning ends a process after Ctrl-C
            raise KeyboardInterrupt from None
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            if getattr(sys.modules.get("wandb"), "run", None) is not None:
                sys.modules["wandb"].finish()  # else the next run joins this one


@contextmanager
def configured_runtime(config: Config) -> Iterator[None]:
    """Set threads, determinism and the compiler as the configuration says; restore them after."""
    trainer = config.trainer
    threads_before = torch.get_num_threads()
    strict_before = torch.are_deterministic_algorithms_enabled()
    _keep_freed_memory()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    on_cpu = trainer.accelerator == "cpu" or not torch.cuda.is_available()
    # Sums of several threads are cut as the number of cores, which differs between machines, says.
    torch.set_num_threads(trainer.threads or (1 if trainer.deterministic and on_cpu else threads_before))
    try:
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # Filling what is written anyway takes time and changes no bit.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(True)
        if config.model.compile:
            _configure_compiler(trainer.deterministic)
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(strict_before)


def _keep_freed_memory() -> None:
    """Let glibc reuse the pages of large tensors, instead of returning them to the system."""
    with suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX


def _configure_compiler(deterministic: bool) -> None:
    """Compile each block for each shape of a batch, and where bits matter from nothing."""
    torch.compiler.reset()  # earlier shapes decide how sums are split
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = MAX_COMPILED_SHAPES
    dynamo.accumulated_recompile_limit = 4 * MAX_COMPILED_SHAPES
    dynamo.fail_on_recompile_limit_hit = True  # else the rest runs uncompiled
    torch._inductor.config.fx_graph_cache = not deterministic
    torch._functorch.config.enable_autograd_cache = not deterministic


class _Run:
    """Hold a run's parts: what is read, what trains it, and where its results go."""

    def __init__(self, config: Config, progress: bool, stop: callbacks.Stop | None) -> None:
        """Check everything that needs no documents; make the trainer."""
        self.begun = time.perf_counter()
        records.provenance()  # of the code that is about to run, whatever changes meanwhile
        import_plugins(config.plugins)
        check_run(config)
        check_accelerator(config)
        self.config = config
        self.progress = progress
        self.folder = run_id.run_folder(config)
        self.record_path = run_id.record_path(config)
        self._got_others = f"others; remove {self.record_path} and {self.folder}"
        records.check_writable(self.folder, "runs_dir")
        records.check_writable(self.record_path.parent, "output")
        self.data = PackedDataModule.from_config(config, progress=progress)
        self.saved = self.folder / "checkpoints"
        # Of what is there, not of what loads: reading a checkpoint takes a while.
        self.reached = max(map(callbacks.step_of, callbacks.checkpoints(self.saved)), default=0)
        options = config.trainer
        self.metrics = callbacks.RunMetrics(options.log_every, options.log_axis)
        self.evaluations = callbacks.Evaluations(config, self.metrics)
        self.leakcheck = callbacks.LeakCheck(config, self.metrics)
        self.checkpoint = callbacks.Checkpoint(self.saved, config, self.metrics, stop)
        ours: list[Any] = [self.metrics, self.leakcheck, self.checkpoint]
        if options.samples:
            ours.append(callbacks.Samples(config, self.folder / "samples.jsonl"))
        self.trainer = make_trainer(config, [*ours, self.evaluations], progress, self.reached)

    def record(self) -> dict[str, Any]:
        """Return the run's record, which it trains for unless there is one."""
        with run_id.RunLock(self.folder) if self.trainer.is_global_zero else nullcontext():
            (found,) = run_id.find_records([self.config])
            if found is not None:
                same = found["corpus_hash"] == self.data.corpora.corpus_hash
                need(same, "data", "this run's documents", self._got_others)
                self._check_start(found)
                if self.progress:
                    # A run with more steps shares the folder.
                    has_more = self.reached > self.config.trainer.max_steps
                    note = f"; its weights are of step {self.reached}" if has_more else ""
                    print(f"already done, nothing is trained: {self.folder}{note}")
                return found
            module = self._prepare()
            self._train(module)
            return self._finish(module)

    def _check_start(self, found: dict[str, Any]) -> None:
        """Check that a finished run began with the weights that its keys name today.

        Raises ConfigError.
        """
        checksum = found["metrics"].get("started_from_checksum")
        if checksum is None:
            return
        key = "model.pretrained" if self.config.trainer.init_from is None else "trainer.init_from"
        model = PackedLitModule.from_config(self.config, self.data.vocab_size).model
        if self.config.trainer.init_from is not None:
            load_initial_weights(model, self.config)
        need(weights_checksum(model) == checksum, key, "the weights that this run began with", self._got_others)

    def _prepare(self) -> PackedLitModule:
        """Make the module from the seed or from given weights; write the configuration."""
        max_steps = self.config.trainer.max_steps
        need(self.reached <= max_steps, "trainer.max_steps", f"at least {self.reached} of {self.folder}", max_steps)
        lightning.seed_everything(self.config.seed, workers=True, verbose=False)
        module = PackedLitModule.from_config(self.config, self.data.vocab_size)
        check_run(self.config, len(module.model.lm_head.weight))
        starts_from = self.config.trainer.init_from or self.config.model.pretrained
        if starts_from is not None and self.trainer.is_global_zero:
            warn_of_another_tokenizer(self.config, Path(starts_from))
        if starts_from is not None and not self.reached:
            if self.config.trainer.init_from is not None:
                load_initial_weights(module.model, self.config)
            self.metrics.started_from = weights_checksum(module.model)
        if self.trainer.is_global_zero:
            records.write_whole(self.folder / CONFIGURATION, OmegaConf.to_yaml(to_dict(self.config)).encode())
            if not self.reached:
                for logger in self.trainer.loggers:
                    logger.log_hyperparams(run_id.recorded_config(self.config))
                    if isinstance(logger, MLFlowLogger):
                        records.write_whole(self.folder / MLFLOW_RUN, str(logger.run_id).encode())
        return module

    def _train(self, module: PackedLitModule) -> None:
        """Take the steps that are left; validate at the end. Raises Stopped."""
        resume = callbacks.newest_checkpoint(self.saved)
        self.backend = backend_name(self.config.ops.backend, self.trainer.strategy.root_device)
        if self.progress and self.trainer.is_global_zero:
            self._announce(module, resume)
        with self.checkpoint.signals(), refusing(MisconfigurationException, prefix="trainer: "):
            self.trainer.fit(module, self.data, ckpt_path=resume, weights_only=True)
        if self.checkpoint.stopped is not None:
            raise self.checkpoint.stopped
        # The last step is validated, whatever validate_every is.
        metrics = self.metrics
        if not metrics.validation or metrics.validation[-1]["step"] != self.trainer.global_step:
            self.trainer.validate(module, self.data, verbose=False)
        if metrics.diverged is None and not math.isfinite(metrics.validation[-1]["loss"]):
            metrics.diverged = self.trainer.global_step

    def _announce(self, module: PackedLitModule, resume: Path | None) -> None:
        """Print what is about to be trained, in one line."""
        train = self.data.corpora.train
        held_out = len(self.data.corpora.validation)
        validated = min(held_out, self.config.data.validation_documents or held_out)
        parameters = sum(parameter.numel() for parameter in module.model.parameters())
        max_steps = self.config.trainer.max_steps
        tokens = max_steps * min(self.config.data.tokens_per_step, train.num_tokens)
        passes_of = train.passes(tokens) if train.source_names else {}
        of_sources = [f"{passes:.2g} of {name}" for name, passes in passes_of.items()]
        sources = f" ({', '.join(of_sources)})" if of_sources else ""
        epochs = " on a stream that begins with these documents"
        if not train.is_streamed:
            epochs = f", {self.data.schedule().passes(max_steps):.2g} epochs{sources}"
        from_step = f", from step {callbacks.step_of(resume)}" if resume else ""
        print(
            f"{len(train):,} documents with {train.num_tokens:,} tokens; "
            f"validation on {validated} of {held_out} held out; "
            f"{parameters:,} parameters; backend {self.backend}; "
            f"{max_steps} steps{epochs}; run {self.folder}{from_step}",
            flush=True,
        )

    def _finish(self, module: PackedLitModule) -> dict[str, Any]:
        """Write weights, evaluate them, and append the record."""
        corpora = self.data.corpora
        record = training_record(self.config, corpora.corpus_hash, module, self.metrics)
        validated = evaluation_documents(corpora.validation, self.config.data)
        record["metrics"]["validation_documents"] = len(validated)
        if self.config.data.sources:
            record["epochs_by_source"] = corpora.train.passes(record["metrics"]["real_tokens"])
        record["hardware"]["backend"] = self.backend
        record["leakcheck"] = self.leakcheck.result()
        # Sharded weights are gathered: every rank takes part.
        state = self.trainer.strategy.lightning_module_state_dict()
        if not self.trainer.is_global_zero:
            return record
        if self.metrics.diverged is None:
            weights = {name.removeprefix("model."): state[name] for name in state if name.startswith("model.")}
            # The folder is a model: weights and, of text, the tokenizer.
            write_pretrained(self.folder, dict(module.model.config), weights)
            if reads_text(self.config.data):
                write_tokenizer_of(self.config.data, self.folder)
            if self.config.evaluations:
                self._evaluate(record)
        else:
            callbacks.logger.warning("The loss was not finite at step %d.", self.metrics.diverged)
        if self.config.trainer.evaluate_every is not None:
            record["curves"]["evaluations"] = self.evaluations.points
        record["wall_seconds"] = time.perf_counter() - self.begun
        records.append_record(self.record_path, record)
        # The run is finished: of its checkpoints the last stays, for a run with more steps.
        for old in callbacks.checkpoints(self.saved)[:-1]:
            old.unlink()
        return record

    def _evaluate(self, record: dict[str, Any]) -> None:
        """Evaluate the model as it was written; add metrics and curves to the record."""
        loaded = load_model(self.folder, str(self.trainer.strategy.root_device))
        results = self.evaluations.evaluate(self.trainer, loaded.model, loaded.tokenizer)
        items = self.folder / "evaluation" / "items"
        for name, result in results.items():
            records.write_items(items / f"{name}.jsonl", result.items)
            for curve, points in result.curves.items():
                record["curves"][f"{name}.{curve}"] = points
        # Beside the step these are <evaluation>.<metric>.
        record["metrics"] |= {name: value for name, value in self.evaluations.points[-1].items() if "." in name}


def check_run(config: Config, vocab_size: int | None = None) -> None:
    """Check the boundary scheme's options, samples and the evaluations. Raises ConfigError."""
    config.trainer.scheme()
    if config.data.chat_template is not None:
        find_chat_template(config.data.tokenizer, config.data.chat_template)
    samples = config.trainer.samples
    need(not samples or reads_text(config.data), "trainer.samples", "0 for documents that are no text", samples)
    for name in config.evaluations:
        check(name, callbacks.evaluation_context(config, name), vocab_size)


def check_accelerator(config: Config) -> None:
    """Raise ConfigError where a GPU is asked for and there is none."""
    key = "cuda_graphs" if config.trainer.cuda_graphs else "accelerator"
    needs_gpu = getattr(config.trainer, key) in (True, "gpu", "cuda")
    need(torch.cuda.is_available() or not needs_gpu, f"trainer.{key}", "a GPU that PyTorch can use", "none")


# Keys of the section trainer that are arguments of Lightning's Trainer.
LIGHTNING_KEYS = ("accelerator", "devices", "num_nodes", "precision", "max_steps")
# Lightning's advice that does not apply: the loader's workers are the user's choice, and so on.
UNWANTED_WARNINGS = ("many workers", "litlogger", "LeafSpec", "`srun`", "GPU available", "FLOPs not found")


def make_trainer(config: Config, ours: list[Any], progress: bool, resumed_step: int) -> lightning.Trainer:
    """Make the Trainer of a run, with our callbacks before the configured ones, but for the last.

    Raises ConfigError where Lightning or the operators' backend refuses the configuration.
    """
    options = config.trainer
    of_lightning: Any = {name: getattr(options, name) for name in LIGHTNING_KEYS}
    configured = [instantiate(spec, "trainer.callbacks") for spec in options.callbacks]
    averages = ", ".join(type(callback).__name__ for callback in configured if isinstance(callback, WeightAveraging))
    # It would average the initial weights: it samples at an epoch's start, and a run is one epoch.
    by_epochs = any(isinstance(callback, StochasticWeightAveraging) for callback in configured)
    need(not by_epochs, "trainer.callbacks", "WeightAveraging or EMAWeightAveraging", "StochasticWeightAveraging")
    # An average is a deep copy, which FSDP2's sharded modules refuse.
    copies = options.strategy != "fsdp2" or not averages
    need(copies, "trainer.callbacks", "no average of weights with fsdp2", f"{averages}; set trainer.strategy=ddp")
    # On an axis of tokens, what was logged after the checkpoint stays, and is logged again.
    purged_step = resumed_step if options.log_axis == "steps" else 0
    bar = [callbacks.ProgressBar(refresh_rate=options.log_every)] if progress else []
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=f".*({'|'.join(UNWANTED_WARNINGS)})")
    with refusing(Exception, prefix="trainer: "):
        trainer = lightning.Trainer(
            **of_lightning,
            strategy=make_strategy(options),
            val_check_interval=options.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=min(options.log_every, options.max_steps),
            logger=[make_logger(spec, run_id.run_folder(config), purged_step) for spec in options.loggers],
            # Evaluations, the last of ours, read weights that a callback averages after the step.
            callbacks=[*ours[:-1], *configured, ours[-1], *bar],
            enable_progress_bar=progress,
            enable_model_summary=False,
            plugins=[callbacks.CheckpointFile()],
        )
        backend_name(config.ops.backend, trainer.strategy.root_device)
    works = options.precision != "16-mixed" or trainer.strategy.root_device.type != "cpu"
    need(works, "trainer.precision", "bf16-mixed or 32-true on a CPU", "'16-mixed'")
    # Lightning's signal handlers, and its broadcasts of them (its issue 20806), are switched off.
    unused: dict[str, Any] = {"register_signal_handlers": trainer._signal_connector}
    unused["_broadcast_sigterm_tensor"] = trainer.fit_loop.epoch_loop
    for name, part in unused.items():
        assert hasattr(part, name), name
        setattr(part, name, lambda: None)
    return trainer


def make_strategy(options: TrainerConfig) -> Strategy | str:
    """Return how devices share a run: FSDP2, or DDP; ``auto`` for one device."""
    devices = options.devices * options.num_nodes
    if options.strategy == "fsdp2":
        return ModelParallelStrategy(devices, 1, save_distributed_checkpoint=False)
    if options.strategy == "auto" and devices == 1:
        return "auto"
    torch._dynamo.config.optimize_ddp = False  # blocks compile one by one anyway
    return DDPStrategy(gradient_as_bucket_view=True)


def instantiate(spec: Any, key: str, **defaults: Any) -> Any:
    """Instantiate a class path, or ``class_path`` and ``init_args``.

    It gets those of ``defaults`` that it takes.
    """
    described: dict[str, Any] = {"class_path": spec} if isinstance(spec, str) else spec
    is_known = isinstance(described, dict) and {"class_path"} <= described.keys() <= {"class_path", "init_args"}
    need(is_known, key, "a class path, or {class_path: ..., init_args: {...}}", described)
    path = described["class_path"]
    prefix = f"{key}: expected a class path, got {path}: "
    with refusing(ImportError, AttributeError, TypeError, ValueError, MisconfigurationException, prefix=prefix):
        made = registry(path)
        parameters = inspect.signature(made).parameters
        taken = {name: value for name, value in defaults.items() if name in parameters}
        return made(**taken | dict(described.get("init_args", {})))


def make_logger(spec: Any, folder: Path, purged_step: int) -> Logger:
    """Make a logger by name or class path, which writes to the run's folder."""
    if spec == "csv":
        return CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)
    if spec == "tensorboard":
        # What was logged after the checkpoint is purged.
        return TensorBoardLogger(folder, spec, "", default_hp_metric=False, purge_step=purged_step or None)
    if spec == "wandb":
        return WandbLogger(folder.name, folder, id=folder.name, project=folder.parent.name or "packmamba")
    if spec == "mlflow":
        # To a server, or to one file beside the folders of runs.
        runs = folder.parent.resolve()
        local: Any = {"tracking_uri": f"sqlite:///{runs / 'mlflow.db'}"}
        local["artifact_location"] = str(runs / "mlartifacts")
        begun = folder / MLFLOW_RUN
        run = begun.read_text() if begun.is_file() else None  # which a resumed run goes on with
        places = {} if "MLFLOW_TRACKING_URI" in os.environ else local
        return MLFlowLogger(runs.name, folder.name, run_id=run, **places)
    return instantiate(spec, "trainer.loggers", save_dir=folder)


def load_initial_weights(model: MambaLM, config: Config) -> None:
    """Load the weights of ``trainer.init_from``. Raises ConfigError."""
    source = str(config.trainer.init_from)
    path = Path(source) if Path(source).is_dir() else _run_of_sweep(source, config.seed)
    with refusing(ValueError, FileNotFoundError, KeyError, prefix="trainer.init_from: "):
        arguments, weights = read_pretrained(path)
        load_weights(model, weights, path, "this run's keys of model")
        mixer = MIXERS[config.model.mixer]
        defaults = {name: parameter.default for name, parameter in inspect.signature(mixer).parameters.items()}
        for name in UNSEEN:
            ours = (defaults | model.config).get(name)
            # A checkpoint without a key has the default; without one of EXPLICIT it does not say which
            # model it is, and any value fits.
            unsaid = ours if name in getattr(mixer, "EXPLICIT", {}) else defaults.get(name)
            theirs = arguments.get(name, unsaid)
            # A list of JSON is the tuple of a default.
            expect(np.array_equal(np.array(ours), np.array(theirs)), name, f"{theirs}, as of {path}", ours)


def warn_of_another_tokenizer(config: Config, folder: Path) -> None:
    """Warn where ``data.tokenizer`` writes a text otherwise than the checkpoint's own does.

    A checkpoint without a tokenizer is no reason for a warning.
    """
    if not (folder / TOKENIZER).is_file() or not reads_text(config.data):
        return
    text = "The quick brown fox, 0123 of them."
    theirs = read_tokenizer(folder).encode(text).tolist()
    if load_tokenizer(config.data).encode(text).tolist() != theirs:
        warnings.warn(f"data.tokenizer: expected ids as of {folder / TOKENIZER}, got others", stacklevel=2)


def weights_checksum(model: MambaLM) -> int:
    """Return a checksum of a model's weights."""
    checksum = 0
    for _, weight in sorted(model.state_dict().items()):
        checksum = zlib.crc32(weight.cpu().contiguous().view(torch.uint8).numpy(), checksum)
    return checksum


def _run_of_sweep(source: str, seed: int) -> Path:
    """Return the folder of the run of this seed that ``<sweep>:<arm>`` names."""
    folder, _, arm = source.rpartition(":")
    of_arm = [record for record in records.records_of(folder or ".") if record["arm"] == arm]
    configs = [record["config"] for record in of_arm if record["seed"] == seed]
    paths = {Path(folder) / "runs" / run_id.id_of(arm, values) for values in configs}
    expected = f"a model's folder, or <sweep>:<arm> with one run of seed {seed}"
    need(len(paths) == 1, "trainer.init_from", expected, f"'{source}', {len(paths)} runs")
    return paths.pop()


def training_record(config: Config, corpus_hash: str, module: Any, metrics: callbacks.RunMetrics) -> dict[str, Any]:
    """Make a run's record from what its callbacks counted."""
    totals = metrics.totals
    last = metrics.validation[-1]
    timed = metrics.timed if metrics.timed["seconds"] else totals  # short runs are all warm-up
    values = {
        **{name: totals[name] for name in ("steps", "real_tokens", "targets")},
        **{f"val_{name}": last.get(name) for name in ("loss", "loss_start", "loss_as_trained")},
        "real_tokens_per_second": timed["real_tokens"] / timed["seconds"],
        "slots_per_second": timed["slots"] / timed["seconds"],
        "padding_fraction": 1 - totals["real_tokens"] / totals["slots"],
        "documents_behind_another": totals["documents_behind"],
        "tokens_behind_another": totals["tokens_behind"],
        "train_seconds": totals["seconds"],
        "parameters": sum(parameter.numel() for parameter in module.model.parameters()),
        "peak_memory_bytes": metrics.peak_memory,
        **module.boundary.measures(),
    }
    if metrics.diverged is not None:
        values["diverged_at_step"] = metrics.diverged
    if metrics.started_from is not None:
        values["started_from_checksum"] = metrics.started_from
    curves = {"train": metrics.train, "validation": metrics.validation, "loss_by_position": metrics.by_position}
    experiment = run_id.name_of(config.output) if config.output else run_id.run_id(config)
    identity = ("training", experiment, config.name, run_id.recorded_config(config), config.seed, corpus_hash)
    return records.make_record(*identity, metrics=values, wall_seconds=0.0, curves=curves)
