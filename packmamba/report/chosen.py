"""The table of trained arms where its sweep, or who compares runs, has said what it compares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from packmamba.records import LATER_KEYS
from packmamba.report import summary
from packmamba.report.measures import title
from packmamba.report.summary import Arm, Interval, Speed
from packmamba.report.tables import Cell, Column, Table, gibibytes, mean_sd, number, percent, word

TITLES = {
    "val_loss": "validation loss",
    "val_loss_start": "loss, first 32 tokens",
    "val_loss_as_trained": "loss, evaluated as trained",
    "real_tokens": "real tokens",
    "real_tokens_per_second": "real tokens/s",
    "padding_fraction": "padding",
    "speedup": "speedup over single",
    "peak_memory_bytes": "peak memory",
}
COLUMNS = ("real_tokens", "real_tokens_per_second", "padding_fraction")
"""Beside the metrics, unless others are named."""


def chosen(arms: Sequence[Arm]) -> Mapping[str, Any]:
    """What is said of the table: ``metrics``, ``columns`` and ``paired``; empty if nothing is."""
    return next((said for arm in arms if (said := arm.sweep.get("table"))), {})


def title_of(metric: str) -> str:
    """In tables; ``mqar.accuracy`` is of an evaluation."""
    evaluation, dot, own = metric.rpartition(".")
    return TITLES.get(metric) or (f"{evaluation}, {title(own)}" if dot else metric.replace("_", " "))


def unpaired(arm: Arm, baseline: Arm, metric: str) -> Interval | None:
    """The difference of two means over seeds that are not matched, with its 95 % interval by Welch's t."""
    ours, theirs = arm[metric].dropna(), baseline[metric].dropna()
    if ours.empty or theirs.empty:
        return None
    mean, half, n = ours.mean() - theirs.mean(), math.nan, min(len(ours), len(theirs))
    if n > 1:
        a, b = ours.var() / len(ours), theirs.var() / len(theirs)
        freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1)) if a + b else 1.0
        half = stdtrit(freedom, 0.975) * math.sqrt(a + b)
    return Interval(mean, mean - half, mean + half, n)


def cell(arm: Arm, speed: Speed, expected: int, column: str) -> Cell:
    """Of an arm under a column: a metric, or a key of its configuration such as ``optimizer.lr``."""
    if column == "real_tokens":
        return number(arm[column].mean(), ",.0f")
    if column == "real_tokens_per_second":
        return number(speed.real_tokens_per_second, ",.0f")
    if column == "padding_fraction":
        return percent(speed.padding_fraction)
    if column == "speedup":
        return number(speed.speedup, ".2f", "x")
    if column == "peak_memory_bytes":
        return gibibytes(arm[column].mean())
    if column in keys_of([arm]):
        return word(_said(arm, column))
    return mean_sd(arm[column], expected)


def columns_of(names: Sequence[str], arms: Sequence[Arm]) -> list[Column]:
    """Those of ``cell``."""
    plain = {"real_tokens", "real_tokens_per_second", "padding_fraction", "speedup", "peak_memory_bytes"}
    plain |= keys_of(arms)
    return [Column(title_of(name), (name,) if name in plain else (name, f"{name}_sd")) for name in names]


def keys_of(arms: Sequence[Arm]) -> set[str]:
    """The keys of the arms' configurations, those that records leave out too."""
    said = {column for arm in arms for column in arm.runs if column.startswith("config.")}
    return {column.removeprefix("config.") for column in said} | set(LATER_KEYS)


def _said(arm: Arm, key: str) -> str:
    """A key's value as files of configurations have it; of a section all that is set in it."""
    run = arm.runs.iloc[0]
    inside = run.filter(like=f"config.{key}.").dropna()
    inside = inside[inside.index.str.startswith(f"config.{key}.")]
    if len(inside):
        values = (f"{name.removeprefix(f'config.{key}.')}: {_as_yaml(value)}" for name, value in inside.items())
        return f"{{{', '.join(values)}}}"
    value = run.get(f"config.{key}")
    if value is not None and value is not pd.NA:
        return _as_yaml(value)
    return _as_yaml(LATER_KEYS.get(key)) if key.count(".") < 2 else "-"


def _as_yaml(value: Any) -> str:
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else str(value)


def known(arms: Sequence[Arm]) -> list[str]:
    """The metrics that any of the arms has."""
    own = {"sweep", "seed", "wall_seconds", "corpus_hash"}
    return sorted({
        name for arm in arms for name in arm.runs
        if not name.startswith(("config.", "curves.")) and name not in own and arm.runs[name].dtype == float
    })  # fmt: skip


def chosen_table(arms: Sequence[Arm], speeds: Sequence[Speed], against: str, differences: Any) -> Table:
    """Each metric with its spread over seeds and its difference from the baseline, then the further columns.

    Args:
        against: what differences are from.
        differences: the cell of an arm's difference in a metric.
    """
    said = chosen(arms)
    metrics, further = said.get("metrics") or ["val_loss"], said.get("columns")
    further = list(COLUMNS) if further is None else further
    columns = [Column("arm", ("arm",), False), Column("seeds", ("seeds",))]
    for metric in metrics:
        names = tuple(f"{metric}_{part}" for part in ("difference", "difference_low", "difference_high", "pairs"))
        columns += [*columns_of([metric], arms), Column(f"minus {against} [95% CI]", names)]
    columns += columns_of(further, arms)
    table = Table("training", f"{', '.join(map(title_of, metrics))} by arm", columns)
    for arm, speed in zip(arms, speeds):
        count = summary.seeds_of(arm, arms)
        cells = [word(arm.label), Cell(str(count), (count.finite,))]
        for metric in metrics:
            cells += [cell(arm, speed, count.expected, metric), differences(arm, metric, count.expected)]
        table.rows.append([*cells, *(cell(arm, speed, count.expected, name) for name in further)])
    for name, seeds in summary.absent_arms(arms).items():
        dashes = [Cell("-", (None,) * len(column.names)) for column in columns[2:]]
        table.rows.append([word(name), Cell(str(summary.Seeds(0, 0, seeds)), (0,)), *dashes])
    how = "paired by seed" if said.get("paired", True) else "of means over seeds that are not matched, by Welch's t"
    table.notes = [f"Differences are {how}."]
    return table
