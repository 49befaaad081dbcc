"""Where documents come from: a source streams its documents in a fixed order and never holds them all.

Whether a document is held out for validation depends on its name or content and ``data.corpus_seed``, never on the
order of files or documents.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import platform
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths

# Tests are not typical functions, lib2to3's hold broken files, and installed packages are not the standard library.
STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
SYNTHETIC_CHUNK = 1024


class Document(NamedTuple):
    held_out: bool
    """Belongs to the validation split."""
    content: Any
    """str; from the synthetic source token ids, (length,) uint32."""


@dataclass(frozen=True)
class Source:
    """A stream of documents, checked and ready to be read as often as one likes."""

    fingerprint: list[Any]
    """JSON values that change whenever what `read` yields may change, tokenizer and split apart."""
    total: int
    """How far `read` advances in all, in `unit`."""
    unit: str
    """B (bytes of source files) or documents."""
    read: Callable[[Callable[[int], object], Counter[str]], Iterator[Document]]
    """read(advance, skipped) yields every document, calls advance(n) on its way, counts in `skipped` what it skips."""


def open_source(data: DataConfig) -> Source:
    """The documents of ``data.source``; files are listed, none is read yet.

    - ``stdlib``: every function and method of the running Python's standard library that is not nested in another
      function, as it stands in its file, decorators included. Held out by file. A file that does not parse is skipped
      and counted (``unparsable_files``).
    - ``text``: every file below the folder ``data.path`` whatever its suffix, each file a document; hidden files and
      folders (leading dot) are not read, links to folders not followed. Held out by file.
    - ``jsonl``: ``data.text_key`` of every line of the file ``data.path``, or of every ``*.jsonl`` file below the
      folder ``data.path``. Lines of white space are no documents. Held out by a hash of the document's text, so equal
      documents are in one split; the share is met on average, with at least one document.
    - ``synthetic``: lengths are ``draw_lengths(data.distribution, data.num_documents, data.corpus_seed)`` exactly, ids
      uniform below ``data.vocab_size``. ``data.tokenizer``, ``data.begin_token`` and ``data.end_token`` do not apply:
      the documents are token ids already, and tokens put around them would change their lengths. Held out by document.

    Raises ConfigError naming the key. `Source.read` raises it too: a text file that is not UTF-8, a broken JSON line
    (file and line named) unless ``data.bad_lines`` is skip, then they are counted (``bad_lines``).
    """
    sources = {"stdlib": _stdlib, "text": _text, "jsonl": _jsonl, "synthetic": _synthetic}
    if data.source not in sources:
        raise ConfigError(f"data.source '{data.source}' is unknown; known: {', '.join(sources)}")
    if not 0 <= data.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction must be at least 0 and below 1, got {data.validation_fraction}")
    if data.corpus_seed < 0:
        raise ConfigError(f"data.corpus_seed must not be negative, got {data.corpus_seed}")
    if data.bad_lines not in ("error", "skip"):
        raise ConfigError(f"data.bad_lines must be error or skip, got '{data.bad_lines}'")
    if data.path is not None and data.source in ("stdlib", "synthetic"):
        raise ConfigError(f"data.path is '{data.path}', but data.source={data.source} reads no path: set text or jsonl")
    return sources[data.source](data)


def _stdlib(data: DataConfig) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = _list_files(root, lambda name: name.endswith(".py"), STDLIB_SKIPPED_FOLDERS)
    if not files:
        raise ConfigError(f"data.source=stdlib finds no Python files in {root}; set data.source to text or jsonl")
    fingerprint, total = _stat(root, files)
    held_out = _held_out_files(files, data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        for name in files:
            code = (root / name).read_bytes()
            try:
                encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
                tree = ast.parse(code)
            except (SyntaxError, ValueError):
                skipped["unparsable_files"] += 1
            else:
                lines = code.splitlines(keepends=True)  # of bytes: splits where the parser counts lines, not at \f
                for function in _functions(tree):
                    start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
                    text = b"".join(lines[start - 1 : function.end_lineno]).decode(encoding)
                    yield Document(name in held_out, text)
            advance(len(code))

    return Source([platform.python_version(), str(root), fingerprint], total, "B", read)


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            else:
                yield from _functions(child)


def _text(data: DataConfig) -> Source:
    root = _path(data)
    if not root.is_dir():
        raise ConfigError(f"data.path '{data.path}' is not a folder; data.source=text reads a folder of text files")
    files = _list_files(root, lambda name: True)
    filled = [name for name in files if (root / name).stat().st_size]
    if not filled:
        raise ConfigError(f"data.path '{data.path}' holds no text: the folder has {len(files)} files, all empty")
    fingerprint, total = _stat(root, files)
    held_out = _held_out_files(filled, data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        for name in files:
            content = (root / name).read_bytes()
            try:
                text = content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{root / name} in data.path is not UTF-8 text (byte {error.start}); move it out of the folder"
                ) from None
            yield Document(name in held_out, text)
            advance(len(content))

    return Source([str(root.resolve()), fingerprint], total, "B", read)


def _jsonl(data: DataConfig) -> Source:
    path = _path(data)
    root, files = path.parent, [path.name]
    if path.is_dir():
        root, files = path, _list_files(path, lambda name: name.endswith(".jsonl"))
        if not files:
            raise ConfigError(f"data.path '{data.path}' has no .jsonl file in it")
    fingerprint, total = _stat(root, files)

    def texts(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[str]:
        for name in files:
            with open(root / name, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace():
                        try:
                            yield _json_text(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, data.text_key)
                        except _BadLine as error:
                            if data.bad_lines == "error":
                                raise ConfigError(
                                    f"{root / name}:{number} {error}; mend the line, or set data.bad_lines=skip"
                                ) from None
                            skipped["bad_lines"] += 1
                    advance(len(line))

    def share(text: str) -> float:
        return _share(text.encode(), data.corpus_seed)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        limit = _reachable_limit(map(share, filter(None, texts(lambda _: None, Counter()))), data.validation_fraction)
        for text in texts(advance, skipped):
            yield Document(share(text) < limit, text)

    return Source([str(root.resolve()), data.text_key, data.bad_lines, fingerprint], total, "B", read)


class _BadLine(Exception):
    """What is wrong with a JSON line, as the end of a sentence."""


def _json_text(line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"is not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is not JSON that can be read ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine(f"is not a JSON object with a field '{key}' (data.text_key)")
    if key not in record:
        raise _BadLine(f"has no field '{key}' (data.text_key); its fields: {', '.join(record) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise _BadLine(f"has a field '{key}' (data.text_key) that is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"has half a surrogate pair in its field '{key}', which is not Unicode text") from None
    return text


def _reachable_limit(shares: Iterable[float], fraction: float) -> float:
    """`fraction`, or just above the smallest share where no share is below it; reads about 1 / fraction shares."""
    smallest = 1.0
    for share in shares if fraction else ():
        if share < fraction:
            return fraction
        smallest = min(smallest, share)
    return float(np.nextafter(smallest, 2)) if fraction else 0.0


def _synthetic(data: DataConfig) -> Source:
    if data.distribution not in LENGTH_DISTRIBUTIONS:
        known = ", ".join(LENGTH_DISTRIBUTIONS)
        raise ConfigError(f"data.distribution '{data.distribution}' is unknown; known: {known}")
    if data.num_documents < 1:
        raise ConfigError(f"data.num_documents must be at least 1, got {data.num_documents}")
    if not 1 <= data.vocab_size <= 2**32:
        raise ConfigError(f"data.vocab_size must be from 1 to 2**32, got {data.vocab_size}")
    count = _held_out_count(data.num_documents, "documents", data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        lengths = draw_lengths(data.distribution, data.num_documents, data.corpus_seed)
        held_out = np.zeros(data.num_documents, bool)
        split_rng = np.random.Generator(np.random.PCG64([data.corpus_seed, 1]))
        held_out[split_rng.choice(data.num_documents, count, replace=False)] = True
        token_rng = np.random.Generator(np.random.PCG64([data.corpus_seed, 2]))
        for first in range(0, data.num_documents, SYNTHETIC_CHUNK):
            chunk = lengths[first : first + SYNTHETIC_CHUNK]
            ends = np.cumsum(chunk, dtype=np.int64)
            tokens = token_rng.integers(data.vocab_size, size=int(ends[-1]), dtype=np.uint32)
            for index, document in enumerate(np.split(tokens, ends[:-1]), first):
                yield Document(bool(held_out[index]), document)
            advance(len(chunk))

    return Source([data.distribution, data.num_documents, data.vocab_size], data.num_documents, " documents", read)


def _path(data: DataConfig) -> Path:
    if data.path is None:
        raise ConfigError(f"data.source={data.source} needs data.path")
    path = Path(data.path)
    if not path.exists():
        raise ConfigError(f"data.path '{data.path}' does not exist")
    return path


def _list_files(root: Path, keep: Callable[[str], bool], skipped_folders: Iterable[str] = ()) -> list[str]:
    """Relative POSIX names of the files below `root`, sorted."""

    def fail(error: OSError) -> None:
        raise ConfigError(f"cannot list the folder {error.filename} of data.path ({error.strerror})") from None

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if not name.startswith(".") and keep(name)]
    return sorted(found)


def _stat(root: Path, files: list[str]) -> tuple[str, int]:
    """A hash of the files' names, sizes and modification times, and their bytes in all."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    for name in files:
        stat = (root / name).stat()
        digest.update(os.fsencode(name) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        total += stat.st_size
    return digest.hexdigest(), total


def _held_out_files(files: list[str], data: DataConfig) -> frozenset[str]:
    ranked = sorted(files, key=lambda name: _share(os.fsencode(name), data.corpus_seed))
    return frozenset(ranked[: _held_out_count(len(files), "files", data)])


def _held_out_count(available: int, what: str, data: DataConfig) -> int:
    count = max(1, round(data.validation_fraction * available)) if data.validation_fraction else 0
    if count == available:
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction} holds out {count} of {available} {what}, leaving "
            f"none to train on; lower it, or add {what}"
        )
    return count


def _share(name: bytes, seed: int) -> float:
    """Uniform in [0, 1), a function of the name and the seed."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=6, key=str(seed).encode()).digest(), "little") / 2**48
