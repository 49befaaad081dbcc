"""Figures of trained arms and of timed optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from packmamba.report import summary
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
from packmamba.report.measures import arms_evaluations, title
from packmamba.report.summary import Arm, Record, Speed, timed_together
from packmamba.report.training import OPEN_END, by_position, difference, versus

Styled = Sequence[tuple[Arm, dict[str, Any]]]


def training_figures(records: Sequence[Record]) -> list[Figure]:
    """Learning curves, differences, speed and loss by position; ``records`` are of one corpus."""
    arms = summary.training_arms(records)
    timed = summary.timed_arms(records)
    speeds = summary.speeds_of(arms, timed)
    styled = _styled(arms)
    drawn = [
        _learning_curves(styled, speeds),
        _differences(styled, "val_loss", "differences", "validation loss", "nats per target; below zero is better"),
        _speed_bars([(arm.label, style["color"], speed) for (arm, style), speed in zip(styled, speeds)]),
        _loss_by_position(styled),
        *(
            _differences(styled, f"{name}.{main}", f"differences-{name}", f"{name}, {title(main)}", title(main))
            for name, (main, *_) in arms_evaluations(arms).items()
        ),
    ]
    return [figure for figure in drawn if figure is not None]


def throughput_figures(records: Sequence[Record]) -> list[Figure]:
    """Speed of arms that were timed and not trained, the latest run; trained ones have it in ``training_figures``."""
    timed = summary.timed_arms(records)
    if not timed or summary.training_arms(records):
        return []
    last = max(timed, key=lambda arm: arm.runs["time"].max()).variant
    latest = [arm for arm in timed if arm.variant == last]
    bars = [(arm.name, style["color"], summary.speed_of(arm, latest)) for arm, style in _styled(latest)]
    figure = _speed_bars(bars)
    return [figure] if figure else []


def _styled(arms: Sequence[Arm]) -> Styled:
    """Arms with their styles; further arms of a scheme have colours of their own, further settings of an arm other dashes."""
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


def _learning_curves(styled: Styled, speeds: Sequence[Speed]) -> Figure | None:
    curves = [arm.points("validation") for arm, _ in styled]
    if all(points.empty or points.loc[points["step"] > 0, "step"].nunique() < 2 for points in curves):
        return None  # a point is no curve
    # What else a machine did during an arm's own run is no property of the arm.
    timed = all(speed.timing and speed.real_tokens_per_second > 0 for speed in speeds)
    fig, panels = axes(2)
    for (arm, style), points, speed in zip(styled, curves, speeds):
        if points.empty:
            continue
        # The loss before the first step is the same for all and would squeeze the rest into a corner.
        points = points[points["step"] > 0]
        seconds = points["real_tokens"] / speed.real_tokens_per_second if timed else points["seconds"]
        steps = points.assign(seconds=seconds).groupby("step")
        loss = steps["loss"].agg(["mean", "min", "max", "count"])
        for ax, key in zip(panels, ("real_tokens", "seconds")):
            x = steps[key].mean()
            if len(x) == 1:  # a line through it would not be seen
                ends = np.abs(loss[["min", "max"]].to_numpy() - loss[["mean"]].to_numpy()).T
                ax.errorbar(x, loss["mean"], yerr=ends, fmt="o", color=style["color"], label=arm.label)
                continue
            ax.plot(x, loss["mean"], label=arm.label, **style)
            if loss["count"].max() > 1:
                ax.fill_between(x, loss["min"], loss["max"], color=style["color"], alpha=0.15)
    unit = "seconds at the speed timed in turns" if timed else "seconds of training"
    panels[0].set(title="Validation loss against data", xlabel="real tokens trained on")
    panels[1].set(title="Validation loss against time", xlabel=unit)
    for ax in panels:
        ax.set_ylabel("validation loss (nats per target)")
        ax.xaxis.set_major_formatter(engineering())
    legend_below(fig)
    band = (
        " Lines and dots are means over seeds, bands and bars their range."
        if any(len(arm.runs) > 1 for arm, _ in styled)
        else ""
    )
    return finish(
        fig,
        "learning-curves",
        "Validation loss, one document at a time from zero state, against real tokens and against seconds "
        + ("at the speed of arms timed in turns." if timed else "of each arm's own run, which is no comparison.")
        + f"{band} Lines that coincide show as stripes.",
    )


def _differences(styled: Styled, metric: str, name: str, what: str, unit: str) -> Figure | None:
    arms = [arm for arm, _ in styled]
    pairs = [(arm, style, found) for arm, style in styled if (found := difference(arm, arms, metric))]
    pairs = [pair for pair in pairs if pair[2].n > 1]
    if not pairs:
        return None
    fig, (ax,) = axes(1, height=1.4 + 0.45 * len(pairs))
    labels = []
    for y, (arm, style, found) in enumerate(pairs):
        baseline = summary.baseline_of(arm, arms)
        labels.append(f"{arm.label} - {baseline.title}")
        dots = (arm[metric] - baseline[metric]).dropna()
        ax.plot(dots, [y] * len(dots), "o", color=style["color"], alpha=0.4, markersize=8, markeredgewidth=0)
        ax.errorbar(found.mean, y, xerr=found.high - found.mean, fmt="D", color=style["color"], capsize=4)
    ax.axvline(0, color=MUTED, linewidth=1)
    name_bars(ax, labels)
    ax.set(title=f"Difference in {what}", xlabel=unit)
    return finish(
        fig,
        name,
        f"Paired differences in {what}: each seed (dots), mean and 95 % confidence interval.",
    )


def _speed_bars(bars: Sequence[tuple[str, str, Speed]]) -> Figure | None:
    """Of arms that were timed together, or where none was, of training runs."""
    together = timed_together([speed for _, _, speed in bars])
    bars = [bar for bar in bars if bar[2].timing == together and bar[2].real_tokens_per_second > 0]
    if not bars:
        return None
    fig, (ax,) = axes(1, height=1.3 + 0.5 * len(bars))
    widest = max(np.nanmax(speed[:2]) for _, _, speed in bars)
    for y, (_, color, speed) in enumerate(bars):
        real = speed.real_tokens_per_second
        slots = float(np.nanmax(speed[:2]))
        ax.barh(y, real, height=0.62, color=color)
        ax.barh(
            y, slots - real, left=real, height=0.62, facecolor="white", edgecolor=color, hatch="////", linewidth=0.8
        )
        text = f"{real:,.0f}" + ("" if pd.isna(speed.speedup) else f"   {speed.speedup:.2f}x")
        ax.text(slots + 0.012 * widest, y, text, va="center", color=INK)
    name_bars(ax, [label for label, _, _ in bars])
    ax.set_xlim(0, 1.2 * widest)
    ax.xaxis.set_major_formatter(engineering())
    ax.set(title="Speed: real tokens per second, and slots lost to padding (hatched)", xlabel="slots per second")
    return finish(
        fig,
        "speed",
        "Real tokens per second (solid; the number) and slots spent on padding (hatched)"
        + (
            ", whole optimizer steps, arms interleaved in one process; speedup is over single."
            if together
            else "; arms were timed in their own training runs, which is no comparison."
        ),
    )


def _loss_by_position(styled: Styled) -> Figure | None:
    """Each arm's loss, and beside it the paired differences with their intervals where there is a baseline to compare with."""
    arms = [arm for arm, _ in styled]
    curves = [(arm, style, points) for arm, style in styled if not (points := arm.points("loss_by_position")).empty]
    if not curves:
        return None
    paired = [(style, found) for arm, style, _ in curves if (found := by_position(arm, arms))]
    fig, (left, *right) = axes(2 if paired else 1)
    for arm, style, points in curves:
        ends = points.groupby("start").agg({"end": "first", "loss": "mean"})
        left.plot(_middle(ends.index, ends["end"]), ends["loss"], label=arm.label, **style)
    left.set(title="Validation loss by position", ylabel="loss (nats per target)")
    for style, found in paired:
        starts, ends, differences = zip(*found)
        middle = _middle(starts, ends)
        right[0].plot(middle, [one.mean for one in differences], **style)
        lows, highs = ([getattr(one, side) for one in differences] for side in ("low", "high"))
        right[0].fill_between(middle, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
    for ax in right:
        ax.axhline(0, color=MUTED, linewidth=1)
        ax.set(title=f"The same, minus {versus(arms)}", ylabel="difference (nats per target)")
    for ax in (left, *right):
        ax.set(xscale="log", xlabel="position in the document (tokens)")
        ax.xaxis.set_major_formatter(engineering())
    legend_below(fig)
    several = any(one.n > 1 for _, found in paired for *_, one in found)
    bands = " with 95 % confidence intervals over seeds (bands)" if several else ", one seed: no intervals, no claim"
    return finish(
        fig,
        "loss-by-position",
        "Validation loss by the target's position in its document; what leaks in training shows first at the start."
        + (f" On the right, paired differences{bands}; {versus(arms)} is zero." if paired else ""),
    )


def _middle(starts: Any, ends: Any) -> np.ndarray:
    """Where positions from ``starts`` up to ``ends`` stand on a logarithmic axis; without an end, as if for a doubling."""
    starts, ends = np.asarray(starts, float), np.asarray(ends, float)
    return np.sqrt((starts + 1) * np.where(ends < OPEN_END, ends, 2 * starts))
