"""Source of Python code: the files of installed packages that a manifest names, whole, as functions, or as a mixture.

A manifest is a gzipped file of JSON lines. The first is a header; each further line is a package: its name, version, split and
files as ``[path, hash, cluster, functions]``. ``cluster`` is a number that near-copies share, null without one. ``functions`` is
null for a file that is left out as a near-copy; else ``n:hex``: the number of functions and, bit by bit from the lowest, which of
them are documents. ``experiments/corpus/build.py`` writes manifests.
"""

from __future__ import annotations

import ast
import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources.source import Advance, Document, Source

UNITS = ("files", "functions", "mixture")


class Manifest(NamedTuple):
    """Parsed manifest."""

    hash: str
    header: dict[str, Any]
    packages: list[dict[str, Any]]

    def taken(self) -> Iterator[tuple[dict[str, Any], str, str, list[bool]]]:
        """Yield package, path, hash and the choice of functions of every file that is not left out."""
        for package in self.packages:
            for path, hash, _, functions in package["files"]:
                if functions is not None:
                    count, _, bits = functions.partition(":")
                    yield package, path, hash, [bool(int(bits, 16) >> i & 1) for i in range(int(count))]


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest. Raises ConfigError if the file is none."""
    try:
        content = gzip.decompress(Path(path).read_bytes())
        header, *packages = map(json.loads, content.decode().splitlines())
        if header["format"] != 1:
            raise ValueError(f"format {header['format']}")
    except (EOFError, ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"data.path: expected a manifest of packages, got '{path}' ({error})") from None
    return Manifest(hashlib.blake2b(content, digest_size=16).hexdigest(), header, packages)


def open_packages(data: DataConfig) -> Source:
    """Open the files of the manifest ``data.path``; ``data.unit`` is what a document is, its group is its package.

    The manifest decides what is validation. A file that is missing or differs is an error: it would be another corpus.
    """
    if data.path is None:
        raise ConfigError("data.path: data.source=packages expected a manifest, got null")
    if data.validation_fraction != DataConfig.validation_fraction:
        raise ConfigError(f"data.validation_fraction: expected none, since {data.path} decides what is validation")
    manifest, unit = read_manifest(data.path), data.unit or "files"
    taken = list(manifest.taken())

    def read(advance: Advance, skipped: Counter[str]) -> Iterator[Document]:
        find = functools.lru_cache(importlib.metadata.distribution)
        for package, path, hash, chosen in taken:
            code = _installed(find, package, path, hash)
            whole = unit == "files" or (unit == "mixture" and int(hash[-1], 16) % 2 == 0)
            functions = [] if whole else functions_of(code) or []
            if not whole and len(functions) != len(chosen):
                raise ConfigError(f"data.path: {path} has other functions here than in the manifest; use its Python")
            for text in [code.decode()] if whole else [text for text, keep in zip(functions, chosen) if keep]:
                yield Document(package["split"] == "validation", text, group=package["name"])
            advance(1)

    return Source([manifest.hash, unit], len(taken), "files", read)


def _installed(find: Callable[[str], Any], package: dict[str, Any], path: str, hash: str) -> bytes:
    """Read a file of an installed package. Raises ConfigError unless it is the manifest's."""
    expected = f"data.path: expected {path} of {package['name']} {package['version']}, as in the manifest"
    try:
        distribution = find(package["name"])
        code = Path(distribution.locate_file(path)).read_bytes()
    except (importlib.metadata.PackageNotFoundError, FileNotFoundError):
        raise ConfigError(f"{expected}, which is not installed here") from None
    if content_hash(code) != hash:
        raise ConfigError(f"{expected}, got another file (version {distribution.version}); install that version")
    return code


def content_hash(code: bytes) -> str:
    return hashlib.blake2b(code, digest_size=8).hexdigest()


def functions_of(code: bytes) -> list[str] | None:
    """Cut out every function and method that is not nested in another function, with its decorators; None if unparsable."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = code.splitlines(keepends=True)  # of bytes: splits where the parser counts lines, not at \f
    found = []
    for function in _functions(tree):
        start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        found.append(b"".join(lines[start - 1 : function.end_lineno]).decode(encoding))
    return found


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            else:
                yield from _functions(child)
