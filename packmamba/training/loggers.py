"""Where a run's curves go as it trains, beside its record."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packmamba.config import Config, ConfigError

if TYPE_CHECKING:  # names of loggers are checked before what takes seconds to import
    from lightning.pytorch.loggers import Logger


class Kind(NamedTuple):
    make: Callable[[Path], Logger]
    """Given the run's folder, whose name is the run's."""
    package: str | None = None
    """What has to be installed beside PackMamba."""


def _csv(folder: Path) -> Logger:
    from packmamba.training.curves import OneFile

    return OneFile(folder)


def _tensorboard(folder: Path) -> Logger:
    from packmamba.training.curves import Events

    return Events(folder)


def _wandb(folder: Path) -> Logger:
    """Sends nothing: ``wandb sync`` does, later. A run that goes on keeps its id."""
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(
        folder.name, folder, version=folder.name, project=folder.parent.name or "packmamba", offline=True
    )


def _mlflow(folder: Path) -> Logger:
    """To the server that MLFLOW_TRACKING_URI names, else a folder of the run's own. A run that goes on is one run there too."""
    from lightning.pytorch.loggers import MLFlowLogger

    kept = folder / "mlflow" / "run_id"
    before = kept.read_text() if kept.is_file() else None
    own = f"file:{(folder / 'mlflow').absolute()}"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or own
    if uri == own:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("packmamba", folder.name, uri, run_id=before)
    if before is None and logger.run_id:  # none on ranks above 0
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(logger.run_id)
    return logger


LOGGERS = {
    "csv": Kind(_csv),
    "tensorboard": Kind(_tensorboard),
    "wandb": Kind(_wandb, "wandb"),
    "mlflow": Kind(_mlflow, "mlflow"),
}


def check_loggers(config: Config) -> None:
    """Raises ConfigError if a package is missing."""
    for name in config.trainer.loggers:
        package = LOGGERS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.loggers: {name} needs the package {package}, which is not installed: pip install 'packmamba[loggers]'"
            )


def make_loggers(config: Config, folder: Path) -> list[Logger]:
    return [LOGGERS[name].make(folder) for name in config.trainer.loggers]


def close_loggers() -> None:
    """W&B knows one run a process: the next one needs it to have ended."""
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        wandb.finish()
