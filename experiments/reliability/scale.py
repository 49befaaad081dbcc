"""Corpora larger than memory, planned from their lengths and streamed from their tokens: how much memory do they take?"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np

from experiments.reliability.processes import held
from packmamba.config import ConfigError, above, at_least, key, load_config
from packmamba.data.datamodule import PackingDataModule
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.schedule import WINDOW_DOCUMENTS, Schedule
from packmamba.records import append_record, make_record, provenance
from packmamba.timing import OtherPrograms

LOOK_SECONDS = 0.05


@dataclass
class Config:
    experiment: str = key("reliability", "The question, which the records name.")
    documents: int = key(100_000_000, "Lengths to plan.", at_least(1))
    gigabytes: float = key(10.0, "Tokens to stream, in 10^9 bytes on the disk.", above(0))
    steps: int = key(100, "Steps to stream of every million documents.", at_least(1))
    keys: list[str] = key([], "Of the section data, as key=value.")
    arms: list[str] = key(["lengths", "tokens"], "What is measured: lengths, tokens, or both.")
    folder: Optional[str] = key(None, "Where files lie meanwhile; null for the system's folder for such.")

    def problems(self) -> Iterator[str]:
        try:
            load_config(None, self.keys)
        except ConfigError as error:
            yield f"keys: {error}"
        if unknown := [arm for arm in self.arms if arm not in ARMS]:
            yield f"arms: expected {' or '.join(ARMS)}, got {unknown[0]!r}"


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record for each arm, each measured in a process of its own.

    metrics: peak_resident_bytes, with the pages of mapped files that this process has read, and peak_anonymous_bytes, without,
    both looked at every 50 ms; start_resident_bytes, what the process has before it begins; seconds, cpu_seconds; documents;
    bytes, of the mapped files; of lengths: windows, rows, padding_fraction; of tokens: steps, real_tokens. The curve ``samples``
    has memory window by window.
    """
    provenance()
    for name in c.arms:
        others, begun = OtherPrograms(), time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="scale-", dir=c.folder) as folder:
            need = 4 * c.documents if name == "lengths" else 3e9 * c.gigabytes
            if (free := shutil.disk_usage(folder).free) < need:
                raise ConfigError(f"folder: {folder} needs room for {need / 1e9:.0f} GB and has {free / 1e9:.0f}")
            made = _elsewhere(PREPARE[name], c, folder)
            metrics, samples = _elsewhere(ARMS[name], c, folder)
        record = make_record(
            kind="scale",
            experiment=c.experiment,
            arm=name,
            config=asdict(c),
            seed=0,
            corpus_hash=f"documents-2k ({LENGTH_DISTRIBUTIONS['documents-2k']})",
            metrics={**made, **metrics, "cores_of_others": others.cores()},
            curves={"samples": samples},
            wall_seconds=time.perf_counter() - begun,
        )
        append_record(records_path, record)


class Memory(threading.Thread):
    """Looks at this process's memory until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_resident_bytes = held(os.getpid()).resident_bytes
        self.resident = self.anonymous = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> dict[str, float]:
        found = held(os.getpid())
        self.resident, self.anonymous = (
            max(self.resident, found.resident_bytes),
            max(self.anonymous, found.anonymous_bytes),
        )
        return {"resident_bytes": found.resident_bytes, "anonymous_bytes": found.anonymous_bytes}


def _watched(work: Callable[[Memory], dict[str, Any]]) -> dict[str, Any]:
    memory, begun, cpu = Memory(), time.perf_counter(), time.process_time()
    memory.start()
    metrics = work(memory)
    memory.look()
    memory.ended.set()
    return metrics | {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "start_resident_bytes": memory.start_resident_bytes,
        "peak_resident_bytes": memory.resident,
        "peak_anonymous_bytes": memory.anonymous,
    }


def make_lengths(c: Config, folder: str) -> dict[str, Any]:
    """A file of lengths, as a corpus has it."""
    with open(Path(folder) / "lengths", "wb") as file:
        for number, first in enumerate(range(0, c.documents, WINDOW_DOCUMENTS)):
            file.write(draw_lengths("documents-2k", min(WINDOW_DOCUMENTS, c.documents - first), number).tobytes())
    return {"documents": c.documents}


def plan_lengths(c: Config, folder: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Every window of an epoch, planned by the library from the mapped file."""
    lengths = np.memmap(Path(folder) / "lengths", np.int32, "r")
    corpus = SimpleNamespace(lengths=lengths, num_documents=len(lengths))
    samples = []

    def work(memory: Memory) -> dict[str, Any]:
        schedule = Schedule(corpus, load_config(None, c.keys).data, seed=0)  # type: ignore[arg-type]
        rows = slots = tokens = 0
        windows = -(-len(lengths) // WINDOW_DOCUMENTS)
        for window in range(windows):
            arrangement, _ = schedule.step(schedule._first_steps[-1])
            rows, slots = rows + arrangement.plan.num_rows, slots + arrangement.plan.num_slots
            tokens += arrangement.plan.num_tokens
            samples.append({"window": window, "steps": schedule._first_steps[-1], **memory.look()})
        if tokens != (expected := int(lengths.sum(dtype=np.int64))):
            raise RuntimeError(f"an epoch has {tokens} tokens where documents have {expected}")
        return {
            "windows": windows,
            "rows": rows,
            "padding_fraction": 1 - tokens / slots,
            "steps": schedule._first_steps[-1],
        }

    return _watched(work) | {"bytes": lengths.nbytes}, samples


def tokens_config(c: Config, folder: str) -> Any:
    mean = float(draw_lengths("documents-2k", 100_000, 0).mean())
    count = round(c.gigabytes * 1e9 / 2 / mean)
    own = [
        "data.source=synthetic",
        "data.distribution=documents-2k",
        "data.vocab_size=50000",
        "data.validation_fraction=0.001",
    ]
    return load_config(None, [*own, f"data.num_documents={count}", f"data.cache_dir={folder}/corpora", *c.keys])


def make_tokens(c: Config, folder: str) -> dict[str, Any]:
    """A token store of so many bytes, made by the library."""
    data = PackingDataModule(tokens_config(c, folder), progress=False)
    train = data.corpora.train
    return {"documents": train.num_documents, "bytes": train.tokens.nbytes}


def stream_tokens(c: Config, folder: str) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Steps of every window of an epoch, as training gets them: documents are drawn from all over the store."""
    data = PackingDataModule(tokens_config(c, folder), progress=False)
    samples = []

    def work(memory: Memory) -> dict[str, Any]:
        data.setup()
        schedule, real, steps = data.steps.schedule, 0, 0
        for window in range(-(-data.corpora.train.num_documents // WINDOW_DOCUMENTS)):
            first = schedule._first_steps[window]
            for step in range(first, first + c.steps):
                real += sum(batch.layout.num_tokens for batch in data.steps[step].batches)
                steps += 1
            samples.append({"window": window, "steps": steps, **memory.look()})
            schedule.step(first)  # how many steps the window has
        return {"steps": steps, "real_tokens": real}

    return _watched(work), samples


PREPARE = {"lengths": make_lengths, "tokens": make_tokens}
ARMS = {"lengths": plan_lengths, "tokens": stream_tokens}


def _elsewhere(work: Callable, c: Config, folder: str) -> Any:
    """In a process of its own, so that no memory is left of what was before."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(work, (c, folder))
