"""Lightning's trainer for one run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ProgressBar

from packmamba.config import Config, ConfigError
from packmamba.config.sections import NOT_ON_CPU, ON_GPUS
from packmamba.training.callbacks import Checkpoints, History
from packmamba.training.checkpoint_behind import CheckpointsBehind
from packmamba.training.checkpoint_file import CheckpointFiles
from packmamba.training.leaks import LeakCheck
from packmamba.training.loggers import make_loggers
from packmamba.training.progress import progress_of
from packmamba.training.strategy import cluster, leave_signals, make_strategy


def make_trainer(
    config: Config,
    folder: Path,
    history: History,
    progress: bool,
    stop: Callable[[History], bool] | None = None,
    further: Sequence[Callback] = (),
) -> lightning.Trainer:
    """Lightning's trainer for one run: a single epoch of ``max_steps`` StepBatches. ``stop``: see Checkpoints, which also hold
    what ``further`` callbacks keep."""
    options = config.trainer
    callbacks = [
        history,
        *further,
        Checkpoints(folder / "checkpoints", options.checkpoint_every, options.validate_every, history, stop),
    ]
    if options.leakcheck_every is not None:
        callbacks.append(LeakCheck(options.leakcheck_every, history))
    if progress:
        callbacks.append(progress_of(config.name, options.max_steps, options.validate_every, history))
    try:
        trainer = lightning.Trainer(
            accelerator=options.accelerator,
            devices=options.devices,
            num_nodes=options.num_nodes,
            strategy=make_strategy(options),
            precision=options.precision,  # type: ignore[arg-type]
            max_steps=options.max_steps,
            val_check_interval=options.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=min(options.log_every, options.max_steps),
            logger=make_loggers(config, folder),
            callbacks=callbacks,
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            enable_model_summary=False,
            use_distributed_sampler=False,
            plugins=[CheckpointsBehind() if options.checkpoint_async else CheckpointFiles(), *cluster()],
        )
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MisconfigurationException) as error:
        raise ConfigError(f"trainer: {' '.join(str(error).split())}") from None
    if trainer.strategy.root_device.type == "cpu" and options.precision in ON_GPUS:
        raise ConfigError(NOT_ON_CPU.format(options.precision))  # Lightning would take bfloat16
    leave_signals(trainer)
    return trainer


def quieten() -> None:
    """Silences Lightning's advice about what is meant here: loader workers, our own resuming, where logs go, the
    accelerator."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in (
        ".*does not have many workers.*",
        ".*dataloader is not resumable.*",
        ".*litlogger.*",
        ".*LeafSpec.*",
        ".*`srun` command is available.*",  # the launcher of a sweep may run on such a machine
        ".*GPU available but not used.*",  # doctor shows it; a run may ask for the CPU
    ):
        warnings.filterwarnings("ignore", message=message)
