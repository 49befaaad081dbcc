"""Figures of the packed operators on a GPU: time per token and share of copy bandwidth, with the hardware's limit in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from experiments.operators.arms import GpuArm
from experiments.operators.gpu_shapes import (
    BY_DOCUMENT,
    CAUSAL_CONV,
    CONV,
    PADDED,
    SCAN,
    SCAN_INDICES,
    SCAN_STATES,
    SSD,
    UNPACKED,
    Arms,
    Shape,
    Shapes,
    by_shape,
    copy_shares,
    scan_limit,
    seconds,
)
from packmamba.report.aggregate import Record
from packmamba.report.figures import MUTED, Figure, axes, finish, legend_below

_SCANS: dict[GpuArm, dict[str, Any]] = {
    PADDED: {"color": "#E69F00", "marker": "v"},
    BY_DOCUMENT: {"color": "#7A4B9A", "marker": "^"},
    UNPACKED: {"color": "#D55E00", "marker": "s"},
    SSD: {"color": "#009E73", "marker": "D"},
    SCAN_INDICES: {"color": "#56B4E9", "marker": "x"},
    SCAN_STATES: {"color": "#9aa0a8", "linewidth": 5.0},
    SCAN: {"color": "#0072B2", "marker": "o"},
}
_CONVS: dict[GpuArm, dict[str, Any]] = {
    CONV: {"color": "#0072B2", "marker": "o"},
    CAUSAL_CONV: {"color": "#D55E00", "marker": "s"},
}
Points = Sequence[tuple[float, Arms]]


def gpu_operators_figures(records: Sequence[Record]) -> list[Figure]:
    """Against tokens, channels and the documents' mean length; only axes along which there are points."""
    found = by_shape(records)
    one_length = [shape for shape in found if shape.documents.isdecimal() or shape.documents == "one"]
    drawn = [
        _figure(
            "gpu-tokens",
            "tokens of the row",
            "at 4096 channels, documents-2k",
            _along(found, lambda s: s.tokens, lambda s: (s.channels, s.documents) == (4096, "documents-2k")),
        ),
        _figure(
            "gpu-channels",
            "channels (d_inner)",
            "at 16384 tokens, documents-2k",
            _along(found, lambda s: s.channels, lambda s: (s.tokens, s.documents) == (16384, "documents-2k")),
        ),
        _figure(
            "gpu-documents",
            "mean document length (tokens)",
            "at 16384 tokens, 4096 channels; lines: documents of one length; hollow: short, documents-2k, heavy",
            _along(found, lambda s: _mean_length(found[s]), lambda s: s[:2] == (16384, 4096) and s in one_length),
            _along(found, lambda s: _mean_length(found[s]), lambda s: s[:2] == (16384, 4096) and s not in one_length),
        ),
    ]
    return [figure for figure in drawn if figure is not None]


def _mean_length(arms: Arms) -> float:
    return _tokens(arms) / next(iter(arms.values()))["config"]["mean_documents"]


def _along(found: Shapes, axis: Callable[[Shape], float], on: Callable[[Shape], bool]) -> Points:
    return sorted(((axis(shape), arms) for shape, arms in found.items() if on(shape)), key=lambda point: point[0])


def _figure(name: str, label: str, where: str, points: Points, apart: Points = ()) -> Figure | None:
    if len(points) < 2:
        return None
    fig, (left, right) = axes(2, width=11.0, height=5.4)
    for arm, style in _SCANS.items():
        _draw(left, points, apart, partial(_per_token, arm), arm.label, style)
    limits = [(x, 1e9 * sum(scan_limit(arms[SCAN])) / _tokens(arms)) for x, arms in points if SCAN in arms]
    left.plot(*zip(*limits), color=MUTED, linestyle=(0, (2, 1.5)), linewidth=1.6, label="the hardware's limit")
    for arm, style in _CONVS.items():
        for direction, dashes in ((0, "-"), (1, (0, (4, 1.5)))):
            way = ("forward", "backward")[direction]
            _draw(
                right,
                points,
                apart,
                partial(_share, arm, direction),
                f"{arm.label}, {way}",
                style | {"linestyle": dashes},
            )
    right.axhline(100, color=MUTED, linestyle=(0, (2, 1.5)), linewidth=1.6, label="copying")
    left.set(title="Scan, forward and backward", ylabel="nanoseconds per token", yscale="log")
    right.set(title="Convolution", ylabel="share of copy bandwidth (%)", ylim=(0, None))
    left.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    left.yaxis.set_minor_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}" if str(y)[0] in "25" else ""))
    ticks = sorted({x for x, _ in points})
    for ax in (left, right):
        ax.set(xscale="log", xlabel=label)
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=30)
        ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    legend_below(fig, columns=4)
    return finish(
        fig,
        name,
        f"The packed operators and the peers', {where}. Left: time per token, forward and backward, with what exponentials, "
        "instruction slots or bytes take at least. Right: the convolution's bytes at the measured copy rate, over its time.",
    )


def _draw(
    ax: Axes,
    points: Points,
    apart: Points,
    value: Callable[[Arms], float | None],
    label: str,
    style: dict[str, Any],
) -> None:
    def known(some: Points) -> list[tuple[float, float]]:
        return [(x, y) for x, arms in some if (y := value(arms)) is not None]

    line, others = known(points), known(apart)
    if line:
        ax.plot(*zip(*line), label=label, **({"linewidth": 1.8} | style))
    if others:
        ax.plot(
            *zip(*others), linestyle="", marker=style.get("marker", "o"), color=style["color"], markerfacecolor="white"
        )


def _per_token(arm: GpuArm, arms: Arms) -> float | None:
    time = seconds(arms, arm)
    return None if time is None else 1e9 * time / _tokens(arms)


def _share(arm: GpuArm, direction: int, arms: Arms) -> float | None:
    return 100 * copy_shares(arms[arm])[direction] if arm in arms else None


def _tokens(arms: Arms) -> int:
    return next(iter(arms.values()))["config"]["tokens"]
