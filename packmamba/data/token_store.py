"""Tokenised corpora on disk, under a hash of everything that decides their tokens; little-endian files without headers."""

import functools
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.corpus import META, SPLITS, Corpus, Mixture
from packmamba.data.sources import open_source, parts_of
from packmamba.data.sources.source import SEED, Document, Source
from packmamba.data.tokenizer import FileTokenizer, TokenIds, Tokenizer, load_tokenizer, token_dtype
from packmamba.files import DiskFull, space_for

FORMAT = 1  # raise when the same keys and files give others
# A task of one encoding thread: large enough to pay for its start, small in memory.
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096


class Corpora(NamedTuple):
    """Hold a corpus or a mixture, and a hash of training and validation, equal on every machine."""

    train: Any
    validation: Any
    corpus_hash: str
    test: Any = None


def load_corpora(data: DataConfig, progress: bool = True) -> Corpora:
    """Open a corpus, tokenised by one process if it is not there; of ``data.sources`` their mixture.

    Raises ConfigError.
    """
    if data.sources:
        return _load_mixture(data, progress)
    source = open_source(data)
    tokenizer = load_tokenizer(data) if source.vocab_size is None else None
    # Everything that decides the tokens. A change of any makes another folder.
    identity = {
        "format": FORMAT,
        "source": [data.source, *source.fingerprint],
        "tokenizer": (tokenizer or TokenIds).fingerprint,
        "validation_fraction": float(data.validation_fraction),
        "corpus_seed": SEED,
    }
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    folder = Path(data.cache_dir).resolve() / f"{data.source}-{key}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                if not folder.exists():  # another process may have made it while this one waited
                    ids = tokenizer or TokenIds(source.vocab_size or 0)
                    with space_for(folder):
                        _tokenize(folder, data, source, ids, identity, progress)
        except DiskFull:
            raise
        except OSError as error:
            failed = f"cannot write '{data.cache_dir}' or read ({error})"
            raise ConfigError(f"data.cache_dir, data.path: {failed}") from None
    try:
        splits = json.loads((folder / META).read_text())["splits"]
        train, validation = Corpus(folder, "train"), Corpus(folder, "validation")
        test = Corpus(folder, "test") if "test" in splits else None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"data.cache_dir: the corpus {folder} is damaged ({error}); delete the folder") from None
    return Corpora(train, validation, train.corpus_hash, test)


def _load_mixture(data: DataConfig, progress: bool) -> Corpora:
    parts = parts_of(data)
    corpora = []
    for number, part in enumerate(parts):
        try:
            corpora.append(load_corpora(part.data, progress))
        except ConfigError as error:
            raise ConfigError(f"data.sources[{number}]: {error}") from None
    mixed = {}
    # A split of the mixture holds the sources that have this split: some have no test documents.
    for split in SPLITS:
        chosen = [(getattr(one, split), part) for one, part in zip(corpora, parts) if getattr(one, split)]
        if chosen:
            names, weights = [part.name for _, part in chosen], [part.weight for _, part in chosen]
            mixed[split] = Mixture([corpus for corpus, _ in chosen], names, weights)
    return Corpora(mixed["train"], mixed["validation"], mixed["train"].corpus_hash, mixed.get("test"))


def evaluation_documents(corpus: Any, data: DataConfig) -> np.ndarray:
    """Return the numbers of the documents to evaluate on, sorted; all of a test split."""
    limit = None if corpus.split == "test" else data.validation_documents
    if limit is None or limit >= corpus.num_documents:
        return np.arange(corpus.num_documents)
    # Not the run's seed: all runs of a corpus are evaluated on the same documents.
    return np.sort(np.random.default_rng(SEED).permutation(corpus.num_documents)[:limit])


def _tokenize(
    folder: Path, data: DataConfig, source: Source, tokenizer: Tokenizer, identity: dict[str, Any], progress: bool
) -> None:
    """Write a corpus under a temporary name, then rename it: it is whole or absent."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # what a killed process left behind
    work.mkdir()
    hidden = None if progress else True  # None: where there is no terminal
    bar = functools.partial(tqdm, unit=" documents", disable=hidden)
    try:
        train, validation, test = (_SplitWriter(work / split, tokenizer) for split in SPLITS)
        documents = bar(source.read(), f"Tokenising {data.source}")
        for chunk in _encoded(documents, tokenizer, data):
            train.add([pair for pair in chunk if not pair[0].held_out])
            validation.add([pair for pair in chunk if pair[0].held_out])
        if source.read_test is not None:
            documents = bar(source.read_test(), f"Tokenising {data.source}, test")
            for chunk in _encoded(documents, tokenizer, data):
                test.add(chunk)
        _check_counts(data, train, validation, test)
        ids = {"vocab_size": tokenizer.vocab_size, "begin_id": tokenizer.begin_id, "end_id": tokenizer.end_id}
        splits = {"train": train.meta(), "validation": validation.meta()}
        if test.counts["documents"]:
            # Its own hash: a test split that is added or
            # changed leaves the identity of runs as it is.
            splits["test"] = test.meta() | {"hash": _hash([*ids.values()], test)}
        corpus_hash = _hash([*ids.values()], train, validation)
        meta = {"identity": identity, "corpus_hash": corpus_hash, **ids, "splits": splits}
        (work / META).write_text(json.dumps(meta, indent=1))
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_counts(data: DataConfig, *writers: "_SplitWriter") -> None:
    train, validation, test = (writer.counts["documents"] for writer in writers)
    got = f"{train} and {validation} in '{data.path}'" + f" and {test} for test" * bool(test)
    remedy = "add others with text, or lower the fractions held out"
    need(train and validation, "data.path", "documents in training and validation", f"{got}; {remedy}")
    key = "test_path" if data.test_path else "test_fraction"
    has_test = test or not (data.test_path or data.test_fraction)
    need(has_test, f"data.{key}", "test documents", f"none in '{data.test_path or data.path}'; add others with text")


def _hash(header: list[Any], *writers: "_SplitWriter") -> str:
    # Groups decide no batch of a training, only how evaluations are summed.
    hashes = [hash.hexdigest() for writer in writers for name, hash in writer.hashes.items() if name != "groups"]
    return hashlib.blake2b(json.dumps([*header, *hashes]).encode(), digest_size=16).hexdigest()


class Encoded(NamedTuple):
    """Hold a document's tokens, without begin and end, and which of them are trained on (None: all)."""

    ids: np.ndarray
    answered: np.ndarray | None = None


class _SplitWriter:
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

    def add(self, documents: list[tuple[Document, Encoded]]) -> None:
        """Write documents, between begin and end tokens; all have targets, answers and groups, or none has."""
        if not documents:
            return
        parts = [np.concatenate([self.begin, encoded.ids, self.end]) for _, encoded in documents]
        lengths = np.array(list(map(len, parts)), "<i4")
        self.counts.update(documents=len(documents), tokens=int(lengths.sum()))
        # One file a column. The first document tells which columns the split has.
        columns = {"tokens": np.concatenate(parts), "lengths": lengths}
        targets = [self._targets(document, encoded, tokens) for (document, encoded), tokens in zip(documents, parts)]
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
        ends_with_answer = encoded.answered[-1:].repeat(len(self.end))
        answered = np.concatenate([np.zeros(len(self.begin), bool), encoded.answered, ends_with_answer])
        # A token predicts its successor where that is part
        # of an answer; the last one predicts nothing.
        return np.append(np.where(answered[1:], tokens[1:].astype("<i4"), -1), -1)


def _encoded(
    documents: Iterable[Document], tokenizer: Tokenizer, data: DataConfig
) -> Iterator[list[tuple[Document, Encoded]]]:
    """Yield chunks of documents with their tokens; documents without any are left out."""
    # The package tokenizers encodes without Python's lock.
    threads = (data.num_proc or min(os.cpu_count() or 1, 16)) if isinstance(tokenizer, FileTokenizer) else 1
    chunks = _chunks(documents)
    with ThreadPoolExecutor(threads) as pool:
        # Two tasks a thread and round: bounds what waits
        # in memory, and few threads idle at its end.
        while some := [*itertools.islice(chunks, 2 * threads)]:
            for chunk, encoded in zip(some, pool.map(functools.partial(_encode, tokenizer), some)):
                yield [pair for pair in zip(chunk, encoded) if len(pair[1].ids)]


def _encode(tokenizer: Tokenizer, documents: list[Document]) -> list[Encoded]:
    """Encode documents: an answer and what lies between answers apart, as when a model continues a prompt."""
    # All parts of all documents go through the tokenizer in one call.
    cut = [_cut_at_answers(document) for document in documents]
    ids = iter(tokenizer.encode_batch([text for parts in cut for text, _ in parts]))
    encoded = []
    for document, parts in zip(documents, cut):
        ids_of_parts = [next(ids) for _ in parts]
        if document.answers is None:
            encoded.append(Encoded(ids_of_parts[0]))
            continue
        is_answer = [part_is_answer for _, part_is_answer in parts]
        answered = np.repeat(is_answer, [len(ids_of_part) for ids_of_part in ids_of_parts])
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
