"""Figures in the house style; all records of one corpus."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Arms, Records
from packmamba.lab.report.tables import table_keys, title

INK, MUTED = "#24292f", "#5c6370"
_LEAK = {"linewidth": 1.8, "linestyle": (0, (4, 1.5))}
# Okabe and Ito's colours.
STYLES: dict[str, dict[str, Any]] = {
    "single": {"color": "#9aa0a8", "linewidth": 6.0},
    "padded": {"color": "#E69F00", "linewidth": 3.6},
    "padded-sorted": {"color": "#8C6D1F", "linewidth": 2.4},
    "packed-reset": {"color": "#0072B2", "linewidth": 1.6},
    "packed-leak": {"color": "#D55E00", **_LEAK},
    "packed-leak-conv": {"color": "#CC79A7", **_LEAK},
    "packed-leak-scan": {"color": "#7A4B9A", **_LEAK},
    "packed-carry": {"color": "#009E73", "linewidth": 1.8, "linestyle": (0, (7, 1.5, 1, 1.5))},
}
OTHERS = ("#56B4E9", "#882255", "#B2182B", "#1B7837", "#4D4D4D")
DPI = 160


class Figure(NamedTuple):
    name: str
    caption: str
    png: bytes
    pdf: bytes


def house_style() -> Any:
    return plt.style.context(Path(__file__).with_name("house.mplstyle"))


def style_of(name: str, rank: int = 0) -> dict[str, Any]:
    return STYLES.get(name, {"color": OTHERS[rank % len(OTHERS)], "linewidth": 1.8})


def style_in(arm: Arm, arms: Arms) -> dict[str, Any]:
    """Return the style of an arm's scheme; of its further arms another."""
    firsts = {one.scheme: one for one in reversed(arms) if one.scheme in STYLES}.values()
    others = [one for one in arms if one not in firsts]
    return style_of("", others.index(arm)) if arm in others else style_of(arm.scheme)


def axes(panels: int, width: float = 10.0, height: float = 4.2) -> tuple[Canvas, list[Axes]]:
    fig, grid = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    return fig, list(grid.flat)


def finish(fig: Canvas, name: str, caption: str) -> Figure:
    """Return the canvas as a figure, as large as its content."""
    png, pdf = io.BytesIO(), io.BytesIO()
    fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
    nobody = dict.fromkeys(("CreationDate", "Creator", "Producer"))
    fig.savefig(pdf, format="pdf", metadata=nobody, bbox_inches="tight")
    plt.close(fig)
    return Figure(name, caption, png.getvalue(), pdf.getvalue())


def legend_below(fig: Canvas, columns: int = 5) -> None:
    legends = [ax.get_legend_handles_labels() for ax in fig.axes]
    handles = {label: handle for each in legends for handle, label in zip(*each)}
    for ncols in range(min(columns, max(1, len(handles))), 0, -1):
        legend = fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)
        if ncols == 1 or legend.get_window_extent().width <= 0.98 * fig.bbox.width:
            return
        legend.remove()


def name_bars(ax: Axes, labels: Sequence[str], shown: bool = True) -> None:
    ax.set_yticks(range(len(labels)), labels if shown else [""] * len(labels))
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


Panel = tuple[dict[str, Any], Mapping[Arm, pd.DataFrame]]


def line_figure(name: str, caption: str, arms: Arms, panels: Sequence[Panel]) -> list[Figure]:
    """Draw arms' lines with intervals; no panel where no line has two points."""
    panels = [panel for panel in panels if any(len(line) > 1 for line in panel[1].values())]
    if not panels:
        return []
    fig, grid = axes(len(panels), width=10.0 if len(panels) > 1 else 6.5)
    for ax, (settings, lines) in zip(grid, panels):
        for arm, line in lines.items():
            style = style_in(arm, arms) | ({"marker": "o"} if len(line) == 1 else {})
            ax.plot(line.index, line["mean"], label=arm.label, **style)
            ax.fill_between(
                line.index, line["low"], line["high"], color=style["color"], alpha=0.15, linewidth=0
            )
        ax.set(**settings)
        ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        if settings.get("xscale") == "log":
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
            ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    legend_below(fig)
    return [finish(fig, name, caption)]


def over_seeds(points: pd.DataFrame, value: str, place: Any) -> pd.DataFrame:
    return points.astype({value: float}).groupby(place)[value].agg(mean="mean", low="min", high="max")


def training_figures(records: Records) -> list[Figure]:
    arms = aggregate.arms_with_speeds(records)
    timed = [arm for arm in arms if arm.timing]
    return [*_learning_curves(arms), *_differences(arms), *_speed_bars(timed), *_loss_by_position(arms)]


def throughput_figures(records: Records) -> list[Figure]:
    timed = [] if aggregate.of_kind(records, "training") else aggregate.timed_arms(records)
    return _speed_bars([replace(arm, variant=()) for arm in timed if arm.timing == timed[0].timing])


def _learning_curves(arms: Arms) -> list[Figure]:
    by_tokens, by_time = {}, {}
    for arm in arms:
        points = arm.points("validation")
        points = (
            points[points["step"] > 0] if len(points) else points
        )  # the loss at step 0 would squeeze the rest
        if len(points):
            line, tokens = (over_seeds(points, "loss", "step"), points.groupby("step")["real_tokens"].mean())
            by_tokens[arm] = line.set_axis(tokens)
            by_time[arm] = line.set_axis(tokens / arm["real_tokens_per_second"].mean())
    panels = [
        (
            {"title": "Against data", "xlabel": "non-padding tokens", "ylabel": "validation loss (nats)"},
            by_tokens,
        )
    ]
    if all(arm.timing for arm in arms):
        panels += [({"title": "Against time", "xlabel": "training time (s), at the measured speed"}, by_time)]
    caption = "Validation loss by tokens and time. Bands: range of seeds."
    return line_figure("learning-curves", caption, arms, panels)


def _differences(arms: Arms) -> list[Figure]:
    metric = table_keys(arms)[0][0]
    pairs = [one for one in aggregate.contrasts(arms, metric) if one.ruling.estimate.seeds > 1]
    if not pairs:
        return []
    fig, (ax,) = axes(1, height=1.4 + 0.45 * len(pairs))
    for y, pair in enumerate(pairs):
        color, one = style_in(pair.arm, arms)["color"], pair.ruling.estimate
        dots = (pair.arm[metric] - pair.other[metric]).dropna()
        ax.plot(dots, [y] * len(dots), "o", color=color, alpha=0.4, markersize=8, markeredgewidth=0)
        ax.errorbar(
            one.mean, y, xerr=[[one.mean - one.low], [one.high - one.mean]], fmt="D", color=color, capsize=4
        )
    ax.axvline(0, color=MUTED, linewidth=1)
    if (margin := pairs[0].arm.sweep.get("margin")) is not None:
        ax.axvspan(-margin, margin, color=MUTED, alpha=0.12, linewidth=0)
    name_bars(ax, [f"{pair.name} (n = {pair.ruling.estimate.seeds})" for pair in pairs])
    ax.set(title="Paired differences", xlabel=title(metric))
    caption = f"Paired differences in {title(metric)}: each seed (dots), mean and 95 % interval."
    return [finish(fig, "differences", caption)]


def _speed_bars(bars: Arms) -> list[Figure]:
    if not bars:
        return []
    fig, (ax,) = axes(1, height=1.3 + 0.5 * len(bars))
    rates = [[arm[f"{what}_per_second"].mean() for what in ("real_tokens", "slots")] for arm in bars]
    for y, (arm, (real, slots)) in enumerate(zip(bars, rates)):
        color, faster = style_in(arm, bars)["color"], arm["speedup"].mean()
        ax.barh(y, real, height=0.62, color=color)
        ax.barh(y, slots - real, left=real, height=0.62, facecolor="white", edgecolor=color, hatch="////")
        ax.text(slots, y, f" {real:,.0f}" + ("" if pd.isna(faster) else f"   {faster:.2f}x"), va="center")
    name_bars(ax, [arm.label for arm in bars])
    ax.set_xlim(0, 1.2 * np.max(rates))
    ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    ax.set(
        title="Speed: non-padding tokens per second, and slots lost to padding (hatched)",
        xlabel="slots per second",
    )
    caption = "Non-padding tokens/s (solid) and slots of padding (hatched); whole optimizer steps, arms interleaved."
    return [finish(fig, "speed", caption)]


def _loss_by_position(arms: Arms) -> list[Figure]:
    axis = {"xscale": "log", "xlabel": "position in the document (tokens)"}
    losses, differences = {}, {}
    for arm in arms:
        if len(points := arm.points("loss_by_position")):
            line = over_seeds(points, "loss", ["start", "end"])
            losses[arm] = line.set_axis([_middle(*place) for place in line.index])
        if rows := aggregate.difference_by_position(arm):
            differences[arm] = pd.DataFrame(
                [one for *_, one in rows], [_middle(*place) for *place, _ in rows]
            )
    panels = [
        (axis | {"title": "Validation loss by position", "ylabel": "loss (nats)"}, losses),
        (
            axis | {"title": f"The same, minus {aggregate.versus(arms)}", "ylabel": "difference (nats)"},
            differences,
        ),
    ]
    caption = (
        "Validation loss by position in the document; paired differences with 95 % intervals over seeds."
    )
    return line_figure("loss-by-position", caption, arms, panels)


def _middle(start: float, end: float) -> float:
    return ((start + 1) * (end if end < aggregate.OPEN_END else 2 * start)) ** 0.5
