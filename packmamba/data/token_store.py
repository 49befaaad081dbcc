"""Tokenised corpora on disk, memory-mapped; each is tokenised once, under a hash of everything that decides its tokens.

A corpus folder holds ``meta.json`` and for each split, little-endian and without headers: ``<split>.tokens`` (uint16 or uint32),
``<split>.offsets`` (int64), ``<split>.lengths`` (int32) and, where documents have targets or groups of their own,
``<split>.targets`` and ``<split>.groups`` (int32).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources import open_source
from packmamba.data.sources.source import SEED
from packmamba.data.tokenize import META, tokenize
from packmamba.data.tokenizer import TokenIds, Tokenizer, load_tokenizer, token_dtype

FORMAT = 1
"""Part of every corpus's key: raised when the same keys and files give other tokens or another folder."""


class Corpus:
    """One split of a corpus, memory-mapped and read-only: n documents with T tokens in all. Pickles as its path.

    Attributes:
        tokens: (T,) uint16 or uint32, all documents in order, begin and end tokens included.
        offsets: (n + 1,) int64; document i is tokens[offsets[i]:offsets[i + 1]].
        lengths: (n,) int32, tokens of each document, at least one.
        targets: (T,) int32, the target after each token, -1 for none; None: the next token of the document.
        groups: (n,) int32, each document's index into ``group_names``; None: no groups.

    Raises ValueError or OSError if a file is missing or shorter than ``meta.json`` says.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder).resolve()
        self.split = split
        meta = json.loads((self.folder / META).read_text())
        self.corpus_hash: str = meta["corpus_hash"]
        self.vocab_size: int = meta["vocab_size"]
        self.begin_id: int | None = meta["begin_id"]
        self.end_id: int | None = meta["end_id"]
        counts = meta["splits"][split]
        self.num_documents: int = counts["documents"]
        self.num_tokens: int = counts["tokens"]
        self.group_names: list[str] = counts.get("groups", [])
        self.tokens = self._map("tokens", token_dtype(self.vocab_size).str, self.num_tokens)
        self.offsets = self._map("offsets", "<i8", self.num_documents + 1)
        self.lengths = self._map("lengths", "<i4", self.num_documents)
        self.targets = self._map("targets", "<i4", self.num_tokens) if "answers" in counts else None
        self.groups = self._map("groups", "<i4", self.num_documents) if self.group_names else None

    def _map(self, name: str, dtype: str, size: int) -> np.ndarray:
        if size == 0:
            return np.empty(0, dtype)
        # A plain view: slicing a memmap object costs several times as much.
        return np.memmap(self.folder / f"{self.split}.{name}", dtype, "r", shape=(size,)).view(np.ndarray)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of a document, (lengths[index],), a view. Raises IndexError if there is none."""
        return self.tokens[self._place(index)]

    def answers(self, index: int) -> Any:
        """Return the targets of a document, (lengths[index],), a view; None where the corpus has no targets."""
        return None if self.targets is None else self.targets[self._place(index)]

    def _place(self, index: int) -> slice:
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return slice(*self.offsets[index : index + 2].tolist())

    def __len__(self) -> int:
        return self.num_documents

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.folder, self.split)


@dataclass(frozen=True)
class Corpora:
    """Both splits of a corpus, and a hash of their tokens, lengths and targets, equal on every machine."""

    train: Corpus
    validation: Corpus
    corpus_hash: str


def load_corpora(data: DataConfig, progress: bool = True) -> Corpora:
    """Open the corpus that ``data`` describes in ``data.cache_dir``; tokenise it first if it is not there.

    Of several processes one tokenises and the others wait. ``progress`` shows a bar on a terminal.
    Raises ConfigError naming the key: a wrong key or file, or a corpus in the cache that is not whole.
    """
    source = open_source(data)
    tokenizer: Tokenizer = load_tokenizer(data) if source.vocab_size is None else TokenIds(source.vocab_size)
    identity = {
        "format": FORMAT,
        "source": [data.source, *source.fingerprint],
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": float(data.validation_fraction),
        "corpus_seed": SEED,
    }
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    folder = Path(data.cache_dir).resolve() / f"{data.source}-{key}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                if not folder.exists():
                    tokenize(folder, data, source, tokenizer, identity, progress)
        except OSError as error:
            raise ConfigError(f"data.cache_dir: cannot write '{data.cache_dir}' ({error.strerror or error})") from None
    try:
        train, validation = Corpus(folder, "train"), Corpus(folder, "validation")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"data.cache_dir: the corpus {folder} is damaged ({error}); delete the folder") from None
    return Corpora(train, validation, train.corpus_hash)


def evaluation_documents(corpus: Corpus, data: DataConfig) -> np.ndarray:
    """Choose the validation documents of every arm and evaluation: all, or a fixed random choice."""
    if data.validation_documents is None or data.validation_documents >= corpus.num_documents:
        return np.arange(corpus.num_documents)
    return np.sort(np.random.default_rng(SEED).permutation(corpus.num_documents)[: data.validation_documents])
