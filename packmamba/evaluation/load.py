"""Load a model from a run's or a checkpoint's folder, with its configuration and tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from packmamba.config import CONFIGURATION, Config, ConfigError, load_config
from packmamba.data.tokenizer import TOKENIZER, Tokenizer, read_tokenizer
from packmamba.nn import MambaLM

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class LoadedModel:
    """A model and how its texts are tokenized.

    Attributes:
        model: on its device, in evaluation mode.
        config: the run's; of any other checkpoint the defaults, with the checkpoint's tokenizer.
        tokenizer: None if the model's token ids have no text.
        folder: that it was loaded from.
        trained: whether ``config`` is that of the model's training.
        losses: token losses by document number, shared by evaluations.
    """

    model: MambaLM
    config: Config
    tokenizer: Tokenizer | None
    folder: Path
    trained: bool
    losses: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.config.name if self.trained else self.folder.resolve().name


def read_config(folder: str | Path) -> Config:
    """Return the configuration of a folder's model, with the folder's tokenizer. Raises ConfigError without a model."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        unfinished = (folder / "checkpoints").is_dir()
        hint = "; the run has not ended: repeat its command" if unfinished else ""
        raise ConfigError(f"{folder}: expected a folder of a run or a checkpoint, got no config.json{hint}")
    trained = (folder / CONFIGURATION).is_file()
    config = load_config(folder / CONFIGURATION if trained else None)
    if (folder / TOKENIZER).is_file() and not (trained and config.data.tokenizer == "bytes"):
        config.data.tokenizer = str(folder / TOKENIZER)
    if not trained:
        config.data.begin_token = config.data.end_token = None
    return config


def load_model(folder: str | Path, device: str = "auto", dtype: str | None = None) -> LoadedModel:
    """Load a run's folder, or a checkpoint's in state-spaces' or Hugging Face's format.

    Args:
        device: such as cpu or cuda:0; auto: a GPU if there is one.
        dtype: of the weights, one of ``DTYPES``; None: the checkpoint's.

    Raises:
        ConfigError: the folder holds no model, or the device or dtype is unknown.
    """
    folder = Path(folder)
    config = read_config(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)} or null, got '{dtype}'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = MambaLM.from_pretrained(folder)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    try:
        model = model.to(torch.device(device), None if dtype is None else getattr(torch, dtype)).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: '{device}' cannot be used here ({str(error).splitlines()[0]})") from None
    tokenizer = read_tokenizer(folder) if (folder / TOKENIZER).is_file() else None
    return LoadedModel(model, config, tokenizer, folder, (folder / CONFIGURATION).is_file())


def weights_id(model: MambaLM) -> str:
    """Return a hash that tells weights apart."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).tolist()
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
