"""Tables of arms, verdicts, timings and evaluations, from records of one corpus.

A table is a list of rows of cells. A cell is a text, for people, and the numbers behind it, for the
CSV file, which has all digits. ``make_table`` makes one from rows of values by name and a line that
describes the columns: a value's format stands beside its title, and nothing else formats it, so
that all numbers of a column have one notation. The library's own tables and those of experiments
are made alike.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import pandas as pd

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Arms, Contrast, Records
from packmamba.lab.report.statistics import FEW_SEEDS, Estimate, Ruling, seeds_for

Row = dict[str, Any]


class Cell(NamedTuple):
    """Hold a text, and its values in the CSV's columns."""

    text: str
    values: tuple[Any, ...]


class Column(NamedTuple):
    """Hold a title, the names of its columns in the CSV, and the format of its values.

    Formats are ``make_table``'s.
    """

    title: str
    names: tuple[str, ...]
    numeric: bool = True
    form: str = ""


@dataclass
class Table:
    """Hold a table; ``name`` is the stem of its files."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def shown(self) -> Table:
        """Return the table without columns that hold dashes alone."""
        # A column without any value says nothing, as ``verdict`` in a sweep without a margin.
        texts = zip(*([cell.text for cell in row] for row in self.rows))
        filled = [{*column} != {"-"} for column in texts] or [True] * len(self.columns)
        rows = [[*compress(row, filled)] for row in self.rows]
        return replace(self, columns=[*compress(self.columns, filled)], rows=rows)


def write_table(table: Table, form: str) -> str:
    """Return the table as csv (unrounded), md or txt."""
    if form == "csv":
        names = [name for column in table.columns for name in column.names]
        values = [[_csv_value(value) for cell in row for value in cell.values] for row in table.rows]
        return pd.DataFrame(values, columns=names).to_csv(index=False, lineterminator="\n")
    table = table.shown()
    titles = [column.title for column in table.columns]
    cells = [[cell.text for cell in row] for row in table.rows]
    if form == "txt":
        rest = pd.DataFrame([row[1:] for row in cells], [row[0] for row in cells], titles[1:])
        return "\n".join([table.title, "", rest.to_string() if cells else "", "", *table.notes, ""])
    # Numbers to the right, so that digits of a column stand below each other.
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    lines = [titles, rules, *([text.replace("|", "\\|") for text in row] for row in cells)]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([f"# {table.title}", "", *rows, *(f"\n{note}" for note in table.notes), ""])


def _csv_value(value: Any) -> str:
    if pd.isna(value):
        return ""
    # Eight digits: more than anything here is measured to, fewer than machines may differ in.
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def make_columns(text: str) -> list[Column]:
    """Make columns of ``title = name name:format | title and name:format``.

    ``!title`` is that of a column of words. ``name[]`` is short for name, name_low and name_high,
    ``name±`` for name and name_spread, ``~`` for a space in a name. Formats are ``make_table``'s.
    """
    columns = []
    for part in text.split(" | "):
        heading, _, described = part.removeprefix("!").partition(" = ")
        short, _, form = (described or heading).partition(":")
        # name± is name and name_spread; name[] is name, name_low and name_high.
        spread = re.sub(r"(\w+)±", r"\1 \1_spread", short)
        names = re.sub(r"(\S+)\[\]", r"\1 \1_low \1_high", spread).split() if described else [short]
        full = tuple(name.replace("~", " ") for name in names)
        columns.append(Column(heading if described else short, full, not part.startswith("!"), form))
    return columns


def make_table(name: str, title: str, columns: str | Sequence[Column], rows: Iterable[Row], *notes: str) -> Table:
    """Make a table of rows, which map a column's first name to its value.

    ``columns`` are made by ``make_columns``; each has a format, as ``,.1f x``: Python's, then a
    unit.
    ``%`` is a share, ``GiB`` bytes, ``p`` a p value, ``.4g ± .2g`` a value and the next column's.
    An Estimate is written with its interval, its format is a number of digits. A Series is written
    as mean and standard deviation, a Cell as it is, and words have no format.
    """
    made = make_columns(columns) if isinstance(columns, str) else [*columns]
    cells = []
    for row in rows:
        cells.append([_cell([row.get(name) for name in column.names], column.form) for column in made])
    return Table(name, title, made, cells, [*notes])


def _cell(values: list[Any], form: str) -> Cell:
    value = values[0]
    plain, _, unit = form.partition(" ")
    if isinstance(value, Cell):
        return value
    if isinstance(value, pd.Series):
        return number(value.mean(), plain, unit) if form else mean_sd(value)
    if isinstance(value, Estimate):
        return interval_cell(value, int(plain or 4), len(values))
    # Several values without a format are for the CSV alone.
    if len(values) > 2 or (len(values) > 1 and not form):
        return Cell("-", tuple(values))
    if unit.startswith("±"):
        text = "-" if value is None else " ± ".join(map(format, values, form.split(" ± ")))
        return Cell(text, tuple(values))
    return number(value, plain, unit) if form else word(str(value))


def word(text: str) -> Cell:
    """Make a cell of a text alone."""
    return Cell(text, (text,))


def number(value: Any, form: str, unit: str = "") -> Cell:
    """Format a number, such as ``,.0f``, or as one of ``SPECIAL``; a dash for none."""
    if pd.isna(value):
        return Cell("-", (value,))
    return Cell((SPECIAL[form](value) if form in SPECIAL else f"{value:{form}}") + unit, (value,))


def _percent(fraction: float) -> str:
    """Write a share with three significant digits; the CSV has the fraction."""
    share = 100 * fraction
    if share in (0, 100):
        return f"{share:.0f} %"
    return "< 0.001 %" if 0 < share < 0.001 else f"{share:#.3g}".rstrip(".") + " %"


# Formats that are words, and not Python's.
SPECIAL: dict[str, Callable[[Any], str]] = {
    "%": _percent,
    "GiB": lambda count: f"{count / 2**30:.2f} GiB",
    "p": lambda p: "< 0.001" if p < 0.001 else f"{p:.3f}",
}


def mean_sd(values: pd.Series) -> Cell:
    """Format mean and standard deviation; not that of one value, or of equal counts."""
    mean, sd = values.mean(), values.std()
    # Whole numbers from 10 on are counts, such as steps: decimals would claim what is not there.
    are_counts = mean >= 10 and bool((values.dropna() % 1 == 0).all())
    digits = ",.0f" if are_counts else ".4f"
    spread = "" if pd.isna(sd) or (are_counts and sd == 0) else f" ± {sd:{digits}}"
    return Cell("-" if pd.isna(mean) else f"{mean:{digits}}{spread}", (mean, sd))


def interval_text(values: Sequence[float], form: str = "+.4f", unit: str = "") -> str:
    """Format a mean, then the ends of its interval if it has one: ``+0.0012 [-0.0003, +0.0027]``.

    All numbers of a column have one notation. Where the form, with a fixed number of digits, would
    show nothing but zeros, the text says which power of ten all of them lie within.
    """
    finite = [value for value in values if not pd.isna(value)]
    largest = max(map(abs, finite))
    shown = [f"{value:{form}}" for value in finite]
    # Arms that compute the same differ by rounding: 0.0000 would hide whether they do.
    if 0 < largest < 1e-4 and not any(digit in "".join(shown) for digit in "123456789"):
        bound = next(bound for bound in ("0.000001", "0.00001", "0.0001") if largest < float(bound))
        return f"within ±{bound}{unit}"
    mean, *ends = shown
    return (f"{mean} [{', '.join(ends)}]" if ends else mean) + unit


def interval_cell(found: Estimate, digits: int = 4, columns: int = 4) -> Cell:
    """Format an estimate with its interval, if it has one; a dash without a pair.

    ``columns`` of the CSV are at most mean, low, high and pairs.
    """
    if pd.isna(found.mean):
        return Cell("-", (None,) * columns)
    # A mean of one pair has no interval, so nothing is claimed.
    claim = " (no claim)" if pd.isna(found.low) else ""
    return Cell(interval_text(found[:3], f"+.{digits}f") + claim, tuple(found[:columns]))


def ruled(ruling: Ruling) -> Row:
    """Return a row's values for a contrast that was ruled on: difference, two p, two verdicts."""
    renamed = {"difference": ruling.estimate, "verdict": ruling.verdict, "registered": ruling.by_interval}
    return ruling._asdict() | renamed


P_COLUMNS = "p of difference, Holm = p_difference:p | p of equivalence, Holm = p_equivalence:p"


# A new metric: derive it in ``aggregate.training_arms`` or write it in ``fit.training_record`` and
# list it in ``records.METRICS``, which a sweep's ``table.metrics`` may name. Name it in TITLES, format
# it in FORMATS; ``_further`` lists those of the headline.
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
# Metrics of evaluations that come last, since they say what the others are of.
COUNTS = ("chance", "answers", "examples", "documents", "targets", "reads_intruding")
# Of every metric that is not here a table shows mean and standard deviation over seeds.
FORMATS = {
    **dict.fromkeys(("real_tokens", "real_tokens_per_second", "slots_per_second", "rounds", *COUNTS), ",.0f"),
    **dict.fromkeys(("seconds_per_step_median", "seconds_per_step_spread", "chance"), ".4g"),
    "padding_fraction": "%",
    "peak_memory_bytes": "GiB",
    "speedup": ".2f x",
}


def title(metric: str) -> str:
    """Return a metric's name in words."""
    return TITLES.get(metric) or metric.replace(".", ", ").replace("_", " ")


def _metric_column(metric: str, arms: Arms) -> Column:
    """Return the column of a metric, or of a key of the configuration."""
    # A source of a mixture may have a count's name: its loss is a loss.
    form = FORMATS.get("loss" if "loss." in metric else metric.rpartition(".")[2])
    if form is not None:
        is_speedup = metric == "speedup" and arms
        heading = f"speedup over {aggregate.versus(arms)}" if is_speedup else title(metric)
        return Column(heading, (metric,), form=form)
    if any(f"config.{metric}" in arm.runs for arm in arms):
        return Column(metric, (metric,))  # a key: one value, no spread
    return Column(title(metric), (metric, f"{metric}_sd"))


def _values(arm: Arm, metrics: Iterable[str], prefix: str = "") -> Row:
    """Return an arm's values in ``_metric_column``'s; ``prefix`` is not in their names."""
    return {metric: arm.value(prefix + metric) for metric in metrics}


def _difference_column(heading: str, name: str = "difference", pairs: str = "pairs") -> Column:
    """Return the column of an Estimate of paired runs."""
    return Column(f"{heading} [95% CI]", (name, f"{name}_low", f"{name}_high", pairs))


def _seeds_cell(arm: Arm, arms: Arms, metric: str = "val_loss") -> Cell:
    """Count an arm's seeds with a value, its diverged runs and what is missing."""
    count = aggregate.seeds_of(arm, arms, metric)
    return Cell(str(count), (count.finite,))


def evaluations_of(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Return the metrics of each evaluation of the arms' runs, the main one first."""
    metrics: dict[str, list[str]] = {}
    for column in dict.fromkeys(column for arm in arms for column in arm.runs if "." in column):
        # Metrics of evaluations are named <evaluation>.<metric>.
        evaluation, _, metric = column.partition(".")
        if evaluation not in ("config", "curves"):
            metrics.setdefault(evaluation, []).append(metric)
    return {evaluation: main_first(names) for evaluation, names in metrics.items()}


def main_first(metrics: Sequence[str]) -> list[str]:
    """Sort an evaluation's metrics: the main one, others by number, counts."""
    # The first that items can be compared by.
    main = next((metric for metric in aggregate.MEASURES if metric in metrics), "")
    return sorted(metrics, key=lambda metric: (metric != main, metric in COUNTS, aggregate.natural(metric)))


def table_keys(arms: Arms) -> tuple[list[str], list[str] | None]:
    """Return metrics, of which the first has verdicts, and columns of the sweep's table."""
    spec: dict[str, Any] = next(filter(None, (arm.sweep.get("table") for arm in arms)), {})
    return spec.get("metrics") or ["val_loss"], spec.get("columns")


def training_tables(records: Records) -> list[Table]:
    """Tabulate arms, verdicts, differences, losses by position, and evaluations."""
    arms = aggregate.arms_with_speeds(records)
    metric = table_keys(arms)[0][0]
    contrasts = aggregate.contrasts(arms, metric)
    tables = [_training(arms, contrasts)]
    if _is_ruled(arms):
        tables.append(_verdicts(contrasts, metric))
    # A verdict means little if its rule was chosen after its result was seen.
    if any(arm.sweep.get("late") for arm in arms):
        for table in tables:
            table.notes.append("Margin, primaries or metric came after runs.")
    tables += [_differences(arms), _positions(arms)]
    tables += [_evaluation(name, metrics, arms) for name, metrics in evaluations_of(arms).items()]
    return [table for table in tables if table.rows]


def _is_ruled(arms: Arms) -> bool:
    """Tell if the sweep names what its verdicts rest on."""
    return any(arm.sweep.get("margin") or arm.sweep.get("primary") for arm in arms)


def _training(arms: Arms, contrasts: Sequence[Contrast]) -> Table:
    """Make the headline: each arm's seeds, metrics, differences, verdict, and what it costs."""
    metrics, more = table_keys(arms)
    if more is None:
        has_values = lambda metric: any(arm[metric].notna().any() for arm in arms)
        more = [metric for metric in _further(arms) if metric not in metrics and has_values(metric)]
    # For each metric its value and the difference from the baseline; the verdict, which is on the
    # first metric; then what the runs cost.
    columns = make_columns("!arm | seeds")
    minus = f"minus {aggregate.versus(arms)}"
    for metric in metrics:
        difference = _difference_column(minus, f"{metric}_difference", f"{metric}_difference_pairs")
        columns += [_metric_column(metric, arms), difference]
    columns += make_columns("!verdict") if _is_ruled(arms) else []
    columns += [_metric_column(metric, arms) for metric in more]
    verdicts = {each.arm: each.verdict for each in contrasts if each.other is each.arm.baseline}
    rows = []
    for arm in arms:
        row: Row = {"arm": arm.label, "seeds": _seeds_cell(arm, arms), "verdict": verdicts.get(arm, "-")}
        row |= _values(arm, [*metrics, *more])
        row |= {f"{metric}_difference": aggregate.difference(arm, metric) for metric in metrics}
        rows.append(row)
    return make_table("training", f"{', '.join(map(title, metrics))} by arm", columns, rows, *_notes(arms))


def _further(arms: Arms) -> list[str]:
    """Return metrics of the headline beside the loss, for a sweep that names none."""
    losses = ["val_loss_start", "val_loss_as_trained"]
    costs = ["real_tokens_per_second", "padding_fraction", "speedup", "peak_memory_bytes"]
    evaluations = [f"{name}.{metrics[0]}" for name, metrics in evaluations_of(arms).items()]
    return ["real_tokens", *losses, *costs, *evaluations]


def _differences(arms: Arms) -> Table:
    metrics = ("val_loss", "val_loss_start")
    rows = []
    for arm in arms:
        row: Row = {metric: aggregate.difference(arm, metric) for metric in metrics}
        if any(found and found.seeds > 1 for found in row.values()):
            rows.append(row | {"arm": arm.label, "baseline": arm.baseline.label})
    columns = make_columns("!arm | !minus = baseline")
    columns += [_difference_column(title(metric), metric) for metric in metrics]
    note = "Mean over seeds of the arm's loss minus the baseline's, with its 95 % interval by Student's t."
    return make_table("differences", "Paired differences over seeds, in nats per target", columns, rows, note)


def _evaluation(name: str, metrics: Sequence[str], arms: Arms) -> Table:
    """Tabulate an evaluation of each arm's models; ``metrics`` without its name, main one first."""
    main = f"{name}.{metrics[0]}"
    evaluated = [arm for arm in arms if arm[main].notna().any()]
    first, *others = (_metric_column(metric, evaluated) for metric in metrics)
    minus = _difference_column(f"minus {aggregate.versus(evaluated)}")
    rows: list[Row] = []
    for arm in evaluated:
        row: Row = {"arm": arm.label, "seeds": _seeds_cell(arm, evaluated, main)}
        row["difference"] = aggregate.difference(arm, main)
        rows.append(row | _values(arm, metrics, f"{name}."))
    groups = max((row["difference"].groups for row in rows if row["difference"]), default=1)
    notes = [f"Intervals are over seeds and {groups} groups of documents."] * (groups > 1)
    columns = [*make_columns("!arm | seeds"), first, minus, *others]
    return make_table(f"evaluation-{name}", f"Evaluation by arm: {name}", columns, rows, *notes)


def _verdicts(contrasts: Sequence[Contrast], metric: str) -> Table:
    families = [each.comparison.family for each in contrasts]
    rows = []
    for contrast in contrasts:
        found = contrast.ruling.estimate
        # Contrasts that Holm's adjustment counts together.
        family = families.count(contrast.comparison.family)
        diverged = Cell(_diverged(contrast) or "-", contrast.comparison.divergence[:4])
        row: Row = {"contrast": contrast.name, "primary": contrast.comparison.family}
        row |= {"seeds": found.seeds, "groups": found.groups if found.groups > 1 else None}
        row |= {"diverged": diverged, "seeds_needed": _seeds_needed(contrast, family)}
        rows.append(ruled(contrast.ruling) | row | {"verdict": contrast.verdict})
    margins = sorted({contrast.margin for contrast in contrasts if contrast.margin is not None})
    within = "".join(f" Equivalent: the interval lies within ± {margin:g}." for margin in margins)
    return make_table(
        "verdicts",
        f"Verdicts on {title(metric)}",
        "!contrast | !primary | difference [95% CI] = difference[] pairs | seeds:d | groups:,d | "
        f"diverged runs = diverged runs other_diverged other_runs | {P_COLUMNS} | !verdict | "
        "seeds for 80 % power = seeds_needed:d",
        rows,
        "Intervals are over paired seeds, and over groups of documents if there are any. Different: "
        f"the 95 % interval excludes zero.{within} Each claim also needs its p to be at most 0.05 "
        "after Holm's adjustment over the primary contrasts, or over the exploratory ones.",
        "Leak not caught, no leak arm: no leak of the same setting is shown to be worse, so the "
        "test could not have failed. Of survivors: runs diverged or have no finite value, and what is "
        "left is a selection; diverges: more often than the other arm, by Fisher's exact test. Of "
        "survivors, seeds missing, other documents: never equivalent.",
        f"Seeds for 80 % power: to be equivalent at no difference, {FEW_SEEDS} or more, at the "
        "upper 80 % confidence bound of the standard deviation; a dash: more than 100, unknown, or of a leak.",
    )


def _diverged(contrast: Contrast) -> str:
    """Say how many runs of each arm diverged, if any did."""
    tally = contrast.comparison.divergence
    text = f"{tally.diverged} of {tally.runs} against {tally.other_diverged} of {tally.other_runs}"
    return text if tally.total else ""


def _seeds_needed(contrast: Contrast, family: int) -> int | None:
    """Return the seeds for 80 % power, where the contrast might be called equivalent."""
    comparison = contrast.comparison
    if comparison.margin is None or contrast.arm.leaks:
        return None  # nobody hopes that a leak is equivalent
    return seeds_for(comparison.differences, comparison.weights, comparison.margin, family)


class Finding(NamedTuple):
    """Hold what a report says first of a contrast, and the numbers that it rests on."""

    claim: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.claim} ({self.evidence})"


def findings(records: Records) -> list[Finding]:
    """Say of each contrast with a baseline, and each primary one, what was found."""
    arms = aggregate.arms_with_speeds(records)
    metric = table_keys(arms)[0][0]
    made = aggregate.contrasts(arms, metric)
    return [_finding(each, metric) for each in made if each.ruling.estimate.seeds or _diverged(each)]


def _finding(contrast: Contrast, metric: str) -> Finding:
    found = contrast.ruling.estimate
    diverged = _diverged(contrast)
    ruling = contrast.verdict
    evidence = title(metric)
    if found.seeds:
        evidence += f" {interval_text(found[:3], unit=' nats' if 'loss' in metric else '')}"
    evidence += f", {found.seeds} seed{'s' * (found.seeds != 1)}"
    # The first that applies: diverged runs, too few seeds, no margin.
    if diverged:
        evidence += f", {diverged} runs diverged"
    elif found.seeds == 1:
        ruling = "one seed, no verdict"
    elif ruling == "open" and contrast.margin is None:
        ruling = "open without a margin"
    speedup = contrast.arm["speedup"].mean()
    if contrast.other is contrast.arm.baseline and not pd.isna(speedup):
        evidence += f"; {speedup:.2f}x as fast"
    return Finding(f"{contrast.name}: {ruling}", evidence)


def _notes(arms: Arms) -> list[str]:
    """Say what the headline's numbers are of, and what they lack."""
    notes = ["Losses are nats per target, each document from zero state."]
    apart = [arm.label for arm in arms if arm.timing is None]
    if apart:
        notes.append(f"Not timed together, speeds do not compare: {', '.join(apart)}.")
    others = [arm.label for arm in arms if not aggregate.same_documents(arm, arm.baseline)]
    if others:
        notes.append(f"Steps hold other documents than the baseline's: {', '.join(others)}.")
    fewest = min(len(arm.runs) for arm in arms)
    if fewest < FEW_SEEDS and len(arms) > 1:
        notes.append(f"Seeds: {fewest}. Claims of parity need at least {FEW_SEEDS}.")
    curves = arms[0].runs.get("curves.loss_by_position", ())
    targets = sum(point["count"] for point in next(iter(curves), None) or ())
    documents = arms[0]["validation_documents"].mean()
    if targets and not pd.isna(documents):
        notes.append(f"Validation: {documents:,.0f} documents, {targets:,.0f} targets.")
        # Seeds vary the training, never the validation documents.
        if documents < 50:
            notes.append("Fewer than 50 documents: intervals over seeds say nothing about other documents.")
    absent = {name for arm in arms for name in arm.sweep.get("absent", ())}
    if absent:
        notes.append(f"Without any run: {', '.join(sorted(absent))}.")
    return notes


def _positions(arms: Arms) -> Table:
    rows: list[Row] = []
    beyond = 0
    for arm in arms:
        for (start, end), found in aggregate.difference_along(arm, "loss_by_position", "start", "end"):
            if found.seeds > 1:
                last = end - 1 if end < aggregate.OPEN_END else Cell("the end", (None,))
                rows.append({"arm": arm.label, "start": start, "end": last, "difference": found})
                # Without any effect one interval in twenty excludes zero: the note says so.
                beyond += found.low > 0 or found.high < 0
    columns = make_columns("!arm | from token = start:,.0f | to token = end:,.0f")
    columns.append(_difference_column(f"minus {aggregate.versus(arms)}"))
    heading = "Loss by position in the document, in nats per target"
    note = f"Paired over seeds. {beyond} of {len(rows)} intervals exclude zero; one in twenty would by chance."
    return make_table("loss-by-position", heading, columns, rows, note)


def throughput_tables(records: Records) -> list[Table]:
    """Tabulate the speed of arms whose steps took turns in one process."""
    metrics = ("rounds", "seconds_per_step_median", "seconds_per_step_spread", *aggregate.SPEEDS)
    rows = []
    for arm in aggregate.timed_arms(records):
        rows.append({"arm": arm.name, "run": Cell((arm.timing or "")[:8], (arm.timing,))} | _values(arm, metrics))
    columns = [*make_columns("!arm"), *(_metric_column(metric, []) for metric in metrics), *make_columns("run")]
    note = "Only arms of one run compare. Speedup: over the arm with 1.00x."
    heading = "Time of optimizer steps, arms interleaved in one process"
    return [make_table("throughput", heading, columns, rows, note)] if rows else []


def evaluation_tables(records: Records) -> list[Table]:
    """Tabulate models by evaluation, with differences from the first."""
    by_task: dict[str, list[aggregate.Record]] = {}
    for record in aggregate.of_kind(records, "evaluation"):
        evaluation = record["config"]["evaluation"]
        options = sorted((evaluation.get("options") or {}).items())
        task = evaluation["name"] + "".join(f", {key}={value}" for key, value in options)
        by_task.setdefault(task, []).append(record)
    tables = []
    for task, evaluated in by_task.items():
        # An evaluation's name is enough where there is only one.
        name = "evaluation" + ("-" + re.sub(r"[^\w.]+", "-", task)) * (len(by_task) > 1)
        tables.append(_evaluated_models(name, task, evaluated))
    return tables


def _evaluated_models(name: str, task: str, records: Records) -> Table:
    """Tabulate the models of one evaluation; the first is the baseline's, if there is one, by the
    report's or the sweep's name for it.
    """
    models: dict[str, Arm] = {}
    for arm, runs in aggregate.frame(records, "evaluation").groupby("arm", sort=False):
        models[arm] = Arm(arm, (), runs.drop_duplicates("seed", keep="last").set_index("seed"))
    named = records[0].get("sweep", {}).get("baseline")
    first = next(models[arm] for arm in (named, *aggregate.BASELINES, *models) if arm in models)
    metrics = main_first(list(first.runs.select_dtypes(float)))
    columns = make_columns("!arm | runs:d") + [_metric_column(metric, []) for metric in metrics]
    rows: list[Row] = []
    # Sorting is stable: the others stay as they came.
    for model in sorted(models.values(), key=lambda model: model is not first):
        rows.append({"arm": model.label, "runs": len(model.runs)} | _values(model, metrics))
        found = None if model is first else aggregate.item_difference(model, first, metrics[0])
        if found:
            # Its pairs are groups of items.
            rows[-1]["difference"] = found._replace(seeds=found.groups)
    notes = []
    if any("difference" in row for row in rows):
        columns.append(_difference_column(f"minus {first.name}"))
        notes = ["Differences are paired by item, with intervals over items (groups of documents), and over seeds."]
    return make_table(name, f"Evaluation: {task}", columns, rows, *notes)


def evaluation_label(records: Records) -> str:
    """Return the only evaluation's name, and a hash of its documents."""
    names = {record["config"]["evaluation"]["name"] for record in aggregate.of_kind(records, "evaluation")}
    name = names.pop() if len(names) == 1 else "documents"
    # Tells evaluations on different documents apart.
    return f"{name}-{zlib.crc32(records[0]['corpus_hash'].encode()) & 0xFFFF:04x}"
