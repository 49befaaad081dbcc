"""Checkpoints of runs as files: whole or not there, known by a checksum, read without running code.

A file is what ``torch.save`` writes, of tensors and plain values alone, then a checksum (``packmamba.nn.sealed``). Files from
before there were checksums have the zip archive's own.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from packmamba.errors import COMMAND, ConfigError, UserError
from packmamba.nn.sealed import is_damaged, save_sealed
from packmamba.training.callbacks import checkpoints

_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE = 22
PARTS = ("state_dict", "optimizer_states", "loops", "callbacks", "carry", "rng")
"""Of a run's checkpoint, what is read here and by Lightning."""


class Damaged(ConfigError):
    """A checkpoint is not what was written."""


class CheckpointFiles(TorchCheckpointIO):
    """How Lightning's trainer writes and reads checkpoints here."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(Path(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True)  # ``newest_whole`` has just read it


def write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """On disk when it returns; before, ``path`` is as it was.

    Raises:
        UserError: the disk is full, say; nothing half written stays behind.
        TypeError: what it holds could only be read by running code.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            save_sealed(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if foreign := get_unsafe_globals_in_checkpoint(temporary):
            raise TypeError(
                f"a checkpoint holds tensors and plain values, so that reading it runs no code; got {', '.join(sorted(foreign))}"
            )
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:
        # A write that fails inside torch.save comes out as a RuntimeError of its C++ half.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"runs_dir: the checkpoint {path} could not be written ({cause.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """What a file holds, on the CPU. No code of it runs.

    Raises:
        Damaged: it is not what was written.
        ConfigError: it is not there, or holds more than tensors and plain values.
    """
    check_whole(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        if get_unsafe_globals_in_checkpoint(path):
            raise ConfigError(
                f"{path} was made by an older version or by somebody else: reading it runs what it says; if you trust who made "
                f"it, {COMMAND} convert {path}"
            ) from None
        raise Damaged(f"{path} cannot be read ({_first_line(error)})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no checkpoint: expected a mapping, got {type(found).__name__}")
    return found


def check_whole(path: Path) -> None:
    """Raises Damaged unless the file holds the bytes that were written."""
    try:
        with open(path, "rb") as file:
            damaged = is_damaged(file)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _ZIP_END_SIZE))
            tail = file.read()
        if damaged is not None:
            if damaged:
                raise Damaged(f"{path} has other bytes than were written")
            return
        if tail[: len(_ZIP_END)] != _ZIP_END:
            raise Damaged(f"{path} is cut short, or no checkpoint")
        with zipfile.ZipFile(path) as archive:
            if (wrong := archive.testzip()) is not None:
                raise Damaged(f"{path} has other bytes than were written, in {wrong}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except zipfile.BadZipFile as error:
        raise Damaged(f"{path} is damaged ({error})") from None


def newest_whole(folder: Path, module: nn.Module) -> Path | None:
    """A run's newest checkpoint that is not damaged; None if there is none at all. Damaged ones are named on stderr.

    Raises ConfigError if all are damaged, or the newest is refused by ``read_checkpoint`` or is not of this module.
    """
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            _check_fits(path, read_checkpoint(path, mmap=True), module.state_dict())
        except Damaged as error:
            damaged.append(str(error))
            continue
        for reason in damaged:
            print(f"warning: the checkpoint {reason}; this run goes on from {path.name}", file=sys.stderr, flush=True)
        return path
    if damaged:
        raise ConfigError(
            f"no checkpoint in {folder} is whole ({'; '.join(damaged)}); remove them to train from the beginning"
        )
    return None


def _check_fits(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    if missing := [part for part in PARTS if not isinstance(found.get(part), (dict, list))]:
        raise ConfigError(f"{path} is no checkpoint of a run: it has no '{missing[0]}'")
    weights = found["state_dict"]
    for name in sorted(expected.keys() | weights.keys()):
        shapes = [getattr(side.get(name), "shape", None) for side in (expected, weights)]
        if shapes[0] != shapes[1]:
            wanted, got = ("none" if shape is None else str(tuple(shape)) for shape in shapes)
            raise ConfigError(f"{path} is of another model: '{name}': expected shape {wanted}, got {got}")


def unsafe_parts(path: Path) -> list[str]:
    """What reading a file would import and run, by name. Raises ConfigError if it is damaged or no archive."""
    check_whole(path)
    try:
        return sorted(get_unsafe_globals_in_checkpoint(path))
    except Exception as error:
        raise ConfigError(f"{path} is no checkpoint ({_first_line(error)})") from None


def convert(path: Path) -> None:
    """Reads a file of an older version, RUNNING WHAT IT SAYS, and writes it again as one that is read without.

    Raises ConfigError if it holds something that has no plain form.
    """
    unsafe_parts(path)
    try:
        write_checkpoint(path, _plain(torch.load(path, map_location="cpu", weights_only=False)))
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers as Python's."""
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
