"""A source that makes its documents as it is read: any amount of text, none of it on the disk. A plugin.

Documents are slices of one text, the code of the running Python's standard library, of four times the lengths of
``data.distribution``, in characters. They are ASCII, so a character is a byte.
"""

from __future__ import annotations

import functools
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from packmamba.config import DataConfig
from packmamba.data.lengths import draw_lengths
from packmamba.data.sources import SOURCES, Part, Source, in_parts, list_files, split_by_content

DOCUMENTS = 12_000
"""Of a part: 31 MB of those of documents-2k."""
CHARACTERS_A_TOKEN = 4
TEXT = 16_000_000
"""Characters that slices are taken of."""


def open_generated(data: DataConfig) -> Source:
    """``data.num_documents`` documents, of ``data.corpus_seed``. Held out by content."""

    def parts() -> list[Part]:
        contents = [partial(texts, *one, data.distribution, data.corpus_seed) for one in pieces(data.num_documents)]
        return split_by_content(contents, data)

    identity = [platform.python_version(), data.distribution, data.num_documents, DOCUMENTS, TEXT]
    return in_parts(identity, data.num_documents, " documents", parts)


def pieces(num_documents: int) -> Iterator[tuple[int, int]]:
    """Number and documents of each part."""
    for number, first in enumerate(range(0, num_documents, DOCUMENTS)):
        yield number, min(DOCUMENTS, num_documents - first)


def lengths_of(number: int, count: int, distribution: str, seed: int) -> np.ndarray:
    """(count,) characters of each document of a part."""
    return CHARACTERS_A_TOKEN * draw_lengths(distribution, count, seed * 1_000_003 + number)


def texts(
    number: int,
    count: int,
    distribution: str,
    seed: int,
    advance: Callable[[int], object],
    skipped: Counter[str],
) -> Iterator[str]:
    """The documents of a part."""
    whole = library()
    lengths = lengths_of(number, count, distribution, seed)
    starts = np.random.Generator(np.random.PCG64([seed, number])).integers(len(whole) - lengths.max(), size=count)
    for start, length in zip(starts.tolist(), lengths.tolist()):
        yield whole[start : start + length]
        advance(1)


@functools.cache
def library() -> str:
    """The standard library's code, its first characters that are ASCII."""
    root = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for name in list_files(root, lambda name: name.endswith(".py"), ("site-packages", "dist-packages", "__pycache__")):
        if len(found) < TEXT and (root / name).is_file():
            found += (root / name).read_bytes()
    return bytes(found).decode("ascii", "ignore")[:TEXT]


SOURCES["generated"] = open_generated
