"""Sources of documents.

A document's split depends on its name or content alone, never on the order of documents.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packmamba.config import ConfigError, DataConfig, need, refusing, resolve, suggest
from packmamba.config.load import reads
from packmamba.data.sources import builtin, files, packages, splits
from packmamba.data.sources.source import Document, Source

# Functions that open a source, by the values of ``data.source``, without reading its documents;
# plugins may add to it.
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
WITHOUT_PATH = ("stdlib", "synthetic", "task")
# Keys of ``data`` that an entry of ``data.sources`` may have, beside ``weight`` and ``name``.
OF_SOURCES = ("source", "path", "unit", "text_key", "loss_on", "subset", "split", "test_path")


@dataclass(frozen=True)
class Part:
    """Hold an entry of ``data.sources``: the configuration of a source, with its weight."""

    name: str
    weight: float
    data: DataConfig


def open_source(data: DataConfig) -> Source:
    """Open ``data.source``, with its test split: list files, read none.

    Raises ConfigError naming the key.
    """
    both = data.test_path and data.test_fraction
    need(not both, "data.test_fraction", "0 with data.test_path", data.test_fraction)
    for key, path in (("path", data.path), ("test_path", data.test_path)):
        if path is not None and data.source in WITHOUT_PATH:
            raise ConfigError(f"data.{key}: data.source={data.source} reads no path, got '{path}'; set data.source")
    if data.test_path is not None and data.path is not None:
        same = Path(data.test_path).resolve() == Path(data.path).resolve()
        need(not same, "data.test_path", "other documents than data.path's", f"'{data.path}' for both; name others")
    source = _open(data)
    if data.test_path is not None:
        source = splits.with_test_from_path(source, _open_test_path(data))
    elif data.test_fraction:
        source = splits.with_test_from_fraction(source, data)
    return source if source.names_splits else splits.cut_single_document(source, data)


def parts_of(data: DataConfig) -> list[Part]:
    """Read ``data.sources``: each entry's keys over those of ``data``. Raises ConfigError."""
    parts = []
    for number, entry in enumerate(data.sources):
        place = f"data.sources[{number}]"
        need(isinstance(entry, dict), place, "keys and values, such as {source: text, path: a, weight: 3}", entry)
        keys = {**entry}
        for key in keys:
            allowed = ("weight", "name", *OF_SOURCES)
            need(key in allowed, place, ", ".join(allowed), f"'{key}'{suggest(key, allowed)}")
        weight = keys.pop("weight", None)
        is_positive = type(weight) in (int, float) and 0 < weight < float("inf")
        need(is_positive, f"{place}.weight", "a number above 0", repr(weight))
        origin = str(keys.get("path") or keys.get("source", number))
        name = str(keys.pop("name", None) or Path(origin).stem)
        common = replace(data, sources=[])
        with refusing(ConfigError, prefix=f"{place}: "):
            section = resolve(DataConfig, [(common, "data"), (keys, place)])
        unread = [key for key in keys if not reads(section.source, key)]
        need(not unread, place, f"keys that source={section.source} reads", ", ".join(unread))
        parts.append(Part(name, float(weight), section))
    names = [part.name for part in parts]
    repeated = next((name for name in names if names.count(name) > 1), None)
    need(repeated is None, "data.sources", "a name of its own for each source; set name", f"'{repeated}' twice")
    return parts


def open_sources(data: DataConfig) -> list[Source]:
    """Open every source of ``data.sources``, or else ``data.source``."""
    return [open_source(part.data) for part in parts_of(data)] or [open_source(data)]


def reads_text(data: DataConfig) -> bool:
    """Return whether documents are text, which a tokenizer turns into ids."""
    return all(source.vocab_size is None for source in open_sources(data))


def read_texts(data: DataConfig, held_out: bool) -> Iterator[str]:
    """Yield the training texts of all sources, or those held out for validation."""
    for source in open_sources(data):
        yield from (document.content for document in source.read() if document.held_out == held_out)


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
