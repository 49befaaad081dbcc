"""Text to token ids: bytes, or a `tokenizers` JSON file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from packmamba.config import ConfigError, DataConfig


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer. Begin and end tokens are never part of what `encode` returns."""

    @property
    def vocab_size(self) -> int:
        """Every id, begin and end tokens' included, is below it."""

    begin_id: int | None
    """Id to put before every document."""
    end_id: int | None
    """Id to put after every document."""
    fingerprint: str
    """Changes with anything that may change an id."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, (length,) of dtype `token_dtype(vocab_size)`."""

    def encode_batch(self, texts: Sequence[Any]) -> list[np.ndarray]:
        """`encode` of each; the fast way for many."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, begin and end tokens left out; bytes that are no text become U+FFFD."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer that ``data.tokenizer``, ``begin_token`` and ``end_token`` ask for.

    Raises ConfigError: no such file, not a tokenizer, package missing, a begin or end token that the file lacks.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer(data.begin_token, data.end_token)
    return FileTokenizer(data.tokenizer, data.begin_token, data.end_token)


class ByteTokenizer:
    """The 256 bytes of UTF-8; begin and end tokens get the next ids (one id if they have one name)."""

    def __init__(self, begin_token: str | None = None, end_token: str | None = None) -> None:
        ids: dict[str | None, int] = {}
        for token in (begin_token, end_token):
            if token is not None:
                ids.setdefault(token, 256 + len(ids))
        self.begin_id = ids.get(begin_token)
        self.end_id = ids.get(end_token)
        self.vocab_size = 256 + len(ids)
        self.fingerprint = f"bytes {begin_token!r} {end_token!r}"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(token_dtype(self.vocab_size))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        numbers = np.asarray(ids, np.int64)
        return numbers[numbers < 256].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizers` JSON file. The file's own truncation, padding and template of special tokens are not applied."""

    def __init__(self, path: str | Path, begin_token: str | None = None, end_token: str | None = None) -> None:
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"data.tokenizer must be bytes or a tokenizers JSON file, and '{path}' is no file")
        content = path.read_bytes()
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(f"data.tokenizer={path} needs the package tokenizers: pip install tokenizers") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises plain Exception
            raise ConfigError(f"data.tokenizer={path} is not a tokenizers JSON file ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._path = path
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"data.tokenizer={path} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.begin_id = self._id("begin_token", begin_token)
        self.end_id = self._id("end_token", end_token)
        self.fingerprint = f"{hashlib.sha256(content).hexdigest()} {begin_token!r} {end_token!r}"

    def _id(self, key: str, token: str | None) -> int | None:
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token)
        if found is None:
            special = [added.content for added in self._tokenizer.get_added_tokens_decoder().values() if added.special]
            hint = f"its special tokens: {', '.join(special[:8])}" if special else "it has no special tokens"
            raise ConfigError(
                f"data.{key} '{token}' is not a token of {self._path} ({hint}); name one, or null for none"
            )
        return found

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        own = [int(i) for i in ids if i not in (self.begin_id, self.end_id)]
        return self._tokenizer.decode(own, skip_special_tokens=False)


class TokenIds:
    """For documents that are token ids already; no begin and end tokens. A vocabulary that must be counted is, when it is asked
    for.
    """

    begin_id: int | None = None
    end_id: int | None = None
    fingerprint = "ids"

    def __init__(self, vocab_size: int | Callable[[], int]) -> None:
        self._vocab_size = vocab_size

    @cached_property
    def vocab_size(self) -> int:
        return self._vocab_size() if callable(self._vocab_size) else self._vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.vocab_size,)

    def encode(self, text: Any) -> np.ndarray:
        return np.asarray(text, token_dtype(self.vocab_size))

    def encode_batch(self, texts: Sequence[Any]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(i)) for i in ids)
