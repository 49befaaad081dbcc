"""Tables of trained arms, timed optimizer steps and evaluations; records given to one function are of one corpus."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from packmamba.records import LATER_KEYS
from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Interval, Record, Seeds, Speed
from packmamba.report.tables import Cell, Column, Table, gibibytes, mean_sd, number, percent, word

PARITY_SEEDS = 5
"""A claim of parity needs at least this many seeds."""
DIFFERENCE = ("difference", "difference_low", "difference_high", "pairs")
TITLES = {
    "val_loss": "validation loss",
    "val_loss_start": "loss, first 32 tokens",
    "val_loss_as_trained": "loss, evaluated as trained",
    "real_tokens": "real tokens",
    "real_tokens_per_second": "real tokens/s",
    "padding_fraction": "padding",
    "peak_memory_bytes": "peak memory",
    "nats": "nats an answer",
    "choice_accuracy": "right choices",
    "choice_accuracy_by_bytes": "right choices, by bytes",
    "quarter": "first quarter cut off",
    "half": "first half cut off",
    "three_quarters": "first three quarters cut off",
    "nats_as_trained": "nats an answer as trained",
    "accuracy_intruding": "accuracy, intruding reads",
    "accuracy_intruding_as_trained": "accuracy as trained, intruding reads",
    "best_intruding_as_trained": "best possible as trained, intruding reads",
    "best_as_trained": "best possible as trained",
}
ORDER = (
    *("accuracy", "chance", "nats", "choice_accuracy", "choice_accuracy_by_bytes", "loss", "bits_per_byte"),
    *("quarter", "half", "three_quarters", "accuracy_as_trained", "nats_as_trained", "loss_as_trained"),
    *("accuracy_intruding", "accuracy_intruding_as_trained", "best_intruding_as_trained", "best_as_trained"),
)
"""An evaluation's metrics in tables."""
OF_CHOICES = {"accuracy": "tokens right", "chance": "right choices by chance"}
COUNTS = ("answers", "examples", "documents", "targets", "reads_intruding")
MAIN = ("choice_accuracy", "accuracy", "loss")
"""An evaluation's main metric: the first of these that it has, else its first."""


WHAT_SCHEMES_DO = {
    "single": "one document at a time",
    "padded": "one document a row, padded",
    "packed-reset": "packed rows; convolution and state are reset at document boundaries",
    "packed-leak": "packed rows; convolution and state run on across document boundaries",
    "packed-leak-conv": "packed rows; the convolution runs on across document boundaries, the state is reset",
    "packed-leak-scan": "packed rows; the state runs on across document boundaries, the convolution is reset",
    "packed-carry": "full rows; a document cut at a row's end continues from its own state in a later row",
}


def arms_legend(records: Sequence[Record]) -> dict[str, str]:
    """Return what each arm's scheme does, by the arm's title."""
    return {
        arm.title: WHAT_SCHEMES_DO.get(arm.scheme, f"packed rows, boundary {arm.scheme.removeprefix('packed-')}")
        for arm in (*aggregate.timed_arms(records), *aggregate.training_arms(records))
    }


def title(metric: str, present: Collection[str] = ()) -> str:
    """Return a metric's title beside the metrics ``present``; ``mqar.accuracy`` is of an evaluation."""
    if "choice_accuracy" in present and metric in OF_CHOICES:
        return OF_CHOICES[metric]
    evaluation, dot, own = metric.rpartition(".")
    return TITLES.get(metric) or (f"{evaluation}, {title(own)}" if dot else metric.replace("_", " "))


def evaluations_of(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Return the evaluations of the arms' runs, and the metrics of each, the main one first."""
    found: dict[str, list[str]] = {}
    for metric in dict.fromkeys(column for arm in arms for column in arm.runs if "." in column):
        name, _, own = metric.partition(".")
        if name not in ("config", "curves"):
            found.setdefault(name, []).append(own)
    return {
        name: sorted(metrics, key=lambda m: m != next((main for main in MAIN if main in metrics), metrics[0]))
        for name, metrics in found.items()
    }


def questions(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group records of kind evaluation by the evaluation's name and its options as text."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["kind"] == "evaluation":
            asked = record["config"]["evaluation"]
            options = ", ".join(f"{key}={value}" for key, value in sorted((asked.get("options") or {}).items()))
            found.setdefault((asked["name"], options), []).append(record)
    return found


def stem(question: tuple[str, str], others: Iterable[tuple[str, str]]) -> str:
    """Return a question's name in files: numbered among those of the same evaluation."""
    alike = [other for other in others if other[0] == question[0]]
    return question[0] + (f"-{alike.index(question) + 1}" if len(alike) > 1 else "")


def difference_cell(found: Any, expected: int = 0) -> Cell:
    """Return mean and interval, and the number of pairs if fewer than expected."""
    if found is None:
        return Cell("-", (None,) * 4)
    # Arms that compute the same differ by rounding: 0.0000 would hide whether they do.
    values = pd.Series(found[:3], dtype=float).dropna()
    form = "+.4f" if values.abs().max() >= 1e-4 else "+.1e"
    mean, *bounds = (f"{value:{form}}" for value in values)
    pairs = f" ({found[3]} pairs)" if 1 < found[3] < expected else ""
    return Cell(f"{mean} [{', '.join(bounds)}]{pairs}" if bounds else mean, tuple(found))


class _ArmColumn(NamedTuple):
    column: Column
    cell: Callable[[Arm, Speed, Seeds], Cell]


def _metric(metric: str, arms: Sequence[Arm]) -> _ArmColumn:
    """Return the column of a metric, or of a configuration key such as ``optimizer.lr``."""
    plain: dict[str, Callable[[Arm, Speed, Seeds], Cell]] = {
        "real_tokens": lambda arm, speed, seeds: number(arm[metric].mean(), ",.0f"),
        "real_tokens_per_second": lambda arm, speed, seeds: number(speed.real_tokens_per_second, ",.0f"),
        "padding_fraction": lambda arm, speed, seeds: percent(speed.padding_fraction),
        "speedup": lambda arm, speed, seeds: number(speed.speedup, ".2f", "x"),
        "peak_memory_bytes": lambda arm, speed, seeds: gibibytes(arm[metric].mean()),
    }
    keys = {str(column).removeprefix("config.") for arm in arms for column in arm.runs if "config." in column}
    if metric in plain or metric in keys | LATER_KEYS.keys():
        name = f"speedup over {aggregate.versus(arms)}" if metric == "speedup" else title(metric)
        return _ArmColumn(Column(name, (metric,)), plain.get(metric, lambda arm, *_: word(_setting(arm, metric))))
    column = Column(title(metric), (metric, f"{metric}_sd"))
    return _ArmColumn(column, lambda arm, speed, seeds: mean_sd(arm[metric], seeds.expected))


def _difference(metric: str, arms: Sequence[Arm], names: tuple[str, ...] = DIFFERENCE) -> _ArmColumn:
    column = Column(f"minus {aggregate.versus(arms)} [95% CI]", names)
    difference = aggregate.difference
    return _ArmColumn(column, lambda arm, _, seeds: difference_cell(difference(arm, arms, metric), seeds.expected))


def _setting(arm: Arm, key: str) -> str:
    """Return a key's value as YAML; of a section all that is set in it."""
    run = arm.runs.iloc[0]
    inside = run[[name for name in run.index if name.startswith(f"config.{key}.")]].dropna()
    if len(inside):
        values = (f"{name.removeprefix(f'config.{key}.')}: {_as_yaml(value)}" for name, value in inside.items())
        return f"{{{', '.join(values)}}}"
    value = run.get(f"config.{key}")
    if value is None or value is pd.NA:
        return _as_yaml(LATER_KEYS.get(key)) if key.count(".") < 2 else "-"
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _fill(table: Table, specs: Sequence[_ArmColumn], arms: Sequence[Arm], speeds: Sequence[Speed]) -> None:
    """Add a row for each arm, and for each arm of the sweep without a run."""
    table.columns += [spec.column for spec in specs]
    for arm, speed in zip(arms, speeds):
        seeds = aggregate.seeds_of(arm, arms)
        cells = [spec.cell(arm, speed, seeds) for spec in specs]
        table.rows.append([word(arm.label), Cell(str(seeds), (seeds.finite,)), *cells])
    for name, count in aggregate.absent_arms(arms).items():
        dashes = [Cell("-", (None,) * len(spec.column.names)) for spec in specs]
        table.rows.append([word(name), Cell(str(Seeds(0, 0, count)), (0,)), *dashes])


def training_tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of quality and speed, of paired differences and of differences by position."""
    arms = aggregate.training_arms(records)
    if not arms:
        return []
    spec = aggregate.table_spec(arms)
    speeds = aggregate.speeds_of(arms, aggregate.timed_arms(records))
    table = Table("training", "Validation loss and speed by arm", [Column("arm", ("arm",), False)])
    table.columns.append(Column("seeds", ("seeds",)))
    if spec:
        metrics = spec.get("metrics") or ["val_loss"]
        further = spec.get("columns")
        further = ["real_tokens", "real_tokens_per_second", "padding_fraction"] if further is None else further
        table.title = f"{', '.join(map(title, metrics))} by arm"
        specs = []
        for metric in metrics:
            names = [f"{metric}_{part}" for part in DIFFERENCE]
            specs += [_metric(metric, arms), _difference(metric, arms, tuple(names))]
    else:
        headline = [
            f"{name}.{next((m for m in ('bits_per_byte', *MAIN) if m in present), present[0])}"
            for name, present in evaluations_of(arms).items()
        ]
        further = ["val_loss_start", "val_loss_as_trained", *headline[:1], "real_tokens_per_second"]
        further += ["padding_fraction", "speedup", "peak_memory_bytes"]
        empty = {m for m in ("val_loss_as_trained", "peak_memory_bytes") if all(arm[m].isna().all() for arm in arms)}
        further = [name for name in further if name not in empty]
        specs = [_metric("real_tokens", arms), _metric("val_loss", arms), _difference("val_loss", arms)]
    _fill(table, [*specs, *(_metric(name, arms) for name in further)], arms, speeds)
    table.notes = _training_notes(arms, speeds, records)
    tables = [table, *([] if spec else [_differences(arms)]), _positions(arms)]
    return [table for table in tables if table.rows]


def _how_timed(arms: Sequence[Arm], speeds: Sequence[Speed]) -> str:
    together = aggregate.timed_together(speeds)
    if together is None:
        return "Real tokens/s and padding are of each arm's own training run: not a comparison."
    others = ", ".join(arm.label for arm, speed in zip(arms, speeds) if speed.timing != together)
    note = "Real tokens/s, padding and speedup: whole optimizer steps, arms interleaved in one process, medians."
    return note + (f" Not timed together with these: {others}." if others else "")


def _training_notes(arms: Sequence[Arm], speeds: Sequence[Speed], records: Sequence[Record]) -> list[str]:
    notes = ["Losses are nats per real target, of documents one at a time from zero state in every arm."]
    notes += [_how_timed(arms, speeds)] if len(arms) > 1 else []
    if not aggregate.table_spec(arms).get("paired", True):
        notes.append("Differences are of means over seeds that are not matched, by Welch's t.")
    leaks = [a for a in arms if a.runs.iloc[0].get("config.trainer.boundary") in ("leak", "leak_conv", "leak_scan")]
    if alone := [arm.label for arm in leaks if (arm["documents_behind_another"] == 0).all()]:
        notes.append(f"No row of {', '.join(alone)} held two documents: nothing crossed, as under reset.")
    if others := [arm.label for arm in arms if _batching(arm) != _batching(aggregate.baseline_of(arm, arms))]:
        notes.append(f"Trained on other documents at a step than the baseline: {', '.join(others)}.")
    tuned = [(arm, keys) for arm in arms if (keys := (arm.sweep.get("tuned") or {}).get("keys"))]
    if tuned:
        best = (f"{arm.label} {', '.join(f'{key}={_setting(arm, key)}' for key in keys)}" for arm, keys in tuned)
        notes.append(f"Each arm has its own best values, chosen with other seeds (tuning/): {'; '.join(best)}.")
    if ends := [f"{arm.label} ({', '.join(keys)})" for arm in arms if (keys := arm.at_an_end)]:
        notes.append(f"At an end of the values tried, beyond which better ones may lie: {', '.join(ends)}.")
    seeds = [aggregate.seeds_of(arm, arms) for arm in arms]
    if any(count.finite < count.expected for count in seeds) or aggregate.absent_arms(arms):
        notes.append("A diverged run has no loss, a missing one no record; means are over the others.")
    fewest = min(len(arm.runs) for arm in arms)
    if fewest < PARITY_SEEDS and len(arms) > 1:
        few = "One seed: no intervals" if fewest == 1 else f"{fewest} seeds: differences carry their intervals"
        notes.append(f"{few}; claims of parity need at least {PARITY_SEEDS} seeds.")
    if left_out := sorted({r["config"]["trainer"]["max_steps"] for r in records if not aggregate.after_asked_steps(r)}):
        notes.append(f"Records after {' and '.join(f'{n:,}' for n in left_out)} steps are left out.")
    return notes


def _batching(arm: Arm) -> Any:
    run = arm.runs.iloc[0]
    return run.get("config.data.batching")


def _differences(arms: Sequence[Arm]) -> Table:
    """From two seeds on."""
    metrics = ("val_loss", "val_loss_start")
    names = {metric: tuple(name.replace("difference", metric) for name in DIFFERENCE) for metric in metrics}
    columns = [Column("arm", ("arm",), False), Column("minus", ("baseline",), False)]
    columns += [Column(f"{title(metric)} [95% CI]", names[metric]) for metric in metrics]
    table = Table("differences", "Paired differences over seeds, in nats per target", columns)
    for arm in arms:
        found = [aggregate.difference(arm, arms, metric) for metric in metrics]
        if any(one and one.n > 1 for one in found):
            cells = [difference_cell(one, aggregate.seeds_of(arm, arms).expected) for one in found]
            table.rows.append([word(arm.label), word(aggregate.baseline_of(arm, arms).label), *cells])
    table.notes = ["Mean over seeds of the arm's loss minus the baseline's, with its 95 % interval by Student's t."]
    return table


def _positions(arms: Sequence[Arm]) -> Table:
    columns = [Column("arm", ("arm",), False), Column("from token", ("start",)), Column("to token", ("end",))]
    columns.append(Column(f"minus {aggregate.versus(arms)} [95% CI]", DIFFERENCE))
    table = Table("loss-by-position", "Loss by position in the document, in nats per target", columns)
    excluding = 0
    for arm in arms:
        for start, end, one in aggregate.difference_by_position(arm, arms):
            if one.n > 1:
                last = number(end - 1, ",.0f") if end < aggregate.OPEN_END else Cell("the end", (None,))
                cell = difference_cell(one, aggregate.seeds_of(arm, arms).expected)
                table.rows.append([word(arm.label), number(start, ",.0f"), last, cell])
                excluding += one.low > 0 or one.high < 0
    table.notes = [
        f"Paired over seeds. {excluding} of {len(table.rows)} intervals exclude zero; one in twenty would by chance."
    ]
    return table


def throughput_tables(records: Sequence[Record]) -> list[Table]:
    """Make the table of interleaved timings."""
    timed, trained = aggregate.timed_arms(records), aggregate.training_arms(records)
    metrics = {
        "rounds": ("rounds", ".0f"),
        "seconds_per_step_median": ("seconds/step, median", ".4g"),
        "seconds_per_step_spread": ("interquartile range", ".2g"),
        "real_tokens_per_second": ("real tokens/s", ",.0f"),
        "slots_per_second": ("slots/s", ",.0f"),
    }
    columns = [Column("arm", ("arm",), False), *(Column(title, (name,)) for name, (title, _) in metrics.items())]
    columns += [Column("padding", ("padding_fraction",)), Column("speedup", ("speedup",))]
    title = "Time of optimizer steps, arms interleaved in one process"
    table = Table("throughput", title, [*columns, Column("run", ("run",))])
    for arm in timed:
        cells = [number(arm[name].mean(), form) for name, (_, form) in metrics.items()]
        cells += [
            percent(arm["padding_fraction"].mean()),
            number(aggregate.speedup(arm, timed, trained, or_single=True), ".2f", "x"),
        ]
        table.rows.append([word(arm.name), *cells, Cell(aggregate.timing_of(arm)[:8], (aggregate.timing_of(arm),))])
    table.notes = [
        "Only arms of one run are compared. Speedup: real tokens per second over those of the run's arm with 1.00x."
    ]
    busy = {aggregate.timing_of(arm): arm["cores_of_others"].max() for arm in timed}
    if any(cores >= 0.5 for cores in busy.values()):
        cores = ", ".join("unknown" if pd.isna(cores) else f"{cores:.1f}" for cores in busy.values())
        table.notes.append(f"Cores kept busy by other programs during each run: {cores}.")
    return [table] if timed else []


def measures(present: Sequence[str]) -> list[str]:
    """Return an evaluation's metrics without counts, in the order of tables: ``loss_2`` before ``loss_16``."""
    numbered = sorted(present, key=lambda m: (len(m), m) if m[-1].isdigit() else (0, ""))
    order = [*ORDER, *numbered]
    if "choice_accuracy" in present:
        order.remove("chance")
        order.insert(order.index("choice_accuracy_by_bytes") + 1, "chance")
    return sorted((m for m in present if m not in COUNTS), key=order.index)


def evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """Make a table of models for each evaluation and its options."""
    asked = questions(records)
    return [_models_table(question, some, asked) for question, some in asked.items()]


def _models_table(question: tuple[str, str], records: Sequence[Record], asked: Collection[tuple[str, str]]) -> Table:
    runs = aggregate.frame(records, "evaluation")
    present = list(dict.fromkeys(metric for record in records for metric in record["metrics"]))
    metrics, counts = measures(present), [count for count in COUNTS if count in present]
    columns = [Column("model", ("model",), False), Column("runs", ("runs",)), *(_mean(m, present) for m in metrics)]
    columns += [Column(count, (count,)) for count in counts]
    name = "evaluation" if len(asked) == 1 else f"evaluation-{stem(question, asked)}"
    options = f", {question[1]}" if len(asked) > 1 and question[1] else ""
    table = Table(name, f"Evaluation: {question[0]}{options}", columns)
    arms = {
        str(arm): group.drop_duplicates("seed", keep="last").set_index("seed")
        for arm, group in runs.groupby("arm", sort=False)
    }
    first = next((name for name in (*aggregate.BASELINES, *arms) if name in arms), "")
    main = next((m for m in MAIN if m in present), "")
    files = {arm: latest["items"].dropna().to_dict() for arm, latest in arms.items() if "items" in latest}
    paired = {
        arm: aggregate.item_difference(own, files[first], main)
        for arm, own in files.items()
        if first in files and arm != first
    }
    if any(paired.values()):
        columns.append(Column(f"{title(main, present)} minus {first}'s [95% CI]", (*DIFFERENCE[:3], "items")))
        table.notes = [
            "Differences are paired by item, with intervals over items (groups of documents), and over seeds."
        ]
    for arm in dict.fromkeys([first, *arms]):
        cells = [mean_sd(arms[arm][m], len(arms[arm])) for m in metrics]
        cells += [number(arms[arm][count].mean(), ",.0f") for count in counts]
        if any(paired.values()):
            found = paired.get(arm)
            cells.append(difference_cell(found and Interval(found.mean, found.low, found.high, found.groups)))
        table.rows.append([word(arm), number(len(arms[arm]), "d"), *cells])
    return table


def _mean(metric: str, present: Collection[str]) -> Column:
    return Column(title(metric, present), (metric, f"{metric}_sd"))


def evaluation_label(records: Sequence[Record]) -> str:
    """Return the evaluation's name, if there is only one, and a short hash of its documents."""
    asked = questions(records)
    (_, some), *others = asked.items()
    name = "documents" if others else some[0]["config"]["evaluation"]["name"]
    return f"{name}-{zlib.crc32(some[0]['corpus_hash'].encode()) & 0xFFFF:04x}"


def arms_evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """Make a table for each evaluation of the trained arms."""
    arms = aggregate.training_arms(records)
    return [_arms_table(name, metrics, arms) for name, metrics in evaluations_of(arms).items()]


def _arms_table(name: str, present: list[str], trained: Sequence[Arm]) -> Table:
    main, counts = f"{name}.{present[0]}", [count for count in COUNTS if count in present]
    arms = [arm for arm in trained if arm[main].notna().any() or _was_to_answer(arm, name)]
    others = [m for m in measures(present) if m not in (present[0], "chance")]
    chance = ["chance"] * ("chance" in present)
    columns = [Column("arm", ("arm",), False), Column("seeds", ("seeds", "seeds_without")), _mean(present[0], present)]
    columns += [Column(f"minus {aggregate.versus(arms)} [95% CI]", DIFFERENCE), *(_mean(m, present) for m in others)]
    columns += [Column(title(one, present), (one,)) for one in (*chance, *counts)]
    table = Table(f"evaluation-{name}", f"Evaluation by arm: {name}", columns)
    for arm in arms:
        seeds = aggregate.seeds_of(arm, arms, main)
        table.rows.append(
            [
                word(arm.label),
                Cell(str(seeds), (seeds.finite, seeds.diverged + seeds.missing)),
                mean_sd(arm[main], seeds.expected),
                difference_cell(aggregate.difference(arm, arms, main), seeds.expected),
                *(mean_sd(arm[f"{name}.{m}"], seeds.expected) for m in others),
                *(number(arm[f"{name}.{m}"].mean(), ".4g") for m in chance),
                *(number(arm[f"{name}.{m}"].mean(), ",.0f") for m in counts),
            ]
        )
    table.notes = [
        "Each document from zero state; as trained: in the run's rows under its boundary scheme. Differences are paired over "
        "seeds, with 95 % intervals by Student's t."
    ]
    return table


def _was_to_answer(arm: Arm, name: str) -> bool:
    return any(name in asked for asked in arm.runs.get("config.evaluations", pd.Series(dtype=object)).dropna())


class Shape(NamedTuple):
    """A curve's point: the key of its place, the axis, the value, and the key of the number of items."""

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
AS_TRAINED = "_as_trained"
Curves = dict[str, dict[str, pd.DataFrame]]
"""<evaluation>.<curve> -> arm -> its points, with a column ``seed``."""


def curves_of(records: Sequence[Record], kind: str) -> Curves:
    """Return the evaluations' curves with two places or more: of trained arms, or of models, the latest of a model and seed."""
    found: Curves = {}

    def add(name: str, arm: str, points: list[dict[str, Any]]) -> None:
        if len({point[SHAPES[name.rpartition(".")[2]].place] for point in points}) > 1:
            found.setdefault(name, {})[arm] = pd.DataFrame(points)

    for arm in aggregate.training_arms(records) if kind == "training" else ():
        for column in arm.runs:
            name = str(column).removeprefix("curves.")
            if name != column and name.rpartition(".")[2] in SHAPES:
                seeds = arm.runs[column].dropna().items()
                add(name, arm.label, [point | {"seed": seed} for seed, points in seeds for point in points])
    asked = questions(records) if kind == "evaluation" else {}
    for question, some in asked.items():
        latest = {(record["arm"], record["seed"]): record for record in sorted(some, key=lambda record: record["time"])}
        for name in dict.fromkeys(name for name, _ in latest):
            own = [record for (model, _), record in latest.items() if model == name]
            for curve in SHAPES:
                points = [point | {"seed": r["seed"]} for r in own for point in r["curves"].get(curve, ())]
                add(f"{stem(question, asked)}.{curve}", name, points)
    return found


def curve_tables(records: Sequence[Record], kind: str) -> list[Table]:
    """Make a table for each curve: a row for each arm and place."""
    tables = []
    for name, arms in curves_of(records, kind).items():
        shape = SHAPES[name.rpartition(".")[2]]
        values = [v for v in (shape.value, shape.value + AS_TRAINED) if any(v in points for points in arms.values())]
        counts = [shape.over] if shape.over else []
        columns = [Column("arm", ("arm",), False), Column(shape.axis, (shape.place,))]
        columns += [*(_mean(value, ()) for value in values), *(Column(count, (count,)) for count in counts)]
        table = Table(f"evaluation-{name.replace('.', '-')}", f"Evaluation: {name.replace('.', ', ')}", columns)
        for arm, points in arms.items():
            for place, here in points.groupby(shape.place):
                cells = [mean_sd(here[v] if v in here else pd.Series(dtype=float)) for v in values]
                cells += [number(here[count].mean(), ",.0f") for count in counts]
                table.rows.append([word(arm), number(float(place), ",.0f"), *cells])
        tables.append(table)
    return tables
