"""Figures generated from records, as PNG: one style, one colour per arm in every figure."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from packmamba.report import summary
from packmamba.report.summary import Arm, Record

INK, MUTED = "#24292f", "#5c6370"
# Okabe and Ito's colours, distinct for the colour-blind. Arms that coincide (under reset single, padded and packed
# must) stay visible as stripes: the later, the thinner.
_STYLES: dict[str, dict[str, Any]] = {
    "single": {"color": "#9aa0a8", "linewidth": 6.0},
    "padded": {"color": "#E69F00", "linewidth": 3.6},
    "packed-reset": {"color": "#0072B2", "linewidth": 1.6},
    "packed-leak": {"color": "#D55E00", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-leak-conv": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-leak-scan": {"color": "#7A4B9A", "linewidth": 1.8, "linestyle": (0, (4, 1.5))},
    "packed-carry": {"color": "#009E73", "linewidth": 1.8, "linestyle": (0, (7, 1.5, 1, 1.5))},
    "in_order": {"color": "#D55E00", "marker": "s"},
    "greedy": {"color": "#0072B2", "marker": "o"},
    "first_fit": {"color": "#CC79A7", "marker": "v"},
    "best_fit": {"color": "#009E73", "marker": "^"},
    "histogram": {"color": "#56B4E9", "marker": "D"},
    "split": {"color": "#7A4B9A", "marker": "x"},
}
_OTHERS = ("#56B4E9", "#7A4B9A", "#8C6D1F", "#B2182B", "#1B7837", "#4D4D4D")
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#b4b9c1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.markersize": 5,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Figure:
    name: str
    """Stem of the file it is written to."""
    caption: str
    png: bytes


def training_figures(records: Sequence[Record]) -> list[Figure]:
    """Learning curves, differences, speed and loss by position; ``records`` are of one corpus."""
    arms = summary.training_arms(records)
    drawn = [_learning_curves(arms, records), _differences(arms), _speed(arms, records), _loss_by_position(arms)]
    return [figure for figure in drawn if figure is not None]


def house_style() -> AbstractContextManager[None]:
    """Inside it, whatever is drawn has this module's fonts, colours and grid."""
    return plt.rc_context(_SETTINGS)


def style_of(name: str, rank: int = 0) -> dict[str, Any]:
    """Colour and line of an arm or strategy, the same everywhere; others get a colour by their rank."""
    return _STYLES.get(name, {"color": _OTHERS[rank % len(_OTHERS)], "linewidth": 1.8})


def axes(columns: int, width: float = 10.0, height: float = 4.2) -> tuple[Canvas, list[Axes]]:
    """A canvas with axes side by side; ``width`` and ``height`` are inches."""
    fig, grid = plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    return fig, list(grid[0])


def finish(fig: Canvas, name: str, caption: str) -> Figure:
    """The canvas as PNG."""
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=160, metadata={"Software": None})
    plt.close(fig)
    return Figure(name, caption, out.getvalue())


def legend_below(fig: Canvas, ax: Axes, columns: int = 5) -> None:
    """One legend for all axes of the canvas, taken from ``ax``."""
    handles, labels = ax.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(1, len(labels))), frameon=False)


def _styled(arms: Sequence[Arm]) -> list[tuple[Arm, dict[str, Any]]]:
    """Arms with their styles; further settings of an arm differ in the dashes of their lines."""
    settings = list(dict.fromkeys((arm.setting, repr(arm.variant)) for arm in arms))
    unknown = sorted({arm.scheme for arm in arms} - _STYLES.keys())
    styled = []
    for arm in arms:
        style = dict(style_of(arm.scheme, unknown.index(arm.scheme) if arm.scheme in unknown else 0))
        if rank := settings.index((arm.setting, repr(arm.variant))):
            style |= {"linestyle": (0, (3 * rank, 1.5)), "linewidth": 1.6}
        styled.append((arm, style))
    return styled


def _points(arm: Arm, curve: str, key: str) -> dict[int, list[dict[str, Any]]]:
    """Points of all seeds by the value of ``key``, in its order; points without a finite loss are left out."""
    points: dict[int, list[dict[str, Any]]] = {}
    for seed in sorted(arm.by_seed):
        for point in arm.by_seed[seed]["curves"].get(curve, []):
            if point.get("loss") is not None:
                points.setdefault(point[key], []).append(point)
    return dict(sorted(points.items()))


def _learning_curves(arms: Sequence[Arm], records: Sequence[Record]) -> Figure | None:
    curves = [(arm, style, _points(arm, "validation", "step")) for arm, style in _styled(arms)]
    if not any(points for _, _, points in curves):
        return None
    speeds = [summary.speed_of(arm, records) for arm in arms]
    # What else a machine did during an arm's own run is no property of the arm.
    timed = all(speed.interleaved and speed.real_tokens_per_second for speed in speeds)
    rates = [speed.real_tokens_per_second or 1.0 for speed in speeds]
    fig, panels = axes(2)
    for ax, key, scales, title, unit in (
        (panels[0], "real_tokens", [1.0] * len(arms), "Validation loss against data", "real tokens trained on"),
        (panels[1], "real_tokens", rates, "Validation loss against time", "seconds at the speed timed in turns")
        if timed
        else (panels[1], "seconds", [1.0] * len(arms), "Validation loss against time", "seconds of training"),
    ):
        for (arm, style, by_step), scale in zip(curves, scales):
            # The loss before the first step is the same for all and would squeeze the rest into a corner.
            steps = [p for step, p in by_step.items() if step > 0 and all(point.get(key) is not None for point in p)]
            x = [statistics.fmean(point[key] for point in points) / scale for points in steps]
            losses = [[point["loss"] for point in points] for points in steps]
            ax.plot(x, [statistics.fmean(each) for each in losses], label=arm.label, **style)
            if any(len(each) > 1 for each in losses):
                ax.fill_between(
                    x, [min(each) for each in losses], [max(each) for each in losses], color=style["color"], alpha=0.15
                )
        ax.set(title=title, xlabel=unit, ylabel="validation loss (nats per target)")
        ax.xaxis.set_major_formatter(_engineering())
    legend_below(fig, panels[0])
    band = " Lines are means over seeds, bands their range." if any(len(arm.by_seed) > 1 for arm in arms) else ""
    return finish(
        fig,
        "learning-curves",
        "Validation loss, one document at a time from zero state, against real tokens and against seconds "
        + ("at the speed of arms timed in turns." if timed else "of each arm's own run, which is no comparison.")
        + f"{band} Lines that coincide show as stripes.",
    )


def _differences(arms: Sequence[Arm]) -> Figure | None:
    pairs = []
    for arm, style in _styled(arms):
        baseline = summary.baseline_of(arm, arms)
        if baseline is None or baseline is arm:
            continue
        difference = summary.paired_difference(arm, baseline, "val_loss")
        if difference is not None and difference.half_width is not None:
            pairs.append((arm, style, baseline, difference))
    if not pairs:
        return None
    fig, (ax,) = axes(1, height=1.4 + 0.45 * len(pairs))
    for y, (arm, style, baseline, difference) in enumerate(pairs):
        shared = sorted(arm.by_seed.keys() & baseline.by_seed.keys())
        losses = [[side.by_seed[seed]["metrics"]["val_loss"] for side in (arm, baseline)] for seed in shared]
        dots = [a - b for a, b in losses if a is not None and b is not None]
        ax.plot(dots, [y] * len(dots), "o", color=style["color"], alpha=0.4, markersize=8, markeredgewidth=0)
        ax.errorbar(difference.mean, y, xerr=difference.half_width, fmt="D", color=style["color"], capsize=4)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(pairs)), [f"{arm.label} - {baseline.scheme}" for arm, _, baseline, _ in pairs])
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set(title="Difference in validation loss", xlabel="nats per target; below zero is better")
    return finish(
        fig,
        "differences",
        "Paired differences in validation loss: each seed (dots), mean and 95 % confidence interval.",
    )


def throughput_figures(records: Sequence[Record]) -> list[Figure]:
    """Speed of arms that were timed and not trained, the latest run; trained ones have it in ``training_figures``."""
    runs = summary.throughput_runs(records)
    if not runs or summary.training_arms(records):
        return []
    latest = max(runs.values(), key=lambda arms: max(record["time"] for record in arms.values()))
    bars = []
    for rank, (name, record) in enumerate(latest.items()):
        metrics = record["metrics"]
        real, slots, padding = (
            metrics[key] for key in ("real_tokens_per_second", "slots_per_second", "padding_fraction")
        )
        speed = summary.Speed(real, slots, padding, summary.speedup(latest, name), interleaved=True)
        bars.append((name, style_of(name, rank)["color"], speed))
    return [_speed_bars(bars)]


def _speed(arms: Sequence[Arm], records: Sequence[Record]) -> Figure | None:
    bars = []
    for arm, style in _styled(arms):
        speed = summary.speed_of(arm, records)
        if speed.real_tokens_per_second is not None:
            bars.append((arm.label, style["color"], speed))
    return _speed_bars(bars) if bars else None


def _speed_bars(bars: Sequence[tuple[str, str, summary.Speed]]) -> Figure:
    fig, (ax,) = axes(1, height=1.3 + 0.5 * len(bars))
    widest = max(max(s.real_tokens_per_second or 0, s.slots_per_second or 0) for _, _, s in bars)
    for y, (_, color, speed) in enumerate(bars):
        real = speed.real_tokens_per_second or 0.0
        slots = max(real, speed.slots_per_second or 0.0)
        ax.barh(y, real, height=0.62, color=color)
        ax.barh(
            y, slots - real, left=real, height=0.62, facecolor="white", edgecolor=color, hatch="////", linewidth=0.8
        )
        text = f"{real:,.0f}"
        if speed.speedup is not None:
            text += f"   {speed.speedup:.2f}x"
        ax.text(slots + 0.012 * widest, y, text, va="center", color=INK)
    ax.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1.2 * widest)
    ax.grid(axis="y", visible=False)
    ax.xaxis.set_major_formatter(_engineering())
    ax.set(title="Speed: real tokens per second, and slots lost to padding (hatched)", xlabel="slots per second")
    interleaved = all(speed.interleaved for _, _, speed in bars)
    return finish(
        fig,
        "speed",
        "Real tokens per second (solid; the number) and slots spent on padding (hatched)"
        + (
            ", whole optimizer steps, arms interleaved in one process; speedup is over single."
            if interleaved
            else "; arms without a speedup were timed in their own training runs, which is no comparison."
        ),
    )


def _loss_by_position(arms: Sequence[Arm]) -> Figure | None:
    curves = [(arm, style, _points(arm, "loss_by_position", "start")) for arm, style in _styled(arms)]
    if not any(points for _, _, points in curves):
        return None
    by_arm = {id(arm): points for arm, _, points in curves}
    fig, (left, right) = axes(2)
    subtracted = set()
    for arm, style, points in curves:
        means = {start: statistics.fmean(point["loss"] for point in each) for start, each in points.items()}
        middles = {start: math.sqrt((start + 1) * each[0]["end"]) for start, each in points.items()}
        left.plot([middles[start] for start in means], list(means.values()), label=arm.label, **style)
        baseline = summary.baseline_of(arm, arms)
        if baseline is None:
            continue
        subtracted.add(baseline.scheme)
        base = {s: statistics.fmean(p["loss"] for p in each) for s, each in by_arm[id(baseline)].items()}
        shared = [start for start in means if start in base]
        right.plot([middles[s] for s in shared], [means[s] - base[s] for s in shared], **style)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="position in the document (tokens)")
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    left.set(title="Validation loss by position", ylabel="loss (nats per target)")
    versus = " or ".join(sorted(subtracted)) or "baseline"
    right.set(title=f"The same, minus {versus}", ylabel="difference (nats per target)")
    legend_below(fig, left)
    return finish(
        fig,
        "loss-by-position",
        "Validation loss by the target's position in its document; what leaks in training shows first at the start. "
        f"On the right, {versus} is zero.",
    )


def _engineering() -> matplotlib.ticker.EngFormatter:
    return matplotlib.ticker.EngFormatter(sep="")
