"""Sources of documents: a document's split depends on its name or content alone, never on the order of documents."""

from __future__ import annotations

from collections.abc import Callable

from packmamba.config import DataConfig
from packmamba.data.sources.builtin import open_stdlib, open_synthetic, open_task
from packmamba.data.sources.datasets import open_huggingface
from packmamba.data.sources.files import open_jsonl, open_megatron, open_parquet, open_splits, open_text
from packmamba.data.sources.packages import open_packages
from packmamba.data.sources.source import Source, open_source

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "stdlib": open_stdlib,
    "text": open_text,
    "jsonl": open_jsonl,
    "splits": open_splits,
    "packages": open_packages,
    "synthetic": open_synthetic,
    "task": open_task,
    "parquet": open_parquet,
    "huggingface": open_huggingface,
    "megatron": open_megatron,
}
"""Values of ``data.source``, which read no file yet; plugins may add to it."""
