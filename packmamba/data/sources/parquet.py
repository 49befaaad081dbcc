"""Parquet files, each row a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
    no_text,
    split_by_content,
)

ROWS = 256
"""At a time."""


def open_parquet(data: DataConfig) -> Source:
    """The column ``data.text_key`` of the file ``data.path``, of every ``*.parquet`` file below the folder ``data.path``, or of
    the files that the pattern ``data.path`` finds. A row without text (null), or whose text is not UTF-8, is an error, unless
    ``data.bad_lines`` is skip: then it is counted (``bad_rows``). All files are looked into before one is read.

    Held out by a hash of the document's text, as JSON lines are.
    """
    _pyarrow()
    root, files = find_files(data, lambda name: name.endswith(".parquet"), "has no .parquet file in it")
    fingerprint, sizes = file_sizes(root, files)

    def parts() -> list[Part]:
        contents: list[Contents] = []
        for name, size in zip(files, sizes):
            groups = _groups(root / name, data.text_key)
            told = 0
            for first, last, done in groups:
                # Progress is counted in the file's bytes, as its rows go.
                share = int(size * done) - told
                told += share
                contents.append(partial(_read, root / name, first, last, data.text_key, data.bad_lines, share))
        return split_by_content(contents, data)

    return in_parts([str(root.resolve()), data.text_key, data.bad_lines, fingerprint], sum(sizes), "B", parts)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise extra("pyarrow", "parquet") from None
    return pyarrow


def _open(path: Path) -> Any:
    try:
        # Without a buffer or with one filled before, a whole row group would lie in memory.
        return _pyarrow().parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True
        )
    except _pyarrow().ArrowInvalid as error:
        raise ConfigError(f"{path} in data.path is no whole parquet file ({_line(error)})") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _groups(path: Path, key: str) -> list[tuple[int, int, float]]:
    """Row groups [first, last) of each part, and the share of the rows up to there. Raises ConfigError for a wrong column."""
    with _open(path) as file:
        schema = file.schema_arrow
        if schema.names.count(key) != 1:
            count = schema.names.count(key)
            raise ConfigError(
                f"{path} in data.path has {f'{count} columns' if count else 'no column'} '{key}' (data.text_key); its columns: "
                f"{', '.join(schema.names) or 'none'}"
            )
        types, kind = _pyarrow().types, schema.field(key).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            texts = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
            raise no_text(str(path), key, str(kind), texts)
        metadata = file.metadata
        found = []
        first = size = rows = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            rows += metadata.row_group(group).num_rows
            if size >= PART_BYTES or group == metadata.num_row_groups - 1:
                found.append((first, group + 1, rows / metadata.num_rows if metadata.num_rows else 1.0))
                first, size = group + 1, 0
        return found or [(0, 0, 1.0)]


def _read(
    path: Path, first: int, last: int, key: str, bad_lines: str, amount: int, advance: Advance, skipped: Counter[str]
) -> Iterator[str]:
    told = seen = 0
    with _open(path) as file:
        groups = range(last)
        before = sum(file.metadata.row_group(group).num_rows for group in groups[:first])
        rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups[first:]))
        try:
            for batch in file.iter_batches(ROWS, row_groups=list(groups[first:]), columns=[key], use_threads=False):
                column = batch.column(0)
                for index in range(len(column)):
                    text, problem = _text(column, index)
                    if problem is None:
                        yield text
                    elif bad_lines == "error":
                        raise ConfigError(
                            f"row {before + seen + index} of {path} {problem} in '{key}' (data.text_key); set "
                            "data.bad_lines=skip to leave such rows out"
                        )
                    else:
                        skipped["bad_rows"] += 1
                seen += len(column)
                advance(amount * seen // rows - told)
                told = amount * seen // rows
        except (OSError, _pyarrow().ArrowException) as error:
            raise ConfigError(f"{path} in data.path is damaged ({_line(error)})") from None
    advance(amount - told)


def _text(column: Any, index: int) -> tuple[Any, str | None]:
    """A row's text, or what is wrong with it."""
    try:
        text = column[index].as_py()
    except UnicodeDecodeError:
        return None, "is not UTF-8"
    return text, "has no text (null)" if text is None else None
