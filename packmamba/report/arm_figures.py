"""Figures of trained arms, timed optimizer steps and evaluations; records given to one function are of one corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Record, Speed
from packmamba.report.arm_tables import AS_TRAINED, SHAPES, curves_of, evaluations_of, title
from packmamba.report.figures import (
    INK,
    MUTED,
    Figure,
    axes,
    engineering,
    finish,
    has_style,
    legend_below,
    name_bars,
    style_of,
)

Styled = Sequence[tuple[Arm, dict[str, Any]]]


def training_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw learning curves, differences, speed, loss by position and evaluations during training."""
    arms = aggregate.training_arms(records)
    timed = aggregate.timed_arms(records)
    speeds = aggregate.speeds_of(arms, timed)
    styled = _styled(arms)
    drawn = [
        _learning_curves(styled, speeds),
        _differences(styled, "val_loss", "differences", "validation loss", "nats per target; below zero is better"),
        _speed_bars(styled, speeds, aggregate.versus(arms)),
        _loss_by_position(styled),
    ]
    for name, (main, *_) in evaluations_of(arms).items():
        metric, what = f"{name}.{main}", f"{name}, {title(main)}"
        drawn.append(_differences(styled, metric, f"differences-{name}", what, title(main)))
        drawn.append(_during_training(styled, name, metric))
    return [figure for figure in drawn if figure is not None]


def throughput_figures(records: Sequence[Record]) -> list[Figure]:
    """Draw the latest timing of arms that were not trained; trained ones have it in ``training_figures``."""
    timed = aggregate.timed_arms(records)
    if not timed or aggregate.training_arms(records):
        return []
    latest = [arm for arm in timed if aggregate.timing_of(arm) == aggregate.timing_of(timed[0])]
    names = [Arm(arm.name, (), arm.runs) for arm in latest]
    figure = _speed_bars(_styled(names), aggregate.speeds_of(names, latest), "single")
    return [figure] if figure else []


def curve_figures(records: Sequence[Record], kind: str) -> list[Figure]:
    """Draw each evaluation's curves, a line for each arm, dotted as trained."""
    figures = []
    for name, arms in curves_of(records, kind).items():
        shape = SHAPES[name.rpartition(".")[2]]
        fig, (ax,) = axes(1, width=6.5)
        for rank, (arm, points) in enumerate(arms.items()):
            style = style_of(aggregate.parts_of(arm)[0], rank)
            for value, line in ((shape.value, "-"), (shape.value + AS_TRAINED, ":")):
                if value in points:
                    label = {"label": arm} if line == "-" else {}
                    _draw(ax, points.groupby(shape.place)[value], style | {"linestyle": line} | label)
        evaluation, _, curve = name.rpartition(".")
        ax.set(xscale="log", xlabel=shape.axis, ylabel=title(shape.value))
        ax.set_title(f"{evaluation}, {curve.replace('_', ' ')}")
        places = sorted({float(place) for points in arms.values() for place in points[shape.place]})
        if len(places) <= 8:
            ax.set_xticks(places)
            ax.minorticks_off()
        ax.xaxis.set_major_formatter(engineering())
        legend_below(fig)
        caption = f"{evaluation}: {title(shape.value)} against {shape.axis}. Dotted: as trained. Bands are the range of seeds."
        figures.append(finish(fig, f"evaluation-{name.replace('.', '-')}", caption))
    return figures


def _styled(arms: Sequence[Arm]) -> Styled:
    """Give further arms of a scheme colours of their own, and further settings of an arm other dashes."""
    settings = list(dict.fromkeys(arm.setting for arm in arms))
    styled: list[tuple[Arm, dict[str, Any]]] = []
    shown: set[tuple[tuple[str, str], str]] = set()
    further: Counter[tuple[str, str]] = Counter()
    for arm in arms:
        place = (arm.setting, arm.scheme)
        scheme = arm.scheme if place not in shown else ""
        style = dict(style_of(scheme, further[arm.setting]))
        further[arm.setting] += not has_style(scheme)
        shown.add(place)
        if rank := settings.index(arm.setting):
            style |= {"linestyle": (0, (3 * rank, 1.5)), "linewidth": 1.6}
        styled.append((arm, style))
    return styled


def _draw(ax: Axes, groups: Any, style: dict[str, Any]) -> None:
    """Draw the means of groups of seeds, with their range as a band."""
    means = groups.mean()
    ax.plot(means.index, means, **style)
    if groups.count().max() > 1:
        ax.fill_between(means.index, groups.min(), groups.max(), color=style["color"], alpha=0.15, linewidth=0)


def _learning_curves(styled: Styled, speeds: Sequence[Speed]) -> Figure | None:
    curves = [arm.points("validation") for arm, _ in styled]
    if all(points.empty or points.loc[points["step"] > 0, "step"].nunique() < 2 for points in curves):
        return None
    # The time of an arm's own run depends on the machine's other load.
    timed = all(speed.timing and speed.real_tokens_per_second > 0 for speed in speeds)
    fig, panels = axes(2)
    for (arm, style), points, speed in zip(styled, curves, speeds):
        if points.empty:
            continue
        # The loss before the first step is the same for all and would squeeze the rest into a corner.
        points = points[points["step"] > 0]
        seconds = points["real_tokens"] / speed.real_tokens_per_second if timed else points["seconds"]
        steps = points.assign(seconds=seconds).groupby("step")
        marker = {"marker": "o"} if steps.ngroups == 1 else {}  # a line through one point would not be seen
        for ax, key in zip(panels, ("real_tokens", "seconds")):
            by_place = points.assign(place=points["step"].map(steps[key].mean())).groupby("place")["loss"]
            _draw(ax, by_place, style | marker | {"label": arm.label})
    panels[0].set(title="Validation loss against data", xlabel="real tokens trained on")
    unit = "training time (s), at measured speed" if timed else "training time (s)"
    panels[1].set(title="Validation loss against time", xlabel=unit)
    for ax in panels:
        ax.set_ylabel("validation loss (nats per target)")
        ax.xaxis.set_major_formatter(engineering())
    legend_below(fig)
    speed_of = "at the speed of arms timed in turns" if timed else "of each arm's own run, which is no comparison"
    caption = (
        f"Validation loss, one document at a time from zero state, against real tokens and against time {speed_of}."
    )
    several = any(len(arm.runs) > 1 for arm, _ in styled)
    caption += " Lines are means over seeds, bands their range." * several + " Lines that coincide show as stripes."
    return finish(fig, "learning-curves", caption)


def _differences(styled: Styled, metric: str, name: str, what: str, unit: str) -> Figure | None:
    arms = [arm for arm, _ in styled]
    pairs = [
        (arm, style, found)
        for arm, style in styled
        if (found := aggregate.difference(arm, arms, metric)) and found.n > 1
    ]
    if not pairs:
        return None
    fig, (ax,) = axes(1, height=1.4 + 0.45 * len(pairs))
    for y, (arm, style, found) in enumerate(pairs):
        dots = (arm[metric] - aggregate.baseline_of(arm, arms)[metric]).dropna()
        ax.plot(dots, [y] * len(dots), "o", color=style["color"], alpha=0.4, markersize=8, markeredgewidth=0)
        ax.errorbar(found.mean, y, xerr=found.high - found.mean, fmt="D", color=style["color"], capsize=4)
    ax.axvline(0, color=MUTED, linewidth=1)
    name_bars(ax, [f"{arm.label} - {aggregate.baseline_of(arm, arms).title}" for arm, _, _ in pairs])
    ax.set(title=f"Difference in {what}", xlabel=unit)
    return finish(fig, name, f"Paired differences in {what}: each seed (dots), mean and 95 % confidence interval.")


def _speed_bars(styled: Styled, speeds: Sequence[Speed], baseline: str) -> Figure | None:
    """Draw arms that were timed together, or where none was, training runs."""
    together = aggregate.timed_together(speeds)
    bars = [(arm, style, speed) for (arm, style), speed in zip(styled, speeds) if speed.timing == together]
    bars = [bar for bar in bars if bar[2].real_tokens_per_second > 0]
    if not bars:
        return None
    fig, (ax,) = axes(1, height=1.3 + 0.5 * len(bars))
    widest = max(np.nanmax(speed[:2]) for _, _, speed in bars)
    for y, (_, style, speed) in enumerate(bars):
        real, slots, color = speed.real_tokens_per_second, float(np.nanmax(speed[:2])), style["color"]
        padding = {"facecolor": "white", "edgecolor": color, "hatch": "////", "linewidth": 0.8}
        ax.barh(y, real, height=0.62, color=color)
        ax.barh(y, slots - real, left=real, height=0.62, **padding)
        text = f"{real:,.0f}" + ("" if pd.isna(speed.speedup) else f"   {speed.speedup:.2f}x")
        ax.text(slots + 0.012 * widest, y, text, va="center", color=INK)
    name_bars(ax, [arm.label for arm, _, _ in bars])
    ax.set_xlim(0, 1.2 * widest)
    ax.xaxis.set_major_formatter(engineering())
    ax.set(title="Speed: real tokens per second, and slots lost to padding (hatched)", xlabel="slots per second")
    timed = f", whole optimizer steps, arms interleaved in one process; speedup is over {baseline}."
    caption = "Real tokens per second (solid; the number) and slots spent on padding (hatched)"
    return finish(fig, "speed", caption + (timed if together else ", of each arm's own training run: no comparison."))


def _loss_by_position(styled: Styled) -> Figure | None:
    """Draw each arm's loss, and beside it the paired differences where there is a baseline."""
    arms = [arm for arm, _ in styled]
    curves = [(arm, style, points) for arm, style in styled if not (points := arm.points("loss_by_position")).empty]
    if not curves:
        return None
    paired = [(style, found) for arm, style, _ in curves if (found := aggregate.difference_by_position(arm, arms))]
    fig, (left, *right) = axes(2 if paired else 1)
    for arm, style, points in curves:
        ends = points.groupby("start").agg({"end": "first", "loss": "mean"})
        left.plot(_middle(ends.index, ends["end"]), ends["loss"], label=arm.label, **style)
    left.set(title="Validation loss by position", ylabel="loss (nats per target)")
    for style, found in paired:
        starts, ends, differences = zip(*found)
        middle = _middle(starts, ends)
        right[0].plot(middle, [one.mean for one in differences], **style)
        lows, highs = [one.low for one in differences], [one.high for one in differences]
        right[0].fill_between(middle, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
    for ax in right:
        ax.axhline(0, color=MUTED, linewidth=1)
        ax.set(title=f"The same, minus {aggregate.versus(arms)}", ylabel="difference (nats per target)")
    for ax in (left, *right):
        ax.set(xscale="log", xlabel="position in the document (tokens)")
        ax.xaxis.set_major_formatter(engineering())
    legend_below(fig)
    caption = "Validation loss by the target's position in its document; leaks in training show first at the start."
    if paired:
        several = any(one.n > 1 for _, found in paired for *_, one in found)
        bands = " with 95 % confidence intervals over seeds (bands)" if several else " of one seed, without intervals"
        caption += f" On the right, paired differences{bands}; {aggregate.versus(arms)} is zero."
    return finish(fig, "loss-by-position", caption)


def _middle(starts: Any, ends: Any) -> np.ndarray:
    """Return where positions [start, end) stand on a logarithmic axis; without an end, as if for a doubling."""
    starts, ends = np.asarray(starts, float), np.asarray(ends, float)
    return np.sqrt((starts + 1) * np.where(ends < aggregate.OPEN_END, ends, 2 * starts))


def _during_training(styled: Styled, name: str, metric: str) -> Figure | None:
    drawn = []
    for arm, style in styled:
        curves = arm.runs.get("curves.evaluations", pd.Series(dtype=object)).dropna()
        points = pd.DataFrame([point for each in curves for point in each])
        if metric in points:
            drawn.append((points.groupby("step")[metric], style | {"label": arm.label}))
    if not drawn:
        return None
    fig, (ax,) = axes(1, width=6.5)
    for groups, style in drawn:
        _draw(ax, groups, style)
    what = title(metric.rpartition(".")[2])
    ax.set(title=f"{name} during the training", xlabel="steps", ylabel=what)
    legend_below(fig)
    return finish(fig, f"evaluations-{name}", f"{name}: {what} during the training. Bands are the range of seeds.")
