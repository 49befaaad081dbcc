"""Megatron's indexed data sets: token ids in ``<prefix>.bin``, and where documents lie in ``<prefix>.idx``.

``.idx``, little-endian: the magic ``MMIDIDX\\0\\0``, version 1 (uint64), a code of the ids' dtype (uint8), the numbers of
sequences and of document indices (uint64 each), every sequence's length (int32) and place in the ``.bin`` in bytes (int64), the
sequence that each document begins with, and their number (int64); files for several modalities end with a mode for each sequence
(int8). Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import (
    PART_BYTES,
    Advance,
    Contents,
    Part,
    Source,
    file_sizes,
    in_parts,
    split_by_content,
)

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""By code; 6 and 7 are floats."""
BLOCK = 1 << 20
"""Ids or sequences at a time."""


class _Index(NamedTuple):
    bin: Path
    dtype: np.dtype
    lengths: np.ndarray
    """(sequences,) int32."""
    places: np.ndarray
    """(sequences,) int64, bytes."""
    documents: np.ndarray
    """(documents + 1,) int64: document i is the sequences [documents[i], documents[i + 1])."""


def open_megatron(data: DataConfig) -> Source:
    """Documents of ``data.path``.bin and ``data.path``.idx, ids as they are. The vocabulary is up to the largest id.

    Held out by a hash of the document's ids (`split_by_content`). ``data.tokenizer``, ``data.begin_token`` and
    ``data.end_token`` do not apply.
    """
    if not data.path:
        raise ConfigError("data.source=megatron needs data.path")
    prefix = Path(data.path)
    for suffix in (".bin", ".idx"):
        if not (path := prefix.with_name(prefix.name + suffix)).exists():
            hint = "; leave the suffix out" if prefix.suffix in (".bin", ".idx") and prefix.exists() else ""
            raise ConfigError(
                f"data.path '{data.path}' names the files {path.stem}.bin and .idx: {path} does not exist{hint}"
            )
    names = [prefix.name + ".bin", prefix.name + ".idx"]
    fingerprint, sizes = file_sizes(prefix.parent, names)
    _read_index(prefix)

    def parts() -> list[Part]:
        contents: list[Contents] = []
        for start, end in _ranges(_read_index(prefix), PART_BYTES):
            contents.append(partial(_read, prefix, start, end))
        return split_by_content(contents, data)

    identity = [str(prefix.resolve()), fingerprint]
    return in_parts(identity, sizes[0], "B", parts, vocab_size=partial(_vocabulary, prefix))


def _read_index(prefix: Path) -> _Index:
    """Maps the index. Raises ConfigError if it is none, or if it is not the ``.bin``'s."""
    idx, binary = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ConfigError(f"{idx} of data.path is no index of Megatron's: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1:
        raise ConfigError(f"{idx} of data.path has version {version}; version 1 can be read")
    if code not in DTYPES:
        raise ConfigError(
            f"{idx} of data.path has ids of dtype code {code}; expected integers, of code {', '.join(map(str, DTYPES))}"
        )
    sizes = [HEADER.size + 12 * sequences + 8 * documents + modes for modes in (0, sequences)]
    if (found := idx.stat().st_size) not in sizes:
        raise ConfigError(
            f"{idx} of data.path has {found} bytes, but {sequences} sequences and {documents} document indices need {sizes[0]}"
        )
    lengths, places, starts = (
        np.memmap(idx, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
        for dtype, offset, count in (
            ("<i4", HEADER.size, sequences),
            ("<i8", HEADER.size + 4 * sequences, sequences),
            ("<i8", HEADER.size + 12 * sequences, documents),
        )
    )
    index = _Index(binary, np.dtype(DTYPES[code]), lengths, places, starts)
    need, found = _need(index), binary.stat().st_size
    if need != found:
        wanted = "an impossible number of" if need is None else need
        raise ConfigError(
            f"{binary} of data.path does not match {idx.name}: the index describes {wanted} bytes, and it has {found}"
        )
    if documents == 0 or starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any():
        raise ConfigError(f"{idx} of data.path is damaged: its documents are not its {sequences} sequences in order")
    return index


def _need(index: _Index) -> int | None:
    """Bytes of the ``.bin`` that the index describes; None if a length or place is impossible."""
    need = 0
    for start in range(0, len(index.lengths), BLOCK):
        lengths, places = (array[start : start + BLOCK].astype("<i8") for array in (index.lengths, index.places))
        if lengths.min() < 0 or places.min() < 0:
            return None
        need = max(need, int((places + lengths * index.dtype.itemsize).max()))
    return need


def _ranges(index: _Index, size: int) -> Iterator[tuple[int, int]]:
    """Documents of each part, about as many bytes each."""
    count = len(index.documents) - 1
    step = max(1, count * size // max(1, index.bin.stat().st_size))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _read(prefix: Path, start: int, end: int, advance: Advance, skipped: Counter[str]) -> Iterator[np.ndarray]:
    index = _read_index(prefix)
    with open(index.bin, "rb") as file:
        for document in range(start, end):
            pieces = []
            for sequence in range(*index.documents[document : document + 2]):
                file.seek(index.places[sequence])
                pieces.append(np.fromfile(file, index.dtype, index.lengths[sequence]))
            ids = np.concatenate(pieces) if pieces else np.empty(0, index.dtype)
            yield ids
            advance(ids.nbytes)


def _vocabulary(prefix: Path) -> int:
    """One more than the largest id; reads all of them."""
    index = _read_index(prefix)
    largest, place = 0, 0
    with open(index.bin, "rb") as file:
        while len(ids := np.fromfile(file, index.dtype, BLOCK)):
            wrong = (ids < 0) | (ids.astype("<i8") >= 2**32)
            if wrong.any():
                at = int(wrong.argmax())
                raise ConfigError(
                    f"{index.bin} of data.path holds {ids[at]} as id {place + at}; expected 0 to 2**32 - 1"
                )
            largest = max(largest, int(ids.max()))
            place += len(ids)
    return largest + 1
