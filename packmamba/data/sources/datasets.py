"""Sources that Hugging Face's package ``datasets`` reads: parquet files, and data sets of the Hub or of a folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Document, Source, find_files, hash_files, list_files, split_by_content

ROWS = 256  # in memory at a time


def open_parquet(data: DataConfig) -> Source:
    """Open the column ``data.text_key`` of the ``.parquet`` files of ``data.path``, each row a document."""
    root, files = find_files(data, (".parquet",))
    paths = [str(root / name) for name in files]
    options = {"data_files": paths, "split": "train", "streaming": True, "batch_size": ROWS, "columns": [data.text_key]}
    read = _read(data, functools.partial(_datasets().load_dataset, "parquet", **options))
    return Source([str(root.resolve()), data.text_key, "error", hash_files(root, files)], read)


def open_huggingface(data: DataConfig) -> Source:
    """Open the column ``data.text_key`` of the split ``data.split`` of the data set ``data.path``, each row a document.

    The path is a name on the Hub (``name@revision`` for one revision), a folder of files, or what ``save_to_disk`` wrote;
    ``data.subset`` chooses among configurations.
    """
    if not data.path:
        raise ConfigError("data.path: data.source=huggingface expected a data set's name or folder, got null")
    path = Path(data.path)
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        version = hash_files(path, list_files(path, ("",)))

        def load() -> Any:
            found = _datasets().load_from_disk(data.path)
            return found[data.split] if isinstance(found, dict) else found

    else:
        builder, revision = _builder(data.path, data.subset)
        version = builder.hash
        options = {"name": data.subset, "split": data.split, "revision": revision}
        load = functools.partial(_datasets().load_dataset, builder.repo_id or data.path, **options)
    name = str(path.resolve()) if path.exists() else data.path
    return Source([name, data.subset, data.split, data.text_key, "error", version], _read(data, load))


def _read(data: DataConfig, load: Callable[[], Any]) -> Callable[[], Iterator[Document]]:
    def contents() -> Iterator[str]:
        row = 0
        try:
            for batch in load().select_columns([data.text_key]).with_format("arrow").iter(ROWS):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if not isinstance(text, str):
                        raise ValueError(f"expected text in the column '{data.text_key}' (data.text_key), got {text!r}")
                    yield text
        except Exception as error:  # the package and those below it raise all kinds
            raise ConfigError(f"data.path: cannot read '{data.path}' after row {row} ({error!r})") from None

    return split_by_content(contents, data.validation_fraction)


def _datasets() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ConfigError("data.source: parquet and huggingface need pip install 'packmamba[integrations]'") from None
    return datasets


@functools.lru_cache
def _builder(path: str, subset: str | None) -> tuple[Any, str | None]:
    """Return the builder and the revision; once a process, since the Hub may be gone when a run asks again."""
    name, _, revision = (path, "", "") if Path(path).exists() else path.partition("@")
    try:
        return _datasets().load_dataset_builder(name, subset, revision=revision or None), revision or None
    except Exception as error:
        raise ConfigError(f"data.path: cannot load '{path}' as a data set ({error!r})") from None
