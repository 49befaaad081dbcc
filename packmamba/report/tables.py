"""Tables of arms, timings and evaluations; all records of one corpus."""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import pandas as pd

from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Arms, Records
from packmamba.report.statistics import seeds_for


class Cell(NamedTuple):
    """Hold a text, and its values in the CSV's columns."""

    text: str
    values: tuple[Any, ...]


class Column(NamedTuple):
    """Hold a title, and the names of its columns in the CSV."""

    title: str
    names: tuple[str, ...]
    numeric: bool = True


@dataclass
class Table:
    """Hold a table; ``name`` is the stem of its files."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def shown(self) -> Table:
        filled = [
            not self.rows or any(row[i].text != "-" for row in self.rows)
            for i in range(len(self.columns))
        ]
        rows = [[*compress(row, filled)] for row in self.rows]
        return replace(self, columns=[*compress(self.columns, filled)], rows=rows)


def write_table(table: Table, form: str) -> str:
    """Return the table as csv (unrounded), md, tex (booktabs) or txt."""
    if form == "csv":
        names = [name for column in table.columns for name in column.names]
        values = [
            [_csv_value(value) for cell in row for value in cell.values] for row in table.rows
        ]
        return pd.DataFrame(values, columns=names).to_csv(index=False, lineterminator="\n")
    table = table.shown()
    titles, cells = (
        [column.title for column in table.columns],
        [[cell.text for cell in row] for row in table.rows],
    )
    if form == "txt":
        index, columns = [row[0] for row in cells], titles[1:]
        text = pd.DataFrame([row[1:] for row in cells], index, columns).to_string() if cells else ""
        return "\n".join([table.title, "", text, "", *table.notes]) + "\n"
    if form == "md":
        rules = ["---:" if column.numeric else "---" for column in table.columns]
        lines = [titles, rules, *([text.replace("|", "\\|") for text in row] for row in cells)]
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return (
            "\n".join([f"# {table.title}", "", *rows, *(f"\n{note}" for note in table.notes)])
            + "\n"
        )
    aligned = "".join("lr"[column.numeric] for column in table.columns)
    latex = pd.DataFrame(cells, columns=titles).to_latex(
        index=False, escape=True, column_format=aligned
    )
    latex = re.sub(r"(?<![\w.}-])-(?=\d)", "$-$", latex).replace("±", r"$\pm$")
    return f"% \\usepackage{{booktabs,graphicx}}\n\\resizebox{{\\columnwidth}}{{!}}{{%\n{latex}}}\n"


def _csv_value(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.8g}" if isinstance(value, float) else str(value)


def make_columns(text: str) -> list[Column]:
    """Make columns of ``title = name name | !title of words = name | title and name``."""
    parts = [
        (part.removeprefix("!").partition(" = "), not part.startswith("!"))
        for part in text.split(" | ")
    ]
    return [
        Column(title, tuple(names.split() or [title]), numeric)
        for (title, _, names), numeric in parts
    ]


def interval_column(title: str, name: str = "difference", pairs: str = "pairs") -> Column:
    return Column(f"{title} [95% CI]", (name, f"{name}_low", f"{name}_high", pairs))


def word(text: str) -> Cell:
    return Cell(text, (text,))


def number(value: float | None, form: str, unit: str = "") -> Cell:
    return Cell("-" if pd.isna(value) else f"{value:{form}}{unit}", (value,))


def percent(fraction: Any) -> Cell:
    """Format a share with three significant digits; the CSV has the fraction."""
    if pd.isna(fraction):
        return number(None, "")
    share = 100 * fraction
    text = (
        f"{share:.0f}"
        if share in (0, 100)
        else "< 0.001"
        if 0 < share < 0.001
        else f"{share:#.3g}".rstrip(".")
    )
    return Cell(f"{text} %", (fraction,))


def gibibytes(count: Any) -> Cell:
    return Cell("-" if pd.isna(count) else f"{count / 2**30:.2f} GiB", (count,))


def mean_sd(values: pd.Series) -> Cell:
    """Format mean and standard deviation; not that of one value, or of equal counts."""
    mean, sd = values.mean(), values.std()
    counts = mean >= 10 and bool((values.dropna() % 1 == 0).all())
    digits = ",.0f" if counts else ".4f"
    spread = "" if pd.isna(sd) or counts and not sd else f" ± {sd:{digits}}"
    return Cell("-" if pd.isna(mean) else f"{mean:{digits}}{spread}", (mean, sd))


def difference_cell(estimate: Any) -> Cell:
    if estimate is None or not estimate.seeds:
        return Cell("-", (None,) * 4)
    values = pd.Series(estimate[:3], dtype=float).dropna()
    form = "+.4f" if values.abs().max() >= 1e-4 else "+.1e"
    mean, *bounds = (f"{value:{form}}" for value in values)
    return Cell(f"{mean} [{', '.join(bounds)}]" if bounds else mean, tuple(estimate[:4]))


TITLES = {
    "val_loss": "validation loss",
    "val_loss_start": "loss, first 32 tokens",
    "val_loss_as_trained": "loss, evaluated as trained",
    "real_tokens": "non-padding tokens",
    "real_tokens_per_second": "non-padding tokens/s",
    "padding_fraction": "padding",
    "peak_memory_bytes": "peak memory",
    "seconds_per_step_median": "seconds/step, median",
    "seconds_per_step_spread": "interquartile range",
}
COUNTS = ("chance", "answers", "examples", "documents", "targets", "reads_intruding")
WHOLE = ("real_tokens", "real_tokens_per_second", "slots_per_second", "rounds", *COUNTS[1:])
EXACT = ("seconds_per_step_median", "seconds_per_step_spread", "chance")
FORMATS: dict[str, Callable[[float], Cell]] = {
    **dict.fromkeys(WHOLE, functools.partial(number, form=",.0f")),
    **dict.fromkeys(EXACT, functools.partial(number, form=".4g")),
    "padding_fraction": percent,
    "peak_memory_bytes": gibibytes,
    "speedup": functools.partial(number, form=".2f", unit="x"),
}
MAIN = ("choice_accuracy", "accuracy", "loss")  # an evaluation's main metric is its first of these


ArmColumn = tuple[Column, Callable[[Arm], Cell]]


def title(metric: str) -> str:
    return TITLES.get(metric) or metric.replace(".", ", ").replace("_", " ")


def arms_table(
    name: str, heading: str, arms: Arms, columns: Sequence[ArmColumn], *notes: str
) -> Table:
    rows = [[word(arm.label), *(cell(arm) for _, cell in columns)] for arm in arms]
    return Table(
        name, heading, [*make_columns("!arm"), *(column for column, _ in columns)], rows, [*notes]
    )


def seeds_column(arms: Arms, metric: str = "val_loss") -> ArmColumn:
    counts = {arm: aggregate.seeds_of(arm, arms, metric) for arm in arms}
    return Column("seeds", ("seeds",)), lambda arm: Cell(str(counts[arm]), (counts[arm].finite,))


def metric_column(metric: str, arms: Arms, prefix: str = "") -> ArmColumn:
    """Return a metric's or key's column; ``prefix`` is not in its title."""
    if form := FORMATS.get(metric.rpartition(".")[2]):
        heading = (
            f"speedup over {aggregate.versus(arms)}"
            if metric == "speedup" and arms
            else title(metric)
        )
        return Column(heading, (metric,)), lambda arm: form(arm[prefix + metric].mean())
    if any(f"config.{metric}" in arm.runs for arm in arms):
        return Column(metric, (metric,)), lambda arm: word(str(arm.says(metric)))
    column = Column(title(metric), (metric, f"{metric}_sd"))
    return column, lambda arm: mean_sd(arm[prefix + metric])


def difference_column(metric: str, arms: Arms, heading: str = "", *names: str) -> ArmColumn:
    column = interval_column(heading or f"minus {aggregate.versus(arms)}", *names)
    return column, lambda arm: difference_cell(aggregate.difference(arm, metric))


def evaluations_of(arms: Iterable[Arm]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for metric in dict.fromkeys(column for arm in arms for column in arm.runs if "." in column):
        name, _, own = metric.partition(".")
        if name not in ("config", "curves"):
            keys.setdefault(name, []).append(own)
    return {name: main_first(metrics) for name, metrics in keys.items()}


def main_first(metrics: Sequence[str]) -> list[str]:
    """Sort an evaluation's metrics: the main one, others by number, counts."""
    main = next((metric for metric in MAIN if metric in metrics), "")
    return sorted(
        metrics, key=lambda metric: (metric != main, metric in COUNTS, aggregate.natural(metric))
    )


def table_keys(arms: Arms) -> tuple[list[str], list[str] | None]:
    """Return metrics, of which the first has verdicts, and columns of the sweep's table."""
    spec: dict[str, Any] = next(filter(None, (arm.sweep.get("table") for arm in arms)), {})
    return spec.get("metrics") or ["val_loss"], spec.get("columns")


def training_tables(records: Records) -> list[Table]:
    """Tabulate arms, verdicts, differences, positions and evaluations."""
    arms = aggregate.arms_with_speeds(records)
    if not arms:
        return []
    (metrics, further), evaluations = table_keys(arms), evaluations_of(arms)
    if further is None:
        further = [
            "real_tokens",
            "val_loss_start",
            "val_loss_as_trained",
            "real_tokens_per_second",
            "padding_fraction",
        ]
        further += [
            "speedup",
            "peak_memory_bytes",
            *(f"{name}.{main}" for name, (main, *_) in evaluations.items()),
        ]
        further = [metric for metric in further if any(arm[metric].notna().any() for arm in arms)]
    columns = [seeds_column(arms)]
    for metric in metrics:
        names = f"{metric}_difference", f"{metric}_difference_pairs"
        columns += [metric_column(metric, arms), difference_column(metric, arms, "", *names)]
    contrasts = aggregate.contrasts(arms, metrics[0])
    ruled = any(arm.sweep.get("margin") or arm.sweep.get("primary") for arm in arms)
    if ruled:
        says = {one.arm: one.verdict for one in contrasts if one.other is one.arm.baseline}
        columns.append(
            (Column("verdict", ("verdict",), False), lambda arm: word(says.get(arm, "-")))
        )
    columns += [metric_column(metric, arms) for metric in further]
    tables = [
        arms_table(
            "training", f"{', '.join(map(title, metrics))} by arm", arms, columns, *_notes(arms)
        )
    ]
    tables += [_verdicts(contrasts, metrics[0])] * ruled
    for each in tables if any("late" in arm.sweep for arm in arms) else ():
        each.notes.append("Margin or primaries came after runs.")
    both = ("val_loss", "val_loss_start")
    columns = [(make_columns("!minus = baseline")[0], lambda arm: word(arm.baseline.label))]
    columns += [difference_column(metric, arms, title(metric), metric) for metric in both]
    pairs = {arm: [aggregate.difference(arm, metric) for metric in both] for arm in arms}
    differing = [arm for arm in arms if any(one and one.seeds > 1 for one in pairs[arm])]
    note = "Mean over seeds of the arm's loss minus the baseline's, with its 95 % interval by Student's t."
    heading = "Paired differences over seeds, in nats per target"
    tables += [arms_table("differences", heading, differing, columns, note), _positions(arms)]
    for name, own in evaluations.items():
        main = f"{name}.{own[0]}"
        evaluated = [arm for arm in arms if arm[main].notna().any()]
        if evaluated:
            first, *others = (metric_column(metric, evaluated, f"{name}.") for metric in own)
            columns = [
                seeds_column(evaluated, main),
                first,
                difference_column(main, evaluated),
                *others,
            ]
            groups = {
                one.groups for arm in evaluated if (one := aggregate.difference(arm, main))
            } - {1}
            notes = (
                [f"Intervals are over seeds and {max(groups)} groups of documents."]
                if groups
                else []
            )
            tables.append(
                arms_table(
                    f"evaluation-{name}", f"Evaluation by arm: {name}", evaluated, columns, *notes
                )
            )
    return [table for table in tables if table.rows]


def _verdicts(contrasts: Sequence[aggregate.Contrast], metric: str) -> Table:
    others = make_columns(
        "seeds | groups | p, Holm = p_holm | !verdict | seeds for 80 % power = seeds_needed"
    )
    columns = [*make_columns("!contrast | !primary"), interval_column("difference"), *others]
    table = Table("verdicts", f"Verdicts on {title(metric)}", columns)
    for one in contrasts:
        margin, p, same, groups = (
            one.arm.sweep.get("margin"),
            one.p,
            one.same_documents,
            one.estimate.groups,
        )
        needed = (
            seeds_for(*aggregate.paired(one.arm, one.other, metric), margin)
            if margin and same
            else None
        )
        names = word(one.name), word("primary" if one.primary else "exploratory")
        adjusted = Cell("< 0.001", (p,)) if p < 0.001 else number(p, ".3f")
        ruling = word(one.verdict + ", other documents" * (not same))
        counts = number(one.estimate.seeds, "d"), number(groups if groups > 1 else None, ",d")
        table.rows.append(
            [*names, difference_cell(one.estimate), *counts, adjusted, ruling, number(needed, "d")]
        )
    known = {margin for one in contrasts if (margin := one.arm.sweep.get("margin"))}
    margins = [
        f" Equivalent: the 95 % interval lies within ± {margin:g}." for margin in sorted(known)
    ]
    table.notes = [
        "Paired over seeds, and groups of documents if there are any. Different: the interval excludes zero, of primaries with "
        f"p <= 0.05 after Holm.{''.join(margins)} Other documents: never equivalent. As is a leak: the test could not have "
        "failed. Seeds for 80 % power: to be equivalent at no difference, by resampling, optimistic from few; dash: over 100.",
    ]
    return table


def sentence(records: Records) -> str:
    """Compare the arms' loss and speed with the baseline's in a sentence."""
    arms, parts = aggregate.arms_with_speeds(records), []
    metric = table_keys(arms)[0][0]
    for one in aggregate.contrasts(arms, metric):
        beside = one.other is one.arm.baseline
        if not (beside or one.primary) or pd.isna(one.estimate.mean):
            continue
        speed = one.arm["speedup"].mean() if beside else math.nan
        cell, seeds = (
            difference_cell(one.estimate).text + " nats" * ("loss" in metric),
            one.estimate.seeds,
        )
        ruling = one.verdict + " without a margin" * (
            one.verdict == "open" and not one.arm.sweep.get("margin")
        )
        lost = aggregate.seeds_of(one.arm, arms).diverged
        counts = f"{seeds} seeds" + f", {lost} diverged" * bool(lost)
        says = f"is {ruling} ({cell}, {counts})" if seeds > 1 else f"{cell} (one seed)"
        says += ", other documents" * (not one.same_documents) + (
            "" if pd.isna(speed) else f", {speed:.2f}x as fast"
        )
        parts.append(f"{one.arm.label if beside else one.name} {says}")
    return (
        f"In {title(metric)}, beside {aggregate.versus(arms)}: {'; '.join(parts)}." if parts else ""
    )


def _notes(arms: Arms) -> list[str]:
    notes = ["Losses are nats per target, each document from zero state."]
    if others := ", ".join(arm.label for arm in arms if arm.timing is None):
        notes.append(f"Not timed together, speeds do not compare: {others}.")
    if others := ", ".join(
        arm.label for arm in arms if not aggregate.same_documents(arm, arm.baseline)
    ):
        notes.append(f"Steps hold other documents than the baseline's: {others}.")
    fewest = min(len(arm.runs) for arm in arms)
    if fewest < aggregate.FEW_SEEDS and len(arms) > 1:
        notes.append(f"Seeds: {fewest}. Claims of parity need at least {aggregate.FEW_SEEDS}.")
    targets = sum(
        point["count"]
        for point in next(iter(arms[0].runs.get("curves.loss_by_position", ())), None) or ()
    )
    documents = arms[0]["validation_documents"].mean()
    if targets and not pd.isna(documents):
        notes.append(f"Validation: {documents:,.0f} documents, {targets:,.0f} targets.")
        if documents < 50:
            notes.append(
                "Fewer than 50 documents: intervals over seeds say nothing about other documents."
            )
    if absent := {name for arm in arms for name in arm.sweep.get("absent", ())}:
        notes.append(f"Without any run: {', '.join(sorted(absent))}.")
    return notes


def _positions(arms: Arms) -> Table:
    columns = make_columns("!arm | from token = start | to token = end")
    columns.append(interval_column(f"minus {aggregate.versus(arms)}"))
    table = Table(
        "loss-by-position", "Loss by position in the document, in nats per target", columns
    )
    rows = [
        (arm, *one)
        for arm in arms
        for one in aggregate.difference_by_position(arm)
        if one[-1].seeds > 1
    ]
    for arm, start, end, one in rows:
        last = number(end - 1, ",.0f") if end < aggregate.OPEN_END else Cell("the end", (None,))
        table.rows.append([word(arm.label), number(start, ",.0f"), last, difference_cell(one)])
    share = f"{sum(one.low > 0 or one.high < 0 for *_, one in rows)} of {len(rows)} intervals"
    table.notes = [f"Paired over seeds. {share} exclude zero; one in twenty would by chance."]
    return table


def throughput_tables(records: Records) -> list[Table]:
    timed = [replace(arm, variant=()) for arm in aggregate.timed_arms(records)]
    metrics = [
        "rounds",
        *EXACT[:2],
        "real_tokens_per_second",
        "slots_per_second",
        "padding_fraction",
        "speedup",
    ]
    columns = [metric_column(metric, []) for metric in metrics]
    columns.append(
        (Column("run", ("run",)), lambda arm: Cell((arm.timing or "")[:8], (arm.timing,)))
    )
    note = "Only arms of one run compare. Speedup: over the arm with 1.00x."
    heading = "Time of optimizer steps, arms interleaved in one process"
    return [arms_table("throughput", heading, timed, columns, note)] if timed else []


def evaluation_tables(records: Records) -> list[Table]:
    """Tabulate models by evaluation, with differences from the first."""
    tasks: dict[str, list[aggregate.Record]] = {}
    for record in aggregate.of_kind(records, "evaluation"):
        one = record["config"]["evaluation"]
        options = "".join(
            f", {key}={value}" for key, value in sorted((one.get("options") or {}).items())
        )
        tasks.setdefault(one["name"] + options, []).append(record)
    tables = []
    for heading, some in tasks.items():
        models = [
            Arm(str(name), (), runs.drop_duplicates("seed", keep="last").set_index("seed"))
            for name, runs in aggregate.frame(some, "evaluation").groupby("arm", sort=False)
        ]
        first = next(
            (m for scheme in aggregate.BASELINES for m in models if m.name == scheme), models[0]
        )
        models.sort(key=lambda model: model is not first)
        metrics = main_first(list(first.runs.select_dtypes(float)))
        paired = {
            arm: aggregate.item_difference(arm, first, metrics[0])
            for arm in models
            if arm is not first
        }
        columns = [(Column("runs", ("runs",)), lambda arm: number(len(arm.runs), "d"))]
        columns += [metric_column(metric, []) for metric in metrics]
        notes = []
        if any(paired.values()):
            cells = {
                arm: difference_cell(one and one._replace(seeds=one.groups))
                for arm, one in paired.items()
            }
            minus = interval_column(f"minus {first.name}")
            columns.append((minus, lambda arm, cells=cells: cells.get(arm, difference_cell(None))))  # type: ignore[misc]
            notes = [
                "Differences are paired by item, with intervals over items (groups of documents), and over seeds."
            ]
        name = "evaluation" + ("-" + re.sub(r"[^\w.]+", "-", heading)) * (len(tasks) > 1)
        tables.append(arms_table(name, f"Evaluation: {heading}", models, columns, *notes))
    return tables


def evaluation_label(records: Records) -> str:
    """Return the only evaluation's name, and a hash of its documents."""
    names = {
        record["config"]["evaluation"]["name"]
        for record in aggregate.of_kind(records, "evaluation")
    }
    name = names.pop() if len(names) == 1 else "documents"
    return f"{name}-{zlib.crc32(records[0]['corpus_hash'].encode()) & 0xFFFF:04x}"
