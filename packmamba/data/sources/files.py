"""Sources of files that need no package: text files, JSON lines, Megatron's indexed data sets."""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import (
    Advance,
    Document,
    Source,
    file_sizes,
    find_files,
    held_out_files,
    split_by_content,
)

MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_text(data: DataConfig) -> Source:
    """Open every visible file below the folder ``data.path``, or that the pattern ``data.path`` matches: a document each.

    Held out by file name. A file that is not UTF-8 is an error.
    """
    root, files = find_files(data, ("",))
    if Path(str(data.path)).is_file():
        raise ConfigError(f"data.path: data.source=text expected a folder, got the file '{data.path}'")
    fingerprint, sizes = file_sizes(root, files)
    held_out = held_out_files([name for name, size in zip(files, sizes) if size], data)

    def read(advance: Advance) -> Iterator[Document]:
        for name in files:
            content = (root / name).read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(f"data.path: expected UTF-8, got {root / name} ({error}); move it") from None
            yield Document(name in held_out, text)
            advance(len(content))

    return Source([str(root.resolve()), fingerprint], sum(sizes), "B", read)


def open_jsonl(data: DataConfig) -> Source:
    """Open the field ``data.text_key`` of each line of the files ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst`` of ``data.path``.

    Blank lines are no documents. A broken line or file is an error that names the file and the line.
    """
    root, files = find_files(data, (".jsonl", ".jsonl.gz", ".jsonl.zst"))
    plain = [name.removesuffix(".gz").removesuffix(".zst") for name in files]
    if twice := [name for name in plain if plain.count(name) > 1]:
        raise ConfigError(f"data.path: expected {root / twice[0]} plain or compressed, got both; remove one")
    fingerprint, sizes = file_sizes(root, files)

    def contents(advance: Advance) -> Iterator[str]:
        for name in files:
            yield from _lines(root / name, data.text_key, advance)

    read = split_by_content(contents, data.validation_fraction)
    return Source([str(root.resolve()), data.text_key, "error", fingerprint], sum(sizes), "B", read)


def _lines(path: Path, key: str, advance: Advance) -> Iterator[str]:
    number = position = 0
    with open(path, "rb") as file:
        lines = _unpacked(path, file)
        try:
            for line in lines:
                number += 1
                if line := line.removeprefix(b"\xef\xbb\xbf").strip():
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get(key), str):
                        raise ValueError(
                            f"expected text in the field '{key}' (data.text_key), got {line.decode()[:60]}"
                        )
                    record[key].encode()  # half a surrogate pair is no text
                    yield record[key]
                advance(file.tell() - position)
                position = file.tell()
        except Exception as error:  # of json, gzip, zlib and zstandard
            raise ConfigError(f"data.path: {path}:{number}: {error}") from None
        advance(file.seek(0, 2) - position)


def _unpacked(path: Path, file: BinaryIO) -> Iterable[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix != ".zst":
        return file
    try:
        import zstandard
    except ImportError:
        raise ConfigError("data.path: .zst files need pip install zstandard") from None
    unpacked: Any = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # of zstd --long=31
    return io.BufferedReader(unpacked.stream_reader(file, read_across_frames=True, closefd=False))


def open_megatron(data: DataConfig) -> Source:
    """Open the documents of ``data.path``.bin and ``data.path``.idx, ids as they are; the vocabulary ends at the largest id.

    ``.idx``, little-endian: ``MMIDIDX\\0\\0``, version 1, a code of the ids' dtype, numbers of sequences and of document indices;
    of each sequence its length (int32) and its place in the ``.bin`` in bytes (int64); the first sequence of each document and
    the number of sequences (int64). Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``.
    """
    if not data.path:
        raise ConfigError("data.path: data.source=megatron expected the name of .bin and .idx without suffix, got null")
    binary, index = Path(f"{data.path}.bin"), Path(f"{data.path}.idx")
    fingerprint, (size, _) = file_sizes(binary.parent, [binary.name, index.name])
    try:
        with open(index, "rb") as file:
            magic, version, code, sequences, documents = MEGATRON_HEADER.unpack(file.read(MEGATRON_HEADER.size))
            dtype = np.dtype(MEGATRON_DTYPES[code])
            lengths = np.frombuffer(file.read(4 * sequences), "<i4")
            places = np.frombuffer(file.read(8 * sequences), "<i8")
            starts = np.frombuffer(file.read(8 * documents), "<i8")
        ends = places + lengths.astype(np.int64) * dtype.itemsize
        if (magic, version, len(starts), max(ends, default=0)) != (b"MMIDIDX\0\0", 1, documents, size):
            raise ValueError(f"other contents than {binary} of {size} bytes")
    except (struct.error, KeyError, ValueError) as error:
        raise ConfigError(f"data.path: expected a whole Megatron index of version 1, got {index} ({error})") from None

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
