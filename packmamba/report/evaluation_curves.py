"""Evaluations against what they go by: length, load, place in the document, windows of context, steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from packmamba.report import summary
from packmamba.report.figures import Figure, axes, engineering, finish, legend_below, style_of
from packmamba.report.measures import arms_evaluations, questions, stem, title
from packmamba.report.summary import Record
from packmamba.report.tables import Column, Table, mean_sd, number, word

LATER = "_as_trained"


class Shape(NamedTuple):
    """Of a curve: the key of a point's place and what it counts, the value, and how many it is a mean over."""

    place: str
    axis: str
    value: str
    over: str


SHAPES = {
    "by_length": Shape("start", "tokens of the document", "accuracy", "answers"),
    "by_load": Shape("start", "load: pairs, tokens or distance to remember", "accuracy", "answers"),
    "by_window": Shape("start", "place in the document (tokens)", "loss", "documents"),
    "context_gain": Shape("windows", "windows from the document's start", "gain", "documents"),
    "remembrance": Shape("without", "first tokens cut off", "variation", ""),
}
Curves = dict[str, dict[str, pd.DataFrame]]
"""<evaluation>.<curve> -> arm -> its points, with a column ``seed``."""


def of_arms(records: Sequence[Record]) -> Curves:
    """Those of trained arms."""
    found: Curves = {}
    for arm in summary.training_arms(records):
        for column in arm.runs:
            name = str(column).removeprefix("curves.")
            if name != column and name.rpartition(".")[2] in SHAPES:
                seeds = arm.runs[column].dropna().items()
                _add(found, name, arm.label, [point | {"seed": seed} for seed, points in seeds for point in points])
    return found


def of_models(records: Sequence[Record]) -> Curves:
    """Those of models that were asked alone; of a model and seed that was asked the same twice the latest."""
    asked = questions(records)
    found: Curves = {}
    for question, some in asked.items():
        latest = {(record["arm"], record["seed"]): record for record in sorted(some, key=lambda record: record["time"])}
        for arm in dict.fromkeys(arm for arm, _ in latest):
            own = [record for (name, _), record in latest.items() if name == arm]
            for curve in SHAPES:
                points = [point | {"seed": r["seed"]} for r in own for point in r["curves"].get(curve, ())]
                _add(found, f"{stem(question, asked)}.{curve}", arm, points)
    return found


def _add(found: Curves, name: str, arm: str, points: list[dict[str, Any]]) -> None:
    shape = SHAPES[name.rpartition(".")[2]]
    # One place is no curve: the table of the evaluation has its number.
    if len({point[shape.place] for point in points}) > 1:
        found.setdefault(name, {})[arm] = pd.DataFrame(points)


def curve_tables(curves: Curves) -> list[Table]:
    """A line for each arm and place: mean and standard deviation over seeds."""
    tables = []
    for name, arms in curves.items():
        shape = SHAPES[name.rpartition(".")[2]]
        values = [value for value in (shape.value, shape.value + LATER) if any(value in some for some in arms.values())]
        counts = [shape.over] if shape.over else []
        columns = [Column("arm", ("arm",), False), Column(shape.axis, (shape.place,))]
        columns += [Column(title(value), (value, f"{value}_sd")) for value in values]
        columns += [Column(count, (count,)) for count in counts]
        table = Table(f"evaluation-{name.replace('.', '-')}", f"Evaluation: {name.replace('.', ', ')}", columns)
        for arm, points in arms.items():
            for place, here in points.groupby(shape.place):
                table.rows.append(
                    [word(arm), number(float(place), ",.0f"),
                     *(mean_sd(here[v] if v in here else pd.Series(dtype=float)) for v in values),
                     *(number(here[count].mean(), ",.0f") for count in counts)]
                )  # fmt: skip
        tables.append(table)
    return tables


def curve_figures(curves: Curves) -> list[Figure]:
    """A line for each arm, dashed as trained; bands are the range of seeds."""
    figures = []
    for name, arms in curves.items():
        shape = SHAPES[name.rpartition(".")[2]]
        fig, (ax,) = axes(1, width=6.5)
        for rank, (arm, points) in enumerate(arms.items()):
            style = style_of(summary.parts_of(arm)[0], rank)
            for value, line in ((shape.value, "-"), (shape.value + LATER, ":")):
                if value in points:
                    _draw(
                        ax,
                        points.groupby(shape.place)[value],
                        arm if line == "-" else None,
                        style | {"linestyle": line},
                    )
        evaluation, _, curve = name.rpartition(".")
        ax.set(xscale="log", xlabel=shape.axis, ylabel=title(shape.value))
        ax.set_title(f"{evaluation}, {curve.replace('_', ' ')}")
        ax.xaxis.set_major_formatter(engineering())
        legend_below(fig)
        caption = f"{evaluation}: {title(shape.value)} against {shape.axis}. Dotted: as trained. Bands are the range of seeds."
        figures.append(finish(fig, f"evaluation-{name.replace('.', '-')}", caption))
    return figures


def on_the_way(records: Sequence[Record]) -> list[Figure]:
    """Each evaluation's main number during the training."""
    arms = summary.training_arms(records)
    figures = []
    for name, (main, *_) in arms_evaluations(arms).items():
        drawn = []
        for rank, arm in enumerate(arms):
            curves = arm.runs.get("curves.evaluations", pd.Series(dtype=object)).dropna()
            points = pd.DataFrame([point for each in curves for point in each])
            if f"{name}.{main}" in points:
                drawn.append((arm.label, style_of(arm.scheme, rank), points.groupby("step")[f"{name}.{main}"]))
        if drawn:
            fig, (ax,) = axes(1, width=6.5)
            for label, style, values in drawn:
                _draw(ax, values, label, style)
            ax.set(title=f"{name} during the training", xlabel="steps", ylabel=title(main))
            legend_below(fig)
            caption = f"{name}: {title(main)} as the training goes on. Bands are the range of seeds."
            figures.append(finish(fig, f"evaluations-{name}", caption))
    return figures


def _draw(ax: Any, groups: Any, label: str | None, style: dict[str, Any]) -> None:
    means = groups.mean()
    ax.plot(means.index, means, **style, **({} if label is None else {"label": label}))
    if groups.count().max() > 1:
        ax.fill_between(means.index, groups.min(), groups.max(), color=style["color"], alpha=0.15, linewidth=0)


def arms_curve_tables(records: Sequence[Record]) -> list[Table]:
    return curve_tables(of_arms(records))


def arms_curve_figures(records: Sequence[Record]) -> list[Figure]:
    return [*on_the_way(records), *curve_figures(of_arms(records))]


def models_curve_tables(records: Sequence[Record]) -> list[Table]:
    return curve_tables(of_models(records))


def models_curve_figures(records: Sequence[Record]) -> list[Figure]:
    return curve_figures(of_models(records))
