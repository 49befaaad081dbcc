"""A run's folder is a model: its weights, configuration and tokenizer, as ``MambaLM.from_pretrained`` and ``eval`` read them."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from packmamba.config import CONFIGURATION, Config, to_dict
from packmamba.data.sources import open_source
from packmamba.data.tokenizer_files import write_tokenizer
from packmamba.evaluation.subject import sealed
from packmamba.nn.pretrained import write_pretrained
from packmamba.records import write_whole
from packmamba.training.checkpoint_file import sync

PREFIX = "model."
"""Of the model's weights among a LitModule's."""


def write_configuration(folder: Path, config: Config) -> None:
    for cut_short in folder.glob(f"{CONFIGURATION}.*.tmp"):  # by a process that was killed here
        cut_short.unlink(missing_ok=True)
    write_whole(folder / CONFIGURATION, sealed(OmegaConf.to_yaml(OmegaConf.create(_escaped(to_dict(config))))))


def _escaped(value: Any) -> Any:
    """A resolved value as text that resolves to it: ``${`` in it refers to nothing."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {name: _escaped(one) for name, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list) else value


def write_model(folder: Path, config: Config, model: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes the model of a run that has ended into its folder; each file appears whole or not at all.

    Args:
        config: the run's.
        model: a MambaLM's ``config``.
        weights: a LitModule's state dict, whole.
    """
    own = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
    for killed in folder.glob("model-*"):
        shutil.rmtree(killed)
    with tempfile.TemporaryDirectory(dir=folder, prefix="model-") as name:
        made = Path(name)
        write_pretrained(made, dict(model), own)
        write_configuration(made, config)
        if open_source(config.data).vocab_size is None:
            data = config.data
            write_tokenizer(made, data.tokenizer, data.begin_token, data.end_token)
        # config.json last: a folder that has it is whole.
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            sync(path)
            os.replace(path, folder / path.name)
    sync(folder)
