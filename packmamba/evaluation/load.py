"""Load a model; the context and the result of its evaluations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from packmamba.config import CONFIGURATION, Config, DataConfig, TrainerConfig, load_config
from packmamba.data.tokenizer import TOKENIZER, Tokenizer, read_tokenizer
from packmamba.errors import ConfigError, need, refusing
from packmamba.nn import MambaLM


@dataclass
class LoadedModel:
    """Hold a model in evaluation mode; its run's configuration if ``trained``, else defaults."""

    model: MambaLM
    config: Config
    tokenizer: Tokenizer | None
    folder: Path
    trained: bool

    @property
    def name(self) -> str:
        """Return the run's name, or the checkpoint's folder."""
        return self.config.name if self.trained else self.folder.resolve().name


def read_config(folder: str | Path) -> Config:
    """Return the configuration of a folder's model. Raises ConfigError."""
    folder = Path(folder)
    hint = "; the run has not ended: repeat its command" if (folder / "checkpoints").is_dir() else ""
    expected = "a folder of a run or a checkpoint"
    need((folder / "config.json").is_file(), str(folder), expected, f"no config.json{hint}")
    trained = (folder / CONFIGURATION).is_file()
    config = load_config(folder / CONFIGURATION if trained else None)
    # The folder's tokenizer, since the path of training may not exist here. A checkpoint without
    # one needs it from the user: bytes may be no ids of it.
    if not trained or ((folder / TOKENIZER).is_file() and config.data.tokenizer != "bytes"):
        config.data.tokenizer = str(folder / TOKENIZER)
    if not trained:
        config.data.begin_token = config.data.end_token = None
    return config


def usable_device(device: str) -> str:
    """Return a device that can be used, auto resolved.

    Raises ConfigError: a model fails later, and less clearly.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: '{device}' cannot be used here ({str(error).splitlines()[0]})") from None
    return device


def load_model(folder: str | Path, device: str = "auto", dtype: str | None = None) -> LoadedModel:
    """Load a run's folder, or a checkpoint's. Raises ConfigError.

    A checkpoint has state-spaces' or Hugging Face's format.
    """
    folder = Path(folder)
    config = read_config(folder)
    device = usable_device(device)
    with refusing(ValueError, FileNotFoundError):
        model = MambaLM.from_pretrained(folder)
    model = model.to(device, None if dtype is None else getattr(torch, dtype)).eval()
    tokenizer = read_tokenizer(folder) if (folder / TOKENIZER).is_file() else None
    return LoadedModel(model, config, tokenizer, folder, (folder / CONFIGURATION).is_file())


@dataclass
class EvalContext:
    """Hold what an evaluation uses besides the model.

    ``options`` are of key ``key``, names of evaluations of key ``names``. ``folder`` has a
    tokenizer for transformers; None: one is made from ``data``.
    """

    data: DataConfig
    tokenizer: Tokenizer | None = None
    examples: int = 200
    seed: int = 1_000_000
    max_slots: int = 16384
    options: dict[str, Any] = field(default_factory=dict)
    key: str = "options"
    names: str = "tasks"
    folder: str | Path | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class EvalResult:
    """Hold metrics, curves, and one item per example.

    A metric ``<name>_as_trained`` is read under the training's boundary scheme.
    """

    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    items: list[dict[str, Any]]
    corpus_hash: str
