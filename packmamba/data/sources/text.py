"""A folder whose every file is a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Document, Source, held_out_files, list_files, source_path, stat_files


def open_text(data: DataConfig) -> Source:
    """Every file below the folder ``data.path`` whatever its suffix, each file a document; hidden files and folders
    (leading dot) are not read, links to folders not followed. Held out by file. A file that is not UTF-8 is an error.
    """
    root = source_path(data)
    if not root.is_dir():
        raise ConfigError(f"data.path '{data.path}' is not a folder; data.source=text reads a folder of text files")
    files = list_files(root, lambda name: True)
    filled = [name for name in files if (root / name).stat().st_size]
    if not filled:
        raise ConfigError(f"data.path '{data.path}' holds no text: the folder has {len(files)} files, all empty")
    fingerprint, total = stat_files(root, files)
    held_out = held_out_files(filled, data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        for name in files:
            content = (root / name).read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{root / name} in data.path is not UTF-8 text (byte {error.start}); move it out of the folder"
                ) from None
            yield Document(name in held_out, text)
            advance(len(content))

    return Source([str(root.resolve()), fingerprint], total, "B", read)
