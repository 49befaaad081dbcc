"""Tables and figures of starts, order and leaks: differences between arms inside and beyond T, over seeds and packages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.boundaries.plots import figures
from experiments.boundaries.runs import (
    EXPLAINED,
    LEAKS,
    REACH,
    Arm,
    Setting,
    arms,
    by_setting,
    contrast,
    dose,
    gain_pairs,
    mean_of,
    paired,
    spans,
)
from experiments.common import make_columns
from packmamba.records import METRICS
from packmamba.report.aggregate import Record, Seeds
from packmamba.report.kinds import Kind
from packmamba.report.statistics import DRAWS, Resampled, bootstrap, holm, within
from packmamba.report.tables import Cell, Column, Table, gibibytes, mean_sd, number, percent, word

MARGIN = 0.005
MIDDLE = 2048
"""Row length that others are compared with."""
FIRST = 256
"""Places at the start of a document, where a leak is felt."""
ENDS = ("", "_low", "_high", "_pairs")
PRIMARY = (("coverage", "foreign", "zero"), ("continuity", "own", "foreign"))
LADDER = (
    *PRIMARY,
    ("own over zero", "own", "zero"),
    ("noise", "noise", "zero"),
    ("foreign over noise", "foreign", "noise"),
    ("own over noise", "own", "noise"),
    ("own scan", "own scan", "own"),
    ("whole", "whole", "own"),
    ("control", "zero, control", "zero"),
)
ORDER = (
    ("8 streams a row", "zero, 8 streams a row", "zero"),
    ("plain streams", "zero, plain streams", "zero"),
    ("shuffled", "shuffled", "zero"),
    ("plain streams, shuffled", "zero, plain streams", "shuffled"),
    ("the pool, other rows", "zero", "rows"),
    ("own, other rows", "own", "rows"),
    ("own, shuffled", "own", "shuffled"),
    ("rows, shuffled", "rows", "shuffled"),
)
LEAK = tuple((name, name, "rows") for name in (*list(LEAKS.values())[1:], "learned"))


def starts_tables(records: Sequence[Record]) -> list[Table]:
    """Primary outcomes, the ladder, order, leaks, context gain, and the arms; ``records`` are of one corpus."""
    settings = by_setting(arms(records))
    tables = [
        _primary(settings),
        _contrasts("ladder", "The ladder: what a continuing piece starts from", settings, LADDER),
        _agreement(settings),
        _contrasts("order", "Order: pieces in other orders, all from zero unless said", _with_rows(settings), ORDER),
        _leaks(settings),
        _lengths(settings),
        _gains(settings),
        _gain_differences(settings),
        _arms(settings),
    ]
    return [table for table in tables if table.rows]


def _with_rows(settings: dict[Setting, dict[str, Arm]]) -> dict[Setting, dict[str, Arm]]:
    """Staggered pools, with the shuffled rows of ``leak.yaml`` beside them, whose documents lie in one stream."""
    rows = {s: here["rows"] for s, here in settings.items() if "rows" in here}
    beside = {s: rows.get(replace(s, stagger=False)) for s in settings if s.stagger}
    return {s: settings[s] | ({"rows": other} if other else {}) for s, other in beside.items()}


def _primary(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """Four tests in each setting, Holm over them."""
    table = Table(
        "primary",
        "Coverage and continuity inside and beyond T, nats per target",
        make_columns(
            "!setting | !outcome | !places | "
            "difference [95% CI] = difference difference_low difference_high pairs | "
            "seeds = every diverged | packages | p, Holm over four = p_holm | !within ±0.005 = equivalent"
        ),
    )
    for setting, here in settings.items():
        if setting.tuning:
            continue
        found = [
            (title, places, sides, contrast(sides[0], sides[1], *span) if len(sides) == 2 else None)
            for title, *names in PRIMARY
            for sides in [[here[name] for name in names if name in here]]
            for places, span in spans(setting.T).items()
        ]
        # All four, measured or not: Holm does not get milder where an arm is missing.
        adjusted = holm({f"{title} {places}": one.p if one else np.nan for title, places, _, one in found})
        for title, places, sides, one in found:
            if len(sides) < 2:
                continue
            p, packages = adjusted[f"{title} {places}"], None if one is None else one.groups
            every = len(set().union(*(here[name].expected for name in ("zero", "foreign", "own") if name in here)))
            lost = len(sides[0].diverged | sides[1].diverged)
            said = f", {lost} diverged" if lost else ""
            pairs = Cell(f"{one.seeds if one else 0} of {every}{said}", (every, lost))
            table.rows.append(
                [word(setting.label()), word(title), word(places), _cell(one), pairs, number(packages, "d"), number(p, ".2g"),
                 word(within(one, MARGIN))]
            )  # fmt: skip
    table.notes = [
        f"Coverage is foreign minus zero, continuity own minus foreign. Inside: places below T; beyond: T to {REACH} T.",
        f"Intervals and p resample seeds and packages together, {DRAWS:,} times. Primary is T = 2048 at 14M; the rest explores.",
    ]
    return table


def _contrasts(
    name: str, title: str, settings: dict[Setting, dict[str, Arm]], pairs: Sequence[tuple[str, str, str]]
) -> Table:
    columns = make_columns("!setting | !what | !minus")
    for places in ("inside", "beyond"):
        columns.append(Column(f"{places} T [95% CI]", tuple(f"{places}{end}" for end in ENDS)))
    table = Table(name, f"{title}, nats per target", columns)
    for setting, here in settings.items():
        for what, arm, other in pairs:
            if arm in here and other in here:
                found = [contrast(here[arm], here[other], *span) for span in spans(setting.T).values()]
                table.rows.append([word(setting.label()), word(what), word(other), *map(_cell, found)])
    table.notes = ["Exploratory but for the primary outcomes; intervals are not adjusted for their number."]
    return table


def _leaks(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """Places alike at every T, too: inside and beyond T are others at another T."""
    columns = [Column(name, (name,), False) for name in ("setting", "what", "minus")]
    columns += [Column("dose", ("dose",)), Column("seeds", ("seeds",))]
    spans_of = {"all places": (0, np.inf), f"first {FIRST}": (0, FIRST), f"from {FIRST} on": (FIRST, np.inf)}
    columns += [
        Column(f"{places} [95% CI]", tuple(f"{places.removesuffix(' T')}{end}" for end in ENDS))
        for places in (*spans_of, "inside T", "beyond T")
    ]
    title = "Leaks: documents end to end in shuffled rows, minus the same rows with reset, nats per target"
    table = Table("leak", title, columns)
    for setting, here in settings.items():
        for what, arm, other in LEAK:
            if arm in here and other in here:
                places = (*spans_of.values(), *spans(setting.T).values())
                found = [contrast(here[arm], here[other], *span) for span in places]
                seeds = number(found[0].seeds if found[0] else 0, "d")
                head = [word(setting.label()), word(what), word(other), percent(dose(here[arm])), seeds]
                table.rows.append([*head, *(_cell(one, digits=5) for one in found)])
    table.notes = [
        "Dose: the share of tokens that stand behind another document in their row. Exploratory; intervals resample seeds and "
        "packages and are not adjusted for their number."
    ]
    return table


def _lengths(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """One arm at several T, and what own gains over zero: as many tokens a step, cut into rows of other lengths."""
    spans_of = {
        "all places": (0, np.inf),
        "first 512": (0, 512),
        "2048 to 16,384": (2048, 16384),
        "from 8192 on": (8192, np.inf),
    }
    columns = [Column(name, (name,), False) for name in ("arm", "rows", "minus")]
    columns += [Column(f"{places} [95% CI]", tuple(f"{places}{end}" for end in ENDS)) for places in spans_of]
    table = Table("row-length", f"Rows of other lengths minus rows of {MIDDLE}, nats per target", columns)
    for setting, here in settings.items():
        other = settings.get(replace(setting, T=MIDDLE), {})
        aside = setting.tuning or setting.after
        for name in ("rows", "leak", "zero"):
            if setting.T != MIDDLE and not aside and name in here and name in other:
                found = [contrast(here[name], other[name], *span) for span in spans_of.values()]
                table.rows.append([word(name), number(setting.T, "d"), number(MIDDLE, "d"), *map(_cell, found)])
        if setting.T != MIDDLE and not aside and {"own", "zero"} <= here.keys() & other.keys():
            less = (other["own"], other["zero"])
            found = [contrast(here["own"], here["zero"], *span, less=less) for span in spans_of.values()]
            row = [word("own over zero"), number(setting.T, "d"), number(MIDDLE, "d")]
            table.rows.append([*row, *map(_cell, found)])
    table.notes = [
        "A step has as many tokens at every T, so that it holds fewer documents in longer rows. Rows and leak read the same "
        "documents at every T, the pool's zero other ones. Own over zero: its gain at one T minus that at the other. Exploratory."
    ]
    return table


def _agreement(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """Whether a few seeds or packages make a difference."""
    table = Table(
        "agreement",
        "The ladder: how many seeds and packages agree, and what is left without any one package",
        make_columns(
            "!setting | !what | !places | difference | seeds of this sign = seeds of_seeds | "
            "packages of this sign = packages of_packages | packages weigh like = like | "
            "without any one package = least most"
        ),
    )
    for setting, here in settings.items():
        for what, arm, other in LADDER:
            for places, span in spans(setting.T).items():
                found = paired(here[arm], here[other], *span) if arm in here and other in here else None
                if found is None or setting.tuning or not found[0].size or found[1].size < 2:
                    continue
                differences, targets = found
                packages, mean = differences.mean(axis=0), differences.mean(axis=0).sum() / targets.sum()
                without = (packages.sum() - packages) / (targets.sum() - targets)
                agree = [int((np.sign(part) == np.sign(mean)).sum()) for part in (differences.sum(axis=1), packages)]
                cells = [Cell(f"{n} of {of}", (n, of)) for n, of in zip(agree, differences.shape)]
                span_said = Cell(f"{without.min():+.4f} to {without.max():+.4f}", (without.min(), without.max()))
                like = number(targets.sum() ** 2 / (targets**2).sum(), ".0f")
                head = [word(setting.label()), word(what), word(places), number(mean, "+.4f")]
                table.rows.append([*head, *cells, like, span_said])
    table.notes = [
        "A package's difference is the mean over seeds. Packages of unequal size weigh like so many of equal size."
    ]
    return table


def _gains(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """What context before the last T tokens is worth, by how much of it there is."""
    every = [arm for here in settings.values() for arm in here.values()]
    windows = [k for k in (2, 4, 8, 16, 32) if any(arm.runs.get(f"long_context.gain_{k}") is not None for arm in every)]
    columns = [Column("setting", ("setting",), False), Column("arm", ("arm",), False)]
    columns += [Column(f"{k} T", (f"gain_{k}", f"gain_{k}_sd")) for k in windows]
    table = Table("context-gain", "Context gain: what context beyond T tokens is worth, nats per target", columns)
    if windows:
        for setting, here in settings.items():
            for arm in here.values():
                cells = [
                    mean_sd(arm.runs[f"long_context.gain_{k}"]) for k in windows if f"long_context.gain_{k}" in arm.runs
                ]
                table.rows.append([word(setting.label()), word(arm.name), *cells])
    table.notes = [
        "Mean and standard deviation over the seeds that each arm has; same targets in every arm. Differences are paired in "
        "gain-differences."
    ]
    return table


def _gain_differences(settings: dict[Setting, dict[str, Arm]]) -> Table:
    """By how much more an arm uses what lies farther back than T than the arm that it is compared with."""
    windows = [4, 8, 16, 32]
    table = Table(
        "gain-differences",
        "Context gain: an arm's minus another's, nats per target",
        make_columns("!setting | !arm | !minus")
        + [
            Column(f"{k} T [95% CI]", tuple(f"gain_{k}{end}" for end in ("", "_low", "_high", "_pairs")))
            for k in windows
        ],
    )
    for setting, here in settings.items():
        for name, arm in here.items():
            other = next((one for one in ("zero", "rows") if one in here and one != name), None)
            if other is None or setting.tuning:
                continue
            found = [bootstrap(*gain_pairs(arm, here[other], k)) for k in windows]
            if any(one.seeds for one in found):
                cells = [_cell(one if one.seeds else None) for one in found]
                table.rows.append([word(setting.label()), word(name), word(other), *cells])
    table.notes = ["Paired by seed; intervals resample seeds and packages, each document weighs the same. Exploratory."]
    return table


def _arms(settings: dict[Setting, dict[str, Arm]]) -> Table:
    table = Table(
        "arms",
        "Every arm: losses and cost",
        make_columns(
            "!setting | !arm | seeds = seeds diverged missing | learning rate = lr | "
            "tokens = real_tokens | validation loss = val_loss val_loss_sd | inside T = inside | "
            "beyond T = beyond | tokens/s = real_tokens_per_second | peak memory = peak_memory_bytes | "
            "states = state_bytes | age, steps = state_age_steps | dose"
        ),
    )
    for setting, here in settings.items():
        for arm in here.values():
            runs, missing = arm.runs, len(arm.expected) - len(arm.runs)
            seeds = Seeds(len(runs) - len(arm.diverged), len(arm.diverged), missing)
            table.rows.append([
                word(setting.label()), word(arm.name), Cell(str(seeds), tuple(seeds)), number(setting.lr, "g"),
                number(runs["real_tokens"].mean(), ",.0f"), mean_sd(runs["val_loss"]),
                *(number(_mean(arm, span), ".4f") for span in spans(setting.T).values()),
                number(runs["real_tokens_per_second"].mean(), ",.0f"), gibibytes(mean_of(arm, "peak_memory_bytes")),
                gibibytes(mean_of(arm, "state_bytes")), number(mean_of(arm, "state_age_steps"), ".0f"),
                percent(dose(arm)),
            ])  # fmt: skip
    table.notes = [
        "Means are over the seeds that each arm has; the other tables pair them. Tokens/s are of training runs, several at a "
        "time on a GPU: speed.yaml compares arms in turns. Dose: the share of tokens that stand behind another document in "
        "their row, of the runs whose records have it."
    ]
    return table


def _mean(arm: Arm, span: tuple[float, float]) -> float | None:
    nats, targets, seeds = arm.losses(*span)
    return float(nats.mean(axis=0).sum() / targets.sum()) if targets.size and seeds else None


def _cell(one: Resampled | None, digits: int = 4) -> Cell:
    if one is None:
        return Cell("-", (None, None, None, None))
    mean, low, high = (f"{value:+.{digits}f}" for value in (one.mean, one.low, one.high))
    bounds = "(no claim)" if np.isnan(one.low) else f"[{low}, {high}]"
    return Cell(f"{mean} {bounds}", (one.mean, one.low, one.high, one.seeds))


def explained(records: Sequence[Record]) -> dict[str, str]:
    names = {arm.name for arm in arms(records)}
    return {name: what for name, what in EXPLAINED.items() if any(each.startswith(name) for each in names)}


def texts(records: Sequence[Record]) -> str:
    """What documents are, and whether tokens mark them."""
    data = records[0]["config"]["data"]
    return (data.get("unit") or data["source"]) + ("" if data.get("begin_token") else "-unmarked")


KINDS = {"training": Kind(starts_tables, figures, texts, METRICS["training"], explained)}
