"""Where documents come from: a source streams its documents in a fixed order and never holds them all.

Whether a document is held out for validation depends on its name or content and ``data.corpus_seed``, never on the
order of files or documents.
"""

from __future__ import annotations

from collections.abc import Callable

from packmamba.config import DataConfig, check
from packmamba.data.sources.jsonl import open_jsonl
from packmamba.data.sources.packages import open_packages
from packmamba.data.sources.source import (
    Document,
    Member,
    Source,
    held_out_files,
    list_files,
    share_of,
    source_path,
    stat_files,
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
}
"""What ``data.source`` may name: each checks its keys and lists its files, and reads none yet. Plugins may add to it."""

__all__ = [
    "SOURCES",
    "Document",
    "Member",
    "Source",
    "held_out_files",
    "list_files",
    "open_source",
    "share_of",
    "source_path",
    "stat_files",
]


def open_source(data: DataConfig) -> Source:
    """The documents of ``data.source``; files are listed, none is read yet.

    Raises ConfigError naming the key. `Source.read` raises it too, of files that cannot be read as they should.
    """
    check(data, "data.")
    return SOURCES[data.source](data)
