"""How throughput grows with the row and the documents: packed rows, filled in order, the last document cut to fit."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from experiments.speedup.arms import Arm
from experiments.speedup.model import Model
from packmamba import timing
from packmamba.data.batching import PackedBatch
from packmamba.data.lengths import draw_lengths
from packmamba.layout import SequenceLayout
from packmamba.training.graphs import BatchGraphs
from packmamba.training.lit_module import PackedLitModule


def measure(model: Model, module: PackedLitModule) -> None:
    """Appends a growth record for each row length and for each mean document length; points take turns."""
    c = model.c
    points = [("row_length", length, draw(c.distribution, length, c.seed), length) for length in c.row_lengths]
    points += [("mean_length", mean, draw(c.distribution, c.slots, c.seed, mean), c.slots) for mean in c.mean_lengths]
    parameters = list(module.parameters())
    graphs = BatchGraphs(module.loss, parameters) if c.growth_graphs else None

    def point(lengths: list[int], row_length: int) -> Callable[[int], float]:
        batch = fill(lengths, row_length, model.vocab_size, c.seed).to(model.device)
        targets = int(batch.loss_mask.sum())

        def forward_backward() -> None:
            for parameter in parameters:
                parameter.grad = None
            if graphs is None:
                (module.loss(batch)[0] / targets).backward()
            else:
                graphs(batch, targets)

        return lambda turn: timing.seconds(forward_backward, model.device)

    times = timing.take_turns(
        {f"{axis} {value}": point(lengths, row_length) for axis, value, lengths, row_length in points},
        c.rounds,
        left_out=lambda name: print(f"left out, {model.name}, {name}: does not fit into memory", file=sys.stderr),
        bar=model.bar("growth"),
    )
    for axis, value, lengths, row_length in points:
        if (timed := times.get(f"{axis} {value}")) is None:
            continue
        median = timing.median(timed)
        metrics = {
            "seconds_per_batch": median,
            "seconds_spread": timing.spread(timed),
            "num_documents": len(lengths),
            **model.speed(row_length / median, 0.0),
        }
        fields = Arm("in_order", row_length, graphs=c.growth_graphs).fields()
        model.record("growth", "packed", fields | {"axis": axis, "value": value}, axis, metrics)


def draw(distribution: str, row_length: int, seed: int, mean: int | None = None) -> list[int]:
    """Documents in order that fill a row, the last one cut to fit; scaled to a mean length if one is given."""
    drawn = draw_lengths(distribution, row_length, seed).astype(np.float64)
    if mean is not None:
        drawn *= mean / drawn.mean()
    ends = np.minimum(np.cumsum(np.maximum(drawn.astype(np.int64), 1)), row_length)
    return [int(n) for n in np.diff(ends, prepend=0) if n]


def fill(lengths: list[int], row_length: int, vocab_size: int, seed: int) -> PackedBatch:
    """One row of random tokens."""
    layout = SequenceLayout.from_lengths([lengths], row_length=row_length)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (1, row_length + 1), generator=generator)
    mask = torch.ones(row_length, dtype=torch.bool)
    mask[layout.ends.long() - 1] = False
    targets = torch.where(mask, tokens[:, 1:], 0)
    return PackedBatch(tokens[:, :-1].contiguous(), targets, mask[None], layout)
