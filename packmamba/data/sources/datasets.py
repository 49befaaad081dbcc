"""Source of data sets of Hugging Face's package ``datasets``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.files import ROWS, extra, texts_of
from packmamba.data.sources.source import Source, hash_files, list_files, split_by_content


def open_huggingface(data: DataConfig) -> Source:
    """Open the column ``data.text_key``, each row a document, of a data set on the Hub, perhaps ``name@revision``, or on disk."""
    if not data.path:
        raise ConfigError("data.path: data.source=huggingface expected a data set's name or folder, got null")
    path, name = Path(data.path), data.path
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        version = hash_files(path, list_files(path, ("",)))

        def load() -> Any:
            found = extra("datasets").load_from_disk(data.path)
            return found[data.split] if isinstance(found, dict) else found

    else:
        builder, revision = _builder(data.path, data.subset)
        version = builder.hash
        options = {"name": data.subset, "split": data.split, "revision": revision}
        load = functools.partial(extra("datasets").load_dataset, builder.repo_id or data.path, **options)

    def rows() -> Iterator[Any]:
        for batch in load().select_columns([data.text_key]).with_format("arrow").iter(ROWS):
            yield from batch.column(0).to_pylist()

    read = split_by_content(lambda: texts_of(name, data.text_key, rows()), data.validation_fraction)
    place = str(path.resolve()) if path.exists() else name
    return Source([place, data.subset, data.split, data.text_key, "error", version], read)


@functools.lru_cache
def _builder(path: str, subset: str | None) -> tuple[Any, str | None]:
    """Return builder and revision; once a process, since the Hub may be gone later."""
    name, _, revision = (path, "", "") if Path(path).exists() else path.partition("@")
    try:
        return extra("datasets").load_dataset_builder(name, subset, revision=revision or None), revision or None
    except Exception as error:
        raise ConfigError(f"data.path: cannot load '{path}' as a data set ({error!r})") from None
