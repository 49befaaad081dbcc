"""The packed operators on a GPU against the bars that were set beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from experiments.operators.arms import GpuArm
from experiments.operators.gpu_shapes import (
    CONV,
    SCAN,
    SCAN_INDICES,
    SCAN_STATES,
    SSD,
    UNPACKED,
    Shape,
    Shapes,
    copy_shares,
    over,
    seconds,
)
from packmamba.report.tables import Cell, Column, Table, number, percent, word


class Bar(NamedTuple):
    what: str
    bar: float
    stretch: float
    measure: Callable[[Shapes], float | None]
    at_most: bool = False
    percent: bool = False


def _ratio(arm: GpuArm, *shapes: Shape) -> Callable[[Shapes], float | None]:
    """The smallest over the shapes; None if one is missing."""

    def measure(found: Shapes) -> float | None:
        ratios = [over(found.get(shape, {}), arm, SCAN) for shape in shapes]
        known = [ratio for ratio in ratios if ratio is not None]
        return min(known) if len(known) == len(ratios) else None

    return measure


def _largest(metric: str) -> Callable[[Shapes], float | None]:
    return lambda found: max((arms[SCAN]["metrics"][metric] for arms in found.values() if SCAN in arms), default=None)


def _per_token(found: Shapes) -> float | None:
    times = [seconds(found.get(_documents(tokens), {}), SCAN) for tokens in (131072, 16384)]
    return times[0] / times[1] / 8 if times[0] and times[1] else None


def _states(found: Shapes) -> float | None:
    ratios = [over(arms, SCAN_STATES, SCAN) for arms in found.values()]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _share(direction: int) -> Callable[[Shapes], float | None]:
    def measure(found: Shapes) -> float | None:
        arms = found.get(_documents(16384), {})
        return copy_shares(arms[CONV])[direction] if CONV in arms else None

    return measure


def _documents(tokens: int, channels: int = 4096, documents: str = "documents-2k") -> Shape:
    return Shape(tokens, channels, documents)


BARS = (
    Bar("mamba-ssm not packed over ours: 16384 tokens, 4096 channels", 3.5, 5, _ratio(UNPACKED, _documents(16384))),
    Bar("the same, 65536 tokens", 3.5, 5, _ratio(UNPACKED, _documents(65536))),
    Bar("the same, 16384 tokens, 5120 channels", 3.5, 5, _ratio(UNPACKED, _documents(16384, 5120))),
    Bar("the same, 16384 tokens, 1536 channels", 3.1, 4.5, _ratio(UNPACKED, _documents(16384, 1536))),
    Bar("the same, 4096 tokens", 2.6, 4, _ratio(UNPACKED, _documents(4096))),
    Bar("the same, one document of 16384 tokens", 2.4, 4, _ratio(UNPACKED, _documents(16384, documents="one"))),
    Bar("the same, short documents, 16384 tokens", 3.2, 4.5, _ratio(UNPACKED, _documents(16384, documents="short"))),
    Bar("Mamba-2 SSD over ours, 16384 tokens", 1.35, 2, _ratio(SSD, _documents(16384))),
    Bar("Mamba-2 SSD over ours, 65536 tokens", 1.35, 2, _ratio(SSD, _documents(65536))),
    Bar("time per token at 131072 tokens over 16384", 1.05, 1, _per_token, True),
    Bar("kept for the backward, activations (largest of all shapes)", 0.5, 0.125, _largest("kept_activations"), True),
    Bar("workspace of the backward, activations (largest)", 2, 1, _largest("workspace_activations"), True),
    Bar("with states in and out over without (largest)", 1.05, 1.02, _states, True),
    Bar("conv1d_pack forward, share of copy bandwidth, 16384 tokens", 0.8, 0.9, _share(0), percent=True),
    Bar("conv1d_pack backward, share of copy bandwidth, 16384 tokens", 0.7, 0.85, _share(1), percent=True),
)


def bars_table(found: Shapes) -> Table:
    columns = [
        Column("forward and backward", ("what",), False),
        Column("bar", ("bar",)),
        Column("stretch", ("stretch",)),
        Column("measured", ("measured",)),
        Column("", ("verdict",), False),
    ]
    table = Table("gpu-bars", "The packed operators on a GPU, against the bars that were set beforehand", columns)
    for bar in BARS:
        value, sign = bar.measure(found), -1 if bar.at_most else 1
        reached = [value is not None and sign * value >= sign * goal for goal in (bar.bar, bar.stretch)]
        verdict = "-" if value is None else "stretch met" if reached[1] else "met" if reached[0] else "missed"
        goals = [percent(goal) if bar.percent else number(goal, "g") for goal in (bar.bar, bar.stretch)]
        measured = percent(value) if bar.percent else number(value, ".3f")
        table.rows.append([word(bar.what), *goals, measured, word(verdict)])
    indices = [(shape, over(arms, SCAN_INDICES, SCAN)) for shape, arms in found.items()]
    known = [ratio for _, ratio in indices if ratio is not None]
    if known:
        span = f"{min(known):.3f} to {max(known):.3f}"
        row = [word("an index per token over the schedule, every shape"), number(None, ""), number(None, "")]
        table.rows.append([*row, Cell(span, (span,)), word("measured")])
    table.notes = ["The first ratios want to be large; times per token, memory and the price of states small."]
    return table
