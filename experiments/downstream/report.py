"""Tables of what models answer that were trained under each scheme: seeds that solve a task, and
nats of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.common import ruled_columns, without_speeds
from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Record, divergence
from packmamba.lab.report.html import KINDS as LIBRARY
from packmamba.lab.report.statistics import Comparison, Ruling, rule, verdict
from packmamba.lab.report.tables import Cell, Table, make_table, number, ruled

MARGIN = 0.02  # nats an answer, named before the runs
COMPARED = ("packed-reset", "packed-leak")  # with padded
# accuracy from which a seed has solved a task: it is learned suddenly, so a mean of seeds says
# little
SOLVED = 0.9


def task_of(records: Sequence[Record]) -> str:
    return records[0]["config"]["data"]["task"]


def answers_tables(records: Sequence[Record]) -> list[Table]:
    """``records`` are of one task."""
    task, arms = task_of(records), aggregate.training_arms(records)
    baseline = next((arm for arm in arms if arm.name == "padded"), None)
    rulings = {} if baseline is None else _rule(task, arms, baseline)
    # No loss is below zero, so a rate beyond the end of the grid lowers an arm's by all of it at
    # most.
    gains = {arm.name: arm[f"{task}.nats"].mean() if _at_an_end(arm) else 0.0 for arm in arms}
    rows = []
    for arm in arms:
        accuracy = arm[f"{task}.accuracy"]
        seeds = aggregate.seeds_of(arm, arms, f"{task}.nats")
        row = {
            "arm": arm.name,
            "runs": Cell(str(seeds), tuple(seeds)),
            "accuracy": accuracy,
            "nats": arm[f"{task}.nats"],
        }
        row |= {"solved": int((accuracy >= SOLVED).sum()), "chance": arm[f"{task}.chance"].mean(), "lr": _rate(arm)}
        row |= {"verdict": "-", "registered": "-"}
        if ruling := rulings.get(arm.name):
            found = ruling.estimate
            row |= ruled(ruling)
            turned = found._replace(low=found.low - gains[arm.name], high=found.high + gains["padded"])
            if verdict(turned, MARGIN) != ruling.by_interval:
                row |= dict.fromkeys(("verdict", "registered"), "open")
        rows.append(row)
    notes = [
        "Examples that training did not see, each document from zero state. Differences are paired by seed, with 95 % intervals "
        "by Student's t. Every step of every arm has the same examples; only answers bear targets.",
        "Verdict: by the interval, and by p after Holm over the two comparisons that were named beforehand, or over the others. "
        "As registered: by the interval alone.",
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
        "minus padded [95 %] = difference[] pairs:4 | "
        f"{ruled_columns(MARGIN)} | its learning rate = lr",
        rows,
        *notes,
    )
    return [table]


def _rule(task: str, arms: Sequence[Arm], baseline: Arm) -> dict[str, Ruling]:
    """Rule on each arm minus the baseline: those named beforehand are one family, the others
    another.
    """
    comparisons = {}
    for arm in arms:
        if arm is not baseline:
            comparisons[arm.name] = Comparison(
                arm[f"{task}.nats"] - baseline[f"{task}.nats"],
                margin=MARGIN,
                divergence=divergence(arm, baseline),
                family="named" if arm.name in COMPARED else "others",
                is_leak=arm.leaks,
            )
    return rule(comparisons, {"named": len({*COMPARED}.difference(comparisons))})


# The least and the greatest learning rate of which a task's arms took their best.
TRIED = {
    "mqar": (2.0e-3, 6.4e-2),
    "selective_copying": (1.0e-3, 1.6e-2),
    "induction": (1.0e-3, 1.6e-2),
    "contradiction": (2.5e-3, 4.0e-2),
}


def _at_an_end(arm: Arm) -> bool:
    """Return True where the learning rate is the least or greatest that was tried."""
    return arm.says("optimizer.lr") in TRIED[arm.says("data.task")]


def _rate(arm: Arm) -> Cell:
    rate = number(arm.says("optimizer.lr"), "g")
    return Cell(f"{rate.text}, an end", rate.values) if _at_an_end(arm) else rate


KINDS = {
    "training": replace(without_speeds(LIBRARY["training"], answers_tables), label=task_of),
    "throughput": replace(LIBRARY["throughput"], label=task_of),
}
