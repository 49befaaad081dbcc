"""The contract of a document source; file listing, fingerprints, the validation split."""

import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig, registry

SEED = 0  # of the validation split, synthetic documents, examples


class Document(NamedTuple):
    """Hold a document; those of a source all have targets or none, and groups or none."""

    held_out: bool
    content: Any  # str, or (length,) ids where the source has a vocab_size
    targets: Any = None  # (length,), after each token, -1 for none; None: the next token
    group: str | None = None


@dataclass(frozen=True)
class Source:
    """Stream documents in a fixed order, any number of times."""

    fingerprint: list[
        Any
    ]  # JSON values that change when documents may, but for the validation fraction
    read: Callable[[], Iterator[Document]]
    vocab_size: int | Callable[[], int] | None = (
        None  # of ids, which get no begin and end tokens; None: text
    )


def open_source(data: DataConfig) -> Source:
    """Open ``data.source``: list files, read none. Raises ConfigError naming the key."""
    if data.path is not None and data.source in ("stdlib", "synthetic", "task"):
        raise ConfigError(
            f"data.path: data.source={data.source} reads no path, got '{data.path}'; set data.source"
        )
    try:
        return registry("packmamba.data.sources:SOURCES")[data.source](data)
    except OSError as error:
        raise ConfigError(
            f"data.path: cannot read '{error.filename or data.path}' ({error})"
        ) from None


def refuse_fraction(data: DataConfig) -> None:
    if data.validation_fraction != DataConfig.validation_fraction:
        raise ConfigError(
            f"data.validation_fraction: expected none, since {data.path} decides what is validation"
        )


def find_files(data: DataConfig, suffixes: tuple[str, ...]) -> tuple[Path, list[str]]:
    """Return a folder and the names in it that ``data.path`` means: a file, a folder's files, or a pattern's."""
    path, names = Path(data.path or "*"), set()
    if path.exists():
        paths, root = [path], path if path.is_dir() else path.parent
    else:
        paths = [Path(name) for name in glob.glob(data.path or "", recursive=True)]
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    for one in paths:
        inside = list_files(one, suffixes) if one.is_dir() else [""]
        names |= {(one / name).relative_to(root).as_posix() for name in inside}
    if not names:
        kinds = " or ".join(suffixes) or "visible"
        raise ConfigError(
            f"data.path: expected {kinds} files for data.source={data.source}, got none in '{data.path}'"
        )
    return root, sorted(names)


def list_files(
    root: Path, suffixes: tuple[str, ...], skipped_folders: Collection[str] = ()
) -> list[str]:
    """Return relative names of the visible files below a folder, sorted; follow no links to folders."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in skipped_folders
        ]
        visible = [name for name in names if not name.startswith(".") and name.endswith(suffixes)]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in visible]
    return sorted(files)


def hash_files(root: Path, files: list[str]) -> str:
    stats = ((name, (root / name).stat()) for name in files)
    facts = b"".join(
        os.fsencode(name) + f"\0{s.st_size}\0{s.st_mtime_ns}\0".encode() for name, s in stats
    )
    return hashlib.blake2b(facts, digest_size=16).hexdigest()


def held_out_files(files: list[str], data: DataConfig) -> frozenset[str]:
    ranked = sorted(files, key=lambda name: share_of(os.fsencode(name)))
    return frozenset(ranked[: held_out_count(len(files), data)])


def held_out_count(available: int, data: DataConfig) -> int:
    count = max(1, round(data.validation_fraction * available))
    if count >= available:
        raise ConfigError(
            f"data.validation_fraction: expected some of {available} left, got {data.validation_fraction}"
        )
    return count


def share_of(name: bytes, seed: int = SEED) -> float:
    """Hash a name to a uniform number in [0, 1)."""
    return (
        int.from_bytes(
            hashlib.blake2b(name, digest_size=6, key=str(seed).encode()).digest(), "little"
        )
        / 2**48
    )


def split_by_content(
    contents: Callable[[], Iterable[Any]], fraction: float
) -> Callable[[], Iterator[Document]]:
    """Hold documents out by a hash of their content, so that equal ones are in one split; at least one."""

    def read() -> Iterator[Document]:
        smallest = 1.0
        for content in contents():  # usually about 1 / fraction of them
            smallest = min(smallest, _share(content)) if len(content) else smallest
            if smallest < fraction:
                break
        limit = max(fraction, float(np.nextafter(smallest, 2)))
        for content in contents():
            yield Document(_share(content) < limit, content)

    return read


def _share(content: Any) -> float:
    return share_of(
        content.encode() if isinstance(content, str) else np.asarray(content, "<i8").tobytes()
    )
