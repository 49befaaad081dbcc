"""Tables of what models answer that were trained under each scheme: seeds that solve a task, and nats of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

from experiments.common import equivalence, make_table, without_speeds
from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Record
from packmamba.report.html import KINDS as LIBRARY
from packmamba.report.statistics import Estimate, holm, interval, verdict
from packmamba.report.tables import Cell, Table, number

MARGIN = 0.02  # nats an answer, named before the runs
COMPARED = ("packed-reset", "packed-leak")  # with padded
SEEDS = 8
SOLVED = 0.9  # accuracy from which a seed has solved a task: it is learned suddenly, so a mean of seeds says little


def task_of(records: Sequence[Record]) -> str:
    return records[0]["config"]["data"]["task"]


def answers_tables(records: Sequence[Record]) -> list[Table]:
    """``records`` are of one task."""
    task, arms = task_of(records), aggregate.training_arms(records)
    if not any(arm[f"{task}.nats"].notna().any() for arm in arms):
        return []
    baseline = next((arm for arm in arms if arm.name == "padded"), None)
    pairs = {
        arm.name: (arm[f"{task}.nats"] - baseline[f"{task}.nats"]).dropna()
        for arm in arms
        if baseline is not None and arm is not baseline
    }
    # Those that were named beforehand count, measured or not.
    p_values = holm(
        dict.fromkeys(COMPARED, nan)
        | {name: equivalence(values, MARGIN) for name, values in pairs.items() if name in COMPARED}
    )
    # No loss is below zero, so a rate beyond the end of the grid lowers an arm's by all of it at most.
    gains = {arm.name: arm[f"{task}.nats"].mean() if _at_an_end(arm) else 0.0 for arm in arms}
    rows = []
    for arm in arms:
        accuracy, found = arm[f"{task}.accuracy"], interval(pairs[arm.name]) if arm.name in pairs else None
        row = {"arm": arm.name, "runs": _runs(arm, task), "accuracy": accuracy, "nats": arm[f"{task}.nats"]}
        row |= {"solved": int((accuracy >= SOLVED).sum()), "chance": arm[f"{task}.chance"].mean(), "difference": found}
        row["verdict"] = _verdict(found, gains[arm.name], gains["padded"]) if arm.name in pairs else "-"
        rows.append(row | {"p": p_values.get(arm.name), "lr": _rate(arm)})
    notes = [
        "Examples that training did not see, each document from zero state. Differences are paired by seed, with 95 % intervals "
        "by Student's t. Every step of every arm has the same examples; only answers bear targets."
    ]
    if any(_at_an_end(arm) for arm in arms):
        notes.append(
            "Where an arm's best learning rate is the least or the greatest that was tried, a better one may lie beyond. It "
            "lowers the arm's loss to zero at most: an answer that this could turn is open."
        )
    table = make_table(
        "answers",
        f"{task}: answers of models trained under each scheme",
        f"!arm | runs = runs diverged missing | seeds solved (accuracy {SOLVED} and more) = solved:d | "
        "accuracy = accuracy accuracy_sd | chance:% | nats an answer = nats nats_sd | "
        "minus padded [95 %] = difference[] pairs:4 small | "
        f"!verdict, margin ± {MARGIN} = verdict | p of equivalence, Holm = p:.2g | its learning rate = lr",
        rows,
        *notes,
    )
    return [table]


def _runs(arm: Arm, task: str) -> Cell:
    """List the seeds with answers, of those that every arm should have, and the state of the others."""
    have, diverged = int(arm[f"{task}.nats"].notna().sum()), int(arm["val_loss"].isna().sum())
    found = aggregate.Seeds(have, diverged, max(SEEDS - have - diverged, 0))
    return Cell(str(found), tuple(found))


def _verdict(found: Estimate | None, gain: float, padded_gain: float) -> str:
    """By the interval, unless it says otherwise once either arm's loss is less by what another learning rate may gain."""
    said = verdict(found, MARGIN)
    turned = found and found._replace(low=found.low - gain, high=found.high + padded_gain)
    return said if verdict(turned, MARGIN) == said else "open"


def _at_an_end(arm: Arm) -> bool:
    """Return True where the learning rate is the least or greatest that was tried."""
    tried = [values for each in arm.sweep.get("tried", ()) for values in each.values()]
    rate = arm.says("optimizer.lr")
    return any(rate in (min(values), max(values)) for values in tried if rate in values)


def _rate(arm: Arm) -> Cell:
    rate = number(arm.says("optimizer.lr"), "g")
    return Cell(f"{rate.text}, an end", rate.values) if _at_an_end(arm) else rate


KINDS = {
    "training": replace(without_speeds(LIBRARY["training"], answers_tables), label=task_of),
    "throughput": replace(LIBRARY["throughput"], label=task_of),
}
