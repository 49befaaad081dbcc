"""How throughput grows with the row and the documents: packed rows, filled in order, the last document cut to fit."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from packmamba.data.batching import PackedBatch
from packmamba.data.lengths import draw_lengths
from packmamba.layout import SequenceLayout
from packmamba.training.graphs import BatchGraphs
from packmamba.training.module import MambaLitModule

if TYPE_CHECKING:
    from experiments.speedup.whole_models import Bench


def measure(bench: Bench, module: MambaLitModule) -> None:
    """Appends a growth record for each row length and for each mean document length; points take turns."""
    c = bench.c
    points = [("row_length", length, draw(c.distribution, length, c.seed), length) for length in c.row_lengths]
    points += [("mean_length", mean, draw(c.distribution, c.slots, c.seed, mean), c.slots) for mean in c.mean_lengths]
    batches = [fill(lengths, row_length, bench).to(bench.device) for _, _, lengths, row_length in points]
    targets = [int(batch.loss_mask.sum()) for batch in batches]
    times: list[list[float]] = [[] for _ in points]

    graphs = BatchGraphs(module.loss, bench.parameters) if c.growth_graphs else None

    def forward_backward(i: int) -> None:
        bench.forget_gradients()
        if graphs is None:
            (module.loss(batches[i])[0] / targets[i]).backward()
        else:
            graphs(batches[i], targets[i])

    for turn in bench.bar(range(c.rounds + 1), "growth", "round"):
        for i in range(len(points)):
            try:
                seconds = bench.seconds(lambda: forward_backward(i))  # noqa: B023
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            if turn:
                times[i].append(seconds)
    for (axis, value, lengths, row_length), timed in zip(points, times):
        if len(timed) < c.rounds:
            print(f"left out, {bench.name}, {axis} {value}: does not fit into memory", file=sys.stderr)
            continue
        median = statistics.median(timed)
        metrics = {
            "seconds_per_batch": median,
            "seconds_spread": float(np.subtract(*np.percentile(timed, [75, 25]))),
            "num_documents": len(lengths),
            **bench.speed(row_length / median, 0.0),
        }
        about = {"axis": axis, "value": value, "row_length": row_length, "cuda_graphs": c.growth_graphs}
        bench.record("growth", "packed", axis, metrics, about)


def draw(distribution: str, row_length: int, seed: int, mean: int | None = None) -> list[int]:
    """Documents in order that fill a row, the last one cut to fit; scaled to a mean length if one is given."""
    drawn = draw_lengths(distribution, row_length, seed).astype(np.float64)
    if mean is not None:
        drawn *= mean / drawn.mean()
    ends = np.minimum(np.cumsum(np.maximum(drawn.astype(np.int64), 1)), row_length)
    return [int(n) for n in np.diff(ends, prepend=0) if n]


def fill(lengths: list[int], row_length: int, bench: Bench) -> PackedBatch:
    """One row of random tokens."""
    layout = SequenceLayout.from_lengths([lengths], row_length=row_length)
    generator = torch.Generator().manual_seed(bench.c.seed)
    assert bench.config.model.vocab_size is not None
    tokens = torch.randint(bench.config.model.vocab_size, (1, row_length + 1), generator=generator)
    mask = torch.ones(row_length, dtype=torch.bool)
    mask[layout.ends.long() - 1] = False
    targets = torch.where(mask, tokens[:, 1:], 0)
    return PackedBatch(tokens[:, :-1].contiguous(), targets, mask[None], layout)
