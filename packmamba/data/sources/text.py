"""Source of text files: each file is a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Advance, Document, Source, file_sizes, find_files, held_out_files


def open_text(data: DataConfig) -> Source:
    """Open every file below the folder ``data.path``, whatever its suffix, or that the pattern ``data.path`` matches.

    Hidden files and folders (leading dot) are left out. Held out by file name. A file that is not UTF-8 is an error.
    """
    root, files = find_files(data, ("",))
    if Path(str(data.path)).is_file():
        raise ConfigError(f"data.path: data.source=text expected a folder, got the file '{data.path}'")
    fingerprint, sizes = file_sizes(root, files)
    filled = [name for name, size in zip(files, sizes) if size]
    if not filled:
        raise ConfigError(f"data.path: expected text, got {len(files)} empty files in '{data.path}'")
    held_out = held_out_files(filled, data)

    def read(advance: Advance, skipped: Counter[str]) -> Iterator[Document]:
        for name in files:
            content = (root / name).read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"data.path: expected UTF-8, got {root / name} (byte {error.start}); move it"
                ) from None
            yield Document(name in held_out, text)
            advance(len(content))

    return Source([str(root.resolve()), fingerprint], sum(sizes), "B", read)
