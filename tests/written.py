"""Documents that tests write for sources, and what sources read from them."""

import gzip
import json
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from packmamba.config import ConfigError, DataConfig
from packmamba.data import encoding, streaming
from packmamba.data.sources import open_source
from packmamba.data.token_store import load_corpora

ZSTD = "backports.zstd" if sys.version_info < (3, 14) else "compression.zstd"
TEXTS = [f"document {i} ☃\u2028 " * (i % 7) + str(i) for i in range(300)]


def read(data):
    """Return every document of a source."""
    return list(open_source(data).read())


def refused(data):
    """Return the one-line ConfigError that the source raises."""
    with pytest.raises(ConfigError) as caught:
        load_corpora(data, progress=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_rows(path: Path, rows) -> Path:
    """Write a line of JSON for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_lines(path: Path, texts=TEXTS) -> Path:
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    if path.suffix == ".gz":
        # members follow each other
        lines = gzip.compress(lines[:5000]) + gzip.compress(lines[5000:])
    elif path.suffix == ".zst":
        zstd = pytest.importorskip(ZSTD)
        lines = zstd.compress(lines[:5000]) + zstd.compress(lines[5000:])
    path.write_bytes(lines)
    return path


def write_texts(folder: Path, texts) -> Path:
    """Write a file for each text, by its number."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return folder


def of(path, source="jsonl", **keys):
    return DataConfig(source=source, path=str(path), **{"validation_fraction": 0.2, **keys})


def write_small_shards(monkeypatch, tokens):
    """Write shards of a streamed corpus in a thread of this process, the first of so many tokens."""
    monkeypatch.setattr(streaming, "FIRST_TOKENS", tokens)
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 3)

    def start(data, folder):
        opened = encoding.open_documents(data, shards=[tokens, streaming.DOUBLINGS])
        threading.Thread(target=streaming.write_shards, args=(folder, data, opened)).start()
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(streaming, "_start_writer", start)


def write_megatron(prefix, documents, code=8, dtype="<u2", cut=1):
    """Write as Megatron does: a sequence for each document, or ``cut`` sequences."""
    sequences = [part for document in documents for part in np.array_split(np.array(document, dtype), cut)]
    ends = np.cumsum([0, *map(len, sequences)])
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    places, starts = ends[:-1] * np.dtype(dtype).itemsize, np.arange(len(documents) + 1) * cut
    parts = np.diff(ends).astype("<i4"), places.astype("<i8"), starts.astype("<i8")
    prefix.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    return prefix
