"""Sources of documents: a document's split depends on its name or content alone, never on the order of documents."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.sources import builtin, files, packages, splits
from packmamba.data.sources.parts import parts_of
from packmamba.data.sources.source import Document, Source

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "stdlib": builtin.open_stdlib,
    "text": files.open_text,
    "jsonl": files.open_jsonl,
    "splits": files.open_splits,
    "packages": packages.open_packages,
    "synthetic": builtin.open_synthetic,
    "task": builtin.open_task,
    "parquet": files.open_parquet,
    "huggingface": files.open_huggingface,
    "megatron": files.open_megatron,
}
"""Values of ``data.source``, which read no file yet; plugins may add to it."""
WITHOUT_PATH = ("stdlib", "synthetic", "task")


def open_source(data: DataConfig) -> Source:
    """Open ``data.source``, with its test split: list files, read none.

    Raises ConfigError naming the key.
    """
    if data.test_path is not None and data.test_fraction:
        raise ConfigError(f"data.test_fraction: expected 0 with data.test_path, got {data.test_fraction}")
    for key, path in (("path", data.path), ("test_path", data.test_path)):
        if path is not None and data.source in WITHOUT_PATH:
            raise ConfigError(f"data.{key}: data.source={data.source} reads no path, got '{path}'; set data.source")
    if data.test_path is not None and data.path is not None:
        same = Path(data.test_path).resolve() == Path(data.path).resolve()
        need(not same, "data.test_path", "other documents than data.path's", f"'{data.path}' for both; name others")
    source = _open(data)
    if data.test_path is not None:
        source = splits.test_from_path(source, _open_test_path(data))
    elif data.test_fraction:
        source = splits.test_from_fraction(source, data)
    return source if source.names_splits else splits.cut_single_document(source, data)


def reads_text(data: DataConfig) -> bool:
    """Return whether documents are text, which a tokenizer turns into ids."""
    sources = [part.data for part in parts_of(data)] or [data]
    return all(open_source(source).vocab_size is None for source in sources)


def _open(data: DataConfig) -> Source:
    try:
        return SOURCES[data.source](data)
    except OSError as error:
        raise ConfigError(f"data.path: cannot read '{error.filename or data.path}' ({error})") from None


def _open_test_path(data: DataConfig) -> Source:
    fraction = DataConfig.validation_fraction  # of no effect: every document is for test
    others = replace(data, path=data.test_path, test_path=None, validation_fraction=fraction)

    @contextmanager
    def named() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.path", "data.test_path")) from None

    def read() -> Iterator[Document]:
        with named():
            yield from source.read()

    with named():
        source = _open(others)
    return replace(source, read=read)
