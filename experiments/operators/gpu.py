"""Time and memory of the packed operators on a GPU, beside the peers', against tokens, channels and documents."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.operators.gpu_arms import HEAD_CHANNELS, STATES
from experiments.operators.gpu_turns import (
    INDEXED,
    SLOW_ARMS,
    Elsewhere,
    Turns,
    clock_hz,
    copy_bytes_per_second,
    elsewhere,
)
from experiments.operators.positions import position_bytes
from packmamba.config import ConfigError
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.records import append_record, make_record, provenance


@dataclass
class OperatorBenchConfig:
    bench: str = "gpu_operators"
    """Which benchmark this is."""
    experiment: str = "operators"
    """The question, which the records name."""
    shapes: list[str] = field(default_factory=lambda: ["16384,4096,documents-2k"])
    """tokens,channels,documents each; documents: documents-2k, short, heavy, one, or the length of every document."""
    layouts: int = 20
    """Rows of different documents that a time is a mean over; where documents have a fixed length, one, five times."""
    rounds: int = 5
    """How often each arm is timed, in turns."""
    slow_rounds: int = 3
    """How often mamba-ssm document by document and padded is, within the first rounds."""
    slow_tokens: int = 16384
    """Rows longer than this are not run document by document or padded: the time per token stays, and takes minutes."""
    seed: int = 0
    """Of the documents' lengths and of the tensors."""


Config = OperatorBenchConfig
Metrics = dict[str, float | None]


def run(config: OperatorBenchConfig | Mapping[str, Any], records_path: Path, progress: bool = True) -> None:
    """Appends one record per shape and arm.

    Arms of a shape are timed in turns, each time over all layouts, inputs larger than the L2 cache, outputs poisoned by
    what other arms left. metrics: forward_seconds, backward_seconds, total_seconds (medians over rounds), their spreads
    (interquartile ranges), kept_activations and workspace_activations (bfloat16 tensors of tokens x channels),
    output_error and gradient_error (the gate's; the largest), position_bytes_forward and _backward (read by all blocks of
    the kernels), copy_bytes_per_second, multiprocessors, clock_hz.

    Raises:
        ConfigError: no GPU, or a shape that is none.
        RuntimeError: an output or gradient is wrong; nothing of that shape is recorded.
    """
    c = config if isinstance(config, OperatorBenchConfig) else OperatorBenchConfig(**config)
    shapes = [_shape(c, shape) for shape in c.shapes]
    if not 1 <= c.slow_rounds <= c.rounds:
        raise ConfigError(f"slow_rounds: expected 1 to rounds={c.rounds}, got {c.slow_rounds}")
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu_operators: needs a GPU")
    provenance()  # of the code as it is now, not as it may be after minutes
    with elsewhere() as other:
        for tokens, channels, documents, rows in shapes:
            began = time.perf_counter()
            results = _measure(c, other, tokens, channels, documents, rows)
            torch.cuda.empty_cache()
            seconds = time.perf_counter() - began
            if progress:
                totals = ", ".join(f"{arm} {1e3 * (m['total_seconds'] or 0):.4g}" for arm, m in results.items())
                print(f"{tokens} x {channels}, {documents} ({seconds:.0f} s): ms {totals}", flush=True)
            for arm, metrics in results.items():
                record = make_record(
                    kind="gpu_operators",
                    experiment=c.experiment,
                    arm=arm,
                    config={
                        "tokens": tokens, "channels": channels, "documents": documents, "states": STATES,
                        "dtype": "bfloat16", "layouts": len(rows), "rounds": c.rounds,
                        "mean_documents": statistics.mean(map(len, rows)),
                    },
                    seed=c.seed,
                    corpus_hash=f"random tensors, documents as configured, seed {c.seed}",
                    metrics=metrics,
                    wall_seconds=seconds,
                )  # fmt: skip
                append_record(records_path, record)


def _shape(c: OperatorBenchConfig, shape: str) -> tuple[int, int, str, list[list[int]]]:
    """Tokens, channels, documents, and the documents' lengths of every row. ConfigError if it is none."""
    try:
        tokens, channels, documents = (part.strip() for part in shape.split(","))
        rows = draw_rows(documents, int(tokens), c.layouts, c.seed)
        if int(channels) % HEAD_CHANNELS or int(channels) < 1:
            raise ValueError
        return int(tokens), int(channels), documents, rows
    except ValueError:
        raise ConfigError(
            f"shapes: expected tokens,channels,documents with channels a multiple of {HEAD_CHANNELS} and "
            f"documents one of {', '.join(LENGTH_DISTRIBUTIONS)}, one, or a length, got {shape!r}"
        ) from None


def draw_rows(documents: str, tokens: int, layouts: int, seed: int) -> list[list[int]]:
    """Rows of whole documents in order, the last one cut to fill the row; one row if their length is fixed."""
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


def _measure(
    c: OperatorBenchConfig, other: Elsewhere, tokens: int, channels: int, documents: str, rows: list[list[int]]
) -> dict[str, Metrics]:
    shape = (tokens, channels, documents, rows, c.seed, c.slow_tokens)
    other.start(*shape)
    here = Turns(*shape, others=True)
    errors = here.errors | other.errors()
    memory = {name: here.memory(name) for name in ("scan", "scan-states")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*here.arms, *INDEXED)}
    copies: list[float] = []
    for turn in range(c.rounds + 1):  # the first is a warm-up
        copies.append(copy_bytes_per_second())
        for name, each in times.items():
            if turn > c.slow_rounds and name in SLOW_ARMS:
                continue
            each.append((other if name in INDEXED else here).seconds(name))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    hardware = {
        "copy_bytes_per_second": statistics.median(copies[1:]),
        "multiprocessors": multiprocessors,
        "clock_hz": clock_hz(),
    }
    results: dict[str, Metrics] = {}
    for name, rounds in times.items():
        forward, backward = zip(*rounds[1:])
        total = [sum(each) for each in rounds[1:]]
        both = name in INDEXED or here.arms[name].backward is not None
        kept, workspace = memory.get(name, (None, None))
        output_error, gradient_error = errors.get(name, (None, None))
        read = position_bytes(name, here.layouts[0], channels, multiprocessors)
        results[name] = {
            "forward_seconds": statistics.median(forward),
            "forward_spread": _spread(forward),
            "backward_seconds": statistics.median(backward) if both else None,
            "backward_spread": _spread(backward) if both else None,
            "total_seconds": statistics.median(total),
            "total_spread": _spread(total),
            "kept_activations": kept,
            "workspace_activations": workspace,
            "output_error": output_error,
            "gradient_error": gradient_error,
            "position_bytes_forward": read[0],
            "position_bytes_backward": read[1],
            **hardware,
        }
    return results


def _spread(values: Any) -> float:
    return float(np.subtract(*np.percentile(values, [75, 25])))
