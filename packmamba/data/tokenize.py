"""Tokenise a source into a corpus folder: threads encode chunks of documents, which are written in order.

The folder is written under a temporary name and renamed once, so a corpus is whole or absent. Its bytes do not depend on the
number of threads. Memory holds at most a few chunks for each thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Document, Source
from packmamba.data.tokenizer import FileTokenizer, Tokenizer, token_dtype

META = "meta.json"
SPLITS = ("train", "validation")
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096
CHUNKS_AHEAD = 2  # for each thread, encoded or waiting at a time


def tokenize(
    folder: Path, data: DataConfig, source: Source, tokenizer: Tokenizer, identity: dict[str, Any], progress: bool
) -> None:
    """Write the corpus of a source. The caller holds the folder's lock.

    Raises ConfigError for documents that cannot be read or split, OSError of the folder.
    """
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    empty = 0
    ids = {"vocab_size": tokenizer.vocab_size, "begin_id": tokenizer.begin_id, "end_id": tokenizer.end_id}
    hidden = None if progress else True  # None: hidden where there is no terminal
    bar = tqdm(None, f"Tokenising {data.source}", source.total, unit=source.unit, unit_scale=True, disable=hidden)
    try:
        with bar, contextlib.ExitStack() as stack:
            writers = [_SplitWriter(work, split, stack) for split in SPLITS]
            for documents, tokens, lengths in _encoded(source, tokenizer, data, bar.update):
                empty += int((lengths == 0).sum())
                writers[documents[0].held_out].add(documents, tokens, lengths)
        train, validation = (writer.counts["documents"] for writer in writers)
        if train + validation == 0:
            raise ConfigError(f"data.path: expected documents with a token in them, got none in '{data.path}'")
        if train == 0 or (validation == 0 and data.validation_fraction):
            got = f"{train} and {validation} with {data.validation_fraction}"
            raise ConfigError(f"data.validation_fraction: expected training and validation documents, got {got}")
        header = [*ids.values(), *(digest for writer in writers for digest in writer.hashes())]
        corpus_hash = hashlib.blake2b(json.dumps(header).encode(), digest_size=16).hexdigest()
        splits = {split: writer.meta() for split, writer in zip(SPLITS, writers)}
        meta = {"identity": identity, "corpus_hash": corpus_hash, **ids, "splits": splits, "empty_documents": empty}
        (work / META).write_text(json.dumps(meta, indent=1))
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _SplitWriter:
    """The growing files of one split, and their hashes."""

    def __init__(self, folder: Path, split: str, stack: contextlib.ExitStack) -> None:
        self._open = lambda name: stack.enter_context(open(folder / f"{split}.{name}", "wb"))
        self.counts = Counter({"documents": 0, "tokens": 0})
        self._files: dict[str, tuple[BinaryIO, Any]] = {}
        self._groups: dict[str, int] = {}
        self._append("offsets", np.zeros(1, "<i8"))
        for name in ("tokens", "lengths"):
            self._append(name, np.empty(0, "<u2"))

    def add(self, documents: list[Document], tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append a chunk. tokens: (T,). lengths: (n,), 0 for a document without tokens, which is left out."""
        documents = [document for document, length in zip(documents, lengths) if length]
        lengths = lengths[lengths > 0]
        if not documents:
            return
        self._append("tokens", tokens)
        self._append("lengths", lengths.astype("<i4"))
        self._append("offsets", self.counts["tokens"] + lengths.cumsum(dtype="<i8"))
        self.counts.update(documents=len(documents), tokens=int(lengths.sum()))
        if documents[0].targets is not None:
            targets = np.concatenate([document.targets for document in documents]).astype("<i4")
            self._append("targets", targets)
            self.counts["answers"] += int((targets >= 0).sum())
        if documents[0].group is not None:
            numbers = [self._groups.setdefault(str(one.group), len(self._groups)) for one in documents]
            self._append("groups", np.array(numbers, "<i4"))

    def _append(self, name: str, array: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self._open(name), hashlib.blake2b(digest_size=16))
        file, digest = self._files[name]
        file.write(array.data)
        digest.update(array.data)

    def hashes(self) -> list[str]:
        return [self._files[name][1].hexdigest() for name in ("tokens", "lengths", "targets") if name in self._files]

    def meta(self) -> dict[str, Any]:
        return dict(self.counts) | ({"groups": list(self._groups)} if self._groups else {})


def _encoded(
    source: Source, tokenizer: Tokenizer, data: DataConfig, advance: Callable[[int], object]
) -> Iterator[tuple[list[Document], np.ndarray, np.ndarray]]:
    """Yield chunks in order: documents of one split, their tokens (T,), and the length of each, 0 if it is empty."""
    # The package tokenizers encodes without Python's lock; bytes and ids hold it.
    threads = (data.num_proc or min(os.cpu_count() or 1, 16)) if isinstance(tokenizer, FileTokenizer) else 1
    pending: deque[tuple[list[Document], Future]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for chunk in _chunks(source.read(advance), data):
            pending.append((chunk, pool.submit(encode, tokenizer, [document.content for document in chunk])))
            if len(pending) >= CHUNKS_AHEAD * threads:
                documents, future = pending.popleft()
                yield documents, *future.result()
        for documents, future in pending:
            yield documents, *future.result()


def _chunks(documents: Iterator[Document], data: DataConfig) -> Iterator[list[Document]]:
    """Yield the documents of each split in order, about CHUNK_CHARACTERS at a time."""
    chunks: dict[bool, list[Document]] = {False: [], True: []}
    sizes: Counter[bool] = Counter()
    try:
        for document in documents:
            held_out = document.held_out
            chunks[held_out].append(document)
            sizes[held_out] += len(document.content)
            if sizes[held_out] >= CHUNK_CHARACTERS or len(chunks[held_out]) >= CHUNK_DOCUMENTS:
                yield chunks[held_out]
                chunks[held_out], sizes[held_out] = [], 0
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {error.filename or data.path} ({error.strerror or error})") from None
    yield from filter(None, chunks.values())


def encode(tokenizer: Tokenizer, contents: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents between begin and end tokens: tokens (T,), lengths (n,) int64, 0 where a document is empty."""
    begin, end = ([] if token is None else [token] for token in (tokenizer.begin_id, tokenizer.end_id))
    dtype = token_dtype(tokenizer.vocab_size)
    encoded = tokenizer.encode_batch(contents)
    pieces = [piece for ids in encoded if len(ids) for piece in (np.array(begin, dtype), ids, np.array(end, dtype))]
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    lengths[lengths > 0] += len(begin) + len(end)
    return np.concatenate([np.empty(0, dtype), *pieces]), lengths
