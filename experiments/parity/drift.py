"""How far two arms' runs drift apart, step by step: their losses of the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import make_columns
from packmamba.report.aggregate import Arm
from packmamba.report.figures import Figure, axes, finish, legend_below
from packmamba.report.tables import Column, Table, number, word

EARLY = 200
"""Optimizer steps of the prediction on float32."""
LINES = {"packed-reset": "#0072B2", "packed-control": "#E69F00", "single": "#009E73"}
Pair = tuple[Arm, Arm]


def apart(arm: Arm, other: Arm, curve: str = "train") -> pd.Series:
    """Size of the difference of two arms' losses, nats per target, by (seed, step); empty without a seed of both."""
    both = [one.points(curve) for one in (arm, other)]
    if any(points.empty for points in both):
        return pd.Series(dtype=float)
    mine, theirs = (points.set_index(["seed", "step"])["loss"] for points in both)
    return (mine - theirs).abs().dropna()


def precision(arm: Arm) -> str:
    return {"32-true": "float32", "bf16-mixed": "bfloat16"}.get(
        said := arm.runs.iloc[0]["config.trainer.precision"], said
    )


def line(arm: Arm, first: Arm) -> Any:
    """Of a figure whose first arm is drawn solid."""
    keys = ("optimizer.lr", "trainer.max_steps", "data.validation_documents")
    own, its = ([one.runs.iloc[0].get(f"config.{key}") for key in keys] for one in (arm, first))
    rate, steps, documents = (one != other for one, other in zip(own, its))
    if rate:
        return ":"
    if precision(arm) == "float32":
        return (0, (4, 1.5))
    return "-." if steps else (0, (6, 1, 1, 1, 1, 1)) if documents else "-"


def drift_table(pairs: Sequence[Pair]) -> Table:
    table = Table(
        "drift",
        "How far apart the losses of the same documents lie, nats per target",
        [
            *make_columns("!arm | !minus | !precision | pairs | step 1 = first"),
            Column(f"largest to step {EARLY}", ("early",)),
            *make_columns("median after step 1 = later | largest | validation, largest at the end = validation"),
        ],
    )
    for arm, other in pairs:
        steps = apart(arm, other)
        if steps.empty:
            continue
        at, read = steps.index.get_level_values("step"), apart(arm, other, "validation")
        end = read[read.index.get_level_values("step") == at.max()]
        sizes = [steps[at == 1].max(), steps[at <= EARLY].max(), steps[at > 1].median(), steps.max()]
        sizes.append(end.max() if len(end) else None)
        seeds = number(steps.index.get_level_values("seed").nunique(), "d")
        table.rows.append(
            [word(arm.name), word(other.name), word(precision(arm)), seeds, *(number(size, ".1e") for size in sizes)]
        )
    table.notes = [
        "The first step and every fiftieth; median or largest over steps and seeds. Every arm has the same documents in "
        "every step, so that without rounding all differences were zero."
    ]
    return table


def drift_figure(pairs: Sequence[Pair]) -> list[Figure]:
    """Differences against steps, on a logarithmic axis; nothing unless there is a pair in float32."""
    if not any(precision(arm) == "float32" for arm, _ in pairs):
        return []
    fig, (ax,) = axes(1, width=6.4)
    for arm, other in pairs:
        steps = apart(arm, other)
        if steps.empty:
            continue
        by_step = steps.groupby("step")
        low, mean, high = by_step.min(), by_step.mean(), by_step.max()
        name = next((name for name in LINES if arm.name.startswith(name)), "")
        style: dict[str, Any] = {
            "color": LINES.get(name, "#5b616b"),
            "linestyle": line(arm, pairs[0][0]),
            "linewidth": 1.8,
        }
        ax.plot(mean.index, mean, marker="o", markersize=3, label=f"{arm.name} minus {other.name}", **style)
        if steps.index.get_level_values("seed").nunique() > 1:
            ax.fill_between(mean.index, np.maximum(low, 1e-7), high, color=style["color"], alpha=0.12, linewidth=0)
    ax.set(yscale="log", xlabel="optimizer step", ylabel="difference of a step's loss, nats")
    legend_below(fig, columns=2)
    caption = (
        "Size of the difference between two arms' losses of the same documents, by step: mean over seeds, and from the least to "
        "the largest. Dashed: float32; dotted: another learning rate; dash-dotted: more steps; with two dots: other "
        "validation documents."
    )
    return [finish(fig, "drift", caption)]
