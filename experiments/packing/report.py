"""Tables and figures of packing: padding and planning time by strategy, row length and buffer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from packmamba.report import summary
from packmamba.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.report.kinds import Kind
from packmamba.report.summary import Record
from packmamba.report.tables import Cell, Column, Table, number, percent, word

# arXiv 2408.03865. Its data, their lengths and its row length are not known to us.
PAPER_PADDING = {
    "the paper, received order": Cell("19.1 %", (0.191,)),
    "the paper, local greedy": Cell("0.41 %", (0.0041,)),
}
DEFAULT_BUFFER = 4096
_ORDER = ("single", "padded", "in_order", "greedy", "first_fit", "best_fit", "histogram", "split")


def packing_tables(records: Sequence[Record]) -> list[Table]:
    """Padding and planning time by strategy and row length, and greedy's padding by buffer; one corpus's records."""
    packing = summary.of_kind(records, "packing")
    if not packing:
        return []
    lengths = _row_lengths(packing)
    columns = [Column(f"row length {length}", (f"row_length_{length}",)) for length in lengths]
    strategy = Column("strategy", ("strategy",), False)
    unknown = Column("row length unknown", ("row_length_unknown",))
    data = _data(packing)
    padding = Table("packing-padding", f"Padding by strategy and row length ({data})", [strategy, *columns, unknown])
    planning = Table("packing-planning", f"Planning, seconds per million documents ({data})", [strategy, *columns])
    nothing = number(None, "")
    for label, chosen in _by_strategy(packing).items():
        padding.rows.append([word(label), *(percent(_padding(chosen, length)) for length in lengths), nothing])
        planning.rows.append([word(label), *(number(_planning(chosen, length), ".3g") for length in lengths)])
    padding.rows += [
        [word(label), *(nothing for _ in lengths), published] for label, published in PAPER_PADDING.items()
    ]
    seeds = len({record["seed"] for record in packing})
    padding.notes = [
        f"Padding is 1 - tokens / slots, mean over {seeds} seed{'s' if seeds != 1 else ''}. "
        "The length distribution is our own choice.",
        "The paper's rows are as published; its data and row length are not known to us.",
    ]
    if overlong := sorted({r["config"]["overlong"] for r in packing if "overlong" in r["config"]}):
        padding.notes.append(
            f"Documents longer than a row: {', '.join(overlong)}; split cuts every document that meets one."
        )
    planning.notes = ["From lengths to rows, on one core; nothing is read or moved."]
    tables = [padding, planning]
    if len(buffers := _buffers(packing)) > 1:
        table = Table("packing-buffer", f"Padding of greedy by buffer and row length ({data})", columns)
        table.columns = [Column("buffer (documents)", ("buffer",)), *columns]
        for buffer, chosen in buffers.items():
            table.rows.append([number(buffer, "d"), *(percent(_padding(chosen, length)) for length in lengths)])
        tables.append(table)
    return tables


def packing_figures(records: Sequence[Record]) -> list[Figure]:
    """Padding and planning time against row length, and greedy's padding against its buffer; one corpus's records."""
    packing = summary.of_kind(records, "packing")
    if not packing:
        return []
    figures = [_by_row_length(packing)]
    if len(_buffers(packing)) > 1:
        figures.append(_by_buffer(packing))
    return figures


def _by_row_length(records: Sequence[Record]) -> Figure:
    lengths = _row_lengths(records)
    fig, (left, right) = axes(2)
    for label, chosen in _by_strategy(records).items():
        style = style_of(chosen[0]["config"]["strategy"]) | {"linewidth": 1.8}
        shares = [(x, 100 * share) for x in lengths if (share := _padding(chosen, x))]  # zero is not on a log axis
        seconds = [(x, value) for x in lengths if (value := _planning(chosen, x)) is not None]
        for ax, points in ((left, shares), (right, seconds)):
            ax.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
    for (label, published), dashes in zip(PAPER_PADDING.items(), ((1, 1.5), (5, 2))):
        label = f"{label}, {published.text} (its data unknown)"
        left.axhline(100 * published.values[0], color=MUTED, linewidth=1.2, linestyle=(0, dashes), label=label)
    left.set(title="Padding", ylabel="slots that are padding (%)")
    right.set(title="Planning time", ylabel="seconds per million documents")
    for ax in (left, right):
        _log_log(ax, lengths, "row length (tokens)")
    legend_below(fig, left, columns=4)
    data = _data(records)
    return finish(
        fig,
        "packing",
        f"Padding and planning time against row length ({data}). Strategies without padding are not on the left.",
    )


def _by_buffer(records: Sequence[Record]) -> Figure:
    lengths, buffers = _row_lengths(records), _buffers(records)
    fig, (ax,) = axes(1)
    for length, shade in zip(lengths, np.linspace(0.85, 0.0, len(lengths))):
        points = [(buffer, 100 * share) for buffer, chosen in buffers.items() if (share := _padding(chosen, length))]
        color = matplotlib.colormaps["viridis"](shade)
        ax.plot([x for x, _ in points], [y for _, y in points], label=f"row length {length}", color=color, marker="o")
    ax.set(title="Padding of greedy packing", ylabel="slots that are padding (%)")
    _log_log(ax, list(buffers), "buffer (documents)")
    ax.legend()
    return finish(
        fig, "packing-buffer", f"Padding of greedy packing against the size of its buffer ({_data(records)})."
    )


def _log_log(ax: Axes, ticks: Sequence[int], label: str) -> None:
    ax.set(xscale="log", yscale="log", xlabel=label)
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def packing_label(records: Sequence[Record]) -> str:
    """Names a corpus of packing records in file names: the distribution and the number of documents."""
    config = summary.of_kind(records, "packing")[0]["config"]
    return f"{config['distribution']}-{config['num_documents']}"


def _by_strategy(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Of greedy the records of the default buffer, or of every buffer if that one is not there."""
    buffers = _buffers(records)
    chosen = [DEFAULT_BUFFER] if DEFAULT_BUFFER in buffers else list(buffers)
    groups: dict[str, list[Record]] = {}
    for strategy in sorted({r["config"]["strategy"] for r in records}, key=lambda s: (*_ORDER, s).index(s)):
        if strategy == "greedy":
            groups |= {f"greedy, buffer {buffer}": buffers[buffer] for buffer in chosen}
        else:
            groups[strategy] = [r for r in records if r["config"]["strategy"] == strategy]
    return groups


def _buffers(records: Sequence[Record]) -> dict[int, list[Record]]:
    greedy = [r for r in records if r["config"]["strategy"] == "greedy"]
    sizes = sorted({r["config"]["buffer"] for r in greedy})
    return {size: [r for r in greedy if r["config"]["buffer"] == size] for size in sizes}


def _row_lengths(records: Sequence[Record]) -> list[int]:
    return sorted({r["config"]["row_length"] for r in records})


def _data(records: Sequence[Record]) -> str:
    config = records[0]["config"]
    return f"{config['distribution']}, {config['num_documents']:,} documents"


def _padding(records: Sequence[Record], row_length: int) -> float | None:
    return _mean([m["padding_fraction"] for m in _latest(records, row_length)])


def _planning(records: Sequence[Record], row_length: int) -> float | None:
    timed = [m for m in _latest(records, row_length) if m["planning_seconds"] is not None]
    return _mean([m["planning_seconds"] / m["num_documents"] * 1e6 for m in timed])


def _latest(records: Sequence[Record], row_length: int) -> list[dict[str, Any]]:
    """Metrics of the latest record of every seed, by seed."""
    chosen = [r for r in records if r["config"]["row_length"] == row_length]
    by_seed = {r["seed"]: r["metrics"] for r in sorted(chosen, key=lambda r: r["time"])}
    return [by_seed[seed] for seed in sorted(by_seed)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return statistics.fmean(finite) if finite else None


# config: strategy, row_length, buffer (null where it has no meaning), distribution, num_documents.
_METRICS = ("padding_fraction", "planning_seconds", "num_rows", "num_documents")
KINDS = {"packing": Kind(packing_tables, packing_figures, packing_label, _METRICS)}
