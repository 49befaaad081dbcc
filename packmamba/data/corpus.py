"""Tokens on disk: a corpus is prepared once under a hash of all that decides its tokens, and memory-mapped after.

A corpus's folder holds ``meta.json`` and for each split, little-endian and without headers: ``<split>.tokens`` (uint16
or uint32), ``<split>.offsets`` (int64) and ``<split>.lengths`` (int32); where documents have their own targets or groups also
``<split>.targets`` and ``<split>.groups`` (int32).
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import DataConfig
from packmamba.data.integrity import check_opened, read_meta
from packmamba.data.preparation import alone, clear_away, prepare
from packmamba.data.sources import open_source
from packmamba.data.tokenization import TokenIds, Tokenizer, load_tokenizer, token_dtype

FORMAT = 1  # part of every key: raise it when the same keys and files shall give other tokens or another folder

HELD = 1 << 28
"""Bytes of a corpus that count as this process's memory, about, however much of it is read."""
AROUND = 1 << 21
"""What Linux maps around a place that is read, at most: a huge page."""

logger = logging.getLogger(__name__)


class Corpus:
    """One split of a prepared corpus, memory-mapped and read-only; n documents of T tokens in all.

    Pickles as its folder's path and maps the files again where it is unpickled. Raises ValueError naming the file if
    the folder is damaged.
    """

    tokens: np.ndarray
    """(T,) uint16 or uint32, all documents one after another, begin and end tokens included."""
    offsets: np.ndarray
    """(n + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]."""
    lengths: np.ndarray
    """(n,) int32, tokens of each document; at least one."""
    targets: np.ndarray | None
    """(T,) int32, what is to be said after each token, -1 for nothing; None: the token that follows, but at documents' ends."""
    groups: np.ndarray | None
    """(n,) int32, what each document belongs to, by its place in ``group_names``; None: documents have no groups."""
    group_names: list[str]
    corpus_hash: str
    """Of the tokens and lengths of both splits."""

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder).resolve()
        self.split = split
        meta = read_meta(self.folder)
        self.num_documents: int = meta["splits"][split]["documents"]
        self.num_tokens: int = meta["splits"][split]["tokens"]
        self.vocab_size: int = meta["vocab_size"]
        self.begin_id: int | None = meta["begin_id"]
        self.end_id: int | None = meta["end_id"]
        self.corpus_hash = meta["corpus_hash"]
        self.tokens = self._map("tokens", token_dtype(self.vocab_size), self.num_tokens)
        self.offsets = self._map("offsets", np.dtype("<i8"), self.num_documents + 1)
        self.lengths = self._map("lengths", np.dtype("<i4"), self.num_documents)
        answers = meta["splits"][split].get("answers")
        self.targets = None if answers is None else self._map("targets", np.dtype("<i4"), self.num_tokens)
        self.group_names = meta["splits"][split].get("groups", [])
        self.groups = self._map("groups", np.dtype("<i4"), self.num_documents) if self.group_names else None
        # Slicing a memmap object costs several times as much.
        self._plain_tokens, self._plain_offsets = self.tokens.view(np.ndarray), self.offsets.view(np.ndarray)
        self._plain_targets = None if self.targets is None else self.targets.view(np.ndarray)
        self._size = self.tokens.nbytes + (0 if self.targets is None else self.targets.nbytes)
        self._held = 0

    def _map(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        path = self.folder / f"{self.split}.{name}"
        found = path.stat().st_size
        if found != size * dtype.itemsize:
            raise ValueError(f"{path} has {found} bytes where meta.json says {size * dtype.itemsize}")
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)

    def document(self, index: int) -> np.ndarray:
        """Tokens of a document, (lengths[index],), a read-only view of the mapped file; IndexError if there is none."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        begin, end = self._plain_offsets[index : index + 2].tolist()
        if self._size > HELD:
            self._held += (end - begin) * self.tokens.itemsize + AROUND
            if self._held > HELD:
                self._let_go()
        return self._plain_tokens[begin:end]

    def _let_go(self) -> None:
        """Gives the pages that were read back to the system, which keeps them as long as it has room; views stay as they are."""
        for mapped in (self.tokens, self.targets):
            if mapped is not None and isinstance(mapped.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                mapped.base.madvise(mmap.MADV_DONTNEED)
        self._held = 0

    def answers(self, index: int) -> np.ndarray | None:
        """Targets of a document where the corpus has targets of its own, (lengths[index],); else None."""
        if self._plain_targets is None:
            return None
        begin, end = self._plain_offsets[index : index + 2].tolist()
        return self._plain_targets[begin:end]

    def group(self, index: int) -> str | None:
        """What a document belongs to."""
        return None if self.groups is None else self.group_names[self.groups[index]]

    def __len__(self) -> int:
        return self.num_documents

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.folder, self.split)

    def __repr__(self) -> str:
        return f"Corpus({self.split}: {self.num_documents} documents, {self.num_tokens} tokens, {self.folder})"


@dataclass(frozen=True)
class Corpora:
    """Both splits of one corpus."""

    train: Corpus
    validation: Corpus
    corpus_hash: str
    """Of the tokens and lengths of both splits; equal on every machine that has the same documents."""
    skipped: dict[str, int]
    """What was left out: empty_documents (no token of their own), bad_lines, unparsable_files."""


def load_corpora(data: DataConfig, progress: bool = True) -> Corpora:
    """The corpus that ``data`` describes, from ``data.cache_dir`` or prepared into it first.

    Any number of processes may do this at once: the first that finds no corpus prepares it, on all cores, and the others
    wait. One that is killed leaves what it has done, and the next goes on from there. A damaged folder is prepared again
    (`check` says what is looked at). Empty documents are left out and counted; what was left out is logged as
    a warning each time. `progress` shows a bar on a terminal while preparing.

    Raises ConfigError naming the key, before any work except for what only reading can show.
    """
    source = open_source(data)
    tokenizer: Tokenizer = load_tokenizer(data) if source.vocab_size is None else TokenIds(source.vocab_size)
    identity = {
        "format": FORMAT,
        "source": [data.source, *source.fingerprint],
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": float(data.validation_fraction),
        "corpus_seed": data.corpus_seed,
    }
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    folder = Path(os.path.realpath(data.cache_dir), f"{data.source}-{key}")  # of links in a circle too
    corpora = _open(folder)
    if corpora is None:
        with alone(folder, data):
            corpora = _open(folder)  # another process may just have made it
            if corpora is None:
                prepare(folder, data, source, tokenizer, identity, progress)
                corpora = _open(folder)
        if corpora is None:
            raise RuntimeError(f"the corpus {folder} disappeared while it was opened")
    else:
        clear_away(folder)
    if corpora.skipped:
        counts = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in corpora.skipped.items())
        logger.warning("the corpus of data.source=%s leaves out %s", data.source, counts)
    return corpora


def _open(folder: Path) -> Corpora | None:
    """None if there is no such corpus or it is damaged, which is logged."""
    try:
        if not folder.exists():
            return None
    except OSError:
        return None  # who makes it says why it cannot be
    try:
        train, validation = Corpus(folder, "train"), Corpus(folder, "validation")
        check_opened(folder)
        return Corpora(train, validation, train.corpus_hash, read_meta(folder)["skipped"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the prepared corpus %s is damaged and will be prepared again (%s)", folder, error)
        return None


def evaluation_documents(corpus: Corpus, data: DataConfig) -> np.ndarray:
    """The validation documents that every arm and every evaluation uses: all, or a fixed random choice."""
    if data.validation_documents is None or data.validation_documents >= corpus.num_documents:
        return np.arange(corpus.num_documents)
    rng = np.random.default_rng(data.corpus_seed)
    return np.sort(rng.permutation(corpus.num_documents)[: data.validation_documents])
