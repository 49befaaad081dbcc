"""Tables and figures of the tasks: are they learned, far beyond the training's sizes too, and by
models that learned nothing?
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from scipy.stats import binomtest

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Record, frame
from packmamba.lab.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import interval
from packmamba.lab.report.tables import Cell, Table, interval_text, make_table

SEED = "#0072B2"


def _task(records: Sequence[Record], kind: str = "training") -> str:
    """The task that the records are about, and whether its documents have begin tokens."""
    config = aggregate.of_kind(records, kind)[0]["config"]
    if kind == "answers":
        return config["task"]
    return config["data"]["task"] + ("-begin" if config["data"].get("task_options", {}).get("begin") else "")


def learned_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate what it took to learn a task, a line for each arm; ``records`` are of one corpus."""
    arms, rows = aggregate.training_arms(records), []
    cores = [record["hardware"]["cores"] for record in aggregate.of_kind(records, "training")]
    for arm in arms:
        task = arm.says("data.task")
        accuracy = arm[f"{task}.accuracy"]
        row = {"arm": arm.label, "seeds": len(arm.runs), "layers": arm.says("model.n_layer")}
        row |= {"parameters": arm["parameters"].iloc[0], "steps": arm["steps"].max(), "cores": max(cores)}
        row |= {"real_tokens": arm["real_tokens"].mean(), "val_loss_max": arm["val_loss"].max()}
        row |= {"accuracy_min": accuracy.min(), "accuracy": accuracy.mean(), "answers": arm[f"{task}.answers"].mean()}
        rows.append(row | {"wall_seconds_max": arm.runs["wall_seconds"].max()})
    table = make_table(
        "learned",
        f"{_task(records)}: what was trained, and how long it took",
        "!arm | seeds:d | layers:d | parameters:,.0f | steps:,.0f | non-padding tokens = real_tokens:,.0f | "
        "validation loss, largest = val_loss_max:.4f | accuracy, smallest = accuracy_min:% | accuracy, mean = accuracy:% | "
        "answers:,.0f | cores:d | seconds, longest = wall_seconds_max:,.0f",
        rows,
        "Seconds are of a whole run, its evaluations with it. Accuracy is of documents one at a time, from zero state.",
    )
    return [table, *_leak_tables(arms)]


def _pair(arms: Sequence[Arm]) -> tuple[Arm, Arm] | None:
    """The arms that trained with reset and with leak."""
    by_boundary = {arm.says("trainer.boundary"): arm for arm in arms}
    return (by_boundary["reset"], by_boundary["leak"]) if by_boundary.keys() >= {"reset", "leak"} else None


def _leak_tables(arms: Sequence[Arm]) -> list[Table]:
    """Tabulate leak minus reset, by seed, on reads of keys that only the predecessor wrote, in
    points.
    """
    if (pair := _pair(arms)) is None:
        return []
    reset, leak = pair
    rows = []
    for evaluated, suffix in (("as trained", "_as_trained"), ("one document at a time", "")):
        for reads, name in (("of keys that only the predecessor wrote", "_intruding"), ("all", "")):
            # What comes before changes nothing for reset: as trained it answers as it does alone.
            base, own = (arm[f"contradiction.accuracy{name}{end}"] for arm, end in ((reset, ""), (leak, suffix)))
            row = {"evaluated": evaluated, "reads": reads, "reset": base.mean(), "leak": own.mean()}
            row |= {"best": leak[f"contradiction.best{name}_as_trained"].mean() if suffix else 1.0}
            row |= {"intrusions": leak[f"contradiction.intrusions{suffix}"].mean() if name else None}
            found = interval(100 * (own - base))
            rows.append(row | {"difference": found and Cell(interval_text(found[:3], "+.1f"), found[:4])})
    table = make_table(
        "leak",
        "contradiction: packed with leak minus packed with reset, paired over seeds",
        "!evaluated | !reads | packed-reset = reset:% | packed-leak = leak:% | "
        "minus, points [95% CI] = difference[] pairs | best possible under leak = best:% | "
        "leak says the predecessor's value = intrusions:%",
        rows,
        "Points are percentages of right answers; 95 % intervals by Student's t over seeds. Best possible: of a reader who knows "
        "how documents are drawn, and sees where one begins only if it has a begin token.",
    )
    return [table]


def leak_figures(records: Sequence[Record]) -> list[Figure]:
    """Right answers of reset and leak as trained, a dot for each seed, and the best possible under
    leak.
    """
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
    rows, what = [], varied.replace("_", " ")
    for (arm, value), group in points.groupby(["arm", "value"], sort=False):
        found = interval(group["accuracy"])
        assert found is not None
        low, high = max(0.0, found.low), min(1.0, found.high)
        text = f"{100 * found.mean:.1f} %" + (f" [{100 * low:.1f}, {100 * high:.1f}]" if found.seeds > 1 else "")
        row = {"arm": arm, "value": value, "in_training": "yes" if group["trained"].iloc[0] else "no", "chance": chance}
        row |= {"seeds": found.seeds, "accuracy": Cell(text, (found.mean, low, high))}
        rows.append(row | {"accuracy_min": group["accuracy"].min(), "answers": group["answers"].mean()})
    table = make_table(
        "answers",
        f"{_task(records, 'answers')}: accuracy by {what}",
        f"!arm | {what} = value:d | !in training = in_training | seeds:d | "
        "accuracy [95% CI] = accuracy accuracy_low accuracy_high | smallest = accuracy_min:% | "
        "answers, each seed = answers:,.0f | chance:%",
        rows,
        "Means over seeds with 95 % intervals by Student's t, cut at 0 and 100 %; every seed's model gets the same questions.",
    )
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
    caption = f"{name}: right answers against {varied.replace('_', ' ')}, each document from zero state."
    return [finish(fig, "answers", caption)]


def _points(records: Sequence[Record]) -> tuple[pd.DataFrame, str, float]:
    """One row for each seed and value; of a repeated run the latest; ``trained``: the value is
    among those of the training.
    """
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
    runs, rows = frame(records, "untrained").drop_duplicates(["arm", "seed"], keep="last"), []
    for task, group in runs.groupby("arm", sort=False):
        right, answers = (group["accuracy"] * group["answers"]).sum(), group["answers"].sum()
        low, high = binomtest(round(right), round(answers)).proportion_ci(method="wilson")
        chance, mean = group["chance"].iloc[0], right / answers
        shown = Cell(f"{100 * mean:.2f} % [{100 * low:.2f}, {100 * high:.2f}]", (mean, low, high))
        row = {"task": task, "seeds": len(group), "answers": answers, "accuracy": shown, "chance": chance}
        row |= {"most_frequent": group["most_frequent"].iloc[0], "above": "yes" if low > chance else "no"}
        rows.append(row)
    table = make_table(
        "untrained",
        "Models that were never trained",
        "!task | seeds:d | answers:,.0f | accuracy [95% CI] = accuracy accuracy_low accuracy_high | chance:% | "
        "the most frequent answer, always = most_frequent:% | !above chance = above",
        rows,
        "Answers of all seeds together; Wilson's 95 % interval. Above chance: the whole interval is. next_line: right choices of "
        "four. The most frequent answer is that of the examples, which nobody knows beforehand.",
    )
    return [table]


KINDS = {
    "training": Kind(learned_tables, leak_figures, label=_task),
    "answers": Kind(answers_tables, answers_figures, lambda records: _task(records, "answers")),
    "untrained": Kind(untrained_tables),
}
