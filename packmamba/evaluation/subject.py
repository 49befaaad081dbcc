"""What is evaluated: a model from a run's or a checkpoint's folder, with the configuration and tokenizer that belong to it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from packmamba.config import CONFIGURATION, Config, ConfigError, load_config
from packmamba.data.tokenization import Tokenizer
from packmamba.data.tokenizer_files import TOKENIZER, read_tokenizer
from packmamba.evaluation.perplexity import Read
from packmamba.nn import MambaLM

SEAL = "# checksum of the rest: "
"""What the first line of a run's configuration begins with. Older ones, and those changed on purpose, have no such line."""
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class Subject:
    """A model, and how its texts were made.

    Attributes:
        model: on its device, in evaluation mode.
        config: the run's; of a checkpoint from elsewhere the defaults, with its tokenizer.
        tokenizer: None for a model of token ids that have no text.
        folder: where it comes from.
        trained: whether ``config`` is that of its training.
        read: losses of the documents that it is asked about.
    """

    model: MambaLM
    config: Config
    tokenizer: Tokenizer | None
    folder: Path
    trained: bool
    read: Read = field(default_factory=Read)

    @property
    def name(self) -> str:
        return self.config.name if self.trained else self.folder.resolve().name


def read_config(folder: str | Path) -> Config:
    """The configuration that a folder's model was trained with; of a checkpoint from elsewhere the defaults.

    ``data.tokenizer`` is the folder's own. Raises ConfigError if the folder holds no model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected one of a run or of a checkpoint")
    if not (folder / "config.json").is_file():
        unfinished = (folder / "checkpoints").is_dir()
        hint = "; the run has not ended: repeat its command" if unfinished else ""
        raise ConfigError(f"{folder} holds no model: expected config.json and weights{hint}")
    if trained := (folder / CONFIGURATION).is_file():
        check_configuration(folder / CONFIGURATION)
    config = load_config(folder / CONFIGURATION if trained else None)
    if (folder / TOKENIZER).is_file() and not (trained and config.data.tokenizer == "bytes"):
        config.data.tokenizer = str(folder / TOKENIZER)
    if not trained:
        config.data.begin_token = config.data.end_token = None
    return config


def check_configuration(path: Path) -> None:
    """Raises ConfigError if a run's configuration has a checksum that does not hold."""
    content = path.read_bytes()
    if content.startswith(SEAL.encode()) and content != sealed(content.decode(errors="replace").partition("\n")[2]):
        raise ConfigError(f"{path} is not what was written; if you have changed it, remove its first line")


def sealed(text: str) -> bytes:
    """A configuration with its checksum."""
    return f"{SEAL}{zlib.crc32(text.encode()):08x}\n{text}".encode()


def load_subject(folder: str | Path, device: str = "auto", dtype: str | None = None) -> Subject:
    """Reads a run's folder, or a checkpoint's in state-spaces' or Hugging Face's format.

    Args:
        device: such as cpu or cuda:0; auto: a GPU if there is one.
        dtype: of the weights, one of ``DTYPES``; None: as they are.

    Raises:
        ConfigError: the folder holds no model, or no such device or dtype.
    """
    folder = Path(folder)
    config = read_config(folder)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)} or null, got '{dtype}'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = MambaLM.from_pretrained(folder)
        model = model.to(torch.device(device), None if dtype is None else getattr(torch, dtype)).eval()
        if model.lm_head.weight.is_meta:
            raise RuntimeError("it holds no values")
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: '{device}' cannot be used here ({str(error).splitlines()[0]})") from None
    tokenizer = read_tokenizer(folder) if (folder / TOKENIZER).is_file() else None
    return Subject(model, config, tokenizer, folder, (folder / CONFIGURATION).is_file())
