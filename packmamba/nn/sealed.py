"""Files of tensors that know their bytes: a SHA-256 of the rest, where those who look for none do not see it.

What ``torch.save`` writes is followed by MARK and the digest; a safetensors file has it among its metadata, of the file with
zeros in its place. A file of somebody else has none, and one that is written anew by other means loses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

MARK = b"packmamba sha256"
TAIL = len(MARK) + hashlib.sha256().digest_size
KEY = "packmamba_sha256"
BLOCK = 1 << 22
_BLANK = b"0" * 64
_LONGEST_HEADER = 100_000_000  # safetensors' own bound


class _Hashed:
    """A file that is written from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_sealed(value: Any, file: BinaryIO) -> None:
    """``torch.save`` with a checksum."""
    hashed = _Hashed(file)
    torch.save(value, hashed)  # type: ignore[arg-type]
    file.write(MARK + hashed.digest.digest())


def save_sealed_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Hugging Face's format with a checksum."""
    save_file(dict(tensors), path, metadata={"format": "pt", KEY: _BLANK.decode()})
    with open(path, "r+b") as file:
        place = _place(file)
        assert place is not None
        digest = _sha256(file, os.fstat(file.fileno()).st_size)
        file.seek(place)
        file.write(digest.hexdigest().encode())


def is_damaged(file: BinaryIO) -> bool | None:
    """Whether a file has other bytes than were written; None: it has no checksum."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - TAIL))
    tail = file.read()
    if tail.startswith(MARK):
        file.seek(0)
        return _sha256(file, size - TAIL).digest() != tail[len(MARK) :]
    if (place := _place(file)) is None:
        return None
    file.seek(place)
    said = file.read(len(_BLANK))
    file.seek(0)
    digest = _sha256(file, place)
    digest.update(_BLANK)
    file.seek(place + len(_BLANK))
    return _sha256(file, size, digest).hexdigest().encode() != said


def _place(file: BinaryIO) -> int | None:
    """Where a safetensors file has its checksum; leaves the file at its beginning."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length) if length < _LONGEST_HEADER else b""
    file.seek(0)
    try:
        said = json.loads(header)["__metadata__"][KEY].encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return 8 + header.index(said) if len(said) == len(_BLANK) and header.count(said) == 1 else None


def _sha256(file: BinaryIO, size: int, digest: Any = None) -> Any:
    """Of the next so many bytes, or of those that there are."""
    digest = digest or hashlib.sha256()
    while size and (block := file.read(min(BLOCK, size))):
        digest.update(block)
        size -= len(block)
    return digest
