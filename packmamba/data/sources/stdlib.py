"""Functions of the running Python's standard library."""

from __future__ import annotations

import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from packmamba.config import ConfigError, DataConfig
from packmamba.data.python_files import functions_of
from packmamba.data.sources.source import Document, Source, held_out_files, list_files, reads_no_path, stat_files

# Tests are not typical functions, lib2to3's hold broken files, and installed packages are not the standard library.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def open_stdlib(data: DataConfig) -> Source:
    """Every function and method of the running Python's standard library that is not nested in another function, as it
    stands in its file, decorators included. Held out by file. A file that does not parse is skipped and counted
    (``unparsable_files``).
    """
    reads_no_path(data)
    root = Path(sysconfig.get_path("stdlib"))
    files = list_files(root, lambda name: name.endswith(".py"), SKIPPED_FOLDERS)
    files = [name for name in files if (root / name).is_file()]  # systems have links to what is not installed
    if not files:
        raise ConfigError(f"data.source=stdlib finds no Python files in {root}; set data.source to text or jsonl")
    fingerprint, total = stat_files(root, files)
    held_out = held_out_files(files, data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        for name in files:
            code = (root / name).read_bytes()
            functions = functions_of(code)
            if functions is None:
                skipped["unparsable_files"] += 1
            for text in functions or ():
                yield Document(name in held_out, text)
            advance(len(code))

    return Source([platform.python_version(), str(root), fingerprint], total, "B", read)
