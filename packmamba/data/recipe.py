"""A manifest made from the packages of this machine: near-copies are clustered first, then packages are split."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from packmamba.config import ConfigError
from packmamba.data.duplicates import FUNCTIONS, Signatures, clusters, signature
from packmamba.data.manifest import FORMAT, File, Manifest, Package, as_bits
from packmamba.data.python_files import functions_of, in_parallel
from packmamba.data.sources.packages import content_hash
from packmamba.data.sources.source import share_of

SIMILARITY = 0.5
LARGEST_SHARE = 0.25
"""Of the validation split that one package may have: a larger one is trained on, so that no package is most of validation."""


class Looked(NamedTuple):
    """What one file holds."""

    hash: str
    size: int
    signature: Signatures
    functions: Signatures
    sizes: list[int]
    """Bytes of each function."""


def make_manifest(
    names: Iterable[str] = (), validation_fraction: float = 0.1, seed: int = 0, progress: bool = True
) -> Manifest:
    """Of the Python files of the packages called ``names``, or of all that are installed.

    Files whose estimated Jaccard similarity is at least 0.5 form a cluster, of which the largest file stays. The functions of the
    files that stay are clustered in the same way. What stays is split by package: packages are drawn until they hold
    ``validation_fraction`` of the bytes, but none that alone would be a quarter of that.

    Raises:
        ConfigError: a package is not installed, or nothing is left to train on or to validate on.
    """
    packages = list(_installed(names))
    jobs = [root / path for *_, root, paths in packages for path in paths]
    bar = tqdm(in_parallel(look, jobs), total=len(jobs), desc="Reading packages", disable=None if progress else True)
    looked = list(bar)
    readable = [i for i, one in enumerate(looked) if one is not None]
    files = [one for one in looked if one is not None]
    if not files:
        raise ConfigError("packages: no Python file in those that are installed")
    cluster = clusters(np.stack([one.signature for one in files]))
    stays = _largest(cluster, [one.size for one in files])
    of_functions = np.concatenate([one.functions for one, stay in zip(files, stays) if stay])
    sizes = [size for one, stay in zip(files, stays) if stay for size in one.sizes]
    if progress:
        print(f"{len(files)} files, {sum(stays)} without near-copies; {len(sizes)} functions", flush=True)
    function_stays = iter(_largest(clusters(of_functions), sizes))
    shared = np.bincount(cluster, minlength=len(files))[cluster] > 1
    made: dict[int, File] = {}
    for i, one in enumerate(files):
        bits = as_bits([next(function_stays) for _ in one.sizes]) if stays[i] else None
        made[readable[i]] = File("", one.hash, int(cluster[i]) if shared[i] else None, bits)
    return _split(packages, made, {readable[i]: one.size for i, one in enumerate(files)}, validation_fraction, seed)


def look(path: Path) -> Looked | None:
    """None for a file that is empty or not UTF-8."""
    code = path.read_bytes()
    try:
        if not code.decode().strip():
            return None
    except UnicodeDecodeError:
        return None
    functions = [text.encode() for text in functions_of(code) or []]
    signatures = np.stack([signature(text) for text in functions]) if functions else np.empty((0, FUNCTIONS), np.uint32)
    return Looked(content_hash(code), len(code), signature(code), signatures, [len(text) for text in functions])


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str, Path, list[str]]]:
    """Name, version, folder and Python files of each package, by name; of several copies the one that Python imports."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name is None or name.lower() in found:
            continue
        root = Path(str(distribution.locate_file("")))
        paths = sorted(
            {
                file.as_posix()
                for file in distribution.files or ()
                if file.suffix == ".py" and ".." not in file.parts and (root / file).is_file()
            }
        )
        found[name.lower()] = (name, distribution.version, root, paths)
    wanted = [name.lower() for name in names]
    if unknown := [name for name in wanted if name not in found]:
        raise ConfigError(f"packages: '{unknown[0]}' is not installed here")
    return [found[name] for name in sorted(wanted or found.keys() - {"packmamba"}) if found[name][-1]]


def _largest(cluster: np.ndarray, sizes: list[int]) -> list[bool]:
    """Of each text whether it is its cluster's largest, of equal ones the first."""
    order = np.lexsort((np.arange(len(sizes)), -np.array(sizes, np.int64), cluster))
    first = np.flatnonzero(np.diff(cluster[order], prepend=-1))
    stays = np.zeros(len(sizes), bool)
    stays[order[first]] = True
    return stays.tolist()


def _split(
    packages: list[tuple[str, str, Path, list[str]]],
    made: dict[int, File],
    sizes: dict[int, int],
    validation_fraction: float,
    seed: int,
) -> Manifest:
    """``made`` and ``sizes`` by the file's number over all packages."""
    number = 0
    files: dict[str, list[File]] = {}
    held: dict[str, int] = {}
    for name, _, _, paths in packages:
        numbers = range(number, number + len(paths))
        number += len(paths)
        files[name] = [made[i]._replace(path=path) for i, path in zip(numbers, paths) if i in made]
        held[name] = sum(sizes[i] for i in numbers if i in made and made[i].taken)
    validation = validation_packages(held, validation_fraction, seed)
    header = {
        "format": FORMAT,
        "python": platform.python_version(),
        "seed": seed,
        "validation_fraction": validation_fraction,
        "similarity": SIMILARITY,
    }
    rows = [
        Package(name, version, "validation" if name in validation else "train", tuple(files[name]))
        for name, version, _, _ in packages
        if files[name]
    ]
    return Manifest(header, tuple(rows))


def validation_packages(sizes: dict[str, int], fraction: float, seed: int) -> set[str]:
    """Which packages are held out; ``sizes`` are the bytes that each holds."""
    wanted = fraction * sum(sizes.values())
    chosen: set[str] = set()
    held = 0
    for name in sorted(sizes, key=lambda name: share_of(name.lower().encode(), seed)):
        if held < wanted and 0 < sizes[name] <= max(LARGEST_SHARE * wanted, min(filter(None, sizes.values()))):
            chosen.add(name)
            held += sizes[name]
    if len(chosen) == sum(size > 0 for size in sizes.values()):
        raise ConfigError(
            f"validation_fraction={fraction} leaves no package to train on; lower it, or name more packages"
        )
    return chosen
