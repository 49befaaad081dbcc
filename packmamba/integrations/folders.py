"""A causal language model from any checkpoint's folder, by the library that it is meant for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packmamba.config import ConfigError


def of_transformers(folder: str | Path) -> bool:
    """Whether a folder holds a model in Hugging Face's format, which transformers reads. Raises ConfigError: it holds none."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder; expected one of a run or of a checkpoint")
    if not path.is_file():
        raise ConfigError(f"{folder} holds no model: expected config.json and weights")
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from None
    return isinstance(published, dict) and "model_type" in published


def load_with_transformers(folder: str | Path, device: str, dtype: str | None) -> Any:
    """The folder's model in evaluation mode. Raises ConfigError: transformers is missing, or cannot read the folder."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"{folder} is in Hugging Face's format, which needs pip install 'packmamba[integrations]'"
        ) from None
    options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
        return model.to(device).eval()
    except Exception as error:  # each file format and each model has errors of its own
        raise ConfigError(f"{folder} cannot be read by transformers: {' '.join(str(error).split())[:300]}") from None
