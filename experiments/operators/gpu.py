"""Time and memory of the packed operators on a GPU, beside the peers', against tokens, channels and
documents.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import timing
from experiments.operators import gpu_implementations
from experiments.operators.arms import GPU_ARMS, GpuArm
from experiments.operators.gpu_implementations import HEAD_CHANNELS, STATES, Implementation, Inputs, Phases, Reference
from packmamba import SequenceLayout
from packmamba.config import ConfigError, key
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.lab.records import append_record, make_record, provenance

HERE = [name for name, arm in GPU_ARMS.items() if not arm.per_token]
COPY = "copy"  # takes a turn with the arms: the rate of copying

Metrics = dict[str, float | None]
# ||a - b|| / ||b|| against float64, by the activations' dtype: of outputs, of gradients, and of outputs of the peers, which
# round more often.
TOLERANCES = {"bfloat16": (2e-3, 5e-3, 1e-2), "float16": (5e-4, 2e-3, 1e-2), "float32": (1e-5, 5e-5, 1e-4)}


@dataclass
class Config:
    experiment: str = key("operators", "The question, which the records name.")
    arms: list[str] = key(HERE, "Arms of arms.GPU_ARMS.", choices=HERE, check=("at least one arm", bool))
    shapes: list[str] = key(["16384,4096,documents-2k"], "tokens,channels,documents: a distribution, one, or a length.")
    dtype: str = key("bfloat16", "Type of the activations: bfloat16, float16 or float32.", choices=TOLERANCES)
    layouts: int = key(20, "Rows that a time is a mean over; of documents of a fixed length, one, five times.", low=1)
    rounds: int = key(5, "How often each arm is timed, in turns.", low=1)
    slow_rounds: int = key(3, "How often mamba-ssm document by document and padded is, within the first rounds.", low=1)
    slow_tokens: int = key(16384, "Longest row that is run document by document or padded, which take minutes.")
    seed: int = key(0, "Of the documents' lengths and of the tensors.", low=0)


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append one record per shape and arm, timed in turns over all layouts; RuntimeError if one is
    wrong.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu_operators: needs a GPU")
    provenance()  # of the code as it is now, not as it may be after minutes
    for shape in c.shapes:
        began = time.perf_counter()
        tokens, channels, documents, rows = draw_shape(c, shape)
        results = _measure(c, tokens, channels, documents, rows)
        torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        if progress:
            totals = ", ".join(f"{arm} {1e3 * (m['total_seconds'] or 0):.4g}" for arm, m in results.items())
            print(f"{tokens} x {channels}, {documents} ({seconds:.0f} s): ms {totals}", flush=True)
        for arm, metrics in results.items():
            config = GPU_ARMS[arm].fields() | {"tokens": tokens, "channels": channels, "documents": documents}
            config |= {"states": STATES, "dtype": c.dtype, "layouts": len(rows), "rounds": c.rounds}
            config |= {"mean_documents": sum(map(len, rows)) / len(rows)}
            corpus = f"random tensors, documents as configured, seed {c.seed}"
            record = make_record("gpu_operators", c.experiment, arm, config, c.seed, corpus, metrics, seconds)
            append_record(records_path, record)


def draw_shape(c: Config, shape: str) -> tuple[int, int, str, list[list[int]]]:
    """Tokens, channels, documents, and the documents' lengths of every row.

    ValueError if it is none.
    """
    tokens, channels, documents = (part.strip() for part in shape.split(","))
    if int(channels) % HEAD_CHANNELS or int(channels) < 1:
        raise ValueError(f"expected channels to be a multiple of {HEAD_CHANNELS}")
    return int(tokens), int(channels), documents, draw_rows(documents, int(tokens), c.layouts, c.seed)


def draw_rows(documents: str, tokens: int, layouts: int, seed: int) -> list[list[int]]:
    """Rows of whole documents in order, the last one cut to fill the row; one row if their length
    is fixed.
    """
    if tokens < 1 or layouts < 1:
        raise ValueError("expected at least one token and one layout")
    if documents in LENGTH_DISTRIBUTIONS:
        drawn = [draw_lengths(documents, tokens, seed + i) for i in range(layouts)]
    else:
        length = tokens if documents == "one" else int(documents)
        if length < 1:
            raise ValueError("expected documents of at least one token")
        drawn = [np.full(-(-tokens // length), length)]
    ends = [np.minimum(np.cumsum(lengths), tokens) for lengths in drawn]
    return [[int(n) for n in np.diff(row, prepend=0) if n] for row in ends]


def _measure(c: Config, tokens: int, channels: int, documents: str, rows: list[list[int]]) -> dict[str, Metrics]:
    shape = (tokens, channels, documents, rows, c.seed, c.dtype)
    arms = {name: GPU_ARMS[name] for name in c.arms if tokens <= c.slow_tokens or not GPU_ARMS[name].slow}
    here = Prepared(*shape, arms)
    scans = [name for name in here.arms if arms[name].operator == "scan"]
    ours = [name for name in scans if arms[name].implementation.startswith("packmamba")]
    memory = {name: here.memory(name) for name in ours}
    turns: dict[str, Callable[[int], Any]] = {COPY: lambda _: copy_bytes_per_second()}
    turns |= {name: lambda _, name=name: here.seconds(name) for name in here.arms}  # type: ignore[misc]
    slow = {name: c.slow_rounds for name in here.arms if arms[name].slow}
    times = timing.take_turns(turns, c.rounds, at_most=slow)
    hardware = {
        "copy_bytes_per_second": timing.median(times.pop(COPY)),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "clock_hz": clock_hz(),
    }
    results: dict[str, Metrics] = {}
    for name, rounds in times.items():
        forward, *backward = zip(*rounds)
        kept_bytes, workspace = memory.get(name, (None, None))
        output_error, gradient_error = here.errors.get(name, (None, None))
        results[name] = {
            **_statistics("forward", forward),
            **_statistics("backward", *backward),
            **_statistics("total", list(map(sum, rounds))),
            "kept_activations": kept_bytes,
            "workspace_activations": workspace,
            "output_error": output_error,
            "gradient_error": gradient_error,
            **hardware,
        }
    return results


def _statistics(phase: str, values: Sequence[float] | None = None) -> Metrics:
    """A phase's median and spread, null for a phase that is not there."""
    found = (None, None) if values is None else (timing.median(values), timing.spread(values))
    return dict(zip((f"{phase}_seconds", f"{phase}_spread"), found))


COPY_BYTES = 2**31
CHECKED_CHANNELS = 16
# padded documents are at least as long as their distribution's longest, where that is at most this
PAD_TO = 2048

Errors = dict[str, tuple[float, float | None]]


class Prepared:
    """Make and check the arms of one shape; leave out peers that are not installed.

    RuntimeError if one is wrong.
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        documents: str,
        rows: list[list[int]],
        seed: int,
        dtype: str,
        arms: Mapping[str, GpuArm],
    ) -> None:
        self.layouts = [SequenceLayout.from_lengths([row], row_length=tokens).to("cuda") for row in rows]
        some = torch.linspace(0, channels - 1, CHECKED_CHANNELS, device="cuda").long()
        inputs = Inputs.random(tokens, channels, seed, "cuda", getattr(torch, dtype))
        distribution = LENGTH_DISTRIBUTIONS.get(documents)
        pad_to = distribution.longest if distribution and distribution.longest <= PAD_TO else 0
        self.arms, references = gpu_implementations.build(arms, inputs, some, pad_to)
        # What the allocator hands out next is this, so that an element that is not written fails
        # the check.
        torch.full((8 * tokens * channels,), torch.nan, device="cuda")
        self.errors = check(self.arms, references, self.layouts[0], some, TOLERANCES[dtype])
        self._waits = {name: launch_cycles(lambda: arm.phases(self.layouts[0])) for name, arm in self.arms.items()}  # noqa: B023

    def seconds(self, name: str) -> list[float]:
        """Forward and, where there is one, backward of an arm, a mean over the layouts; of one
        layout, five times.
        """
        layouts = self.layouts if len(self.layouts) > 1 else self.layouts * 5
        return device_seconds((self.arms[name].phases(layout) for layout in layouts), self._waits[name])

    def memory(self, name: str) -> tuple[float, float]:
        """Measure an arm's memory, in activations: saved by its forward besides outputs, and its
        backward's peak.
        """
        arm = self.arms[name]
        assert arm.backward is not None
        call = arm.prepare(self.layouts[0])
        arm.forward(call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        outputs = arm.forward(call)
        kept = torch.cuda.memory_allocated() - before - _bytes(outputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = arm.backward(outputs, call)
        activation = _bytes(outputs[:1])
        workspace = torch.cuda.max_memory_allocated() - before - _bytes(gradients)
        return kept / activation, workspace / activation


def device_seconds(runs: Iterable[Phases], wait: int) -> list[float]:
    """Time each phase on the GPU, a mean over runs; before each it waits ``wait`` cycles, so that
    the host has launched it.
    """
    marks = []
    gc.collect()
    gc.disable()  # a collection between two launches would show
    try:
        for run in runs:
            next(run)
            torch.cuda._sleep(wait)
            marks.append([_event(), *(_event() for _ in run)])
        torch.cuda.synchronize()
    finally:
        gc.enable()
    phases = zip(*([a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])] for events in marks))
    return [statistics.fmean(taken) for taken in phases]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def launch_cycles(phases: Callable[[], Phases]) -> int:
    """Return GPU cycles in which the host surely launches all phases: twice the slowest of three
    runs, after a warm-up.
    """
    taken = []
    for _ in range(4):
        run = phases()
        next(run)
        torch.cuda.synchronize()
        taken.append(timing.seconds(lambda: list(run)))  # noqa: B023
    return int(min(2 * max(taken[1:]) + 3e-4, 0.05) * clock_hz())


@cache
def clock_hz() -> float:
    """Return the highest clock of the GPU's multiprocessors."""
    command = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits", "--id=0"]
    return 1e6 * float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def check(
    arms: Mapping[str, Implementation],
    references: dict[str, Reference],
    layout: SequenceLayout,
    some: torch.Tensor,
    tolerances: tuple[float, float, float],
) -> Errors:
    """(output error, gradient error) of every arm that can be held against float64.

    RuntimeError if one is wrong.
    """
    expected: dict[str, torch.Tensor] = {}
    errors: Errors = {}
    for name, arm in arms.items():
        if arm.output is None:
            continue
        prepared = arm.prepare(layout)
        if arm.gradients:
            found = prepared.errors(some)
            gradients = {what: error for what, error in found.items() if what.startswith("grad")}
            outputs = {what: error for what, error in found.items() if what not in gradients}
            limits = tolerances[:2]
        else:
            if arm.expects not in expected:
                expected[arm.expects] = references[arm.expects](layout)
            with torch.no_grad():
                y = arm.output(arm.forward(prepared), prepared).index_select(2, some)
            error = gpu_implementations.relative_error(y, expected[arm.expects])
            outputs, gradients, limits = {"output": error}, {}, (tolerances[2], 0)
        for kind, limit in zip((outputs, gradients), limits):
            for what, error in kind.items():
                if not error <= limit:
                    raise RuntimeError(f"{name}: {what} is off by {error:.1e}; nothing is timed")
        errors[name] = max(outputs.values()), max(gradients.values(), default=None)
    return errors


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by copying 2 GiB."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def copy() -> Phases:
        yield
        target.copy_(source)
        yield

    return 2 * COPY_BYTES / device_seconds((copy() for _ in range(3)), int(2e-4 * clock_hz()))[0]


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
