"""Weights that a run starts from: another run's, a published checkpoint's, or those of a checkpoint file."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

from packmamba.config import Config, ConfigError
from packmamba.nn import MambaLM
from packmamba.nn.pretrained import load_weights, read_pretrained
from packmamba.records import has_records, read_records
from packmamba.training.checkpoint_file import check_whole, read_checkpoint
from packmamba.training.model_folder import PREFIX
from packmamba.training.run_id import id_of

HELP = "expected a run's or published checkpoint's folder, a .ckpt file, or <sweep's folder>:<arm>"


def start_from(config: Config, model: MambaLM) -> int | None:
    """Loads what ``trainer.init_from`` names; returns a checksum of the weights, None without it.

    Raises:
        ConfigError: it is not there, cannot be read or does not fit the model.
    """
    if config.trainer.init_from is None:
        return None
    path = weights_path(config)
    try:
        weights = _of_checkpoint(path) if path.is_file() else read_pretrained(path)[1]
        load_weights(model, weights, path, "this run's keys of model")
        if bad := [name for name, weight in sorted(weights.items()) if not bool(weight.isfinite().all())]:
            raise ValueError(f"{path}: {bad[0]} has values that are not finite")
    except (ValueError, FileNotFoundError, KeyError) as error:
        raise ConfigError(f"trainer.init_from: {' '.join(str(error).split())}") from None
    checksum = 0
    for _, tensor in sorted(weights.items()):
        checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def check_start(config: Config) -> None:
    """Refuses, before documents are read, weights that are not there or not what was written. Raises ConfigError."""
    if config.trainer.init_from is None:
        return
    path = weights_path(config)
    try:
        if path.is_file():
            check_whole(path)
        elif not (path / "config.json").is_file():
            raise ConfigError(f"{HELP}, got '{path}', which holds no model")
    except ConfigError as error:
        raise ConfigError(f"trainer.init_from: {error}") from None


def weights_path(config: Config) -> Path:
    """The folder or file that ``trainer.init_from`` names; of ``folder:arm`` the run of this seed. Raises ConfigError."""
    said = str(config.trainer.init_from)
    folder, _, arm = said.rpartition(":")
    if Path(said).exists():
        return Path(said)
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"trainer.init_from: {HELP}, got '{said}', which is not there")
    try:
        records = read_records(folder) if has_records(folder) else []
    except ValueError as error:
        raise ConfigError(f"trainer.init_from: {error}") from None
    trained = [r for r in records if r["kind"] == "training" and r["arm"] == arm and r["seed"] == config.seed]
    if not trained:
        raise ConfigError(
            f"trainer.init_from: {folder} has no trained run of arm '{arm}' with seed {config.seed}; train it there first"
        )
    paths = list(dict.fromkeys(Path(folder) / "runs" / id_of(record["arm"], record["config"]) for record in trained))
    if len(paths) > 1:
        raise ConfigError(
            f"trainer.init_from: {folder} has {len(paths)} runs of arm '{arm}' with seed {config.seed}, expected one; name its "
            f"folder, such as {paths[-1]}"
        )
    (path,) = paths
    if not (path / "config.json").is_file():
        raise ConfigError(f"trainer.init_from: {path} has no model; its run diverged, or its folder is elsewhere")
    return path


def _of_checkpoint(path: Path) -> dict[str, Tensor]:
    state = read_checkpoint(path).get("state_dict")
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no checkpoint of a run: it has no 'state_dict'")
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
