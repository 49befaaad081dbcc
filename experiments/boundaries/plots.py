"""Figures of starts and of leaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from experiments.boundaries.runs import STARTS, Arm, Setting, arms, by_setting, contrast, dose, gain_pairs, of_one_start
from packmamba.report.aggregate import Record
from packmamba.report.figures import MUTED, Figure, axes, finish, legend_below
from packmamba.report.statistics import Resampled, bootstrap

COLORS = {"noise": "#E69F00", "foreign": "#0072B2", "own": "#009E73", "own scan": "#CC79A7"}
AFTER_NAME = "-post-training"
AFTER = {"": False, AFTER_NAME: True}
"""Ends of figures' names, and whether their runs went on from other runs' weights."""
LEAST, MOST = 5, 16
"""Powers of two between which places are drawn: before them differences are many times larger."""


def starts_figures(records: Sequence[Record]) -> list[Figure]:
    """Difference from zero against the place in the document over T; a panel for each setting, most seeds first.

    Whole is in tables alone: it is ten times as far from zero as the others, and would flatten them.
    """
    every = by_setting(arms(records))
    shown = [(s, here) for s, here in every.items() if not s.tuning and _pairs(here) > 1]
    settings = dict(sorted(shown, key=lambda one: (-_pairs(one[1]), one[0].after)))
    if not settings:
        return []
    fig, panels = axes(len(settings), width=max(6.0, 4.4 * min(3, len(settings))), height=3.8, columns=3)
    for ax, (setting, here) in zip(panels, settings.items()):
        ax.axhline(0, color=MUTED, linewidth=1.2, label="zero")
        rungs = [name for name in STARTS.values() if name != "zero"]
        seeds = {name: count for name in rungs if (count := _pairs(here, name)) > 1}
        for name in seeds:
            points = [
                (2**power, contrast(here[name], here["zero"], 2**power * setting.T, 2 ** (power + 1) * setting.T))
                for power in range(-4, 5)
            ]
            found = [(x * 2**0.5, one) for x, one in points if one and one.seeds > 1]
            ax.errorbar(
                [x for x, _ in found], [one.mean for _, one in found], yerr=_halves([one for _, one in found]),
                color=COLORS[name], marker="o", linewidth=1.6, capsize=2, label=name,
            )  # fmt: skip
        ax.axvline(1, color="#b4b9c1", linewidth=1)
        fewer = "".join(f", {name}: {count}" for name, count in seeds.items() if count < max(seeds.values()))
        title = f"{setting.label()}\n{max(seeds.values())} seeds{fewer}"
        ax.set(title=title, xscale="log", xlabel="place in the document / T", ylabel="nats minus zero's")
        ax.set_xticks([1 / 16, 1 / 4, 1, 4, 16], ["1/16", "1/4", "1", "4", "16"])
        ax.set_xticks([], minor=True)
    legend_below(fig, columns=6)
    caption = (
        "Loss minus that of zero, by the place in the document over T; bars are 95 % intervals over seeds and packages."
    )
    return [finish(fig, "starts", caption)]


def _pairs(here: dict[str, Arm], name: str = "own", other: str = "zero") -> int:
    """Seeds that have both arms."""
    if not {other, name} <= here.keys():
        return 0
    first, second = of_one_start(here[other], here[name])
    return len(first.runs.index.intersection(second.runs.index))


def leak_figures(records: Sequence[Record]) -> list[Figure]:
    """What a leak does to the loss by the place in the document, and against its dose; also in post-training."""
    settings = {
        s: here for s, here in by_setting(arms(records)).items() if not s.tuning and _pairs(here, "leak", "rows") > 1
    }
    found = []
    for end, after in AFTER.items():
        part = {s: here for s, here in settings.items() if s.after == after}
        found += [*_leaks_by_place(f"leaks{end}", part), *_doses(f"dose{end}", part)]
    return found


def _leaks_by_place(name: str, settings: dict[Setting, dict[str, Arm]]) -> list[Figure]:
    if not settings:
        return []
    fig, (ax,) = axes(1, width=7.0)
    for (setting, here), color in zip(settings.items(), itertools.cycle(COLORS.values())):
        points = [
            (2 ** (power + 0.5), contrast(here["leak"], here["rows"], 2**power, 2 ** (power + 1)))
            for power in range(LEAST, MOST)
        ]
        found = [(x, one) for x, one in points if one and one.seeds > 1]
        ax.errorbar(
            [x for x, _ in found], [one.mean for _, one in found], yerr=_halves([one for _, one in found]), color=color,
            marker="o", linewidth=1.6, capsize=2, label=f"{setting.label()}, {_pairs(here, 'leak', 'rows')} seeds",
        )  # fmt: skip
    ax.axhline(0, color=MUTED, linewidth=1.2)
    ax.set(xscale="log", xlabel="place in the document", ylabel="loss: leak minus rows, nats")
    ax.set_xticks([64, 256, 1024, 4096, 16384], ["64", "256", "1024", "4096", "16,384"])
    ax.set_xticks([], minor=True)
    legend_below(fig, columns=1)
    after = "; runs that went on from zero" if name.endswith(AFTER_NAME) else ""
    caption = (
        f"Leak minus the same rows with reset, by the place in the document from {2**LEAST} on, each document read from "
        f"zero{after}; bars are 95 % intervals over seeds and packages."
    )
    return [finish(fig, name, caption)]


def _halves(found: Sequence[Resampled]) -> np.ndarray:
    """Lengths of error bars; 0 without an interval."""
    return np.maximum(np.nan_to_num([[one.mean - one.low for one in found], [one.high - one.mean for one in found]]), 0)


def _doses(name: str, settings: dict[Setting, dict[str, Arm]]) -> list[Figure]:
    known = [(dose(here["leak"]), s, here) for s, here in settings.items()]
    doses = sorted(((100 * share, s, here) for share, s, here in known if share is not None), key=lambda one: one[0])
    if len(doses) < 2:
        return []
    fig, panels = axes(2, width=9.0)
    losses = [contrast(here["leak"], here["rows"], 0, np.inf) for _, _, here in doses]
    gains = [bootstrap(*gain_pairs(here["leak"], here["rows"], 4)) for _, _, here in doses]
    lines = [(0, "loss, all places", "#0072B2", losses)]
    lines.append((1, "context gain at 4 T", "#009E73", [one if one.seeds else None for one in gains]))
    for panel, label, color, found in lines:
        points = [(share, one) for (share, *_), one in zip(doses, found) if one is not None and one.seeds > 1]
        x, y = [share for share, _ in points], [one.mean for _, one in points]
        errors = _halves([one for _, one in points])
        panels[panel].errorbar(x, y, yerr=errors, color=color, marker="o", linestyle="none", capsize=2, label=label)
    for ax, ylabel in zip(panels, ("loss: leak minus rows, nats", "context gain: leak minus rows, nats")):
        ax.axhline(0, color=MUTED, linewidth=1.2)
        names = [f"{share:.3g} %\nT = {s.T}" for share, s, _ in doses]
        ax.set(xscale="log", xlabel="tokens behind another document", ylabel=ylabel)
        ax.set_xticks([share for share, *_ in doses], names)
        ax.set_xticks([], minor=True)
    legend_below(fig, columns=3)
    caption = (
        "Leak minus the same rows with reset, by the share of tokens that stand behind another document, which "
        f"grows with T{'; runs that went on from zero' if name.endswith(AFTER_NAME) else ''}; 95 % intervals."
    )
    return [finish(fig, name, caption)]


def figures(records: Sequence[Record]) -> list[Figure]:
    """``records`` are of one corpus."""
    return [*starts_figures(records), *leak_figures(records)]
