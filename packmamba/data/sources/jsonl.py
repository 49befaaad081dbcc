"""Source of JSON lines: each line is a document; files are plain, or compressed by gzip or zstd."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Advance, Source, file_sizes, find_files, split_by_content


def open_jsonl(data: DataConfig) -> Source:
    """Open the field ``data.text_key`` of each line of the files ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst`` of ``data.path``.

    Blank lines are no documents. A broken line or file is an error that names the file and the line.
    """
    root, files = find_files(data, (".jsonl", ".jsonl.gz", ".jsonl.zst"))
    fingerprint, sizes = file_sizes(root, files)
    for name in files:
        if name.endswith((".gz", ".zst")) and (plain := name.rpartition(".")[0]) in files:
            raise ConfigError(f"data.path: {root / plain} is there twice, also as {name}; remove one of them")

    def contents(advance: Advance) -> Iterator[str]:
        for name in files:
            yield from _texts(root / name, data.text_key, advance)

    read = split_by_content(contents, data.validation_fraction)
    return Source([str(root.resolve()), data.text_key, "error", fingerprint], sum(sizes), "B", read)


def _texts(path: Path, key: str, advance: Advance) -> Iterator[str]:
    number = position = 0
    with open(path, "rb") as file:
        try:
            for number, line in enumerate(_lines(path, file), 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.isspace():
                    yield _text(line, key)
                advance(file.tell() - position)
                position = file.tell()
        except (ValueError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"data.path: {path}:{number}: {error}") from None
        advance(file.seek(0, 2) - position)


def _text(line: bytes, key: str) -> str:
    """Return the text of a JSON line. Raises ValueError or RecursionError."""
    record = json.loads(line.decode())
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        got = f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"expected an object with text in its field '{key}' (data.text_key), got {got}")
    record[key].encode()  # half a surrogate pair is no text
    return record[key]


def _lines(path: Path, file: BinaryIO) -> Iterable[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return _zstd_lines(file) if path.suffix == ".zst" else file


def _zstd_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of zstd frames. Raises ValueError for a damaged file, EOFError for one that is cut short."""
    try:
        import zstandard
    except ImportError:
        raise ConfigError("data.path: .zst files need the package zstandard; pip install zstandard") from None
    frame, rest = None, bytearray()
    while block := file.read(1 << 14):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                rest += frame.decompress(block)
            except zstandard.ZstdError as error:
                raise ValueError(error) from None
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        *lines, last = rest.split(b"\n")
        yield from (bytes(line) + b"\n" for line in lines)
        rest = last
    if frame is not None:
        raise EOFError("the last zstd frame is cut short")
    if rest:
        yield bytes(rest)
