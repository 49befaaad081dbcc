"""A tokenizer beside a model: files that PackMamba and transformers' AutoTokenizer both read.

``tokenizer.json`` is in the format of the package ``tokenizers``; ``tokenizer_config.json`` names the begin and end tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packmamba.config import ConfigError
from packmamba.data.tokenization import ByteTokenizer, FileTokenizer, Tokenizer

TOKENIZER, OPTIONS = "tokenizer.json", "tokenizer_config.json"
BYTES = "packmamba_bytes"
"""Marks a tokenizer of bytes, which needs no package."""


def write_tokenizer(folder: str | Path, tokenizer: str, begin_token: str | None, end_token: str | None) -> None:
    """Writes both files. ``tokenizer``: "bytes" or the path of a ``tokenizers`` JSON file, as ``data.tokenizer``."""
    folder = Path(folder)
    if tokenizer == "bytes":
        content = json.dumps(_bytes(begin_token, end_token), ensure_ascii=False, indent=1)
    else:
        content = Path(tokenizer).read_text(encoding="utf-8")
    options: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        BYTES: tokenizer == "bytes",
    }
    options |= {
        name: token for name, token in (("bos_token", begin_token), ("eos_token", end_token)) if token is not None
    }
    (folder / TOKENIZER).write_text(content, encoding="utf-8")
    (folder / OPTIONS).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a run's or a checkpoint's folder. Raises ConfigError if there is none that can be read."""
    folder = Path(folder)
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(f"{folder} has no {TOKENIZER}; name one with data.tokenizer")
    options: dict[str, Any] = {}
    if (folder / OPTIONS).is_file():
        try:
            options = json.loads((folder / OPTIONS).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{folder / OPTIONS} is not JSON ({error})") from None
    begin, end = (_text(options.get(name)) for name in ("bos_token", "eos_token"))
    if options.get(BYTES):
        return ByteTokenizer(begin, end)
    return FileTokenizer(folder / TOKENIZER, begin, end)


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _bytes(begin_token: str | None, end_token: str | None) -> dict[str, Any]:
    """Each byte is the token of its own number, begin and end tokens come after them, as in ``ByteTokenizer``."""
    names = [token for token in dict.fromkeys((begin_token, end_token)) if token is not None]
    added = [
        {"id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, name in enumerate(names)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


def _characters() -> list[str]:
    """What ByteLevel calls each byte: itself where it can be printed, else the next character from 256 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]
