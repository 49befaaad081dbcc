"""Tables and figures of the tasks: are they learned, far beyond the training's sizes too, and by models that learned nothing?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from scipy.special import stdtrit

from experiments.common import make_columns
from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Record, frame
from packmamba.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.report.html import Kind
from packmamba.report.statistics import Estimate, interval
from packmamba.report.tables import Cell, Column, Table, number, percent, word

SEED = "#0072B2"


def _task(records: Sequence[Record], kind: str = "training") -> str:
    """The task that the records are about, and whether its documents have begin tokens."""
    config = aggregate.of_kind(records, kind)[0]["config"]
    if kind == "answers":
        return config["task"]
    return config["data"]["task"] + ("-begin" if config["data"].get("task_options", {}).get("begin") else "")


def learned_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate what it took to learn a task, a line for each arm; ``records`` are of one corpus."""
    arms = aggregate.training_arms(records)
    table = Table(
        "learned",
        f"{_task(records)}: what was trained, and how long it took",
        make_columns(
            "!arm | seeds | layers | parameters | steps | real tokens = real_tokens | "
            "validation loss, largest = val_loss_max | accuracy, smallest = accuracy_min | "
            "accuracy, mean = accuracy | answers | cores | seconds, longest = wall_seconds_max"
        ),
    )
    for arm in arms:
        accuracy = arm[f"{arm.runs['config.data.task'].iloc[0]}.accuracy"]
        answers = arm[f"{arm.runs['config.data.task'].iloc[0]}.answers"]
        cores = max(record["hardware"]["cores"] for record in aggregate.of_kind(records, "training"))
        table.rows.append([
            word(arm.label), number(len(arm.runs), "d"), number(arm.runs["config.model.n_layer"].iloc[0], "d"),
            number(arm["parameters"].iloc[0], ",.0f"), number(arm["steps"].max(), ",.0f"),
            number(arm["real_tokens"].mean(), ",.0f"), number(arm["val_loss"].max(), ".4f"), percent(accuracy.min()),
            percent(accuracy.mean()), number(answers.mean(), ",.0f"), number(cores, "d"),
            number(arm.runs["wall_seconds"].max(), ",.0f"),
        ])  # fmt: skip
    table.notes = [
        "Seconds are of a whole run, its evaluations with it. Accuracy is of documents one at a time, from zero state."
    ]
    return [table, *_leak_tables(arms)]


def _pair(arms: Sequence[Arm]) -> tuple[Arm, Arm] | None:
    """The arms that trained with reset and with leak."""
    by_boundary = {arm.runs["config.trainer.boundary"].iloc[0]: arm for arm in arms}
    return (by_boundary["reset"], by_boundary["leak"]) if by_boundary.keys() >= {"reset", "leak"} else None


def _leak_tables(arms: Sequence[Arm]) -> list[Table]:
    """Tabulate leak minus reset, by seed, on reads of keys that only the predecessor wrote, in points."""
    if (pair := _pair(arms)) is None:
        return []
    reset, leak = pair
    table = Table(
        "leak",
        "contradiction: packed with leak minus packed with reset, paired over seeds",
        make_columns(
            "!evaluated | !reads | packed-reset = reset | packed-leak = leak | "
            "minus, points [95% CI] = difference difference_low difference_high pairs | "
            "best possible under leak = best | leak says the predecessor's value = intrusions"
        ),
    )
    for evaluated, suffix in (("as trained", "_as_trained"), ("one document at a time", "")):
        for reads, name in (("of keys that only the predecessor wrote", "_intruding"), ("all", "")):
            # What comes before changes nothing for reset: as trained it answers as it does alone.
            base, own = (arm[f"contradiction.accuracy{name}{end}"] for arm, end in ((reset, ""), (leak, suffix)))
            found = interval(100 * (own - base))
            best = leak[f"contradiction.best{name}_as_trained"].mean() if suffix else 1.0
            intrusions = leak[f"contradiction.intrusions{suffix}"].mean() if name else None
            table.rows.append([
                word(evaluated), word(reads), percent(base.mean()), percent(own.mean()), _points_cell(found),
                percent(best), percent(intrusions),
            ])  # fmt: skip
    table.notes = [
        "Points are percentages of right answers; 95 % intervals by Student's t over seeds. Best possible: of a reader who knows "
        "how documents are drawn, and sees where one begins only if it has a begin token."
    ]
    return [table]


def _points_cell(found: Estimate | None) -> Cell:
    if found is None:
        return number(None, "")
    text = f"{found.mean:+.1f}" + (f" [{found.low:+.1f}, {found.high:+.1f}]" if found.seeds > 1 else "")
    return Cell(text, tuple(found[:4]))


def leak_figures(records: Sequence[Record]) -> list[Figure]:
    """Right answers of reset and leak as trained, a dot for each seed, and the best possible under leak."""
    if (pair := _pair(aggregate.training_arms(records))) is None:
        return []
    reset, leak = pair
    fig, panels = axes(2, width=8.0, height=3.4)
    for ax, (title, name) in zip(panels, (("all reads", ""), ("keys that only the predecessor wrote", "_intruding"))):
        values = {
            "reset": reset[f"contradiction.accuracy{name}"],
            "leak, alone": leak[f"contradiction.accuracy{name}"],
            "leak, as trained": leak[f"contradiction.accuracy{name}_as_trained"],
        }
        for place, (arm, found) in enumerate(values.items()):
            colour = style_of("packed-reset" if arm == "reset" else "packed-leak")["color"]
            ax.bar(place, 100 * found.mean(), 0.6, color=colour, alpha=0.35)
            ax.plot([place] * len(found), 100 * found, "o", color=colour)
        best = 100 * leak[f"contradiction.best{name}_as_trained"].mean()
        ax.axhline(best, color=MUTED, linewidth=1.2, linestyle=(0, (5, 2)), label="best possible as trained with leak")
        ax.set_xticks(range(len(values)), values)
        ax.set(title=title, ylabel="right answers (%)", ylim=(0, 103))
    legend_below(fig)
    return [finish(fig, "leak", f"{_task(records)}: right answers by arm, a dot for each seed.")]


def answers_tables(records: Sequence[Record]) -> list[Table]:
    """Accuracy at each size; ``records`` are of one trained task."""
    points, varied, chance = _points(records)
    table = Table(
        "answers",
        f"{_task(records, 'answers')}: accuracy by {varied.replace('_', ' ')}",
        [
            *make_columns("!arm"),
            Column(varied.replace("_", " "), ("value",)),
            *make_columns(
                "!in training = in_training | seeds | "
                "accuracy [95% CI] = accuracy accuracy_low accuracy_high | smallest = accuracy_min | "
                "answers, each seed = answers | chance"
            ),
        ],
    )
    for (arm, value), group in points.groupby(["arm", "value"], sort=False):
        found = interval(group["accuracy"])
        assert found is not None
        low, high = max(0.0, found.low), min(1.0, found.high)
        text = f"{100 * found.mean:.1f} %" + (f" [{100 * low:.1f}, {100 * high:.1f}]" if found.seeds > 1 else "")
        table.rows.append([
            word(str(arm)), number(value, "d"), word("yes" if group["trained"].iloc[0] else "no"), number(found.seeds, "d"),
            Cell(text, (found.mean, low, high)), percent(group["accuracy"].min()), number(group["answers"].mean(), ",.0f"),
            percent(chance),
        ])  # fmt: skip
    table.notes = [
        "Means over seeds with 95 % intervals by Student's t, cut at 0 and 100 %; every seed's model gets the same questions."
    ]
    return [table]


def answers_figures(records: Sequence[Record]) -> list[Figure]:
    """Accuracy against size, a line for each seed."""
    points, varied, chance = _points(records)
    fig, (ax,) = axes(1, width=6.4, height=3.6)
    for seed, group in points.groupby("seed"):
        ax.plot(group["value"], 100 * group["accuracy"], color=SEED, alpha=0.8, marker="o", linewidth=1.4,
                label="a trained model, each seed" if seed == points["seed"].min() else None)  # fmt: skip
    ax.axhline(100 * chance, color=MUTED, linewidth=1.2, linestyle=(0, (5, 2)), label="chance")
    trained = points[points["trained"]]["value"]
    if len(trained):
        ax.axvspan(trained.min(), trained.max(), color=SEED, alpha=0.08, linewidth=0, label="sizes in training")
    values = sorted(points["value"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, [str(value) for value in values])
    ax.minorticks_off()
    name = _task(records, "answers")
    ax.set(ylim=(-3, 103), xlabel=varied.replace("_", " "), ylabel="right answers (%)", title=name)
    legend_below(fig, columns=3)
    return [
        finish(
            fig, "answers", f"{name}: right answers against {varied.replace('_', ' ')}, each document from zero state."
        )
    ]


def _points(records: Sequence[Record]) -> tuple[pd.DataFrame, str, float]:
    """One row for each seed and value; of a repeated run the latest; ``trained``: the value is among those of the training."""
    latest = {(r["arm"], r["seed"]): r for r in sorted(aggregate.of_kind(records, "answers"), key=lambda r: r["time"])}
    rows, varied, chance = [], "", 0.0
    for (arm, seed), record in sorted(latest.items()):
        varied, chance = record["config"]["varied"], record["metrics"]["chance"]
        span = record["config"]["trained"].get(varied)
        low, high = span if isinstance(span, list) else (span, span)
        for point in record["curves"]["answers"]:
            inside = low is not None and low <= point["value"] <= high
            rows.append(point | {"arm": arm, "seed": seed, "trained": inside})
    return pd.DataFrame(rows), varied, chance


def untrained_tables(records: Sequence[Record]) -> list[Table]:
    """Every task's accuracy without training, beside chance."""
    runs = frame(records, "untrained").drop_duplicates(["arm", "seed"], keep="last")
    table = Table(
        "untrained",
        "Models that were never trained",
        make_columns(
            "!task | seeds | answers | accuracy [95% CI] = accuracy accuracy_low accuracy_high | chance | "
            "the most frequent answer, always = most_frequent | !above chance = above"
        ),
    )
    for task, group in runs.groupby("arm", sort=False):
        right, answers = (group["accuracy"] * group["answers"]).sum(), group["answers"].sum()
        low, high = wilson(right, answers)
        chance, frequent = group["chance"].iloc[0], group["most_frequent"].iloc[0]
        mean = right / answers
        table.rows.append([
            word(str(task)), number(len(group), "d"), number(answers, ",.0f"),
            Cell(f"{100 * mean:.2f} % [{100 * low:.2f}, {100 * high:.2f}]", (mean, low, high)),
            percent(chance), percent(frequent), word("yes" if low > chance else "no"),
        ])  # fmt: skip
    table.notes = [
        "Answers of all seeds together; Wilson's 95 % interval. Above chance: the whole interval is. next_line: right choices of "
        "four. The most frequent answer is that of the examples, which nobody knows beforehand."
    ]
    return [table]


def wilson(right: float, answers: float) -> tuple[float, float]:
    """The 95 % interval of a share by its count (Wilson 1927)."""
    z = stdtrit(math.inf, 0.975)
    centre = (right + z**2 / 2) / (answers + z**2)
    half = z / (answers + z**2) * math.sqrt(right * (answers - right) / answers + z**2 / 4)
    return centre - half, centre + half


KINDS = {
    "training": Kind(learned_tables, leak_figures, label=_task),
    "answers": Kind(
        answers_tables,
        answers_figures,
        label=lambda records: _task(records, "answers"),
    ),
    "untrained": Kind(untrained_tables),
}
