"""Where documents come from: a source streams its documents in a fixed order and never holds them all.

Whether a document is held out for validation depends on its name or content and ``data.corpus_seed``, never on the
order of files or documents.
"""

from __future__ import annotations

from collections.abc import Callable

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.huggingface import open_huggingface
from packmamba.data.sources.jsonl import open_jsonl
from packmamba.data.sources.megatron import open_megatron
from packmamba.data.sources.packages import open_packages
from packmamba.data.sources.parquet import open_parquet
from packmamba.data.sources.source import (
    PART_BYTES,
    PART_EXAMPLES,
    Document,
    Member,
    Part,
    Source,
    held_out_files,
    in_parts,
    list_files,
    share_of,
    source_path,
    split_by_content,
    stat_files,
    unreadable,
)
from packmamba.data.sources.stdlib import open_stdlib
from packmamba.data.sources.synthetic import open_synthetic
from packmamba.data.sources.task import open_task
from packmamba.data.sources.text import open_text

SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "stdlib": open_stdlib,
    "text": open_text,
    "jsonl": open_jsonl,
    "packages": open_packages,
    "synthetic": open_synthetic,
    "task": open_task,
    "parquet": open_parquet,
    "huggingface": open_huggingface,
    "megatron": open_megatron,
}
"""What ``data.source`` may name: each checks its keys and lists its files, and reads none yet. Plugins may add to it."""

__all__ = [
    "PART_BYTES",
    "PART_EXAMPLES",
    "SOURCES",
    "Document",
    "Member",
    "Part",
    "Source",
    "held_out_files",
    "in_parts",
    "list_files",
    "open_source",
    "share_of",
    "source_path",
    "split_by_content",
    "stat_files",
    "unreadable",
]


def open_source(data: DataConfig) -> Source:
    """The documents of ``data.source``; files are listed, none is read yet.

    Raises ConfigError naming the key. `Source.read` raises it too, of files that cannot be read as they should.
    """
    try:
        return SOURCES[data.source](data)
    except PermissionError as error:  # of a folder on the way, which cannot be looked into
        raise ConfigError(f"data.path '{error.filename or data.path}' cannot be read (permission denied)") from None
