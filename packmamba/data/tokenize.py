"""Tokenise a source into a corpus folder: chunks of documents are encoded by a process pool and written in order.

The folder is written under a temporary name and renamed once, so a corpus is whole or absent. Its bytes do not depend on the
number of processes. Memory holds at most a few chunks for each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Document, Source
from packmamba.data.tokenizer import FileTokenizer, Tokenizer, token_dtype
from packmamba.errors import UserError

META = "meta.json"
SPLITS = ("train", "validation")
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096
CHUNKS_AHEAD = 2  # for each process, encoded or waiting at a time
SMALL = 16  # a corpus of fewer chunks is encoded sooner than processes start


def tokenize(
    folder: Path, data: DataConfig, source: Source, tokenizer: Tokenizer, identity: dict[str, Any], progress: bool
) -> None:
    """Write the corpus of a source. The caller holds the folder's lock.

    Raises ConfigError for documents that cannot be read or split, UserError for a killed process, OSError of the folder.
    """
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    skipped: Counter[str] = Counter()
    ids = {"vocab_size": tokenizer.vocab_size, "begin_id": tokenizer.begin_id, "end_id": tokenizer.end_id}
    hidden = None if progress else True  # None: hidden where there is no terminal
    bar = tqdm(None, f"Tokenising {data.source}", source.total, unit=source.unit, unit_scale=True, disable=hidden)
    try:
        with bar, contextlib.ExitStack() as stack:
            writers = [_SplitWriter(work, split, stack) for split in SPLITS]
            chunks = stack.enter_context(contextlib.closing(_encoded(source, tokenizer, data, bar.update, skipped)))
            for documents, tokens, lengths in chunks:
                skipped["empty_documents"] += int((lengths == 0).sum())
                writers[documents[0].held_out].add(documents, tokens, lengths)
        _check_split(data, *(writer.counts["documents"] for writer in writers))
        header = [*ids.values(), *(digest for writer in writers for digest in writer.hashes())]
        corpus_hash = hashlib.blake2b(json.dumps(header).encode(), digest_size=16).hexdigest()
        splits = {writer.split: writer.meta() for writer in writers}
        meta = {"identity": identity, "corpus_hash": corpus_hash, **ids, "splits": splits, "skipped": dict(+skipped)}
        (work / META).write_text(json.dumps(meta, indent=1))
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _SplitWriter:
    """The growing files of one split, and their hashes."""

    def __init__(self, folder: Path, split: str, stack: contextlib.ExitStack) -> None:
        self.split, self._folder, self._stack = split, folder, stack
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
        if lengths.max() >= 2**31:
            raise ConfigError(f"data.path: a document has {lengths.max()} tokens, expected below 2**31; cut it")
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
            opened = self._stack.enter_context(open(self._folder / f"{self.split}.{name}", "wb"))
            self._files[name] = (opened, hashlib.blake2b(digest_size=16))
        file, digest = self._files[name]
        file.write(array.data)
        digest.update(array.data)

    def hashes(self) -> list[str]:
        return [self._files[name][1].hexdigest() for name in ("tokens", "lengths", "targets") if name in self._files]

    def meta(self) -> dict[str, Any]:
        return dict(self.counts) | ({"groups": list(self._groups)} if self._groups else {})


def _check_split(data: DataConfig, train: int, validation: int) -> None:
    if train + validation == 0:
        raise ConfigError(f"data.path: expected documents with a token in them, got none in '{data.path}'")
    if train == 0 or (validation == 0 and data.validation_fraction):
        got = f"{train} and {validation} with {data.validation_fraction}"
        raise ConfigError(f"data.validation_fraction: expected training and validation documents, got {got}")


def _encoded(
    source: Source, tokenizer: Tokenizer, data: DataConfig, advance: Callable[[int], object], skipped: Counter[str]
) -> Generator[tuple[list[Document], np.ndarray, np.ndarray], None, None]:
    """Yield chunks in order: documents of one split, their tokens (T,), and the length of each, 0 if it is empty."""
    # Reading bytes or ids is cheaper in this process than sending them to another one.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = (data.num_proc or cores) if isinstance(tokenizer, FileTokenizer) else 1
    chunks = _chunks(source.read(advance, skipped), data)
    first = list(itertools.islice(chunks, SMALL)) if processes > 1 else []
    processes = processes if len(first) == SMALL else 1
    pending: deque[tuple[list[Document], Future]] = deque()
    with _pool(tokenizer, processes) as submit:
        for chunk in itertools.chain(first, chunks):
            pending.append((chunk, submit([document.content for document in chunk])))
            if len(pending) >= CHUNKS_AHEAD * processes:
                documents, future = pending.popleft()
                yield documents, *future.result()
        while pending:
            documents, future = pending.popleft()
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


_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that has the pool
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    """End this worker when the process that has the pool is killed; else it would wait for ever."""
    parent.join()
    os._exit(1)


def _encode_in_worker(contents: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    return encode(_tokenizer, contents)


@contextlib.contextmanager
def _pool(tokenizer: Tokenizer, processes: int) -> Iterator[Callable[[list[Any]], Future]]:
    """Start a pool and yield its ``submit`` for the contents of a chunk; a single process encodes in a thread."""
    if processes == 1:
        with ThreadPoolExecutor(1) as thread:
            yield lambda contents: thread.submit(encode, tokenizer, contents)
        return
    # A fork of this process would copy the locks of PyTorch's threads; the fork server has none, and imports once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (tokenizer,))
    # A worker imports the user's script, which without a guard would tokenise again: it gets an empty one.
    script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield lambda contents: pool.submit(_encode_in_worker, contents)
    except BrokenProcessPool:
        raise UserError("data.num_proc: a tokenising process was killed, perhaps out of memory; lower it") from None
    finally:
        pool.shutdown(cancel_futures=True)
        sys.modules["__main__"] = script
