"""Source of Python code: the files of installed packages that a manifest names.

A document is a whole file, or a function; or both are mixed.

A manifest is gzipped JSON lines: a header, then packages: name, version, split and files as
``[path, hash, cluster, functions]``. ``functions``: null for a near-copy that is left out; else
``n:hex``, their number and, from the lowest bit, which are documents.
"""

import ast
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import json
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import ConfigError, DataConfig, need, refusing
from packmamba.data.sources.source import Document, Source
from packmamba.data.sources.splits import refuse_splits


class Manifest(NamedTuple):
    """Hold a manifest: its hash, its header, and each package's files."""

    hash: str
    header: dict[str, Any]
    packages: list[dict[str, Any]]

    def taken(self) -> Iterator[tuple[dict[str, Any], str, str, list[bool]]]:
        """Yield package, path, hash and chosen functions of files."""
        for package in self.packages:
            for path, hash, _, functions in package["files"]:
                if functions is not None:
                    count, _, bits = functions.partition(":")
                    yield (package, path, hash, [bool(int(bits, 16) >> i & 1) for i in range(int(count))])


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest. Raises ConfigError naming the file."""
    prefix = f"data.path: expected a manifest of packages, got '{path}' ("
    with refusing(EOFError, ValueError, KeyError, TypeError, OSError, prefix=prefix, suffix=")"):
        content = gzip.decompress(Path(path).read_bytes())
        header, *packages = map(json.loads, content.decode().splitlines())
        if header["format"] != 1:
            raise ValueError(f"format {header['format']}")
    return Manifest(hashlib.blake2b(content, digest_size=16).hexdigest(), header, packages)


def open_packages(data: DataConfig) -> Source:
    """Open the files of the manifest ``data.path``, which splits them.

    A document's group is its package.
    """
    refuse_splits(data)
    manifest, unit = read_manifest(data.path or ""), data.unit or "files"
    find = functools.lru_cache(importlib.metadata.distribution)

    def read() -> Iterator[Document]:
        for package, path, hash, chosen in manifest.taken():
            code = b""
            with contextlib.suppress(importlib.metadata.PackageNotFoundError, FileNotFoundError):
                code = Path(str(find(package["name"]).locate_file(path))).read_bytes()
            wanted = f"{path} of {package['name']} {package['version']}"
            need(content_hash(code) == hash, "data.path", wanted, "another or none; install that version")
            whole = unit == "files" or (unit == "mixture" and int(hash[-1], 16) % 2 == 0)
            texts = [code.decode()] if whole else functions_of(code) or []
            if not whole and len(texts) != len(chosen):
                raise ConfigError(f"data.path: {path} has other functions than in the manifest; use its Python")
            for text in texts if whole else itertools.compress(texts, chosen):
                yield Document(package["split"] == "validation", text, group=package["name"])

    return Source([manifest.hash, unit], read, names_splits=True)


def content_hash(code: bytes) -> str:
    return hashlib.blake2b(code, digest_size=8).hexdigest()


def functions_of(code: bytes) -> list[str] | None:
    """Cut out functions and methods, not nested ones, with decorators; None if unparsable."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    # Of bytes: splits where the parser counts lines, not at \f.
    lines = code.splitlines(keepends=True)
    texts = []
    for function in _functions(tree):
        start = min(part.lineno for part in (function, *function.decorator_list))
        texts.append(b"".join(lines[start - 1 : function.end_lineno]).decode(encoding))
    return texts


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            else:
                yield from _functions(child)
