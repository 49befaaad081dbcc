"""The contract of a document source; file listing and fingerprints."""

import glob
import hashlib
import io
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from packmamba.config import ConfigError, DataConfig, need

SEED = 0  # of the splits, synthetic documents, examples
# What file systems behind URLs call the time of a file's last change, or a hash of its content.
VERSIONS = "mtime modified updated created LastModified last_modified Last-Modified ETag etag blob_id sha CRC"


class Document(NamedTuple):
    """Hold a document.

    Those of a source all have targets or none, answers or none, groups or none.
    """

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


class File(NamedTuple):
    """Hold a file that ``data.path`` means, on this machine or behind a URL.

    Args:
        place: path or URL, for messages.
        size: bytes; None if a server does not tell.
        version: changes when the file does, as far as its file system tells.
        open: opens the file for reading bytes, buffered.
    """

    place: str
    size: int | None
    version: Any
    open: Callable[[], io.BufferedReader]


def find_files(data: DataConfig, suffixes: tuple[str, ...]) -> tuple[str, dict[str, File]]:
    """Return a folder, and by their names in it, sorted, the files that ``data.path`` means.

    The path or URL is a file, a folder or a pattern; of a folder the visible files with one of
    the suffixes. Raises ConfigError, and OSError for a file of this machine.
    """
    expected = f"a folder, file or pattern with data.source={data.source}"
    need(data.path is not None, "data.path", expected, "null; set data.path=my/folder")
    path = str(data.path)
    root, files = (_find_remote if "://" in path else _find_local)(path, suffixes)
    kinds = " or ".join(suffixes) or "visible"
    need(files, "data.path", f"{kinds} files for data.source={data.source}", f"none in '{path}'")
    return root, dict(sorted(files.items()))


def _find_local(pattern: str, suffixes: tuple[str, ...]) -> tuple[str, dict[str, File]]:
    path = Path(pattern)
    if path.exists():
        paths, root = [path], path if path.is_dir() else path.parent
    else:
        paths = [Path(name) for name in glob.glob(pattern, recursive=True)]
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
    files = [one / name for one in paths for name in (list_files(one, suffixes) if one.is_dir() else [""])]
    return str(root.resolve()), {file.relative_to(root).as_posix(): _local_file(file) for file in files}


def _local_file(path: Path) -> File:
    stat = path.stat()
    return File(str(path), stat.st_size, stat.st_mtime_ns, lambda: path.open("rb"))


def _find_remote(url: str, suffixes: tuple[str, ...]) -> tuple[str, dict[str, File]]:
    """Return the URL, and files by their names below it.

    Those of a pattern are named from its part before a wildcard on.
    """
    try:
        file_system, path = fsspec.core.url_to_fs(url)
        file_system.invalidate_cache()  # files may have changed since this process listed them
        root = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), path.split("/")))
        found = {path: file_system.info(path)} if root == path else file_system.glob(path, detail=True)
        for folder, info in list(found.items()):
            if info["type"] == "directory" or folder.endswith("/"):  # the latter over HTTP
                inside = file_system.find(folder, detail=True)
                del found[folder]
                found |= {file: inside[file] for file in inside if file.endswith(suffixes)}
        opened = {file: _remote_file(file_system, file, info) for file, info in found.items()}
        files = {name.removeprefix(root).strip("/"): file for name, file in opened.items()}
    except Exception as error:  # file systems raise all kinds
        reason = error.__cause__ or error  # the cause names the missing package, or the host
        install = f"; pip install {reason.name}" if isinstance(reason, ModuleNotFoundError) else ""
        got = f"'{url}' ({type(reason).__name__}: {reason}){install}"
        raise ConfigError(f"data.path: expected what fsspec reads, got {got}") from None
    return url, {name: file for name, file in files.items() if "/." not in f"/{name}"}


def _remote_file(file_system: Any, path: str, info: dict[str, Any]) -> File:
    if not info.get("size"):  # over HTTP a list has names alone
        info = file_system.info(path)
    version = [str(info.get(key)) for key in VERSIONS.split()]
    # A buffer, since a file of fsspec reads a whole block for each line.
    opened = lambda: io.BufferedReader(file_system.open(path))
    return File(file_system.unstrip_protocol(path), info["size"], version, opened)


def list_files(root: Path, suffixes: tuple[str, ...], skipped_folders: Collection[str] = ()) -> list[str]:
    """Return relative names of the visible files below a folder, sorted.

    Warn of links to folders, which are not followed. Raises OSError for a folder that cannot be
    read.
    """

    def refuse(error: OSError) -> None:
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        for link in filter(os.path.islink, (os.path.join(folder, name) for name in folders)):
            warnings.warn(f"{link}: not read, as a link to a folder; give a pattern, such as **/*", stacklevel=2)
        visible = [name for name in names if not name.startswith(".") and name.endswith(suffixes)]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in visible]
    return sorted(files)


def hash_files(root: Path, files: list[str]) -> str:
    """Hash names, sizes and times of the last change of files of a folder on this machine."""
    return hash_facts({name: _local_file(root / name) for name in files})


def hash_facts(files: dict[str, File]) -> str:
    """Hash name, size and version of each file."""
    facts = (os.fsencode(name) + f"\0{file.size}\0{file.version}\0".encode() for name, file in files.items())
    return hashlib.blake2b(b"".join(facts), digest_size=16).hexdigest()


def share_of(name: bytes, seed: int = SEED) -> float:
    """Hash a name to a uniform number in [0, 1)."""
    digest = hashlib.blake2b(name, digest_size=6, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little") / 2**48
