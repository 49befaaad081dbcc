"""What a source of documents gives, and what those that read files share."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.errors import UserError

PART_BYTES = 1 << 25
"""About what a part of a source reads: what a process works on at a time, and what is lost of its work if it is killed."""


PART_EXAMPLES = 20_000
"""The same of a task's examples: some seconds' work, where a process starts in one."""


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


Advance = Callable[[int], object]
Part = Callable[[Advance, "Counter[str]"], Iterator[Document]]
"""part(advance, skipped) yields documents, calls advance(n) on its way, counts in `skipped` what it skips."""
Contents = Callable[[Advance, "Counter[str]"], Iterator[Any]]
"""The same, without saying which split a document belongs to."""


@dataclass(frozen=True)
class Source:
    """A stream of documents, checked and ready to be read as often as one likes."""

    fingerprint: list[Any]
    """JSON values that change whenever what `read` yields may change, tokenizer and split apart."""
    total: int | None
    """How far `read` advances in all, in `unit`; None: not known before."""
    unit: str
    """B (bytes of source files) or documents."""
    read: Part
    """Every document."""
    vocab_size: int | Callable[[], int] | None = None
    """Documents are token ids below it, which get no begin and end tokens; None: documents are text."""
    parts: Callable[[], Sequence[Part]] | None = None
    """Cuts `read` into parts, in order, that other processes read: they pickle. May read a little. None: `read` is one."""


def in_parts(
    fingerprint: list[Any], total: int | None, unit: str, parts: Callable[[], Sequence[Part]], **more: Any
) -> Source:
    """A source that is read by its parts, one after another or in several processes."""

    def read(advance: Advance, skipped: Counter[str]) -> Iterator[Document]:
        return itertools.chain.from_iterable(part(advance, skipped) for part in parts())

    return Source(fingerprint, total, unit, read, parts=parts, **more)


def source_path(data: DataConfig) -> Path:
    if not data.path:
        raise ConfigError(f"data.source={data.source} needs data.path")
    path = Path(data.path)
    if not path.exists():
        if path.is_symlink():
            raise ConfigError(f"data.path '{data.path}' is a link to '{os.readlink(path)}', which does not exist")
        raise ConfigError(f"data.path '{data.path}' does not exist")
    return path


def reads_no_path(data: DataConfig) -> None:
    if data.path is not None:
        raise ConfigError(f"data.path is '{data.path}', but data.source={data.source} reads no path: set text or jsonl")


def find_files(data: DataConfig, keep: Callable[[str], bool], nothing: str) -> tuple[Path, list[str]]:
    """The files of ``data.path``: a file, those below a folder whose name `keep` keeps, or what a pattern such as ``a/*.b``
    finds. Returns a folder and names relative to it, sorted. `nothing` ends the sentence that says there are none.
    """
    if not data.path or Path(data.path).exists() or not glob.has_magic(data.path):
        path = source_path(data)
        if not path.is_dir():
            return path.parent, [path.name]
        files = list_files(path, keep)
        if not files:
            raise ConfigError(f"data.path '{data.path}' {nothing}")
        return path, files
    found = [Path(name) for name in glob.glob(data.path, recursive=True)]
    root = Path(*itertools.takewhile(lambda name: not glob.has_magic(name), Path(data.path).parts))
    names = {path.relative_to(root).as_posix() for path in found if not path.is_dir()}
    for folder in (path for path in found if path.is_dir()):
        names |= {(folder / name).relative_to(root).as_posix() for name in list_files(folder, keep)}
    if not names:
        raise ConfigError(f"data.path '{data.path}' {nothing}")
    return root, sorted(names)


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


def file_sizes(root: Path, files: list[str]) -> tuple[str, list[int]]:
    """A hash of the files' names, sizes and modification times, and their sizes.

    Raises ConfigError, before any is opened, for what is no file: a link to nowhere, a pipe (opening it would wait), a device.
    """
    digest, sizes = hashlib.blake2b(digest_size=16), []
    for name in files:
        try:
            found = (root / name).stat()
        except OSError as error:
            what = "a link to nowhere" if (root / name).is_symlink() else f"not to be read ({error.strerror})"
            raise ConfigError(f"{root / name} in data.path is {what}; remove it") from None
        if not stat.S_ISREG(found.st_mode):
            what = "a pipe" if stat.S_ISFIFO(found.st_mode) else "no regular file"
            raise ConfigError(f"{root / name} in data.path is {what}; documents are read from files: remove it")
        digest.update(os.fsencode(name) + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        sizes.append(found.st_size)
    return digest.hexdigest(), sizes


def stat_files(root: Path, files: list[str]) -> tuple[str, int]:
    """As `file_sizes`, but their bytes in all."""
    digest, sizes = file_sizes(root, files)
    return digest, sum(sizes)


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


def split_by_content(contents: Sequence[Contents], data: DataConfig) -> list[Part]:
    """Parts that hold documents out by a hash of their content (text or ids), so that equal ones are in one split, wherever
    they come from; the share is met on average, with at least one document.
    """

    def first_shares() -> Iterator[float]:
        for one in contents:
            for content in one(lambda _: None, Counter()):
                if len(content):
                    yield _share(content, data.corpus_seed)

    limit = _reachable_limit(first_shares(), data.validation_fraction)
    return [partial(_split, one, data.corpus_seed, limit) for one in contents]


def _split(contents: Contents, seed: int, limit: float, advance: Advance, skipped: Counter[str]) -> Iterator[Document]:
    for content in contents(advance, skipped):
        yield Document(_share(content, seed) < limit, content)


def _share(content: Any, seed: int) -> float:
    return share_of(content.encode() if isinstance(content, str) else np.asarray(content, "<i8").tobytes(), seed)


def _reachable_limit(shares: Iterable[float], fraction: float) -> float:
    """`fraction`, or just above the smallest share where no share is below it; reads about 1 / fraction shares."""
    smallest = 1.0
    for share in shares if fraction else ():
        if share < fraction:
            return fraction
        smallest = min(smallest, share)
    return float(np.nextafter(smallest, 2)) if fraction else 0.0


def extra(package: str, source: str) -> ConfigError:
    """What is said where a source's package is missing."""
    return ConfigError(f"data.source={source} needs the package {package}: pip install 'packmamba[integrations]'")


def unreadable(error: OSError) -> UserError:
    """What is said of a file that the system does not let us read now."""
    return UserError(f"{error.filename or 'a file'} in data.path cannot be read ({error.strerror or error})")


def no_text(place: str, key: str, kind: str, texts: Iterable[str]) -> ConfigError:
    """What is said of a column that holds no text but `kind`."""
    return ConfigError(
        f"the column '{key}' (data.text_key) of {place} holds {kind}, not text; its columns of text: "
        f"{', '.join(texts) or 'none'}"
    )
