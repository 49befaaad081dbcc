"""Text that tasks are made from when they are given none: the modules of the running Python's standard library."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


@functools.cache
def standard_library() -> tuple[tuple[str, str], ...]:
    """(package, text) of each source file, in a fixed order; a package is a top-level module or folder."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not SKIPPED & set(inside.parts):
            found.append((inside.parts[0].removesuffix(".py"), path.read_text(encoding="utf-8", errors="replace")))
    return tuple(found)


def check_documents(documents: Iterable[str | tuple[str, str]] | None) -> list[tuple[str, str]]:
    """(package, text) of each document; a text alone is a package of its own. Raises ValueError naming the argument."""
    if documents is None:
        return list(standard_library())
    if isinstance(documents, (str, bytes)):
        raise ValueError("documents: expected a sequence of texts, got one text")
    try:
        documents = list(documents)
    except TypeError:
        raise TypeError(f"documents: expected a sequence of texts, got {type(documents).__name__}") from None
    if wrong := [item for item in documents if not isinstance(item, (str, tuple, list))]:
        raise TypeError(f"documents: expected texts, or pairs (package, text), got {wrong[0]!r:.60}")
    pairs = [(str(i), item) if isinstance(item, str) else tuple(item) for i, item in enumerate(documents)]
    if not pairs or not all(len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in pairs):
        raise ValueError("documents: expected at least one text, or pairs (package, text)")
    return pairs  # type: ignore[return-value]
