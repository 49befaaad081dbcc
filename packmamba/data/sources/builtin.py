"""Sources without files: the standard library's functions, random ids, examples of a task."""

import functools
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import DataConfig, need, refusing
from packmamba.data.lengths import draw_lengths
from packmamba.data.sources.packages import functions_of
from packmamba.data.sources.source import SEED, Document, Source, hash_files, list_files
from packmamba.data.sources.splits import held_out_counts, split_by_name

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
LIBRARY = Path(sysconfig.get_path("stdlib"))
CHUNK = 1024  # documents drawn at a time; their ids depend on it


@functools.cache
def library_files() -> list[str]:
    """List the standard library's modules, without dangling links."""
    return [name for name in list_files(LIBRARY, (".py",), SKIPPED_FOLDERS) if (LIBRARY / name).is_file()]


@functools.cache
def standard_library() -> tuple[tuple[str, str], ...]:
    """Return (top-level module or folder, text) of each module."""
    paths = sorted(map(Path, library_files()))
    texts = ((LIBRARY / path).read_text(encoding="utf-8", errors="replace") for path in paths)
    return tuple((path.parts[0].removesuffix(".py"), text) for path, text in zip(paths, texts))


def open_stdlib(data: DataConfig) -> Source:
    """Open the functions of Python's standard library, held out by file."""
    files = library_files()
    fingerprint = [platform.python_version(), str(LIBRARY), hash_files(LIBRARY, files)]
    texts = lambda name: functions_of((LIBRARY / name).read_bytes()) or ()
    return split_by_name(fingerprint, files, files, texts, data)


def open_synthetic(data: DataConfig) -> Source:
    """Open documents of random ids, with lengths of ``data.distribution``."""
    count, _ = held_out_counts(data.num_documents, data)

    def read() -> Iterator[Document]:
        lengths = draw_lengths(data.distribution, data.num_documents, SEED)
        split_rng, token_rng = (np.random.Generator(np.random.PCG64([SEED, stream])) for stream in (1, 2))
        held_out = np.zeros(data.num_documents, bool)
        held_out[split_rng.choice(data.num_documents, count, replace=False)] = True
        for first in range(0, data.num_documents, CHUNK):
            ends = np.cumsum(lengths[first : first + CHUNK], dtype=np.int64)
            tokens = token_rng.integers(data.vocab_size, size=int(ends[-1]), dtype=np.uint32)
            yield from map(Document, held_out[first : first + CHUNK].tolist(), np.split(tokens, ends[:-1]))

    return Source([data.distribution, data.num_documents, data.vocab_size], read, data.vocab_size)


def open_task(data: DataConfig) -> Source:
    # Here, since a task reads the standard library.
    from packmamba.data.tasks import TASKS

    need(data.task in TASKS, "data.task", f"one of {', '.join(TASKS)} with data.source=task", f"'{data.task}'")
    with refusing(TypeError, ValueError, prefix="data.task_options: "):
        task: Any = TASKS[str(data.task)](**data.task_options)
    most = getattr(task, "num_examples", None) or data.num_documents
    expected = f"at most the {most} of task '{data.task}'"
    need(data.num_documents <= most, "data.num_documents", expected, data.num_documents)
    validation, _ = held_out_counts(data.num_documents, data)
    trained = data.num_documents - validation

    def read() -> Iterator[Document]:
        for index in range(data.num_documents):
            example = task.example(SEED, index)
            yield Document(index >= trained, example.tokens, np.where(example.mask, example.targets, -1))

    return Source([data.task, dict(sorted(data.task_options.items())), data.num_documents], read, task.vocab_size)
