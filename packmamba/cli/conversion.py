"""The command convert: checkpoints of older versions, which only running what they say can read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packmamba.config import ConfigError, key, load


@dataclass
class ConvertConfig:
    yes: bool = key(False, "Convert without asking: you trust who made the file.")


def convert_checkpoint(file: str, overrides: Sequence[str]) -> str:
    """Says what became of it. Raises ConfigError if there is no such checkpoint, or nobody says that it is to be trusted."""
    options = load(ConvertConfig, None, overrides)
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{path} is no file; expected a checkpoint, such as runs/<run>/checkpoints/step=100.ckpt")
    from packmamba.training.checkpoint_file import convert, unsafe_parts  # imports PyTorch

    unsafe = unsafe_parts(path)
    if not unsafe:
        return f"{path} holds tensors and plain values alone: there is nothing to convert."
    said = f"To read {path} is to run what it names: {', '.join(unsafe)}. Such a file can do anything that you can."
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{said} If you trust who made it, add yes=true")
        print(said)
        if input("Do you trust who made it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ConfigError(f"{path} was left as it is")
    convert(path)
    return f"{path} is converted; runs go on from it."
