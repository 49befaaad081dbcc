"""Tables of arms, verdicts, timings and evaluations, from records of one corpus.

A table is a list of rows of cells. A cell is a text, for people, and the numbers behind it, for the
CSV file, which has all digits. In a column all numbers have one notation.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import pandas as pd

from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Arm, Arms, Contrast, Records
from packmamba.lab.report.statistics import FEW_SEEDS, Estimate, margin_from_pilot, seeds_for


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
        """Return the table without columns that hold dashes alone."""
        filled = []
        for place in range(len(self.columns)):
            filled.append(not self.rows or any(row[place].text != "-" for row in self.rows))
        rows = [[*compress(row, filled)] for row in self.rows]
        return replace(self, columns=[*compress(self.columns, filled)], rows=rows)


def write_table(table: Table, form: str) -> str:
    """Return the table as csv (unrounded), md, tex (booktabs) or txt."""
    if form == "csv":
        names = [name for column in table.columns for name in column.names]
        values = [[_csv_value(value) for cell in row for value in cell.values] for row in table.rows]
        return pd.DataFrame(values, columns=names).to_csv(index=False, lineterminator="\n")
    table = table.shown()
    titles = [column.title for column in table.columns]
    cells = [[cell.text for cell in row] for row in table.rows]
    if form == "txt":
        index = [row[0] for row in cells]
        rest = pd.DataFrame([row[1:] for row in cells], index, titles[1:])
        return "\n".join([table.title, "", rest.to_string() if cells else "", "", *table.notes, ""])
    if form == "md":
        rules = ["---:" if column.numeric else "---" for column in table.columns]
        lines = [titles, rules, *([text.replace("|", "\\|") for text in row] for row in cells)]
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([f"# {table.title}", "", *rows, *(f"\n{note}" for note in table.notes), ""])
    aligned = "".join("lr"[column.numeric] for column in table.columns)
    frame = pd.DataFrame(cells, columns=titles)
    latex = frame.to_latex(index=False, escape=True, column_format=aligned)
    latex = re.sub(r"(?<![\w.}-])-(?=\d)", "$-$", latex).replace("±", r"$\pm$")
    return f"% \\usepackage{{booktabs,graphicx}}\n\\resizebox{{\\columnwidth}}{{!}}{{%\n{latex}}}\n"


def _csv_value(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.8g}" if isinstance(value, float) else str(value)


def make_columns(text: str) -> list[Column]:
    """Make columns of ``title = name name | !title of words = name | title and name``."""
    columns = []
    for part in text.split(" | "):
        title, _, names = part.removeprefix("!").partition(" = ")
        columns.append(Column(title, tuple(names.split() or [title]), not part.startswith("!")))
    return columns


def interval_column(title: str, name: str = "difference", pairs: str = "pairs") -> Column:
    """Make the column of ``difference_cell``."""
    return Column(f"{title} [95% CI]", (name, f"{name}_low", f"{name}_high", pairs))


def word(text: str) -> Cell:
    """Make a cell of a text alone."""
    return Cell(text, (text,))


def number(value: float | None, form: str, unit: str = "") -> Cell:
    """Format a number, such as ``,.0f``; a dash for none."""
    return Cell("-" if pd.isna(value) else f"{value:{form}}{unit}", (value,))


def percent(fraction: Any) -> Cell:
    """Format a share with three significant digits; the CSV has the fraction."""
    if pd.isna(fraction):
        return number(None, "")
    share = 100 * fraction
    if share in (0, 100):
        text = f"{share:.0f}"
    else:
        text = "< 0.001" if 0 < share < 0.001 else f"{share:#.3g}".rstrip(".")
    return Cell(f"{text} %", (fraction,))


def gibibytes(count: Any) -> Cell:
    """Format a number of bytes; the CSV has bytes."""
    return Cell("-" if pd.isna(count) else f"{count / 2**30:.2f} GiB", (count,))


def mean_sd(values: pd.Series) -> Cell:
    """Format mean and standard deviation; not that of one value, or of equal counts."""
    mean, sd = values.mean(), values.std()
    counts = mean >= 10 and bool((values.dropna() % 1 == 0).all())
    digits = ",.0f" if counts else ".4f"
    spread = "" if pd.isna(sd) or counts and not sd else f" ± {sd:{digits}}"
    return Cell("-" if pd.isna(mean) else f"{mean:{digits}}{spread}", (mean, sd))


def interval_text(values: Sequence[float], form: str = "+.4f", unit: str = "") -> str:
    """Format a mean, then the ends of its interval if it has one: ``+0.0012 [-0.0003, +0.0027]``.

    All numbers of a column have one notation. Where the form, with a fixed number of digits, would
    show nothing but zeros, the text says which power of ten all of them lie within.
    """
    known = [value for value in values if not pd.isna(value)]
    largest = max(map(abs, known))
    shown = [f"{value:{form}}" for value in known]
    if 0 < largest < 1e-4 and not any(digit in "".join(shown) for digit in "123456789"):
        bound = next(bound for bound in ("0.000001", "0.00001", "0.0001") if largest < float(bound))
        return f"within ±{bound}{unit}"
    mean, *ends = shown
    return (f"{mean} [{', '.join(ends)}]" if ends else mean) + unit


def p_cell(p: float | None) -> Cell:
    """Format a p value with three decimals."""
    if p is not None and p < 0.001:
        return Cell("< 0.001", (p,))
    return number(p, ".3f")


def difference_cell(found: Estimate | None) -> Cell:
    """Format a difference with its interval and number of pairs; a dash without a pair."""
    if found is None or not found.seeds:
        return Cell("-", (None,) * 4)
    return Cell(interval_text(found[:3]), tuple(found[:4]))


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
    """Return a metric's name in words."""
    return TITLES.get(metric) or metric.replace(".", ", ").replace("_", " ")


def arms_table(name: str, heading: str, arms: Arms, columns: Sequence[ArmColumn], *notes: str) -> Table:
    """Make a table with a row for each arm; a column has a function that makes an arm's cell."""
    titles = [*make_columns("!arm"), *(column for column, _ in columns)]
    rows = [[word(arm.label), *(cell(arm) for _, cell in columns)] for arm in arms]
    return Table(name, heading, titles, rows, [*notes])


def seeds_column(arms: Arms, metric: str = "val_loss") -> ArmColumn:
    """Count an arm's seeds with a value, its diverged runs and what is missing."""
    counts = {arm: aggregate.seeds_of(arm, arms, metric) for arm in arms}
    return Column("seeds", ("seeds",)), lambda arm: Cell(str(counts[arm]), (counts[arm].finite,))


def metric_column(metric: str, arms: Arms, prefix: str = "") -> ArmColumn:
    """Return a metric's or key's column; ``prefix`` is not in its title."""
    form = FORMATS.get(metric.rpartition(".")[2])
    if form is not None:
        is_speedup = metric == "speedup" and arms
        heading = f"speedup over {aggregate.versus(arms)}" if is_speedup else title(metric)
        return Column(heading, (metric,)), lambda arm: form(arm[prefix + metric].mean())
    if any(f"config.{metric}" in arm.runs for arm in arms):
        return Column(metric, (metric,)), lambda arm: word(str(arm.says(metric)))
    column = Column(title(metric), (metric, f"{metric}_sd"))
    return column, lambda arm: mean_sd(arm[prefix + metric])


def difference_column(metric: str, arms: Arms, heading: str = "", *names: str) -> ArmColumn:
    """Return a column of differences from each arm's baseline."""
    column = interval_column(heading or f"minus {aggregate.versus(arms)}", *names)
    return column, lambda arm: difference_cell(aggregate.difference(arm, metric))


def evaluations_of(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Return the metrics of each evaluation of the arms' runs, the main one first."""
    metrics: dict[str, list[str]] = {}
    for column in dict.fromkeys(column for arm in arms for column in arm.runs if "." in column):
        evaluation, _, metric = column.partition(".")
        if evaluation not in ("config", "curves"):
            metrics.setdefault(evaluation, []).append(metric)
    return {evaluation: main_first(some) for evaluation, some in metrics.items()}


def main_first(metrics: Sequence[str]) -> list[str]:
    """Sort an evaluation's metrics: the main one, others by number, counts."""
    main = next((metric for metric in MAIN if metric in metrics), "")
    return sorted(metrics, key=lambda metric: (metric != main, metric in COUNTS, aggregate.natural(metric)))


def table_keys(arms: Arms) -> tuple[list[str], list[str] | None]:
    """Return metrics, of which the first has verdicts, and columns of the sweep's table."""
    spec: dict[str, Any] = next(filter(None, (arm.sweep.get("table") for arm in arms)), {})
    return spec.get("metrics") or ["val_loss"], spec.get("columns")


def training_tables(records: Records) -> list[Table]:
    """Tabulate arms, verdicts, differences, losses by position, and evaluations."""
    arms = aggregate.arms_with_speeds(records)
    if not arms:
        return []
    metric = table_keys(arms)[0][0]
    contrasts = aggregate.contrasts(arms, metric)
    tables = [_training(arms, contrasts)]
    if _is_ruled(arms):
        tables.append(_verdicts(contrasts, metric))
    if any("late" in arm.sweep for arm in arms):
        for table in tables:
            table.notes.append("Margin or primaries came after runs.")
    tables += [_differences(arms), _positions(arms)]
    tables += [_evaluation(name, metrics, arms) for name, metrics in evaluations_of(arms).items()]
    return [table for table in tables if table.rows]


def _is_ruled(arms: Arms) -> bool:
    """Tell if the sweep names what its verdicts rest on."""
    return any(arm.sweep.get("margin") or arm.sweep.get("primary") for arm in arms)


def _training(arms: Arms, contrasts: Sequence[Contrast]) -> Table:
    """Make the headline: each arm's seeds, metrics, differences, verdict, and what it costs."""
    metrics, further = table_keys(arms)
    columns = [seeds_column(arms)]
    for metric in metrics:
        names = f"{metric}_difference", f"{metric}_difference_pairs"
        columns += [metric_column(metric, arms), difference_column(metric, arms, "", *names)]
    if _is_ruled(arms):
        verdicts = {one.arm: one.verdict for one in contrasts if one.other is one.arm.baseline}
        verdict_column = Column("verdict", ("verdict",), False)
        columns.append((verdict_column, lambda arm: word(verdicts.get(arm, "-"))))
    if further is None:
        further = [key for key in _further_keys(arms) if any(arm[key].notna().any() for arm in arms)]
    columns += [metric_column(metric, arms) for metric in further]
    heading = f"{', '.join(map(title, metrics))} by arm"
    notes = _notes(arms) + _pilot_notes(arms, contrasts)
    return arms_table("training", heading, arms, columns, *notes)


def _further_keys(arms: Arms) -> list[str]:
    """Return metrics of the headline beside the loss, for a sweep that names none."""
    evaluations = evaluations_of(arms).items()
    return [
        "real_tokens",
        "val_loss_start",
        "val_loss_as_trained",
        "real_tokens_per_second",
        "padding_fraction",
        "speedup",
        "peak_memory_bytes",
        *(f"{name}.{metrics[0]}" for name, metrics in evaluations),
    ]


def _pilot_notes(arms: Arms, contrasts: Sequence[Contrast]) -> list[str]:
    """Say which margin a sweep without one gives a later sweep: half of its leak's least harm."""
    notes = []
    is_pilot = not _is_ruled(arms) and not aggregate.higher_is_better(table_keys(arms)[0][0])
    for contrast in contrasts if is_pilot else ():
        if contrast.arm.leaks and contrast.same_documents and contrast.ruling.estimate.low > 0:
            margin = margin_from_pilot(contrast.ruling.estimate)
            notes.append(
                f"{contrast.name}: half of the lower end of its interval is {margin:.2g}, a margin "
                "for a later sweep with other seeds."
            )
    return notes


def _differences(arms: Arms) -> Table:
    metrics = ("val_loss", "val_loss_start")
    columns = [(make_columns("!minus = baseline")[0], lambda arm: word(arm.baseline.label))]
    columns += [difference_column(metric, arms, title(metric), metric) for metric in metrics]
    differing = []
    for arm in arms:
        found = [aggregate.difference(arm, metric) for metric in metrics]
        if any(one and one.seeds > 1 for one in found):
            differing.append(arm)
    note = "Mean over seeds of the arm's loss minus the baseline's, with its 95 % interval by Student's t."
    heading = "Paired differences over seeds, in nats per target"
    return arms_table("differences", heading, differing, columns, note)


def _evaluation(name: str, metrics: Sequence[str], arms: Arms) -> Table:
    """Tabulate an evaluation of each arm's models; ``metrics`` without its name, main one first."""
    main = f"{name}.{metrics[0]}"
    evaluated = [arm for arm in arms if arm[main].notna().any()]
    first, *others = (metric_column(metric, evaluated, f"{name}.") for metric in metrics)
    columns = [seeds_column(evaluated, main), first, difference_column(main, evaluated), *others]
    groups = set()
    for arm in evaluated:
        found = aggregate.difference(arm, main)
        if found and found.groups > 1:
            groups.add(found.groups)
    notes = [f"Intervals are over seeds and {max(groups)} groups of documents."] if groups else []
    heading = f"Evaluation by arm: {name}"
    return arms_table(f"evaluation-{name}", heading, evaluated, columns, *notes)


def _verdicts(contrasts: Sequence[Contrast], metric: str) -> Table:
    columns = [
        *make_columns("!contrast | !primary"),
        interval_column("difference"),
        *make_columns(
            "seeds | groups | diverged runs = diverged runs other_diverged other_runs | "
            "p of difference, Holm = p_difference | p of equivalence, Holm = p_equivalence | "
            "!verdict | seeds for 80 % power = seeds_needed"
        ),
    ]
    table = Table("verdicts", f"Verdicts on {title(metric)}", columns)
    for contrast in contrasts:
        found = contrast.ruling.estimate
        family = sum(one.primary == contrast.primary for one in contrasts)
        row = [
            word(contrast.name),
            word("primary" if contrast.primary else "exploratory"),
            difference_cell(found),
            number(found.seeds, "d"),
            number(found.groups if found.groups > 1 else None, ",d"),
            Cell(_diverged(contrast) or "-", tuple(contrast.comparison.divergence)),
            p_cell(contrast.ruling.p_difference),
            p_cell(contrast.ruling.p_equivalence),
            word(contrast.verdict),
            number(_seeds_needed(contrast, family), "d"),
        ]
        table.rows.append(row)
    margins = sorted({contrast.margin for contrast in contrasts if contrast.margin is not None})
    within = "".join(f" Equivalent: the interval lies within ± {margin:g}." for margin in margins)
    table.notes = [
        "Intervals are over paired seeds, and over groups of documents if there are any. Different: "
        f"the 95 % interval excludes zero.{within} Each claim also needs its p to be at most 0.05 "
        "after Holm's adjustment over the primary contrasts, or over the exploratory ones.",
        "Leak not caught, no leak arm: no leak of the same setting is shown to be worse, so the "
        "test could not have failed. Of survivors: runs diverged, and what is left is a selection, "
        "never equivalent; diverges: more often than the other arm, by Fisher's exact test. Other "
        "documents: never equivalent.",
        f"Seeds for 80 % power: to be equivalent at no difference, {FEW_SEEDS} or more, at the "
        "upper 80 % confidence bound of the standard deviation; a dash: more than 100.",
    ]
    return table


def _diverged(contrast: Contrast) -> str:
    """Say how many runs of each arm diverged, if any did."""
    diverged, runs, other_diverged, other_runs = contrast.comparison.divergence
    return f"{diverged} of {runs} against {other_diverged} of {other_runs}" * bool(diverged + other_diverged)


def _seeds_needed(contrast: Contrast, family: int) -> int | None:
    """Return the seeds for 80 % power, where the contrast might be called equivalent."""
    comparison = contrast.comparison
    if comparison.margin is None or contrast.arm.leaks:
        return None
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
    return [_finding(one, metric) for one in made if one.ruling.estimate.seeds or _diverged(one)]


def _finding(contrast: Contrast, metric: str) -> Finding:
    found, diverged, ruling = contrast.ruling.estimate, _diverged(contrast), contrast.verdict
    evidence = title(metric)
    if found.seeds:
        unit = " nats" if "loss" in metric else ""
        evidence += f" {interval_text(found[:3], unit=unit)}"
    evidence += f", {found.seeds} seed{'s' * (found.seeds != 1)}"
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
        if documents < 50:
            few = "Fewer than 50 documents: intervals over seeds say nothing about other documents."
            notes.append(few)
    absent = {name for arm in arms for name in arm.sweep.get("absent", ())}
    if absent:
        notes.append(f"Without any run: {', '.join(sorted(absent))}.")
    return notes


def _positions(arms: Arms) -> Table:
    columns = make_columns("!arm | from token = start | to token = end")
    columns.append(interval_column(f"minus {aggregate.versus(arms)}"))
    heading = "Loss by position in the document, in nats per target"
    table, beyond = Table("loss-by-position", heading, columns), 0
    for arm in arms:
        for start, end, found in aggregate.difference_by_position(arm):
            if found.seeds > 1:
                to_end = Cell("the end", (None,))
                last = number(end - 1, ",.0f") if end < aggregate.OPEN_END else to_end
                row = [word(arm.label), number(start, ",.0f"), last, difference_cell(found)]
                table.rows.append(row)
                beyond += found.low > 0 or found.high < 0
    share = f"{beyond} of {len(table.rows)} intervals"
    table.notes = [f"Paired over seeds. {share} exclude zero; one in twenty would by chance."]
    return table


def throughput_tables(records: Records) -> list[Table]:
    """Tabulate the speed of arms whose steps took turns in one process."""
    timed = [replace(arm, variant=()) for arm in aggregate.timed_arms(records)]
    speeds = ("real_tokens_per_second", "slots_per_second", "padding_fraction", "speedup")
    columns = [metric_column(metric, []) for metric in ("rounds", *EXACT[:2], *speeds)]
    run = Column("run", ("run",))
    columns.append((run, lambda arm: Cell((arm.timing or "")[:8], (arm.timing,))))
    note = "Only arms of one run compare. Speedup: over the arm with 1.00x."
    heading = "Time of optimizer steps, arms interleaved in one process"
    return [arms_table("throughput", heading, timed, columns, note)] if timed else []


def evaluation_tables(records: Records) -> list[Table]:
    """Tabulate models by evaluation, with differences from the first."""
    tasks: dict[str, list[aggregate.Record]] = {}
    for record in aggregate.of_kind(records, "evaluation"):
        evaluation = record["config"]["evaluation"]
        options = sorted((evaluation.get("options") or {}).items())
        task = evaluation["name"] + "".join(f", {key}={value}" for key, value in options)
        tasks.setdefault(task, []).append(record)
    tables = []
    for task, some in tasks.items():
        name = "evaluation" + ("-" + re.sub(r"[^\w.]+", "-", task)) * (len(tasks) > 1)
        tables.append(_evaluated_models(name, task, some))
    return tables


def _evaluated_models(name: str, task: str, records: Records) -> Table:
    """Tabulate the models of one evaluation; the first is the baseline's, if there is one."""
    models = []
    for arm, runs in aggregate.frame(records, "evaluation").groupby("arm", sort=False):
        latest = runs.drop_duplicates("seed", keep="last").set_index("seed")
        models.append(Arm(str(arm), (), latest))
    by_name = {model.name: model for model in models}
    first = next((by_name[arm] for arm in aggregate.BASELINES if arm in by_name), models[0])
    models.sort(key=lambda model: model is not first)
    metrics = main_first(list(first.runs.select_dtypes(float)))
    columns: list[ArmColumn] = [(Column("runs", ("runs",)), lambda arm: number(len(arm.runs), "d"))]
    columns += [metric_column(metric, []) for metric in metrics]
    paired = {}
    for model in models[1:]:
        found = aggregate.item_difference(model, first, metrics[0])
        paired[model] = found and found._replace(seeds=found.groups)
    notes = []
    if any(paired.values()):
        minus = interval_column(f"minus {first.name}")
        columns.append((minus, lambda arm: difference_cell(paired.get(arm))))
        notes.append(
            "Differences are paired by item, with intervals over items (groups of documents), and over seeds."
        )
    return arms_table(name, f"Evaluation: {task}", models, columns, *notes)


def evaluation_label(records: Records) -> str:
    """Return the only evaluation's name, and a hash of its documents."""
    evaluated = aggregate.of_kind(records, "evaluation")
    names = {record["config"]["evaluation"]["name"] for record in evaluated}
    name = names.pop() if len(names) == 1 else "documents"
    return f"{name}-{zlib.crc32(records[0]['corpus_hash'].encode()) & 0xFFFF:04x}"
