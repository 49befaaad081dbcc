"""What a source of documents gives, and what those that read files share."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import ConfigError, DataConfig


class Document(NamedTuple):
    held_out: bool
    """Belongs to the validation split."""
    content: Any
    """str; token ids, (length,) integers, where the source has a vocab_size."""
    targets: Any = None
    """(length,) integers, what is to be said after each token, -1 for nothing; None: the token that follows. All documents
    of a source have them, or none."""


class Member(Document):
    """A document of a group, such as a package: the corpus keeps it. All documents of a source are members, or none."""

    group: str

    @classmethod
    def of(cls, group: str, held_out: bool, content: Any) -> Member:
        made = cls(held_out, content)
        made.group = group
        return made


@dataclass(frozen=True)
class Source:
    """A stream of documents, checked and ready to be read as often as one likes."""

    fingerprint: list[Any]
    """JSON values that change whenever what `read` yields may change, tokenizer and split apart."""
    total: int
    """How far `read` advances in all, in `unit`."""
    unit: str
    """B (bytes of source files) or documents."""
    read: Callable[[Callable[[int], object], Counter[str]], Iterator[Document]]
    """read(advance, skipped) yields every document, calls advance(n) on its way, counts in `skipped` what it skips."""
    vocab_size: int | None = None
    """Documents are token ids below it, which get no begin and end tokens; None: documents are text."""


def source_path(data: DataConfig) -> Path:
    if data.path is None:
        raise ConfigError(f"data.source={data.source} needs data.path")
    path = Path(data.path)
    if not path.exists():
        raise ConfigError(f"data.path '{data.path}' does not exist")
    return path


def reads_no_path(data: DataConfig) -> None:
    if data.path is not None:
        raise ConfigError(f"data.path is '{data.path}', but data.source={data.source} reads no path: set text or jsonl")


def list_files(root: Path, keep: Callable[[str], bool], skipped_folders: Iterable[str] = ()) -> list[str]:
    """Relative POSIX names of the files below `root`, sorted."""

    def fail(error: OSError) -> None:
        raise ConfigError(f"cannot list the folder {error.filename} of data.path ({error.strerror})") from None

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".") and keep(name)]
    return sorted(found)


def stat_files(root: Path, files: list[str]) -> tuple[str, int]:
    """A hash of the files' names, sizes and modification times, and their bytes in all."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    for name in files:
        stat = (root / name).stat()
        digest.update(os.fsencode(name) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        total += stat.st_size
    return digest.hexdigest(), total


def held_out_files(files: list[str], data: DataConfig) -> frozenset[str]:
    ranked = sorted(files, key=lambda name: share_of(os.fsencode(name), data.corpus_seed))
    return frozenset(ranked[: held_out_count(len(files), "files", data)])


def held_out_count(available: int, what: str, data: DataConfig) -> int:
    count = max(1, round(data.validation_fraction * available)) if data.validation_fraction else 0
    if count == available:
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction} holds out {count} of {available} {what}, leaving "
            f"none to train on; lower it, or add {what}"
        )
    return count


def share_of(name: bytes, seed: int) -> float:
    """Uniform in [0, 1), a function of the name and the seed."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6, key=str(seed).encode()).digest(), "little") / 2**48
