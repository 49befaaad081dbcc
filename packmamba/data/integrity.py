"""Whether a corpus's files are what was written.

``meta.json`` holds a checksum of each file but the offsets, which follow from the lengths, and of itself; the corpus hash is
made of the files' checksums. Opening a large corpus reads its lengths and offsets (12 bytes a document), a whole check
every byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

BLOCK = 1 << 22
WHOLE_BYTES = 1 << 30
"""Files of a corpus that are no larger, all together, are read whole when it is opened: a second or two."""
SPLITS = ("train", "validation")
META = "meta.json"
KEYS = {"identity", "corpus_hash", "vocab_size", "begin_id", "end_id", "splits", "skipped", "checksums"}
"""Of that file, beside its own checksum."""


def hash_of(file: BinaryIO, size: int | None = None) -> Any:
    """Of a file's first bytes, or all. ValueError if it has not so many."""
    digest = hashlib.blake2b(digest_size=16)
    left = os.fstat(file.fileno()).st_size if size is None else size
    while left and (block := file.read(min(BLOCK, left))):
        digest.update(block)
        left -= len(block)
    if left:
        raise ValueError(f"{file.name} is shorter than it was")
    return digest


def corpus_hash(vocab_size: int, begin_id: int | None, end_id: int | None, checksums: Mapping[str, str]) -> str:
    """Of tokens, lengths and targets of both splits."""
    names = [f"{split}.{name}" for split in SPLITS for name in ("tokens", "lengths", "targets")]
    header = [vocab_size, begin_id, end_id, *(checksums[name] for name in names if name in checksums)]
    return hashlib.blake2b(json.dumps(header).encode(), digest_size=16).hexdigest()


def write_meta(folder: Path, meta: Mapping[str, Any]) -> None:
    (folder / META).write_text(_text(meta))


def read_meta(folder: Path) -> dict[str, Any]:
    """Of corpora from before it had a checksum, as it is. ValueError if it is not as it was written."""
    try:
        meta = json.loads(text := (folder / META).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / META} is not JSON ({error})") from None
    old = isinstance(meta, dict) and meta.keys() <= KEYS  # 'chacksum' would guard nothing
    if not old and (not isinstance(meta, dict) or not meta.pop("checksum", None) or text != _text(meta)):
        raise ValueError(f"{folder / META} has changed since it was written")
    return meta


def _text(meta: Mapping[str, Any]) -> str:
    return json.dumps({**meta, "checksum": _checksum(meta)}, indent=1)


def _checksum(meta: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16).hexdigest()


def check(folder: Path, whole: bool = False) -> None:
    """Raises ValueError naming the file of a corpus that is not as it was written, OSError for one that is missing.

    Corpora from before there were checksums have their offsets held to their lengths, and a whole check of one recomputes
    the corpus hash; where documents have targets of their own it was made otherwise.
    """
    meta = read_meta(folder)
    known = meta.get("checksums")
    if known and _hash(meta, known) != meta["corpus_hash"]:
        raise ValueError(f"{folder / META} has changed since it was written")
    found = {}
    for split in SPLITS:
        counts = meta["splits"][split]
        names = ["lengths"]
        if whole:
            names += [
                "tokens",
                *(["targets"] if "answers" in counts else []),
                *(["groups"] if "groups" in counts else []),
            ]
        for name in (f"{split}.{name}" for name in names if known or whole):
            with open(folder / name, "rb") as file:
                found[name] = hash_of(file).hexdigest()
            if known and found[name] != known[name]:
                raise ValueError(f"{folder / name} has other bytes than were written")
        check_offsets(folder, split)
    old = not known and not any("answers" in counts for counts in meta["splits"].values())
    if old and whole and _hash(meta, found) != meta["corpus_hash"]:
        raise ValueError(f"{folder} has other bytes than were written, in its tokens or lengths")


_seen: set[tuple[tuple[str, int, int], ...]] = set()


def check_opened(folder: Path) -> None:
    """``check`` of a corpus that is opened; of one that is not large a whole one, once a process as long as its files stay."""
    files = [(str(path), path.stat()) for path in sorted(folder.iterdir())]
    state = tuple((path, found.st_size, found.st_mtime_ns) for path, found in files)
    if state not in _seen:
        check(folder, whole=sum(found.st_size for _, found in files) <= WHOLE_BYTES)
        _seen.add(state)


def _hash(meta: Mapping[str, Any], checksums: Mapping[str, str]) -> str:
    return corpus_hash(meta["vocab_size"], meta["begin_id"], meta["end_id"], checksums)


def check_offsets(folder: Path, split: str) -> None:
    """Raises ValueError unless each document begins where the one before it ends."""
    with open(folder / f"{split}.lengths", "rb") as lengths, open(folder / f"{split}.offsets", "rb") as offsets:
        end = np.zeros(1, "<i8")
        same = offsets.read(8) == end.tobytes()
        while same and (block := lengths.read(BLOCK)):
            ends = end + np.frombuffer(block, "<i4").cumsum(dtype="<i8")
            same = offsets.read(2 * len(block)) == ends.tobytes()
            end = ends[-1:]
        if not same or offsets.read(1):
            raise ValueError(f"{offsets.name} does not follow from {lengths.name}")


def write_offsets(folder: Path, split: str) -> None:
    """Where documents begin, from their lengths."""
    with open(folder / f"{split}.lengths", "rb") as lengths, open(folder / f"{split}.offsets", "wb") as offsets:
        end = np.zeros(1, "<i8")
        offsets.write(end.tobytes())
        while block := lengths.read(BLOCK):
            ends = end + np.frombuffer(block, "<i4").cumsum(dtype="<i8")
            offsets.write(ends.tobytes())
            end = ends[-1:]


def sync(path: Path) -> None:
    """Puts a file, or a folder's list of files, on the disk; then forgets what memory holds of it, so that the next to read
    it reads the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_file() and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
