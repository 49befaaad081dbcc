"""Tables generated from records, as Markdown, CSV and plain text. The same records give the same text, always."""

from __future__ import annotations

import csv
import io
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from packmamba.report import summary
from packmamba.report.summary import PARITY_SEEDS, Arm, Record, Speed


class Cell(NamedTuple):
    """What people read, and what the CSV's columns hold."""

    text: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    title: str
    names: tuple[str, ...]
    """The CSV's columns."""
    numeric: bool = True


@dataclass
class Table:
    name: str
    """Stem of the files it is written to."""
    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        titles = [column.title for column in self.columns]
        rules = ["---:" if column.numeric else "---" for column in self.columns]
        body = [[cell.text.replace("|", "\\|") for cell in row] for row in self.rows]
        lines = ["| " + " | ".join(cells) + " |" for cells in [titles, rules, *body]]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"# {self.title}", "", *lines, *notes]) + "\n"

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([name for column in self.columns for name in column.names])
        for row in self.rows:
            writer.writerow([_csv_value(value) for cell in row for value in cell.values])
        return out.getvalue()

    def text(self) -> str:
        body = [[cell.text for cell in row] for row in self.rows]
        widths = [
            max(len(text) for text in [*column.title.split(), *(line[i] for line in body)])
            for i, column in enumerate(self.columns)
        ]
        titles = [textwrap.wrap(column.title, width) for column, width in zip(self.columns, widths)]
        height = max(map(len, titles))
        head = list(zip(*([""] * (height - len(lines)) + lines for lines in titles)))
        grid = [*head, ["-" * width for width in widths], *body]
        lines = [
            "  ".join(c.rjust(w) if column.numeric else c.ljust(w) for c, w, column in zip(line, widths, self.columns))
            for line in grid
        ]
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), "", *self.notes]) + "\n"


def training_tables(records: Sequence[Record]) -> list[Table]:
    """Quality and speed of every arm; ``records`` are of one corpus."""
    arms = summary.training_arms(records)
    if not arms:
        return []
    baselines = {baseline.scheme for arm in arms if (baseline := summary.baseline_of(arm, arms))}
    versus = " or ".join(sorted(baselines)) or "baseline"
    columns: list[tuple[Column, Callable[[Arm, Speed], Cell]]] = [
        (Column("arm", ("arm",), False), lambda arm, _: word(arm.label)),
        (Column("seeds", ("seeds",)), lambda arm, _: number(len(arm.by_seed), "d")),
        (Column("real tokens", ("real_tokens",)), lambda arm, _: number(arm.mean("real_tokens"), ",.0f")),
        (Column("validation loss", _with_sd("val_loss")), lambda arm, _: mean_sd(arm.values("val_loss"))),
        (
            Column(f"minus {versus} [95% CI]", ("difference", "difference_low", "difference_high", "pairs")),
            lambda arm, _: _difference(arm, summary.baseline_of(arm, arms)),
        ),
        (
            Column("loss, first 32 tokens", _with_sd("val_loss_start")),
            lambda arm, _: mean_sd(arm.values("val_loss_start")),
        ),
        (
            Column("loss, evaluated as trained", _with_sd("val_loss_as_trained")),
            lambda arm, _: mean_sd(arm.values("val_loss_as_trained")),
        ),
        (
            Column("real tokens/s", ("real_tokens_per_second",)),
            lambda _, speed: number(speed.real_tokens_per_second, ",.0f"),
        ),
        (Column("padding", ("padding_fraction",)), lambda _, speed: percent(speed.padding_fraction)),
        (Column("speedup over single", ("speedup",)), lambda _, speed: number(speed.speedup, ".2f", "x")),
        (Column("peak memory", ("peak_memory_bytes",)), lambda arm, _: gibibytes(arm.mean("peak_memory_bytes"))),
    ]
    for metric in ("val_loss_as_trained", "peak_memory_bytes"):  # columns that may have nothing to show
        if not any(arm.values(metric) for arm in arms):
            columns = [pair for pair in columns if metric not in pair[0].names]
    speeds = [summary.speed_of(arm, records) for arm in arms]
    table = Table("training", "Validation loss and speed by arm", [column for column, _ in columns])
    table.rows = [[cell(arm, speed) for _, cell in columns] for arm, speed in zip(arms, speeds)]
    table.notes = [
        "Losses are nats per real target; validation runs one document at a time from zero state, for every arm alike.",
        "Real tokens/s, padding and speedup: whole optimizer steps, arms interleaved in one process, medians."
        if all(speed.interleaved for speed in speeds)
        else "Real tokens/s and padding of arms without a speedup are of their own training runs: not a comparison.",
    ]
    if statement := seeds_statement(records):
        table.notes.append(statement)
    return [table]


def throughput_tables(records: Sequence[Record]) -> list[Table]:
    """Interleaved timings, arms of one run together; ``records`` are of one corpus."""
    runs = summary.throughput_runs(records)
    columns: list[tuple[Column, Callable[[dict[str, Any]], Cell]]] = [
        (Column("rounds", ("rounds",)), lambda m: number(m["rounds"], ".0f")),
        (
            Column("seconds/step, median", ("seconds_per_step_median",)),
            lambda m: number(m["seconds_per_step_median"], ".4g"),
        ),
        (
            Column("interquartile range", ("seconds_per_step_spread",)),
            lambda m: number(m["seconds_per_step_spread"], ".2g"),
        ),
        (Column("real tokens/s", ("real_tokens_per_second",)), lambda m: number(m["real_tokens_per_second"], ",.0f")),
        (Column("slots/s", ("slots_per_second",)), lambda m: number(m["slots_per_second"], ",.0f")),
        (Column("padding", ("padding_fraction",)), lambda m: percent(m["padding_fraction"])),
    ]
    table = Table(
        "throughput",
        "Time of optimizer steps, arms interleaved in one process",
        [
            Column("arm", ("arm",), False),
            *(column for column, _ in columns),
            Column("speedup over single", ("speedup",)),
            Column("run", ("run",)),
        ],
        notes=["Only arms of one run are compared. Speedup is the ratio of real tokens per second."],
    )
    for run, arms in runs.items():
        for name, record in arms.items():
            cells = [cell(record["metrics"]) for _, cell in columns]
            speedup = number(summary.speedup(arms, name), ".2f", "x")
            table.rows.append([word(name), *cells, speedup, word(run)])
    return [table] if table.rows else []


def seeds_statement(records: Iterable[Record]) -> str | None:
    """What the number of seeds allows to be claimed; None without training records or with seeds enough."""
    fewest = summary.fewest_seeds(records)
    if fewest is None or fewest >= PARITY_SEEDS:
        return None
    if fewest == 1:
        return (
            "One seed: this shows speed, padding and learning curves; parity claims need the longer run with at least "
            "five seeds."
        )
    return f"{fewest} seeds: differences carry their intervals; parity claims need at least five seeds."


def word(text: str) -> Cell:
    return Cell(text, (text,))


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """A missing number is a dash."""
    return Cell("-" if value is None else f"{value:{form}}{unit}", (value,))


def percent(fraction: float | None) -> Cell:
    """Three significant digits; the CSV keeps the fraction."""
    if fraction is None:
        return number(None, "")
    share = 100 * fraction
    text = f"{share:.0f}" if share in (0, 100) else "< 0.001" if 0 < share < 0.001 else f"{share:#.3g}"
    return Cell(f"{text} %", (fraction,))


def gibibytes(count: float | None) -> Cell:
    return Cell("-" if count is None else f"{count / 2**30:.2f} GiB", (count,))


def mean_sd(values: Sequence[float]) -> Cell:
    """Mean and, with two values or more, their standard deviation."""
    if not values:
        return Cell("-", (None, None))
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Cell(f"{mean:.4f}", (mean, None))
    sd = statistics.stdev(values)
    return Cell(f"{mean:.4f} ± {sd:.4f}", (mean, sd))


def _difference(arm: Arm, baseline: Arm | None) -> Cell:
    difference = None if baseline in (None, arm) else summary.paired_difference(arm, baseline, "val_loss")
    if difference is None:
        return Cell("-", (None, None, None, None))
    values = (difference.mean, difference.low, difference.high, difference.seeds)
    # Arms that compute the same differ by rounding: 0.0000 would hide whether they do.
    form = "+.4f" if max(abs(value) for value in values[:3] if value is not None) >= 1e-4 else "+.1e"
    mean, low, high = (None if value is None else f"{value:{form}}" for value in values[:3])
    return Cell(f"{mean} (no claim)" if low is None else f"{mean} [{low}, {high}]", values)


def _with_sd(metric: str) -> tuple[str, str]:
    return metric, f"{metric}_sd"


def _csv_value(value: Any) -> str:
    # Eight digits: more than anything here is measured to, fewer than the last bits in which machines may differ.
    return "" if value is None else f"{value:.8g}" if isinstance(value, float) else str(value)
