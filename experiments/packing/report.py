"""Tables and figures of packing: padding and planning time by strategy, row length and buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import interval
from packmamba.lab.report.tables import Cell, Table, make_table

# arXiv 2408.03865. Its data, their lengths and its row length are not known to us.
PAPER_PADDING = {
    "the paper, received order": Cell("19.1 %", (0.191,)),
    "the paper, local greedy": Cell("0.41 %", (0.0041,)),
}
DEFAULT_BUFFER = 4096
_STYLES: dict[str, dict[str, Any]] = {
    "single": {"color": "#9aa0a8"},
    "padded": {"color": "#E69F00", "marker": "P"},
    "next_fit": {"color": "#D55E00", "marker": "s"},
    "greedy": {"color": "#0072B2", "marker": "o"},
    "first_fit": {"color": "#CC79A7", "marker": "v"},
    "best_fit_decreasing": {"color": "#009E73", "marker": "^"},
    "spfhp": {"color": "#56B4E9", "marker": "D"},
    "concat_split": {"color": "#7A4B9A", "marker": "x"},
}


def packing_tables(records: Sequence[Record]) -> list[Table]:
    """Padding and planning time by strategy and row length, greedy's padding by buffer, and the
    intervals of all these.
    """
    plans = _plans(records)
    data, seeds = f"({_data(plans)})", plans["seed"].nunique()
    overlong = ", ".join(sorted(plans["config.overlong"].dropna().unique()))
    notes = [
        f"Padding is 1 - tokens / slots, mean over {seeds} seed{'s' if seeds != 1 else ''}. "
        "The length distribution is our own choice.",
        "The paper's rows are as published; its data and row length are not known to us.",
        f"Documents longer than a row: {overlong}; split cuts every document that meets one.",
    ]
    shown, every = (each.set_index(["strategy", "row_length"]) for each in (_shown(plans), plans))
    paper = [{"strategy": name, "row_length_unknown": published} for name, published in PAPER_PADDING.items()]
    padding, planning = "Padding by strategy and row length", "Planning, seconds per million documents"
    on_one_core = "From lengths to rows, on one core; nothing is read or moved."
    tables = [
        _table("padding", f"{padding} {data}", shown["padding_fraction"], ":%", *notes, more=paper),
        _table("planning", f"{planning} {data}", shown["per_million"], ":.3g", on_one_core),
    ]
    greedy = plans[plans["config.strategy"] == "greedy"].set_index(["buffer", "row_length"])["padding_fraction"]
    if greedy.index.get_level_values("buffer").nunique() > 1:
        tables.append(_table("buffer", f"Padding of greedy by buffer and row length {data}", greedy, ":%"))
    if seeds > 1:
        means = "means with 95 % intervals over seeds"
        note = f"{seeds} seeds, Student's t. A seed draws the lengths anew."
        slots, times = 100 * every["padding_fraction"], every["per_million"]
        tables.append(_table("padding-intervals", f"Padding, % of the slots: {means} {data}", slots, "[]", note))
        tables.append(_table("planning-intervals", f"{planning}: {means} {data}", times, "[]", note))
    return tables


def _table(
    name: str, title: str, values: pd.Series, form: str, *notes: str, more: Sequence[dict[str, Any]] = ()
) -> Table:
    """Make a row for each strategy or buffer, with a cell for each row length; ``more``: rows of no
    known row length.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for (group, length), some in values.groupby(level=[0, 1], sort=False):
        cell = _interval_cell(some) if form == "[]" else some
        rows.setdefault(group, {values.index.names[0]: group})[f"row_length_{length}"] = cell
    columns = ["!strategy" if values.index.names[0] == "strategy" else "buffer (documents) = buffer:d"]
    columns += [f"row length {n} = row_length_{n}{form}" for n in sorted(values.index.unique("row_length"))]
    columns += ["row length unknown = row_length_unknown:%"] * bool(more)
    return make_table(f"packing-{name}", title, " | ".join(columns), [*rows.values(), *more], *notes)


def packing_figures(records: Sequence[Record]) -> list[Figure]:
    """Padding and planning time against row length, and greedy's padding against its buffer; one
    corpus's records.
    """
    plans = _plans(records)
    return [_by_row_length(plans), *([_by_buffer(plans)] if plans["buffer"].nunique() > 1 else [])]


def _by_row_length(plans: pd.DataFrame) -> Figure:
    shown = _shown(plans)
    fig, (left, right) = axes(2)
    for label, chosen in shown.groupby("strategy", sort=False):
        name = chosen["config.strategy"].iloc[0]
        style = _STYLES.get(name, style_of(name)) | {"linewidth": 1.8, "label": label}
        _line(left, chosen, "row_length", 100 * chosen["padding_fraction"], style)
        _line(right, chosen, "row_length", chosen["per_million"], style)
    for (label, published), dashes in zip(PAPER_PADDING.items(), ((1, 1.5), (5, 2))):
        label = f"{label}, {published.text} (its data unknown)"
        left.axhline(100 * published.values[0], color=MUTED, linewidth=1.2, linestyle=(0, dashes), label=label)
    left.set(title="Padding", ylabel="slots that are padding (%)", ylim=(1e-4, None))
    right.set(title="Planning time", ylabel="seconds per million documents")
    for ax in (left, right):
        _log_log(ax, sorted(plans["row_length"].unique()), "row length (tokens)")
    legend_below(fig, columns=4)
    caption = f"Padding and planning time against row length ({_data(plans)}){_bars(plans)}."
    return finish(fig, "packing", f"{caption} Strategies without padding are not on the left.")


def _by_buffer(plans: pd.DataFrame) -> Figure:
    greedy = plans[plans["config.strategy"] == "greedy"]
    lengths = sorted(greedy["row_length"].unique())
    fig, (ax,) = axes(1)
    for length, shade in zip(lengths, np.linspace(0.85, 0.0, len(lengths))):
        chosen = greedy[greedy["row_length"] == length]
        style = {"label": f"row length {length}", "color": matplotlib.colormaps["viridis"](shade), "marker": "o"}
        _line(ax, chosen, "buffer", 100 * chosen["padding_fraction"], style)
    ax.set(title="Padding of greedy packing", ylabel="slots that are padding (%)")
    _log_log(ax, sorted(greedy["buffer"].unique()), "buffer (documents)")
    legend_below(fig, columns=5)
    caption = f"Padding of greedy packing against the size of its buffer ({_data(plans)}){_bars(plans)}."
    return finish(fig, "packing-buffer", caption)


def _line(ax: Axes, chosen: pd.DataFrame, along: str, values: pd.Series, style: dict[str, Any]) -> None:
    """Means over seeds with their intervals; what is zero is not on a logarithmic axis."""
    found = {x: interval(each) for x, each in values.groupby(chosen[along])}
    points = [(x, one) for x, one in found.items() if one and one.mean > 0]
    halves = [0 if one.seeds == 1 else one.high - one.mean for _, one in points]
    ax.errorbar([x for x, _ in points], [one.mean for _, one in points], yerr=halves, capsize=2, **style)


def _log_log(ax: Axes, ticks: Sequence[int], label: str) -> None:
    ax.set(xscale="log", yscale="log", xlabel=label)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _plans(records: Sequence[Record]) -> pd.DataFrame:
    """Return the latest record of every plan and seed: row_length, buffer, per_million (seconds),
    strategy with its buffer.
    """
    plans = aggregate.frame(records, "packing")
    plans["row_length"], plans["buffer"] = plans["config.row_length"], plans["config.buffer"]
    plans["per_million"] = 1e6 * plans["planning_seconds"] / plans["num_documents"]
    plans = plans.drop_duplicates(["config.strategy", "row_length", "buffer", "seed"], keep="last")
    order = {name: i for i, name in enumerate(_STYLES)}
    place = plans["config.strategy"].map(order).fillna(len(order))
    plans = plans.assign(place=place).sort_values(["place", "buffer", "seed"], kind="stable")
    label = [f"{s}, buffer {b}" if s == "greedy" else s for s, b in zip(plans["config.strategy"], plans["buffer"])]
    return plans.assign(strategy=label)


def _shown(plans: pd.DataFrame) -> pd.DataFrame:
    """Select greedy's default buffer, or every buffer if that one is not there."""
    default = plans["buffer"] == DEFAULT_BUFFER
    return plans[default | (plans["config.strategy"] != "greedy")] if default.any() else plans


def _interval_cell(values: pd.Series) -> Cell:
    found = interval(values)
    assert found is not None
    return Cell(f"{found.mean:#.3g} [{found.low:#.3g}, {found.high:#.3g}]", found[:3])


def _data(plans: pd.DataFrame) -> str:
    first = plans.iloc[0]
    return f"{first['config.distribution']}, {first['config.num_documents']:,} documents"


def _label(records: Sequence[Record]) -> str:
    return "{distribution}-{num_documents}".format(**records[0]["config"])


def _bars(plans: pd.DataFrame) -> str:
    return "; bars are 95 % intervals over seeds" if plans["seed"].nunique() > 1 else ""


# config: strategy, row_length, buffer (null where it has no meaning), distribution, num_documents.
KINDS = {"packing": Kind(packing_tables, packing_figures, _label)}
