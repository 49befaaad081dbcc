"""Evaluations' metrics: their names in tables, which are counts, and which number says most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from packmamba.report.summary import Arm, Record

TITLES = {
    "accuracy": "accuracy",
    "chance": "chance",
    "nats": "nats an answer",
    "choice_accuracy": "right choices",
    "choice_accuracy_by_bytes": "right choices, by bytes",
    "loss": "loss",
    "bits_per_byte": "bits per byte",
    "quarter": "first quarter cut off",
    "half": "first half cut off",
    "three_quarters": "first three quarters cut off",
    "accuracy_as_trained": "accuracy as trained",
    "nats_as_trained": "nats an answer as trained",
    "loss_as_trained": "loss as trained",
    "accuracy_intruding": "accuracy, intruding reads",
    "accuracy_intruding_as_trained": "accuracy as trained, intruding reads",
    "best_intruding_as_trained": "best possible as trained, intruding reads",
    "best_as_trained": "best possible as trained",
}
OF_CHOICES = {"accuracy": "tokens right", "chance": "right choices by chance"}
"""Titles where an evaluation has choices: chance is theirs."""
COUNTS = ("answers", "examples", "documents", "targets", "reads_intruding")
MAIN = ("choice_accuracy", "accuracy", "loss")
"""An evaluation's main number: the first of these that it has, else its first."""
HEADLINE = ("bits_per_byte", *MAIN)
"""The same for the one number beside losses: bits per byte of the right choice tell models apart that still guess."""


def arms_evaluations(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """The evaluations that the runs of these arms ended with, and the metrics of each, the main number first."""
    found: dict[str, list[str]] = {}
    for metric in dict.fromkeys(column for arm in arms for column in arm.runs if "." in column):
        name, _, own = metric.partition(".")
        if name not in ("config", "curves"):
            found.setdefault(name, []).append(own)
    for metrics in found.values():
        main = next((m for m in MAIN if m in metrics), metrics[0])
        metrics.sort(key=lambda m: m != main)
    return found


def questions(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Records of kind evaluation by what was asked: the evaluation's name, and its options as text."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "evaluation":
            asked = record["config"]["evaluation"]
            options = ", ".join(f"{key}={value}" for key, value in sorted((asked.get("options") or {}).items()))
            found.setdefault((asked["name"], options), []).append(record)
    return found


def stem(question: tuple[str, str], others: Iterable[tuple[str, str]]) -> str:
    """Of a question's tables and figures among those of others: its name, and which of that name it is."""
    alike = [other for other in others if other[0] == question[0]]
    return question[0] + (f"-{alike.index(question) + 1}" if len(alike) > 1 else "")


def headline(arms: Iterable[Arm]) -> tuple[str, str] | None:
    """The metric of the first evaluation that stands beside the losses, and its title; None without evaluations."""
    for name, present in arms_evaluations(arms).items():
        metric = next((m for m in HEADLINE if m in present), present[0])
        return f"{name}.{metric}", f"{name}, {title(metric)}"
    return None


def measures(present: Sequence[str]) -> list[str]:
    """Without counts, in the order of ``TITLES``, then as they come, but ``loss_2`` before ``loss_16``."""
    numbered = sorted(present, key=lambda m: (len(m), m) if m[-1].isdigit() else (0, ""))
    order = [*TITLES, *numbered]
    if "choice_accuracy" in present:
        order.remove("chance")
        order.insert(order.index("choice_accuracy_by_bytes") + 1, "chance")
    return sorted((m for m in present if m not in COUNTS), key=order.index)


def title(metric: str, present: Collection[str] = ()) -> str:
    """As tables name a metric among those that are ``present``."""
    if "choice_accuracy" in present and metric in OF_CHOICES:
        return OF_CHOICES[metric]
    return TITLES.get(metric, metric.replace("_", " "))
