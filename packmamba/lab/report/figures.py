"""Figures in the house style; all records of one corpus.

The library draws four: learning curves, paired differences, speed, and the loss by position. An arm
has the colour of its scheme in each of them, which is that of the documentation. Experiments draw
theirs with the same helpers: ``axes``, ``legend_below``, ``finish``.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # a window would need a screen

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Arms, Records
from packmamba.lab.report.tables import table_keys, title

INK = "#24292f"
MUTED = "#5c6370"
_LEAK = {"linewidth": 1.8, "linestyle": (0, (4, 1.5))}
# Okabe and Ito's colours, which colour-blind readers can tell apart. Lines that often coincide have
# different widths, so that each of them is seen.
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
PAGE_WIDTH = 4.6  # inches; scaled to a screen of 390 pixels, text still has 10


class Figure(NamedTuple):
    """Hold a drawn figure; ``name`` is the stem of its file."""

    name: str
    caption: str
    png: bytes


def house_style() -> Any:
    """Return the context in which figures are drawn."""
    return plt.style.context(Path(__file__).with_name("house.mplstyle"))


def style_of(name: str, rank: int = 0) -> dict[str, Any]:
    """Return the line style of a scheme; of another arm one by its rank."""
    return STYLES.get(name, {"color": OTHERS[rank % len(OTHERS)], "linewidth": 1.8})


def _style_in(arm: Arm, arms: Arms) -> dict[str, Any]:
    """Return the style of an arm's scheme; of its further arms another."""
    # Reversed, so that the first arm of a scheme has its style.
    firsts = {each.scheme: each for each in reversed(arms) if each.scheme in STYLES}.values()
    others = [each for each in arms if each not in firsts]
    return style_of("", others.index(arm)) if arm in others else style_of(arm.scheme)


def axes(panels: int, width: float = 10.0, height: float = 4.2) -> tuple[Canvas, list[Axes]]:
    """Make a canvas with panels side by side; sizes are in inches."""
    fig, grid = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    return fig, list(grid.flat)


def finish(fig: Canvas, name: str, caption: str) -> Figure:
    """Return the canvas as a figure, as large as its content and the same bytes each time."""
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
    plt.close(fig)
    return Figure(name, caption, png.getvalue())


def legend_below(fig: Canvas, columns: int = 5) -> None:
    """Draw one legend for all panels below them, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for ax in fig.axes:
        drawn, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn))
    # As many columns as fit the width; one always does.
    for ncols in range(min(columns, max(1, len(handles))), 0, -1):
        legend = fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)
        if ncols == 1 or legend.get_window_extent().width <= 0.98 * fig.bbox.width:
            return
        legend.remove()


def name_above(ax: Axes, labels: Sequence[str]) -> None:
    """Name rows from the top down, the first at y = 0, by text above each, within the panel."""
    ax.set_yticks([])
    ax.set_ylim(len(labels) - 0.5, -0.8)
    for y, label in enumerate(labels):
        ax.text(0.01, y - 0.3, label, transform=ax.get_yaxis_transform(), va="center", fontsize=9)


Lines = dict[Arm, pd.DataFrame]


class _Panel(NamedTuple):
    """Hold arms' lines: tables of mean, low and high over the horizontal axis."""

    title: str
    xlabel: str
    ylabel: str
    lines: Lines


def _line_figure(name: str, caption: str, arms: Arms, panels: Sequence[_Panel], log: bool = False) -> list[Figure]:
    """Draw arms' lines with intervals, panel below panel; no panel where no line has two points."""
    panels = [panel for panel in panels if any(line["mean"].count() > 1 for line in panel.lines.values())]
    if not panels:
        return []
    size = (PAGE_WIDTH, 3.2 * len(panels) + 0.3)
    fig, grid = plt.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
    for ax, panel in zip(grid.flat, panels):
        for arm, line in panel.lines.items():
            # A line of one point would not be seen.
            style = _style_in(arm, arms) | ({"marker": "o"} if len(line) == 1 else {})
            ax.plot(line.index, line["mean"], label=arm.label, **style)
            ax.fill_between(line.index, line["low"], line["high"], color=style["color"], alpha=0.15, linewidth=0)
        ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        if log:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=2, numticks=6))
            ax.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
            ax.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    legend_below(fig)
    return [finish(fig, name, caption)]


def _along(arms: Arms, curve: str, places: list[str], axis: Callable[[pd.DataFrame], float]) -> tuple[Lines, Lines]:
    """Return arms' losses at each place of a curve, and their differences from the baselines'.

    A loss is the mean, least and greatest of the seeds, a difference has its interval. ``axis``
    returns where a place is drawn from its points; at zero, before the first step, it is not: that
    loss would squeeze the rest.
    """
    losses: Lines = {}
    differences: Lines = {}
    for arm in arms:
        by_place = arm.points(curve).astype({"loss": float}).groupby(places)
        drawn_at = {place: axis(group) for place, group in by_place}
        line = by_place["loss"].agg(mean="mean", low="min", high="max").set_axis([*drawn_at.values()])
        losses[arm] = line[line.index > 0]
        found = aggregate.difference_along(arm, curve, *places)
        estimates = {drawn_at[place]: estimate for place, estimate in found if drawn_at[place]}
        if estimates:
            differences[arm] = pd.DataFrame([*estimates.values()], [*estimates])
    return losses, differences


def training_figures(records: Records) -> list[Figure]:
    """Draw learning curves, paired differences, speed, and the loss by position."""
    arms = aggregate.arms_with_speeds(records)
    timed = [arm for arm in arms if arm.timing]
    return [*_learning_curves(arms), *_differences(arms), *_speed_bars(timed), *_loss_by_position(arms)]


def throughput_figures(records: Records) -> list[Figure]:
    """Draw the speed of arms that were only timed, of the latest timing."""
    timed = [] if aggregate.of_kind(records, "training") else aggregate.timed_arms(records)
    return _speed_bars([replace(arm, variant=()) for arm in timed if arm.timing == timed[0].timing])


def _learning_curves(arms: Arms) -> list[Figure]:
    by_tokens, differences = _along(arms, "validation", ["step"], lambda points: points["real_tokens"].mean())
    # Tokens over the measured speed: the run's own time has validation and other load in it.
    speeds = {arm: arm["real_tokens_per_second"].mean() for arm in arms}
    by_time = {arm: line.set_axis(line.index / speeds[arm]) for arm, line in by_tokens.items()}
    alike = {arm: line for arm, line in differences.items() if aggregate.same_documents(arm, arm.baseline)}
    panels = [_Panel("Against data", "non-padding tokens", "validation loss (nats)", by_tokens)]
    # Runs of their own may have shared a machine: only speeds of one timing compare.
    if all(arm.timing for arm in arms):
        panels.append(_Panel("Against time", "training time (s), at the measured speed", "", by_time))
    panels.append(_Panel(_minus(arms), "non-padding tokens", "difference (nats)", alike))
    caption = "Validation loss by tokens and time; bands: range of seeds. "
    caption += "Paired differences: 95 % intervals over seeds."
    return _line_figure("learning-curves", caption, arms, panels)


def _differences(arms: Arms) -> list[Figure]:
    metric = table_keys(arms)[0][0]
    contrasts = [each for each in aggregate.contrasts(arms, metric) if each.ruling.estimate.seeds > 1]
    if not contrasts:
        return []
    fig, (ax,) = axes(1, width=PAGE_WIDTH, height=1.2 + 0.5 * len(contrasts))
    for y, contrast in enumerate(contrasts):
        color = _style_in(contrast.arm, arms)["color"]
        mean, low, high = contrast.ruling.estimate[:3]
        dots = (contrast.arm[metric] - contrast.other[metric]).dropna()
        # Each seed's difference; the diamond is the mean, with its interval.
        ax.plot(dots, [y] * len(dots), "o", color=color, alpha=0.4, markersize=8, markeredgewidth=0)
        ax.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="D", color=color, capsize=4)
    ax.axvline(0, color=MUTED, linewidth=1)
    margin = contrasts[0].margin
    if margin is not None:
        ax.axvspan(-margin, margin, color=MUTED, alpha=0.12, linewidth=0)
    name_above(ax, [f"{each.name} (n = {each.ruling.estimate.seeds})" for each in contrasts])
    ax.set(title="Paired differences", xlabel=title(metric))
    caption = f"Paired differences in {title(metric)}: each seed (dots), mean and 95 % interval."
    return [finish(fig, "differences", caption)]


def _speed_bars(bars: Arms) -> list[Figure]:
    if not bars:
        return []
    fig, (ax,) = axes(1, width=PAGE_WIDTH, height=1.2 + 0.6 * len(bars))
    slots = [arm["slots_per_second"].mean() for arm in bars]
    for y, arm in enumerate(bars):
        color = _style_in(arm, bars)["color"]
        tokens = arm["real_tokens_per_second"].mean()
        speedup = arm["speedup"].mean()
        ax.barh(y, tokens, height=0.36, color=color)
        # Hatched from the tokens on: slots of padding.
        hatched = {"facecolor": "white", "edgecolor": color, "hatch": "////"}
        ax.barh(y, slots[y] - tokens, left=tokens, height=0.36, **hatched)
        times = "" if pd.isna(speedup) else f"   {speedup:.2f}x"
        ax.text(slots[y], y, f" {tokens:,.0f}{times}", va="center")
    name_above(ax, [arm.label for arm in bars])
    ax.set_xlim(0, 1.45 * np.max(slots))  # room for the numbers on the right
    ax.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    ax.set(title="Speed", xlabel="slots per second")
    caption = "Non-padding tokens/s (solid) and slots of padding (hatched); whole optimizer steps, arms interleaved."
    return [finish(fig, "speed", caption)]


def _loss_by_position(arms: Arms) -> list[Figure]:
    losses, differences = _along(arms, "loss_by_position", ["start", "end"], _middle)
    position = "position in the document (tokens)"
    panels = [_Panel("Validation loss by position", position, "loss (nats)", losses)]
    panels.append(_Panel(_minus(arms), position, "difference (nats)", differences))
    caption = "Validation loss by position in the document; paired differences, 95 % intervals over seeds."
    return _line_figure("loss-by-position", caption, arms, panels, log=True)


def _minus(arms: Arms) -> str:
    """Return the title of a panel of differences."""
    several = len({arm.baseline for arm in arms}) > 1
    return "The same, minus " + ("each arm's baseline" if several else aggregate.versus(arms))


def _middle(points: pd.DataFrame) -> float:
    """Return where a range of positions is drawn, counted from 1; the last has no end."""
    start, end = points[["start", "end"]].iloc[0]
    # The geometric middle, since the axis is logarithmic.
    return ((start + 1) * (end if end < aggregate.OPEN_END else 2 * start)) ** 0.5
