"""Which files of which installed packages a corpus consists of: package, version, path, content hash, cluster, split.

A manifest is a gzipped file of JSON lines. The first is a header; each further line is a package: its name, version, split, and
its files as ``[path, hash, cluster, functions]``. ``cluster`` is a number that near-copies share, null without one.
``functions`` is null for a file that is left out as a near-copy; else ``n:hex``, its number of functions and, bit by bit from the
lowest, which of them are taken: the others are near-copies.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packmamba.config import ConfigError

FORMAT = 1
SPLITS = ("train", "validation")


class File(NamedTuple):
    path: str
    """Below the folder that the package is installed in."""
    hash: str
    cluster: int | None
    functions: str | None
    """None: left out."""

    @property
    def taken(self) -> bool:
        return self.functions is not None

    @property
    def whole(self) -> bool:
        """In a mixture of files and functions the file is a document; else its functions are."""
        return int(self.hash[-1], 16) % 2 == 0


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    split: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    header: dict[str, object]
    """How it was made: format, python, seed, validation_fraction, similarity."""
    packages: tuple[Package, ...]

    @functools.cached_property
    def hash(self) -> str:
        """Of all that it says."""
        return hashlib.blake2b(self._text().encode(), digest_size=16).hexdigest()

    @property
    def taken(self) -> Iterator[tuple[Package, File]]:
        """Every file of the corpus."""
        return ((package, file) for package in self.packages for file in package.files if file.taken)

    def _text(self) -> str:
        lines = [self.header, *map(vars, self.packages)]
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def write(self, path: str | Path) -> None:
        """The same manifest gives the same bytes."""
        Path(path).write_bytes(gzip.compress(self._text().encode(), 9, mtime=0))


def read_manifest(path: str | Path, key: str = "data.path") -> Manifest:
    """Raises ConfigError naming the key: no such file, or no manifest."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{key} '{path}' is no file; expected a manifest, as the command corpus writes them")
    return _read(path.read_bytes(), path, key)


@functools.lru_cache(maxsize=2)  # a run opens its corpus several times
def _read(content: bytes, path: Path, key: str) -> Manifest:
    try:
        header, *packages = map(json.loads, gzip.decompress(content).decode().splitlines())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}")
        return Manifest(header, tuple(_package(**package) for package in packages))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key} '{path}' is not a manifest of packages ({error})") from None


def _package(name: str, version: str, split: str, files: list[list]) -> Package:
    if split not in SPLITS:
        raise ValueError(f"split {split}")
    return Package(name, version, split, tuple(File(*file) for file in files))


def which_bits(functions: str) -> list[bool]:
    """Of each function of a file whether it is taken."""
    count, _, bits = functions.partition(":")
    number = int(bits or "0", 16)
    return [bool(number >> i & 1) for i in range(int(count))]


def as_bits(taken: list[bool]) -> str:
    """The inverse of ``which_bits``."""
    return f"{len(taken)}:{sum(1 << i for i, one in enumerate(taken) if one):x}"
