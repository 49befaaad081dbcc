"""Which documents train, which are held out for validation and which for test.

Documents are split by a hash of their content, files of the sources text and stdlib by a hash of
their name: the lowest hashes are validation, the highest are test, the rest are trained on. So the
order of documents decides nothing, and a test split leaves the validation split as it was. A
single document is cut instead.
"""

import functools
import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.sources.source import Document, Source, share_of
from packmamba.data.tokenizer import TokenIds

Read = Callable[[], Iterator[Document]]
Texts = Callable[[str], Iterable[str]]  # of a file, by its name
ABOVE_ALL_SHARES = 2.0
MIN_PART = 2  # characters or ids: the least that has a next token to predict
MAX_HELD_OUT_PART = 1 << 16  # characters or ids: a document is validated in one forward pass


def refuse_splits(data: DataConfig) -> None:
    """Raise ConfigError for keys of a split where the documents name their splits."""
    for name in ("validation_fraction", "test_fraction", "test_path"):
        if getattr(data, name) != getattr(DataConfig, name):
            raise ConfigError(f"data.{name}: expected none, since {data.path} decides the splits")


def split_by_name(
    fingerprint: list[Any], files: Iterable[str], filled: list[str], texts: Texts, data: DataConfig
) -> Source:
    """Open files, each with its ``texts``.

    The lowest hashes of their names are validation, the highest test.

    Only ``filled`` ones, which have a text, are counted and held out. A single one is neither: its
    document is cut instead.
    """
    ranked = sorted(filled, key=lambda name: share_of(os.fsencode(name)))
    validation, test = held_out_counts(len(ranked), data) if len(ranked) > 1 else (0, 0)
    held_out = frozenset(ranked[:validation])
    tested = frozenset(ranked[len(ranked) - test :])

    def documents(names: Iterable[str]) -> Iterator[Document]:
        for name in names:
            yield from (Document(name in held_out, text) for text in texts(name))

    read = lambda: documents(name for name in files if name not in tested)
    read_test = lambda: documents(sorted(tested))
    return Source(fingerprint, read, read_test=read_test if data.test_fraction else None)


def held_out_counts(available: int, data: DataConfig) -> tuple[int, int]:
    """Return how many documents are validation and test. Raises ConfigError if they are all."""
    validation = max(1, round(data.validation_fraction * available))
    test = max(1, round(data.test_fraction * available)) if data.test_fraction else 0
    held_out = f"{validation} for validation" + f" and {test} for test" * bool(test)
    expected = f"at least one of {available} documents left to train on"
    remedy = "add documents, or lower the fractions held out"
    need(validation + test < available, "data.validation_fraction", expected, f"{held_out}; {remedy}")
    return validation, test


def split_by_content(documents: Callable[[], Iterable[Document]], fraction: float) -> Read:
    """Hold documents out by a hash of their content, at least one.

    Equal documents are therefore in one split.
    """

    def read() -> Iterator[Document]:
        smallest = 1.0
        for document in documents():  # usually about 1 / fraction of them
            if len(document.content):
                smallest = min(smallest, _share(document.content))
            if smallest < fraction:
                break
        limit = max(fraction, float(np.nextafter(smallest, 2)))
        for document in documents():
            yield document._replace(held_out=_share(document.content) < limit)

    return read


def with_test_from_path(source: Source, others: Source) -> Source:
    """Take every document of ``others`` as a test document."""
    size = lambda: max(TokenIds(one.vocab_size or 0).vocab_size for one in (source, others))
    fingerprint = [*source.fingerprint, "test_path", *others.fingerprint]
    read = _without_equals(source.read, others.read, "test", "trained or validated on")
    both = replace(source, fingerprint=fingerprint, read=read, read_test=others.read)
    return both if source.vocab_size is None else replace(both, vocab_size=size)


def with_test_from_fraction(source: Source, data: DataConfig) -> Source:
    """Take ``data.test_fraction`` of the documents as test documents, at least one."""
    if source.read_test is None:
        read, read_test = _test_by_content(source, data.test_fraction)
    else:  # names decided, so equal files may be in two splits
        validation = lambda: (document for document in source.read() if document.held_out)
        read_test = _without_equals(source.read_test, validation, "validation", "tested on")
        read = _without_equals(source.read, read_test, "test", "trained on")
    fingerprint = [*source.fingerprint, "test_fraction", float(data.test_fraction)]
    return replace(source, fingerprint=fingerprint, read=read, read_test=read_test)


def _without_equals(read: Read, others: Read, split: str, use: str) -> Read:
    """Leave out what equals a document of ``others``, which are of ``split``; warn how many."""

    @functools.cache
    def digests() -> set[bytes]:
        return {_digest(document.content) for document in others() if len(document.content)}

    def read_rest() -> Iterator[Document]:
        left_out = 0
        for document in read():
            if _digest(document.content) in digests():
                left_out += 1
            else:
                yield document
        if left_out:
            warnings.warn(f"Documents that equal a {split} document are not {use}: {left_out}.", stacklevel=1)

    return read_rest


def _test_by_content(source: Source, fraction: float) -> tuple[Read, Read]:
    """Move the documents with the highest hashes to the test split: return both readers."""

    @functools.cache
    def first_test_share() -> float:
        shares = (_share(one.content) for one in source.read() if len(one.content))
        largest, count = 0.0, 0
        for count, share in enumerate(shares, start=1):  # usually about 1 / fraction of them
            largest = max(largest, share)
            if largest >= 1 - fraction and count > 1:
                break
        return min(1 - fraction, largest) if count > 1 else ABOVE_ALL_SHARES

    def documents(test: bool) -> Iterator[Document]:
        for document in source.read():
            if (_share(document.content) >= first_test_share()) == test:
                yield document

    return functools.partial(documents, test=False), functools.partial(documents, test=True)


def cut_single_document(source: Source, data: DataConfig) -> Source:
    """Cut a source's only document: its end is held out, in the order train, validation, test.

    The parts have the configured fractions of its characters, or of its ids. A held-out part
    longer than ``MAX_HELD_OUT_PART`` becomes several documents of at most that length.
    """

    def held_out(document: Document, content: Any) -> list[Document]:
        parts = [content[i : i + MAX_HELD_OUT_PART] for i in range(0, len(content), MAX_HELD_OUT_PART)]
        return [document._replace(held_out=True, content=part) for part in parts]

    @functools.cache
    def readers() -> tuple[Read, Any]:
        """Return readers of training and validation, and of test: the source's unless single."""
        filled = (document for document in source.read() if len(document.content))
        first_two = list(itertools.islice(filled, 2))
        if len(first_two) != 1 or first_two[0].targets is not None or first_two[0].answers is not None:
            return source.read, source.read_test
        document, content = first_two[0], first_two[0].content
        first_test = len(content) - _part_length(content, data.test_fraction)
        trained = first_test - _part_length(content, data.validation_fraction)
        least = least_length(data)
        alone = f"in '{data.path}': one alone needs {least} characters or ids and has {len(content)}"
        got = f"{alone}; add documents, or lower the fractions held out"
        need(len(content) >= least, "data.path", "documents in training and validation", f"0 and 1 {got}")
        expected = f"at least {MIN_PART} left to train on"
        need(trained >= MIN_PART, "data.validation_fraction", expected, f"{trained} {got}")
        train = document._replace(held_out=False, content=content[:trained])
        parts = [train, *held_out(document, content[trained:first_test])]
        test = held_out(document, content[first_test:])
        return lambda: iter(parts), (lambda: iter(test)) if data.test_fraction else source.read_test

    read_test = source.read_test and (lambda: readers()[1]())
    return replace(source, read=lambda: readers()[0](), read_test=read_test)


def _part_length(content: Any, fraction: float) -> int:
    return max(MIN_PART, round(fraction * len(content))) if fraction else 0


def least_length(data: DataConfig) -> int:
    """Return the least length of a single document that can be cut into its splits."""
    return MIN_PART * (3 if data.test_fraction else 2)


def _share(content: Any) -> float:
    return share_of(_bytes_of(content))


def _digest(content: Any) -> bytes:
    return hashlib.blake2b(_bytes_of(content), digest_size=16).digest()


def _bytes_of(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else np.asarray(content, "<i8").tobytes()
