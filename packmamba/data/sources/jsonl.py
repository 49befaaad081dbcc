"""Files of JSON lines, each line a document; plain, or compressed by gzip or zstd."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import (
    PART_BYTES,
    Advance,
    Contents,
    Part,
    Source,
    extra,
    file_sizes,
    find_files,
    in_parts,
    split_by_content,
)

BLOCK = 1 << 14
"""Compressed bytes at a time: what they unpack to is in memory."""


def open_jsonl(data: DataConfig) -> Source:
    """``data.text_key`` of every line of the file ``data.path``, of every ``*.jsonl``, ``*.jsonl.gz`` and ``*.jsonl.zst``
    file below the folder ``data.path``, or of the files that the pattern ``data.path`` finds. A name that ends in ``.gz`` or
    ``.zst`` is compressed. Lines of white space are no documents. A broken line is an error that names file and line, unless
    ``data.bad_lines`` is skip: then it is counted (``bad_lines``).

    Held out by a hash of the document's text (`split_by_content`).
    """
    root, files = find_files(
        data, lambda name: name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")), "has no .jsonl file in it"
    )
    fingerprint, sizes = file_sizes(root, files)
    for name in files:
        if (plain := _plain(name)) != name and plain in files:
            raise ConfigError(f"{root / plain} in data.path is there compressed too, as {name}; remove one of them")
    if any(name.endswith(".zst") for name in files):
        _zstandard()

    def parts() -> list[Part]:
        contents: list[Contents] = []
        for name, size in zip(files, sizes):
            if _plain(name) != name:
                contents.append(partial(_compressed, root / name, data.text_key, data.bad_lines))
                continue
            for start in range(0, size, PART_BYTES):
                end = min(start + PART_BYTES, size)
                contents.append(partial(_range, root / name, start, end, data.text_key, data.bad_lines))
        return split_by_content(contents, data)

    return in_parts([str(root.resolve()), data.text_key, data.bad_lines, fingerprint], sum(sizes), "B", parts)


def _plain(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst")


def _range(
    path: Path, start: int, end: int, key: str, bad_lines: str, advance: Advance, skipped: Counter[str]
) -> Iterator[str]:
    """Of the lines that begin in [start, end)."""
    with open(path, "rb") as file:
        place = start
        if start:  # what is left of a line that began before
            file.seek(start - 1)
            place -= 1
            while place < end:
                piece = file.readline(1 << 20)  # a line may be longer than memory allows
                place += len(piece)
                if not piece or piece.endswith(b"\n"):
                    break
        number = 0
        while place < end and (line := file.readline()):
            number += 1
            place += len(line)
            try:
                text = _text(line, key, place == len(line))
            except _BadLine as error:
                if bad_lines == "error":
                    raise _refused(path, _lines_before(path, start) + number, error) from None
                skipped["bad_lines"] += 1
            else:
                if text is not None:
                    yield text
            advance(len(line))


def _lines_before(path: Path, place: int) -> int:
    """Lines that begin before this byte."""
    count, at = 0, 0
    with open(path, "rb") as file:
        while at < place and (block := file.read(min(1 << 20, place - at))):
            count += block.count(b"\n")
            at += len(block)
            last = block[-1:]
    return count + (at > 0 and last != b"\n")


def _compressed(path: Path, key: str, bad_lines: str, advance: Advance, skipped: Counter[str]) -> Iterator[str]:
    told = 0
    with open(path, "rb") as file:
        for number, line in enumerate(_lines(path, file), 1):
            try:
                text = _text(line, key, number == 1)
            except _BadLine as error:
                if bad_lines == "error":
                    raise _refused(path, number, error) from None
                skipped["bad_lines"] += 1
            else:
                if text is not None:
                    yield text
            if (place := file.tell()) > told:
                advance(place - told)
                told = place
        advance(file.seek(0, 2) - told)


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Of a compressed file. Raises ConfigError if it is damaged or cut short."""
    rest = bytearray()
    kind = "gzip" if path.suffix == ".gz" else "zstd"
    for block in _unpacked(path, file, kind):
        rest += block
        if b"\n" in block:
            *lines, last = bytes(rest).split(b"\n")
            yield from (line + b"\n" for line in lines)
            rest = bytearray(last)
    if rest:
        yield bytes(rest)


def _unpacked(path: Path, file: BinaryIO, kind: str) -> Iterator[bytes]:
    """Frames follow each other in both formats; a file that ends within one is cut short."""
    unpacker: Any = None
    errors = (zlib.error,) if kind == "gzip" else (_zstandard().ZstdError,)
    while block := file.read(BLOCK):
        while block:
            if unpacker is None:
                unpacker = _unpacker(kind)
            try:
                yield unpacker.decompress(block)
            except errors as error:
                raise ConfigError(f"{path} in data.path is damaged: it is not {kind} ({error})") from None
            block = unpacker.unused_data if unpacker.eof else b""
            if unpacker.eof:
                unpacker = None
                block = block.lstrip(b"\0") if kind == "gzip" else block  # what gzip allows after a frame
    if unpacker is not None:
        raise ConfigError(f"{path} in data.path is cut short: its {kind} data end too early")


def _unpacker(kind: str) -> Any:
    if kind == "gzip":
        return zlib.decompressobj(wbits=31)
    return _zstandard().ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise extra("zstandard", "jsonl with .zst files") from None
    return zstandard


class _BadLine(Exception):
    """What is wrong with a JSON line, as the end of a sentence."""


def _refused(path: Path, number: int, error: _BadLine) -> ConfigError:
    return ConfigError(f"{path}:{number} {error}; mend the line, or set data.bad_lines=skip")


def _text(line: bytes, key: str, first: bool) -> str | None:
    """None for a line of white space. `first` lines may begin with a byte order mark."""
    if line.isspace():
        return None
    return _json_text(line.removeprefix(b"\xef\xbb\xbf") if first else line, key)


def _json_text(line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"is not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is not JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine(f"is not a JSON object with a field '{key}' (data.text_key)")
    if key not in record:
        raise _BadLine(f"has no field '{key}' (data.text_key); its fields: {', '.join(record) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise _BadLine(f"has a field '{key}' (data.text_key) that is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"has half a surrogate pair in its field '{key}', which is not Unicode text") from None
    return text
