"""Tables of trained arms and of timed optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from packmamba.report import summary
from packmamba.report.chosen import chosen, chosen_table, unpaired
from packmamba.report.measures import headline
from packmamba.report.summary import PARITY_SEEDS, Arm, Interval, Record, Speed
from packmamba.report.tables import Cell, Column, Table, gibibytes, mean_sd, number, percent, word

DIFFERENCE = ("difference", "difference_low", "difference_high", "pairs")
_SAID = {f"config.{key}" for key in ("data.strategy", "trainer.boundary", "name", "seed", "run", "evaluations")}
_PAIRED = {"val_loss": "validation loss", "val_loss_start": "loss, first 32 tokens"}


_SCHEMES = {
    "single": "one document at a time",
    "padded": "each document in a row of its own, filled up to the longest of its batch",
    "packed-reset": "documents one after another in rows; convolution and state start afresh in each",
    "packed-leak": "documents one after another in rows; convolution and state run on from one into the next",
    "packed-leak-conv": "documents one after another in rows; the convolution runs on from one into the next, the state does not",
    "packed-leak-scan": "documents one after another in rows; the state runs on from one into the next, the convolution does not",
    "packed-carry": "rows filled to the end; a document that a row cuts goes on from its own state in a later row",
}

OPEN_END = 2**31 - 1
"""Of a stretch of positions: it goes on for ever."""


def training_tables(records: Sequence[Record]) -> list[Table]:
    """Quality and speed of every arm, then paired differences with their intervals; ``records`` are of one corpus."""
    arms = summary.training_arms(records)
    if not arms:
        return []
    timed = summary.timed_arms(records)
    speeds = summary.speeds_of(arms, timed)
    if chosen(arms):
        found = chosen_table(
            arms, speeds, versus(arms), lambda arm, metric, n: difference_cell(difference(arm, arms, metric), n)
        )
        tables = [found, _positions(arms)]
    else:
        tables = [_arms(arms, speeds), _differences(arms), _positions(arms)]
    if statement := seeds_statement(records):
        tables[0].notes.append(statement)
    if left_out := sorted({r["config"]["trainer"]["max_steps"] for r in records if not summary.asked_for(r)}):
        steps = " and ".join(f"{steps:,}" for steps in left_out)
        tables[0].notes.append(f"Records after {steps} steps are left out: the sweep asks for others.")
    return [table for table in tables if table.rows]


def _arms(arms: Sequence[Arm], speeds: Sequence[Speed]) -> Table:
    counts = [summary.seeds_of(arm, arms) for arm in arms]
    asked = headline(arms)
    columns = [
        Column("arm", ("arm",), False),
        Column("seeds", ("seeds",)),
        Column("real tokens", ("real_tokens",)),
        Column("validation loss", _with_sd("val_loss")),
        Column(f"minus {versus(arms)} [95% CI]", DIFFERENCE),
        Column("loss, first 32 tokens", _with_sd("val_loss_start")),
        Column("loss, evaluated as trained", _with_sd("val_loss_as_trained")),
        *([Column(asked[1], _with_sd(asked[0]))] if asked else []),
        Column("real tokens/s", ("real_tokens_per_second",)),
        Column("padding", ("padding_fraction",)),
        Column("speedup over single", ("speedup",)),
        Column("peak memory", ("peak_memory_bytes",)),
    ]
    rows = [
        [
            word(arm.label),
            Cell(str(count), (count.finite,)),
            number(arm["real_tokens"].mean(), ",.0f"),
            mean_sd(arm["val_loss"], count.expected),
            difference_cell(difference(arm, arms, "val_loss"), count.expected),
            mean_sd(arm["val_loss_start"], count.expected),
            mean_sd(arm["val_loss_as_trained"], count.expected),
            *([mean_sd(arm[asked[0]], count.expected)] if asked else []),
            number(speed.real_tokens_per_second, ",.0f"),
            percent(speed.padding_fraction),
            number(speed.speedup, ".2f", "x"),
            gibibytes(arm["peak_memory_bytes"].mean()),
        ]
        for arm, speed, count in zip(arms, speeds, counts)
    ]
    for name, seeds in summary.absent_arms(arms).items():
        dashes = [Cell("-", (None,) * len(column.names)) for column in columns[2:]]
        rows.append([word(name), Cell(str(summary.Seeds(0, 0, seeds)), (0,)), *dashes])
    empty = {m for m in ("val_loss_as_trained", "peak_memory_bytes") if not any(arm[m].notna().any() for arm in arms)}
    shown = [i for i, column in enumerate(columns) if not empty.intersection(column.names)]
    table = Table("training", "Validation loss and speed by arm", [columns[i] for i in shown])
    table.rows = [[row[i] for i in shown] for row in rows]
    table.notes = [
        "Losses are nats per real target. Validation runs one document at a time from zero state, for every arm alike.",
        _how_timed(arms, speeds),
    ][: 1 if len(arms) == 1 else 2]
    if alone := [arm.label for arm in arms if _crosses(arm) and (arm["documents_behind_another"] == 0).all()]:
        table.notes.append(f"No row of {', '.join(alone)} held two documents: nothing crossed, as under reset.")
    for keys, seeds in dict.fromkeys(tuned for arm in arms if (tuned := _tuned(arm))):
        best = ", ".join(f"{arm.label} {_best(arm, keys)}" for arm in arms if _tuned(arm) == (keys, seeds))
        table.notes.append(
            f"Each arm has its own best {' and '.join(keys)}, chosen with {seeds} other seeds (tuning/): {best}."
        )
    if ends := [f"{arm.label} its {' and '.join(found)}" for arm in arms if (found := arm.at_an_end)]:
        table.notes.append(f"At an end of what was tried, beyond which a better one may lie: {', '.join(ends)}.")
    if any(count.finite < count.expected for count in counts) or summary.absent_arms(arms):
        table.notes.append(
            "A run that diverged has no loss; one that is missing has no record. Means are over the others, and say of how many."
        )
    return table


def _tuned(arm: Arm) -> tuple[tuple[str, ...], int] | None:
    """The keys of which the arm takes its best values, and how many seeds chose them."""
    tuned = arm.sweep.get("tuned")
    return (tuple(tuned["keys"]), len(tuned["seeds"])) if tuned else None


def _best(arm: Arm, keys: Sequence[str]) -> str:
    values = [arm.runs.iloc[0].get(f"config.{key}") for key in keys]
    return " and ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _how_timed(arms: Sequence[Arm], speeds: Sequence[Speed]) -> str:
    together = summary.timed_together(speeds)
    trained, elsewhere = (
        ", ".join(arm.label for arm, speed in zip(arms, speeds) if which(speed.timing))
        for which in (lambda timing: timing is None, lambda timing: timing not in (None, together))
    )
    if together is None:
        return "Real tokens/s and padding are of each arm's own training run: not a comparison."
    said = ["Real tokens/s, padding and speedup: whole optimizer steps, arms interleaved in one process, medians."]
    said += [f"Another timing, not compared with these: {elsewhere}."] if elsewhere else []
    said += [f"Their own training runs, no comparison: {trained}."] if trained else []
    return " ".join(said)


def _crosses(arm: Arm) -> bool:
    """Whether the arm lets something cross between documents of a row."""
    return arm.runs.iloc[0].get("config.trainer.boundary") in ("leak", "leak_conv", "leak_scan", "foreign_heads")


def _differences(arms: Sequence[Arm]) -> Table:
    """Only with intervals: from two seeds on."""
    columns = [Column("arm", ("arm",), False), Column("minus", ("baseline",), False)]
    columns += [
        Column(f"{title} [95% CI]", tuple(name.replace("difference", metric) for name in DIFFERENCE))
        for metric, title in _PAIRED.items()
    ]
    table = Table("differences", "Paired differences over seeds, in nats per target", columns)
    for arm in arms:
        found = [difference(arm, arms, metric) for metric in _PAIRED]
        if any(one and one.n > 1 for one in found):
            baseline = summary.baseline_of(arm, arms)
            expected = summary.seeds_of(arm, arms).expected
            cells = [difference_cell(one, expected) for one in found]
            table.rows.append([word(arm.label), word(baseline.label), *cells])
    table.notes = ["Mean over seeds of the arm's loss minus the baseline's, with its 95 % interval by Student's t."]
    return table


def _positions(arms: Sequence[Arm]) -> Table:
    paired = [
        (arm.label, summary.seeds_of(arm, arms).expected, *each)
        for arm in arms for each in by_position(arm, arms) if each[-1].n > 1
    ]  # fmt: skip
    columns = [Column("arm", ("arm",), False), Column("from token", ("start",)), Column("to token", ("end",))]
    table = Table(
        "loss-by-position",
        "Loss by position in the document, in nats per target",
        [*columns, Column(f"minus {versus(arms)} [95% CI]", DIFFERENCE)],
        [
            [word(label), number(start, ",.0f"), _last(end), difference_cell(one, expected)]
            for label, expected, start, end, one in paired
        ],
    )
    excluding = sum(one.low > 0 or one.high < 0 for *_, one in paired)
    table.notes = [
        f"Paired over seeds. {excluding} of {len(paired)} intervals exclude zero; one in twenty would by chance."
    ]
    return table


def _last(end: float) -> Cell:
    """The last position of a stretch."""
    return number(end - 1, ",.0f") if end < OPEN_END else Cell("the end", (None,))


def throughput_tables(records: Sequence[Record]) -> list[Table]:
    """Interleaved timings, arms of one run together; ``records`` are of one corpus."""
    timed = summary.timed_arms(records)
    metrics = {
        "rounds": ("rounds", ".0f"),
        "seconds_per_step_median": ("seconds/step, median", ".4g"),
        "seconds_per_step_spread": ("interquartile range", ".2g"),
        "real_tokens_per_second": ("real tokens/s", ",.0f"),
        "slots_per_second": ("slots/s", ",.0f"),
    }
    columns = [Column("arm", ("arm",), False), *(Column(title, (name,)) for name, (title, _) in metrics.items())]
    columns += [Column("padding", ("padding_fraction",)), Column("speedup over single", ("speedup",))]
    table = Table(
        "throughput", "Time of optimizer steps, arms interleaved in one process", [*columns, Column("run", ("run",))]
    )
    for arm in timed:
        cells = [number(arm[name].mean(), form) for name, (_, form) in metrics.items()]
        cells += [percent(arm["padding_fraction"].mean()), number(summary.speedup(arm, timed), ".2f", "x")]
        table.rows.append([word(arm.name), *cells, word(dict(arm.variant)["run"])])
    table.notes = ["Only arms of one run are compared. Speedup is the ratio of real tokens per second."]
    busy = {dict(arm.variant)["run"]: arm["cores_of_others"].max() for arm in timed}
    if any(cores >= 0.5 for cores in busy.values()):
        said = ", ".join("an unknown number of" if pd.isna(cores) else f"{cores:.1f}" for cores in busy.values())
        timings = "these timings, in their order" if len(busy) > 1 else "this timing"
        table.notes.append(f"Cores that other programs kept busy during {timings}: {said}.")
    return [table] if timed else []


def training_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each trained arm does."""
    return _legend(summary.training_arms(records))


def throughput_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each timed arm does."""
    return _legend(summary.timed_arms(records))


def _legend(arms: Sequence[Arm]) -> dict[str, str]:
    """By name without a setting: the scheme, and the keys whose values are not those of most arms of the same setting."""
    legend: dict[str, str] = {}
    for arm in arms:
        peers = [peer.runs.iloc[0].filter(like="config.").map(repr) for peer in arms if peer.setting == arm.setting]
        usual = pd.DataFrame(peers).mode().iloc[0] if peers[0].size else peers[0]
        config = arm.runs.iloc[0]
        keys = [key for key in usual.index if key not in _SAID and repr(config[key]) != usual[key]]
        keys = ["config.data.strategy"] * (arm.scheme not in ("single", "padded")) + keys
        own = ", ".join(f"{key.removeprefix('config.')}={config[key]}" for key in keys if key in config)
        what = _SCHEMES.get(arm.scheme, f"documents in rows, boundary {arm.scheme.removeprefix('packed-')}")
        legend.setdefault(arm.title, f"{what} ({own})" if own else what)
    return legend


def difference(arm: Arm, arms: Sequence[Arm], metric: str) -> Interval | None:
    """The arm's metric minus its baseline's, paired by seed unless its sweep says otherwise; None for the baseline, or without
    shared seeds."""
    baseline = summary.baseline_of(arm, arms)
    if baseline is arm:
        return None
    paired = chosen(arms).get("paired", True)
    return summary.interval(arm[metric] - baseline[metric]) if paired else unpaired(arm, baseline, metric)


def by_position(arm: Arm, arms: Sequence[Arm]) -> list[tuple[int, int, Interval]]:
    """Of each stretch of positions, from and up to: the arm's loss minus its baseline's, paired by seed."""
    baseline = summary.baseline_of(arm, arms)
    if baseline is arm:
        return []
    sides = [side.points("loss_by_position") for side in (arm, baseline)]
    if any(points.empty for points in sides):
        return []
    keys = ["start", "end", "seed"]
    ours, theirs = (points.set_index(keys)["loss"].astype(float) for points in sides)
    paired = (ours - theirs).dropna().groupby(level=["start", "end"])
    return [(start, end, one) for (start, end), values in paired if (one := summary.interval(values))]


def versus(arms: Sequence[Arm]) -> str:
    """The names, without their settings, of the arms that others are compared with."""
    baselines = {summary.baseline_of(arm, arms) for arm in arms}
    return " or ".join(sorted({one.label if one.sweep.get("apart") else one.title for one in baselines}))


def seeds_statement(records: Iterable[Record]) -> str | None:
    """What the number of seeds allows to be claimed; None without arms to compare or with seeds enough."""
    groups = summary.by_corpus(records).values()
    arms = [arm for group in groups for arm in summary.training_arms(group)]
    fewest = min((len(arm.runs) for arm in arms), default=PARITY_SEEDS)
    if fewest >= PARITY_SEEDS or len(arms) == 1:
        return None
    if fewest == 1:
        return (
            "One seed: this shows speed, padding and learning curves; parity claims need the longer run with at least "
            "five seeds."
        )
    return f"{fewest} seeds: differences carry their intervals; parity claims need at least five seeds."


def difference_cell(found: Interval | None, expected: int = 0) -> Cell:
    """Fewer pairs than expected are said."""
    if found is None:
        return Cell("-", (None, None, None, None))
    # Arms that compute the same differ by rounding: 0.0000 would hide whether they do.
    values = pd.Series(found[:3]).dropna()
    form = "+.4f" if values.abs().max() >= 1e-4 else "+.1e"
    mean, *bounds = (f"{value:{form}}" for value in values)
    pairs = f" ({found.n} pairs)" if 1 < found.n < expected else ""
    return Cell(f"{mean} [{', '.join(bounds)}]{pairs}" if bounds else f"{mean} (no claim)", tuple(found))


def _with_sd(metric: str) -> tuple[str, str]:
    return metric, f"{metric}_sd"
