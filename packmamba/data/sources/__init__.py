"""Sources of documents: a document's split depends on its name or content alone, never on the order of documents."""

from collections.abc import Callable

from packmamba.config import DataConfig
from packmamba.data.sources import builtin, files, packages
from packmamba.data.sources.source import Source, open_source

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
