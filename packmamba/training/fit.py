"""One training run, from a configuration to its record; run again, it goes on from where it was stopped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning

from packmamba.config import Config, ConfigError
from packmamba.data.datamodule import PackingDataModule
from packmamba.ops.backends import backend_name
from packmamba.records import append_record, check_writable, make_record, provenance
from packmamba.training.asking import check_evaluations
from packmamba.training.average import Average, snapshot_steps
from packmamba.training.callbacks import History, Stopped, checkpoints, keep_newest, newest_step
from packmamba.training.checkpoint_file import newest_whole
from packmamba.training.checks import check_accelerator, check_run
from packmamba.training.divergence import DIVERGENCE, find_origin
from packmamba.training.evaluations import Evaluations, run_evaluations
from packmamba.training.loggers import close_loggers
from packmamba.training.model_folder import write_configuration, write_model
from packmamba.training.module import MambaLitModule
from packmamba.training.run_id import (
    RunLock,
    find_record,
    name_of,
    record_path,
    recorded_config,
    records_of,
    run_folder,
    run_id,
)
from packmamba.training.signals import Interrupted, Told
from packmamba.training.start import check_start, start_from
from packmamba.training.strategy import agree
from packmamba.training.surroundings import prepare_environment, surroundings
from packmamba.training.trainer import make_trainer, quieten

logger = logging.getLogger(__name__)


def fit(config: Config, progress: bool = True, stop: Callable[[History], bool] | None = None) -> dict[str, Any]:
    """Trains, evaluates and writes the record, which it returns.

    A run whose record exists is not repeated; one that has a checkpoint goes on from it, on a CPU to the same bits as if it had
    never stopped. What runs before it in the same process changes nothing.

    Args:
        stop: asked after each step, with the run's history, whether the run shall stop there. All of several ranks stop,
            after the next logged step, if one of them says so.

    Raises:
        ConfigError: naming the key.
        Stopped: by ``stop``; a checkpoint is written.
        Interrupted: by SIGINT or SIGTERM, unless somebody else handles them; in training, a checkpoint is written first.
    """
    prepare_environment([config])
    told = Told()
    with surroundings(config), told.heard():
        try:
            return _fit(config, progress, stop, told)
        except SystemExit as ended:  # how Lightning ends a process that is interrupted
            why = ended.__context__
            raise (why if isinstance(why, KeyboardInterrupt) else KeyboardInterrupt()) from None
        finally:
            close_loggers()


def _fit(config: Config, progress: bool, stop: Callable[[History], bool] | None, told: Told) -> dict[str, Any]:
    begun = time.perf_counter()
    provenance()  # cached: the record names the code as it was when the run began
    check_run(config)
    path = record_path(config)
    if (done := find_record(config)) is not None:
        if done["corpus_hash"] != PackingDataModule(config, progress=progress).corpora.corpus_hash:
            raise ConfigError(
                f"the documents have changed since this run; remove its record in {path} and its folder to train again"
            )
        return done
    check_accelerator(config)
    folder = run_folder(config)
    check_writable(folder, "runs_dir")
    if config.output is not None:
        check_writable(path.parent, "output")
    if (reached := newest_step(folder / "checkpoints")) > config.trainer.max_steps:
        raise ConfigError(
            f"trainer.max_steps: expected at least {reached}, the steps that {folder} has been trained for already, got "
            f"{config.trainer.max_steps}; give another runs_dir to train it anew"
        )
    if not reached:
        check_start(config)
    quieten()
    history = History(config.trainer.log_every)
    options = config.trainer
    average = Average(snapshot_steps(options.max_steps, options.average_snapshots, options.average_share))
    evaluations = Evaluations(config, history) if options.evaluate_every is not None else None
    others = [*([average] if average.at else []), *([evaluations] if evaluations else [])]

    lock = RunLock(folder)

    def stops(history: History) -> bool:
        lock.check()
        asked = int(stop is not None and bool(stop(history)))  # 1 is no signal that is heard
        agreed = agree(trainer, max(told.signal, asked), options.log_every)
        told.signal = max(told.signal, agreed if agreed > 1 else 0)
        return bool(agreed)

    trainer = make_trainer(config, folder, history, progress, stops, others)
    try:
        backend = backend_name(config.ops.backend, trainer.strategy.root_device)
    except ValueError as error:
        raise ConfigError(f"ops.{error}") from None
    data = PackingDataModule(config, progress=progress)
    data.check_targets()
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    module = MambaLitModule(config, data.corpora.train.vocab_size)
    check_evaluations(config, len(module.model.lm_head.weight))
    if not checkpoints(folder / "checkpoints"):
        history.started_from = start_from(config, module.model)
    with lock if trainer.is_global_zero else nullcontext():
        if trainer.is_global_zero and find_record(config) is not None:
            raise ConfigError(f"another process has just finished this run; its record is {path}")
        if trainer.is_global_zero:
            write_configuration(folder, config)
            for one in () if reached else trainer.loggers:
                one.log_hyperparams(recorded_config(config))
        _train(trainer, module, data, folder, told)
        if not history.validation or history.validation[-1]["step"] != trainer.global_step:
            trainer.validate(module, data, verbose=False)
        last = history.validation[-1]
        if history.diverged is None and not math.isfinite(last["loss"]):
            history.diverged = trainer.global_step
        if average.at and history.diverged is None:
            average.load_into(module.model)
            trainer.validate(module, data, verbose=False)
            history.validation[-1]["loss_last_weights"] = last["loss"]
        record = training_record(config, data.corpora.corpus_hash, module, history, time.perf_counter() - begun)
        record["hardware"]["backend"] = backend
        weights = trainer.strategy.lightning_module_state_dict()  # whole, which shards need all ranks for
        if trainer.is_global_zero:
            lock.check()
            if history.diverged is None:
                write_model(folder, config, module.model.config, weights)
                numbers, curves = run_evaluations(config, folder, trainer.strategy.root_device, progress)
                record["metrics"] |= numbers
                record["curves"] |= curves
                if evaluations:
                    evaluations.add(trainer, numbers)
            if evaluations:
                evaluations.add_ends_of(records_of(config))
                record["curves"]["evaluations"] = evaluations.points
            record["wall_seconds"] = time.perf_counter() - begun  # with the evaluations at its end
            if history.diverged is not None and trainer.world_size == 1:
                record["metrics"] |= _say_origin(config, folder, history.diverged)
            lock.check()
            append_record(path, record)
            carried = "state_bytes" not in record["metrics"] or "state_age_steps" in record["metrics"]
            if not carried and history.diverged is None:
                logger.warning(
                    "trainer.boundary=%s: no row went on from a state in these %d steps; that takes more of them "
                    "(trainer.max_steps), fewer data.streams, or rows that do not hold all of a step (data.row_length)",
                    options.boundary, record["metrics"]["steps"],
                )  # fmt: skip
            keep_newest(folder / "checkpoints", 1)
    return record


def _say_origin(config: Config, folder: Path, step: int) -> dict[str, float]:
    """Where the run's values stopped being finite, for people and for the record."""
    try:
        origin = find_origin(config, folder, step)
    except Exception as error:  # the record of what was trained matters more
        logger.warning(
            "Step %d could not be taken again to look for its first value that is not finite: %s", step, error
        )
        return {}
    if origin is None:
        return {}
    logger.warning("%s", origin)
    (folder / DIVERGENCE).write_text(f"{origin}\n")
    return {"diverged_document": origin.documents[0]} if origin.documents else {}


def _train(
    trainer: lightning.Trainer, module: MambaLitModule, data: PackingDataModule, folder: Path, told: Told
) -> None:
    """From the newest checkpoint, if there is one, to the last step, or to the one in which the process is told to end."""
    resume = newest_whole(folder / "checkpoints", module)
    told.looks = True
    try:
        trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    except Stopped:
        if not told.signal:
            raise
    finally:
        told.looks = False
    if told.signal:
        raise Interrupted(
            told.signal, f"after step {trainer.global_step} of {trainer.max_steps}, with a checkpoint"
        ) from None


def training_record(
    config: Config, corpus_hash: str, module: MambaLitModule, history: History, wall_seconds: float
) -> dict[str, Any]:
    """The run's record: losses at its last evaluation, which is of the mean of weights if there is one; throughput after
    the first steps; curves."""
    totals, timed, last = history.totals, history.timed, history.validation[-1]
    timed = timed if timed["seconds"] else totals
    return make_record(
        kind="training",
        experiment=name_of(config.output) if config.output else run_id(config),
        arm=config.name,
        config=recorded_config(config),
        seed=config.seed,
        corpus_hash=corpus_hash,
        metrics={
            "steps": totals["steps"],
            "real_tokens": totals["real_tokens"],
            "targets": totals["targets"],
            "val_loss": last["loss"],
            **{f"val_{name}": last[name] for name in ("loss_last_weights",) if name in last},
            "val_loss_start": last["loss_start"],
            "val_loss_as_trained": last.get("loss_as_trained"),
            "real_tokens_per_second": timed["real_tokens"] / timed["seconds"],
            "slots_per_second": timed["slots"] / timed["seconds"],
            "padding_fraction": 1 - totals["real_tokens"] / totals["slots"],
            "documents_behind_another": totals["documents_behind"],
            "tokens_behind_another": totals["tokens_behind"],
            "train_seconds": totals["seconds"],
            "parameters": sum(p.numel() for p in module.model.parameters()),
            "peak_memory_bytes": history.peak_memory,
            **module.boundary.measures(),
            **({} if history.diverged is None else {"diverged_at_step": history.diverged}),
            **({} if history.started_from is None else {"started_from_checksum": history.started_from}),
        },
        wall_seconds=wall_seconds,
        curves={
            "train": history.train,
            "validation": history.validation,
            "loss_by_position": history.by_position,
            **history.per_step(),
        },
    )
