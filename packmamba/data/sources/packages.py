"""Python source of installed packages, as a manifest names it: whole files, functions, or both."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from packmamba.config import ConfigError, DataConfig
from packmamba.data.manifest import File, Manifest, read_manifest, which_bits
from packmamba.data.python_files import functions_of, in_parallel
from packmamba.data.sources.source import Document, Member, Source

UNITS = ("files", "functions", "mixture")


def open_packages(data: DataConfig) -> Source:
    """The files that the manifest ``data.path`` names, from the packages installed here; ``data.unit`` says what a document is.

    Validation is what the manifest says. A document's group is its package. A file that is missing here or has another content
    is an error: the corpus would be another one.
    """
    if data.path is None:
        raise ConfigError("data.source=packages needs data.path, a manifest; the command corpus writes one")
    if data.validation_fraction != DataConfig.validation_fraction:
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction}: the manifest {data.path} says what is validation; the command "
            "corpus writes one with another fraction"
        )
    manifest = read_manifest(data.path)
    unit = data.unit or "files"
    taken = list(manifest.taken)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        compare(manifest).refuse(str(data.path))
        places = installed(manifest)
        jobs = [(places[package.name].root / file.path, file) for package, file in taken]
        made = in_parallel(partial(texts, unit=unit), jobs)
        for (package, _), some in zip(taken, made):
            for text in some:
                yield Member.of(package.name, package.split == "validation", text)
            advance(1)

    return Source([manifest.hash, unit], len(taken), "files", read)


def texts(job: tuple[Path, File], unit: str) -> list[str]:
    """The documents of one file. Raises ConfigError if its functions are not those that the manifest counts."""
    path, file = job
    code = path.read_bytes()
    if unit == "files" or (unit == "mixture" and file.whole):
        return [code.decode()]
    found, taken = functions_of(code) or [], which_bits(file.functions or "0:")
    if len(found) != len(taken):
        raise ConfigError(
            f"{path} has {len(found)} functions for this Python where the manifest counts {len(taken)}: the corpus would be "
            "another one; use the manifest's Python"
        )
    return [text for text, take in zip(found, taken) if take]


class Place(NamedTuple):
    version: str
    root: Path


def installed(manifest: Manifest) -> dict[str, Place]:
    """Where those of the manifest's packages lie that are installed here."""
    places = {}
    for package in manifest.packages:
        try:
            distribution = importlib.metadata.distribution(package.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        places[package.name] = Place(distribution.version, Path(str(distribution.locate_file(""))))
    return places


class Comparison(NamedTuple):
    """What of a manifest is not here as it says."""

    packages: list[str]
    """Missing."""
    versions: list[str]
    """Installed in another version, as ``name 1.0 (here 1.1)``."""
    missing: list[str]
    different: list[str]
    total: int
    """Files that the corpus takes."""

    @property
    def same(self) -> bool:
        return not (self.missing or self.different)

    def refuse(self, manifest: str) -> None:
        """Raises ConfigError unless all is as the manifest says."""
        if self.same:
            return
        parts = [
            f"{len(some)} {what} (first {some[0]})"
            for what, some in (
                ("packages are missing", self.packages),
                ("packages have another version", self.versions),
                ("files are missing", self.missing),
                ("files differ", self.different),
            )
            if some
        ]
        raise ConfigError(
            f"{manifest} names {self.total} files, and here {', '.join(parts)}: the corpus would be another one, and its numbers "
            "not comparable; install those versions, or make a manifest of this machine's packages with the command corpus"
        )


def compare(manifest: Manifest) -> Comparison:
    """Looks at every file of the corpus."""
    places = installed(manifest)
    found = Comparison([], [], [], [], sum(1 for _ in manifest.taken))
    for package in manifest.packages:
        if package.name not in places:
            found.packages.append(package.name)
        elif (here := places[package.name].version) != package.version:
            found.versions.append(f"{package.name} {package.version} (here {here})")
    for package, file in manifest.taken:
        name = f"{package.name}: {file.path}"
        try:
            code = (places[package.name].root / file.path).read_bytes() if package.name in places else None
        except OSError:
            code = None
        if code is None:
            found.missing.append(name)
        elif content_hash(code) != file.hash:
            found.different.append(name)
    return found


def content_hash(code: bytes) -> str:
    return hashlib.blake2b(code, digest_size=8).hexdigest()
