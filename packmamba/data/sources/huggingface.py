"""Data sets of Hugging Face's package ``datasets``: from the Hub, from a folder of files, or saved to disk."""

from __future__ import annotations

import contextlib
import functools
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
    in_parts,
    list_files,
    no_text,
    split_by_content,
)
from packmamba.errors import UserError

ROWS = 256
"""At a time."""
SECONDS = 10
"""To wait for the Hub: the package itself asks for half a minute before it gives up."""


def open_huggingface(data: DataConfig) -> Source:
    """The column ``data.text_key`` of the split ``data.split`` of the data set ``data.path``: a name on the Hub
    (``name@revision`` for one revision), a folder of files, or a folder that ``save_to_disk`` wrote. ``data.subset`` chooses
    among configurations. ``data.streaming`` reads rows over the network without a copy on the disk. A row without text (null)
    is an error, unless ``data.bad_lines`` is skip: then it is counted (``bad_rows``).

    Held out by a hash of the document's text, as JSON lines are.
    """
    if not data.path:
        raise ConfigError("data.source=huggingface needs data.path, a data set's name or a folder")
    _datasets()
    total: int | None
    if _saved(data.path):
        if data.subset is not None:
            raise ConfigError(
                f"data.subset: expected none, since data.path '{data.path}' was saved with one configuration; got '{data.subset}'"
            )
        folder = Path(data.path)
        version = file_sizes(folder, list_files(folder, lambda name: True))[0]
        total = len(_load_saved(data))
    else:
        builder = _builder(data.path, data.subset)
        version = builder.hash
        splits = builder.info.splits or {}
        total = splits[data.split].num_examples if data.split in splits else None
    name = str(Path(data.path).resolve()) if Path(data.path).exists() else data.path
    fingerprint = [name, data.subset, data.split, data.text_key, data.bad_lines, version]
    return in_parts(fingerprint, total, " documents", partial(_parts, data))


def _parts(data: DataConfig) -> list[Part]:
    found = _load_saved(data) if _saved(str(data.path)) else _load(data)
    columns, texts = found.column_names, None
    if found.features is not None:
        texts = [name for name, kind in found.features.items() if _is_text(kind)]
    elif columns is None:  # a stream says what it has when it is read
        columns = list(next(iter(found), {}))
    if data.text_key not in columns:
        raise ConfigError(
            f"data.path '{data.path}' has no column '{data.text_key}' (data.text_key); its columns: "
            f"{', '.join(columns) or 'none'}"
        )
    if texts is not None and data.text_key not in texts:
        kind = found.features[data.text_key]
        raise no_text(f"data.path '{data.path}'", data.text_key, getattr(kind, "dtype", type(kind).__name__), texts)
    found = found.select_columns([data.text_key])
    common = (str(data.path), data.text_key, data.bad_lines)
    contents: list[Contents] = []
    if data.streaming and not _saved(str(data.path)):
        count = found.num_shards
        contents += [partial(_read, found.shard(count, index), 0, None, *common) for index in range(count)]
    else:
        step = max(ROWS, len(found) * PART_BYTES // max(1, found.data.nbytes))
        for start in range(0, len(found), step):
            contents.append(partial(_read, found, start, min(start + step, len(found)), *common))
    return split_by_content(contents, data)


def _read(
    found: Any,
    start: int,
    end: int | None,
    name: str,
    key: str,
    bad_lines: str,
    advance: Advance,
    skipped: Counter[str],
) -> Iterator[str]:
    """The texts of rows [start, end), or of a stream."""
    try:
        for number, text in enumerate(_column(found, start, end, key), start):
            if isinstance(text, str):
                yield text
            elif bad_lines == "error":
                what = "has no text (null)" if text is None else f"has a {type(text).__name__}, not text,"
                raise ConfigError(
                    f"row {number} of data.path '{name}' {what} in '{key}' (data.text_key); set data.bad_lines=skip to leave "
                    "such rows out"
                )
            else:
                skipped["bad_rows"] += 1
            advance(1)
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # of the network, of files in any format
        raise UserError(f"data.path '{name}' cannot be read ({_line(error)}); the same command goes on") from None


def _column(found: Any, start: int, end: int | None, key: str) -> Iterator[Any]:
    if end is None:
        for row in found:
            yield row.get(key)
        return
    for first in range(start, end, ROWS):
        yield from found[first : min(first + ROWS, end)][key]


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", None) in ("string", "large_string") and isinstance(kind, _datasets().Value)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise extra("datasets", "huggingface") from None
    return datasets


def _saved(path: str) -> bool:
    """By ``save_to_disk``."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _load_saved(data: DataConfig) -> Any:
    found = _refusing(data.path, lambda: _datasets().load_from_disk(data.path))
    if not isinstance(found, dict):
        if data.split != "train" and data.split != str(found.split):
            raise ConfigError(f"data.split: data.path '{data.path}' was saved without splits, got '{data.split}'")
        return found
    if data.split not in found:
        raise ConfigError(
            f"data.split: expected one of {', '.join(found)} in data.path '{data.path}', got '{data.split}'"
        )
    return found[data.split]


def _load(data: DataConfig) -> Any:
    path, revision = _named(str(data.path))
    with _reached(path):
        return _refusing(
            data.path,
            lambda: _datasets().load_dataset(
                path, data.subset, split=data.split, streaming=data.streaming, revision=revision
            ),
        )


@functools.lru_cache
def _builder(name: str, subset: str | None) -> Any:
    """Once a process: a run asks again when it ends, and the Hub may then not be there."""
    path, revision = _named(name)
    with _reached(path):
        return _refusing(name, lambda: _datasets().load_dataset_builder(path, subset, revision=revision))


def _named(path: str) -> tuple[str, str | None]:
    """A name and its revision."""
    if Path(path).exists():
        return path, None
    name, _, revision = path.partition("@")
    return name, revision or None


@functools.lru_cache
def _unreachable(name: str) -> str | None:
    """Why the Hub does not answer, asked once; None if it does. Raises ConfigError for a data set that it does not have."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(
            f"data.path '{name}' is no folder here and no data set on the Hub (one that is private needs `hf auth login`)"
        ) from None
    except Exception as error:  # of whatever lies between
        return _line(error)
    return None


@contextlib.contextmanager
def _reached(path: str) -> Iterator[None]:
    """Where the Hub cannot be reached, the package is told so: it looks into its cache, and does not ask again and again."""
    if Path(path).exists() or (reason := _unreachable(path)) is None:
        yield
        return
    config = _datasets().config
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    except ConfigError:
        raise ConfigError(
            f"data.path '{path}' is no folder here, no data set that was loaded before, and the Hub cannot be reached ({reason})"
        ) from None
    finally:
        config.HF_HUB_OFFLINE = before


def _refusing(path: str | None, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # the package and those below it raise all kinds
        raise ConfigError(
            f"data.path '{path}' cannot be loaded as a data set, with data.subset and data.split as they are ({_line(error)})"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(f"{error}".split()).rstrip(".") or type(error).__name__
