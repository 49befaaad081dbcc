"""A folder whose every file is a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import (
    PART_BYTES,
    Advance,
    Document,
    Part,
    Source,
    file_sizes,
    find_files,
    held_out_files,
    in_parts,
)


def open_text(data: DataConfig) -> Source:
    """Every file below the folder ``data.path`` whatever its suffix, or that the pattern ``data.path`` finds, each file a
    document; hidden files and folders (leading dot) are not read, links to folders not followed. Held out by file. A file
    that is not UTF-8 is an error.
    """
    root, files = find_files(data, lambda name: True, "holds no text: there is no file")
    if Path(str(data.path)).is_file():
        raise ConfigError(f"data.path '{data.path}' is not a folder; data.source=text reads a folder of text files")
    fingerprint, sizes = file_sizes(root, files)
    filled = [name for name, size in zip(files, sizes) if size]
    if not filled:
        raise ConfigError(f"data.path '{data.path}' holds no text: all of its {len(files)} files are empty")
    held_out = held_out_files(filled, data)

    def parts() -> list[Part]:
        groups: list[list[str]] = []
        room = 0
        for name, size in zip(files, sizes):
            if room <= 0:
                groups.append([])
                room = PART_BYTES
            groups[-1].append(name)
            room -= size + 1024  # a file costs something also if it is empty
        return [partial(_read, root, names, held_out.intersection(names)) for names in groups]

    return in_parts([str(root.resolve()), fingerprint], sum(sizes), "B", parts)


def _read(
    root: Path, names: list[str], held_out: frozenset[str], advance: Advance, skipped: Counter[str]
) -> Iterator[Document]:
    for name in names:
        content = (root / name).read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{root / name} in data.path is not UTF-8 text (byte {error.start}); move it out of the folder"
            ) from None
        yield Document(name in held_out, text)
        advance(len(content))
