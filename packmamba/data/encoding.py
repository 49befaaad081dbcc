"""Tokenize documents, and write the files of a split.

``Opened.identity`` is everything that decides their tokens; its hash names the corpus' folder.
"""

import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import DataConfig
from packmamba.data.corpus import META
from packmamba.data.sources import open_source
from packmamba.data.sources.source import SEED, Document, Source
from packmamba.data.tokenizer import FileTokenizer, TokenIds, Tokenizer, load_tokenizer, token_dtype

FORMAT = 2  # raise when the same keys and files give others
# A task of one encoding thread: large enough to pay for its start, small in memory.
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096


class Opened(NamedTuple):
    """Hold a source, its tokenizer, and what decides the tokens.

    No document of the source was read. Without a tokenizer documents are ids.
    """

    source: Source
    tokenizer: Tokenizer | None
    identity: dict[str, Any]

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Of documents that are ids it may read them all, for the vocabulary.
        """
        return self.tokenizer or TokenIds(self.source.vocab_size or 0)

    def folder(self, data: DataConfig) -> Path:
        """Return the folder of the tokenized corpus.

        A change of anything in ``identity`` makes another.
        """
        key = hashlib.blake2b(json.dumps(self.identity).encode(), digest_size=8).hexdigest()
        return Path(data.cache_dir).resolve() / f"{data.source}-{key}"


def open_documents(data: DataConfig, **identity: Any) -> Opened:
    """Open ``data.source`` and its tokenizer. Raises ConfigError.

    identity: what else decides the files.
    """
    source = open_source(data)
    tokenizer = load_tokenizer(data) if source.vocab_size is None else None
    identity = {
        "format": FORMAT,
        "source": [data.source, *source.fingerprint],
        "tokenizer": (tokenizer or TokenIds).fingerprint,
        "validation_fraction": float(data.validation_fraction),
        "corpus_seed": SEED,
        **identity,
    }
    return Opened(source, tokenizer, identity)


class Encoded(NamedTuple):
    """Hold a document's tokens, and which of them are trained on.

    They are without begin and end tokens. ``answered`` None: all are trained on.
    """

    ids: np.ndarray
    answered: np.ndarray | None = None


# Documents with their tokens.
Chunk = list[tuple[Document, Encoded]]


class SplitWriter:
    """Append documents to a split's files, and hash what is written."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path = path
        dtype = token_dtype(tokenizer.vocab_size)
        self.begin = np.array([] if tokenizer.begin_id is None else [tokenizer.begin_id], dtype)
        self.end = np.array([] if tokenizer.end_id is None else [tokenizer.end_id], dtype)
        self.counts = Counter({"documents": 0, "tokens": 0})
        self.hashes: dict[str, Any] = {}
        self.groups: dict[str, int] = {}

    def meta(self) -> dict[str, Any]:
        """Return the split's part of ``META``."""
        return {**self.counts, **({"groups": [*self.groups]} if self.groups else {})}

    def add(self, documents: Chunk) -> None:
        """Write documents that have tokens, between begin and end tokens.

        All have targets, answers and groups, or none has.
        """
        documents = [pair for pair in documents if len(pair[1].ids)]
        if not documents:
            return
        parts = [np.concatenate([self.begin, encoded.ids, self.end]) for _, encoded in documents]
        lengths = np.array(list(map(len, parts)), "<i4")
        self.counts.update(documents=len(documents), tokens=int(lengths.sum()))
        # One file a column. The first document tells which columns the split has.
        columns = {"tokens": np.concatenate(parts), "lengths": lengths}
        targets = [self._targets(*pair, tokens) for pair, tokens in zip(documents, parts)]
        if targets[0] is not None:
            columns["targets"] = np.concatenate(targets).astype("<i4")
            self.counts["answers"] += int((columns["targets"] >= 0).sum())
        if documents[0][0].group is not None:
            # Groups are numbered in the order in which they first come.
            numbers = [self.groups.setdefault(str(one.group), len(self.groups)) for one, _ in documents]
            columns["groups"] = np.array(numbers, "<i4")
        for name, column in columns.items():
            with open(f"{self.path}.{name}", "ab") as file:
                file.write(column.data)
            self.hashes.setdefault(name, hashlib.blake2b(digest_size=16)).update(column.data)

    def _targets(self, document: Document, encoded: Encoded, tokens: np.ndarray) -> Any:
        """Return what each token predicts, -1 for nothing; None: the next token, everywhere.

        The end token is trained on where the document ends with an answer: it says that the
        answer is over.
        """
        if encoded.answered is None:
            return document.targets
        # Also behind an empty answer, which has no token; not without any answer.
        last_answer_end = document.answers[-1][1] if document.answers else -1
        ends_with_answer = np.full(len(self.end), last_answer_end == len(document.content))
        answered = np.concatenate([np.zeros(len(self.begin), bool), encoded.answered, ends_with_answer])
        # A token predicts its successor where that is part
        # of an answer; the last one predicts nothing.
        return np.append(np.where(answered[1:], tokens[1:].astype("<i4"), -1), -1)


def encode(documents: Iterable[Document], tokenizer: Tokenizer, data: DataConfig) -> Iterator[Chunk]:
    """Yield chunks of documents with their tokens, all of them in order."""
    # The package tokenizers encodes without Python's lock.
    threads = (data.num_proc or min(os.cpu_count() or 1, 16)) if isinstance(tokenizer, FileTokenizer) else 1
    chunks = _chunks(documents)
    with ThreadPoolExecutor(threads) as pool:
        # Two tasks a thread and round: bounds what waits
        # in memory, and few threads idle at its end.
        while some := [*itertools.islice(chunks, 2 * threads)]:
            for chunk, encoded in zip(some, pool.map(functools.partial(_encode, tokenizer), some)):
                yield list(zip(chunk, encoded))


def _encode(tokenizer: Tokenizer, documents: list[Document]) -> list[Encoded]:
    """Encode documents, answers apart from what lies between them.

    A model that continues a prompt reads it encoded in the same way.
    """
    # All parts of all documents go through the tokenizer in one call.
    cut = [_cut_at_answers(document) for document in documents]
    ids = iter(tokenizer.encode_batch([text for parts in cut for text, _ in parts]))
    encoded = []
    for document, parts in zip(documents, cut):
        ids_of_parts = [next(ids) for _ in parts]
        answered = None
        if document.answers is not None:
            answered = np.repeat([is_answer for _, is_answer in parts], [*map(len, ids_of_parts)])
        encoded.append(Encoded(np.concatenate(ids_of_parts), answered))
    return encoded


def _cut_at_answers(document: Document) -> list[tuple[Any, bool]]:
    """Cut a document's content in parts, each with whether it is an answer."""
    if document.answers is None:
        return [(document.content, True)]
    parts = []
    end = 0
    for first, last in document.answers:
        parts += [(document.content[end:first], False), (document.content[first:last], True)]
        end = last
    return [*parts, (document.content[end:], False)]


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.content)
        if size >= CHUNK_CHARACTERS or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    yield chunk


def write_meta(
    folder: Path, opened: Opened, tokenizer: Tokenizer, splits: dict[str, SplitWriter], **others: Any
) -> None:
    """Write ``META`` of a folder.

    It says what decided the tokens, what training and validation hash to, and counts of splits.
    """
    ids = {"vocab_size": tokenizer.vocab_size, "begin_id": tokenizer.begin_id, "end_id": tokenizer.end_id}
    counts = {name: writer.meta() for name, writer in splits.items()}
    if "test" in splits:
        # Its own hash: a test split that is added or changed leaves the identity of runs as it is.
        counts["test"]["hash"] = _hash([*ids.values()], splits["test"])
    corpus_hash = _hash([*ids.values()], *(writer for name, writer in splits.items() if name != "test"))
    meta = {"identity": opened.identity, "corpus_hash": corpus_hash, **ids, "splits": counts, **others}
    (folder / META).write_text(json.dumps(meta, indent=1))


def _hash(header: list[Any], *writers: SplitWriter) -> str:
    # Groups decide no batch of a training, only how evaluations are summed.
    hashes = [hash.hexdigest() for writer in writers for name, hash in writer.hashes.items() if name != "groups"]
    return hashlib.blake2b(json.dumps([*header, *hashes]).encode(), digest_size=16).hexdigest()
