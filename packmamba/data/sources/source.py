"""The contract of a document source; file listing and fingerprints."""

import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import DataConfig, need

SEED = 0  # of the splits, synthetic documents, examples


class Document(NamedTuple):
    """Hold a document; those of a source all have targets or none, answers or none, groups or none."""

    held_out: bool
    content: Any  # str, or (length,) ids where the source has a vocab_size
    targets: Any = None  # (length,), after each token, -1 for none; None: the next token
    group: str | None = None
    # A text's ranges that are trained on; None: all of it.
    answers: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Source:
    """Stream documents in a fixed order, any number of times.

    Args:
        fingerprint: JSON values that change when documents may, but for the validation fraction.
        read: yields the training and validation documents.
        vocab_size: of ids, which get no begin and end tokens; None: documents are text.
        read_test: yields the test documents. None: ``open_source`` takes ``data.test_fraction``
            of the documents out of ``read``, by a hash of their content.
        names_splits: the documents name their splits, so fractions do not apply.
    """

    fingerprint: list[Any]
    read: Callable[[], Iterator[Document]]
    vocab_size: int | Callable[[], int] | None = None
    read_test: Callable[[], Iterator[Document]] | None = None
    names_splits: bool = False


def find_files(data: DataConfig, suffixes: tuple[str, ...]) -> tuple[Path, list[str]]:
    """Return a folder and the names in it that ``data.path`` means: a file, a folder's files, or a pattern's."""
    expected = f"a folder, file or pattern with data.source={data.source}"
    need(data.path is not None, "data.path", expected, "null; set data.path=my/folder")
    path = Path(str(data.path))
    names: set[str] = set()
    if path.exists():
        paths, root = [path], path if path.is_dir() else path.parent
    else:
        paths = [Path(name) for name in glob.glob(str(data.path), recursive=True)]
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    for one in paths:
        inside = list_files(one, suffixes) if one.is_dir() else [""]
        names |= {(one / name).relative_to(root).as_posix() for name in inside}
    kinds = " or ".join(suffixes) or "visible"
    need(names, "data.path", f"{kinds} files for data.source={data.source}", f"none in '{data.path}'")
    return root, sorted(names)


def list_files(root: Path, suffixes: tuple[str, ...], skipped_folders: Collection[str] = ()) -> list[str]:
    """Return relative names of the visible files below a folder, sorted; follow no links to folders."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        visible = [name for name in names if not name.startswith(".") and name.endswith(suffixes)]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in visible]
    return sorted(files)


def hash_files(root: Path, files: list[str]) -> str:
    stats = ((name, (root / name).stat()) for name in files)
    facts = b"".join(os.fsencode(name) + f"\0{s.st_size}\0{s.st_mtime_ns}\0".encode() for name, s in stats)
    return hashlib.blake2b(facts, digest_size=16).hexdigest()


def share_of(name: bytes, seed: int = SEED) -> float:
    """Hash a name to a uniform number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6, key=str(seed).encode()).digest(), "little") / 2**48
