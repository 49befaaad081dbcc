"""Source of Megatron's indexed data sets: token ids in ``<prefix>.bin``, places of documents in ``<prefix>.idx``.

``.idx``, little-endian: ``MMIDIDX\\0\\0``, version 1 (uint64), a code of the ids' dtype (uint8), numbers of sequences and of
document indices (uint64 each); of each sequence its length (int32) and its place in the ``.bin`` in bytes (int64); the first
sequence of each document and the number of sequences (int64). Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Advance, Source, file_sizes, split_by_content

HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(data: DataConfig) -> Source:
    """Open the documents of ``data.path``.bin and ``data.path``.idx, ids as they are; the vocabulary ends at the largest id."""
    if not data.path:
        raise ConfigError("data.path: data.source=megatron expected the name of .bin and .idx without suffix, got null")
    binary, index = Path(f"{data.path}.bin"), Path(f"{data.path}.idx")
    fingerprint, (size, _) = file_sizes(binary.parent, [binary.name, index.name])
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
    magic, version, code, sequences, documents = HEADER.unpack(head) if len(head) == HEADER.size else (b"",) * 5
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in DTYPES:
        raise ConfigError(f"data.path: expected a Megatron index of version 1 with integer ids, got {index}")
    dtype = np.dtype(DTYPES[code])
    if index.stat().st_size < HEADER.size + 12 * sequences + 8 * documents:
        raise ConfigError(f"data.path: expected {index} whole, got {index.stat().st_size} bytes; copy it again")
    lengths, places, starts = (
        np.memmap(index, kind, "r", offset, (count,)) if count else np.empty(0, kind)
        for kind, offset, count in (
            ("<i4", HEADER.size, sequences),
            ("<i8", HEADER.size + 4 * sequences, sequences),
            ("<i8", HEADER.size + 12 * sequences, documents),
        )
    )
    if size != max(places + lengths.astype(np.int64) * dtype.itemsize, default=0):
        raise ConfigError(f"data.path: {binary} has {size} bytes, expected what {index} describes")

    def contents(advance: Advance) -> Iterator[np.ndarray]:
        with open(binary, "rb") as file:
            for first, last in zip(starts[:-1], starts[1:]):
                pieces = [np.empty(0, dtype)]
                for sequence in range(first, last):
                    file.seek(places[sequence])
                    pieces.append(np.fromfile(file, dtype, lengths[sequence]))
                ids = np.concatenate(pieces)
                yield ids
                advance(ids.nbytes)

    def vocabulary() -> int:
        largest = 0
        with open(binary, "rb") as file:
            while len(ids := np.fromfile(file, dtype, 1 << 20)):
                if ids.min() < 0:
                    raise ConfigError(f"data.path: expected ids of at least 0, got {ids.min()} in {binary}")
                largest = max(largest, int(ids.max()))
        return largest + 1

    read = split_by_content(contents, data.validation_fraction)
    return Source([str(Path(data.path).resolve()), fingerprint], size, "B", read, vocab_size=vocabulary)
