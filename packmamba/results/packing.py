"""Tables and figures of packing: padding and planning time by strategy, row length and buffer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from packmamba.results import summary
from packmamba.results.plots import Figure, axes, finish, style_of
from packmamba.results.summary import Record
from packmamba.results.tables import Column, Table, number, percent, word

# arXiv 2408.03865. Its data, their lengths and its row length are not known to us.
PAPER_PADDING = {"the paper, received order": 0.191, "the paper, local greedy": 0.0041}
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
        [word(label), *(nothing for _ in lengths), percent(published)] for label, published in PAPER_PADDING.items()
    ]
    seeds = len({record["seed"] for record in packing})
    padding.notes = [
        f"Padding is 1 - tokens / slots, mean over {seeds} seed{'s' if seeds != 1 else ''}. "
        "The length distribution is our own choice.",
        "The paper's rows are as published; its data and row length are not known to us.",
    ]
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
    """Padding against row length and buffer, planning time against row length; one corpus's records."""
    packing = summary.of_kind(records, "packing")
    if not packing:
        return []
    lengths = _row_lengths(packing)
    data = _data(packing)
    figures = []
    fig, (left, right) = axes(1, 2)
    for label, chosen in _by_strategy(packing).items():
        strategy = chosen[0]["config"]["strategy"]
        style = style_of(strategy)
        shares = [
            (x, 100 * share) for x in lengths if (share := _padding(chosen, x))
        ]  # zero has no place on a log axis
        if shares:
            left.plot(*zip(*shares), label=label, **style)
        seconds = [(x, value) for x in lengths if (value := _planning(chosen, x)) is not None]
        if seconds:
            right.plot(*zip(*seconds), label=label, **style)
    for label, published in PAPER_PADDING.items():
        left.axhline(100 * published, color="#8a8f98", linewidth=1, linestyle=(0, (2, 2)))
        left.annotate(
            f"{label}, {percent(published).text} (its data unknown)",
            (0.01, 100 * published),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            color="#5c6370",
        )
    for ax, title, unit in (
        (left, "Padding", "slots that are padding (%)"),
        (right, "Planning time", "seconds per million documents"),
    ):
        ax.set(title=title, xlabel="row length (tokens)", ylabel=unit, xscale="log", yscale="log")
        ax.set_xticks(lengths, [str(length) for length in lengths])
        ax.minorticks_off()
    right.legend()
    caption = f"Padding and planning time against row length. {data}. Strategies without padding are not on the left."
    figures.append(finish(fig, "packing", caption))
    if len(buffers := _buffers(packing)) > 1:
        fig, (ax,) = axes(1, 1)
        for rank, length in enumerate(lengths):
            shares = [(b, 100 * share) for b, chosen in buffers.items() if (share := _padding(chosen, length))]
            if shares:
                shade = 0.25 + 0.65 * rank / max(1, len(lengths) - 1)
                ax.plot(
                    *zip(*shares), label=f"row length {length}", color=(0, 0.45 * (1 - shade / 2), shade), marker="o"
                )
        ax.set(title="Padding of greedy packing by buffer", xlabel="buffer (documents)", xscale="log", yscale="log")
        ax.set_ylabel("slots that are padding (%)")
        ax.set_xticks(list(buffers), [str(buffer) for buffer in buffers])
        ax.minorticks_off()
        ax.legend()
        figures.append(
            finish(fig, "packing-buffer", f"Padding of greedy packing against the size of its buffer. {data}.")
        )
    return figures


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
