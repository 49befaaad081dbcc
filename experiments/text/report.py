"""Verdicts of the primaries for each architecture, further contrasts, numerics, packers, answers,
fine-tuning, the pilot.

What was planned and has no run stands in the tables as ``not run``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.common import name_bars, of_planned
from packmamba.lab.records import read_records
from packmamba.lab.report import statistics
from packmamba.lab.report.aggregate import Arm, Record, divergence, training_arms
from packmamba.lab.report.figures import MUTED, Figure, axes, finish
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import Comparison, Divergence, Estimate, estimate, interval, rule, verdict
from packmamba.lab.report.tables import Cell, Table, make_table

MIXERS = {"mamba1": "Mamba-1", "mamba2": "Mamba-2"}
ALL, BEYOND = "perplexity.by_group", "beyond.by_group"
IN_FLOAT32 = "perplexity_float32.by_group"
INSIDE, START = "start < 2048", "start < 256"


class Contrast(NamedTuple):
    """An arm minus another at some places; ``sign`` of the prediction, 0 for either, None for
    equivalence.
    """

    name: str
    arm: str
    other: str
    seeds: int = 16
    sign: int | None = 0
    curve: str = ALL
    where: str = ""


PRIMARY = (
    Contrast("P1 packed with reset minus padded", "packed-reset", "padded", sign=None),
    Contrast("P2 leak minus reset", "packed-leak", "packed-reset", sign=1),
    Contrast("P3 own minus shuffled, beyond T", "own", "shuffled", 12, curve=BEYOND),
    Contrast("P4 own minus zero, beyond T", "own", "zero", 12, -1, BEYOND),
)
EXPLORATORY = (
    Contrast("sums in another order minus reset", "packed-control", "packed-reset", 8),
    Contrast("leak minus padded", "packed-leak", "padded"),
    Contrast("leak minus reset, first 256 bytes", "packed-leak", "packed-reset", where=START),
    Contrast("reset minus padded, first 256 bytes", "packed-reset", "padded", where=START),
    Contrast("own minus zero, inside T", "own", "zero", 12, where=INSIDE),
    Contrast("own minus shuffled, inside T", "own", "shuffled", 12, where=INSIDE),
    Contrast("shuffled minus zero, beyond T", "shuffled", "zero", 12, curve=BEYOND),
    Contrast("one document at a time minus padded", "single", "padded", 4),
    Contrast("packed with reset, trained a second time, minus first", "packed-reset-second", "packed-reset", 8),
    Contrast("packed with reset, trained a third time, minus first", "packed-reset-third", "packed-reset", 8),
    *(
        one._replace(name=f"130M: {one.name}", arm=f"{one.arm}-130m", other=f"{one.other}-130m", seeds=4)
        for one in PRIMARY
    ),
)
REPEATS = Path(__file__).parent / "repeats"  # of runs whose seeds have records
PACKERS = ("next-fit", "greedy", "best-fit-decreasing", "concat-split", "padded-sorted")
STATES = ("zero", "own", "shuffled")
PARITY = ("padded", "packed-reset", "packed-control", "packed-leak", "single")
TASKS = {
    "headword.choice_accuracy": "four headwords of a gloss",
    "module.choice_accuracy": "four modules of an option",
    "last_word.nats": "last word of a definition, nats a byte",
}
TUNED = {"pairs.nats": "nats a byte of an answer", "asked_headword.choice_accuracy": "four headwords of a gloss"}
PAIRS = (("packed-reset", "padded"), ("packed-leak", "packed-reset"), ("own", "zero"))
TUNED_PAIRS = (("tuned-reset", "tuned-padded"), ("tuned-leak", "tuned-reset"))
PILOT = 100  # seeds from here on are the pilot's
PLANNED = {"packed-control": 8, "own": 12, "single": 4}  # seeds, where a table's others have more
NOT_RUN = Cell("not run", (None, None))
FACTORS = {
    "layout, reset minus padded": ("reset", "padded"),
    "micro-batch, 24,576 minus 131,072 slots": ("24k", "131k"),
    "precision, float32 minus bfloat16": ("32-true", "bf16-mixed"),
}
NUMERICS_SEEDS = 8
Arms = dict[tuple[str, str], Arm]
Sums = tuple[Any, Any]


def by_name(records: Sequence[Record]) -> Arms:
    """Return arms by architecture and title; those of a learning-rate grid have its point in their
    title.
    """
    arms = {}
    for arm in training_arms(records):
        rate = arm.name.partition(" lr=")[2]
        arms[arm.says("model.mixer", "mamba1"), arm.title + (rate and f" {rate}")] = arm
    return arms


def nats(arm: Arm | None, other: Arm | None, curve: str, where: str = "") -> Sums:
    """Return differences of nats (seeds, groups) and targets (groups,); empty without one of the
    arms.
    """
    if arm is None or other is None:
        return np.empty((0, 0)), np.empty(0)
    return statistics.difference_by_group(arm, other, curve, "nats", "targets", where)


def fulfilled(one: Contrast, found: Estimate | None, p: float, margin: float | None) -> str:
    """Return whether the prediction was right or wrong; open if neither is shown."""
    if found is None or math.isnan(found.low):
        return "open"
    if one.sign is None:
        out = margin is not None and (found.low > margin or found.high < -margin)
        return "wrong" if out else "right" if p <= 0.05 else "open"
    sign = one.sign or math.copysign(1, found.mean)
    low, high = sorted((sign * found.low, sign * found.high))
    return "wrong" if high < 0 else "right" if low > 0 and p <= 0.05 else "open"


def registered(
    found: Mapping[Contrast, Estimate], p_same: float, margin: float | None
) -> dict[Contrast, tuple[float, str, str]]:
    """Return p, verdict and prediction by the rule that was fixed beforehand: Holm over the four
    claims.

    P1's claim is of equivalence, with ``p_same``, the others' of a difference.
    """
    claims = {one: p_same if one.sign is None else it.p for one, it in found.items()}
    adjusted, result = statistics.holm(claims), {}
    for one, it in found.items():
        p = adjusted[one]
        ruled = verdict(it, margin) if one.sign is None else verdict(it, None, p)
        result[one] = p, ruled, fulfilled(one, it, p, margin)
    return result


def verdicts(arms: Arms) -> Table:
    """Make the table of primaries, of which each architecture has four, whether they ran or not."""
    rows = []
    for mixer, title in MIXERS.items():
        margins = [arm.sweep.get("margin") for (of, name), arm in arms.items() if (of, name) == (mixer, "packed-reset")]
        margin, family, p_same = next(iter(margins), None), {}, math.nan
        for one in PRIMARY:
            arm, other = (arms.get((mixer, name)) for name in (one.arm, one.other))
            counts = Divergence() if arm is None or other is None else divergence(arm, other)
            sums, targets = nats(arm, other, one.curve)
            judged = margin if one.sign is None else None
            family[one] = Comparison(sums, targets, judged, counts, is_leak=one.arm == "packed-leak")
            if judged is not None:
                p_same = statistics.p_of_equivalence(sums, targets, judged)
        rulings = rule(family)
        fixed = registered({one: ruling.estimate for one, ruling in rulings.items()}, p_same, margin)
        for one, ruling in rulings.items():
            it, (p, ruled, prediction) = ruling.estimate, fixed[one]
            row: dict[str, Any] = {"primary": one.name, "architecture": title, "difference": it, "p_holm": p}
            row |= {"seeds": of_planned(it.seeds, one.seeds), "groups": it.groups if it.seeds else None}
            row |= {"margin": margin if one.sign is None else None}
            row |= {"verdict": ruling.verdict, "registered": ruled, "prediction": prediction}
            rows.append(row if it.seeds else row | dict.fromkeys(("verdict", "registered", "prediction"), "not run"))
    return make_table(
        "verdicts-text",
        "Primaries: differences of the loss of sealed documents, nats a target",
        "!primary | !architecture | difference [95 %] = difference[]:5 | "
        "seeds = seeds planned | groups:d | p, Holm over the four claims = p_holm:p | margin:.4f | !verdict | "
        "!as registered = registered | !prediction",
        rows,
        "Intervals resample seeds and groups of documents. P1's p is of equivalence, the others' of a difference. Verdict: by "
        "today's rule, Holm over an architecture's four for each kind of claim; *equivalent* is bare only where P2 catches the "
        "leak. As registered: P1 by the interval alone, the others by p, too. Prediction: right if p is at most 0.05 and the "
        "sign is the predicted one; wrong if the interval shows the opposite.",
    )


def exploratory(arms: Arms) -> Table:
    """Make a row for each further contrast, and for models that are read on from other states than
    their documents' own.
    """
    rows = []
    for mixer, title in MIXERS.items():
        found = [(one, nats(arms.get((mixer, one.arm)), arms.get((mixer, one.other)), *one[5:])) for one in EXPLORATORY]
        for trained, start in itertools.product(STATES, ("zero", "foreign")):
            name = f"{trained}'s models read on from {start} minus from own states, beyond T"
            one = Contrast(name, trained, trained, PLANNED.get(trained, 12))
            found.append((one, _read_from(arms.get((mixer, trained)), start)))
        for one, sums in found:
            it = estimate(*sums)
            row: dict[str, Any] = {"contrast": one.name, "architecture": title}
            row["difference"] = it or Cell("not run", (None,) * 3)
            rows.append(row | {"seeds": of_planned(it.seeds if it else 0, one.seeds)})
    return make_table(
        "exploratory-text",
        "Exploratory contrasts, nats a target",
        "!contrast | !architecture | difference [95 %] = difference[]:5 | seeds = seeds planned",
        rows,
        f"Intervals resample seeds and groups and are not adjusted for the number of {len(rows)} contrasts.",
    )


def _read_from(arm: Arm | None, start: str) -> Sums:
    """Return nats of an arm read on from these states minus from its documents' own (seeds,
    groups), and targets.
    """
    points = pd.DataFrame() if arm is None else arm.points(BEYOND)
    if points.empty:
        return np.empty((0, 0)), np.empty(0)
    points = points.assign(more=points[f"nats_{start}"] - points["nats"])
    both = points.pivot_table(index="seed", columns="group", values=["more", "targets"], aggfunc="sum")
    return both["more"].to_numpy(float), both["targets"].to_numpy(float)[0]


def arms_table(arms: Arms, names: Sequence[str], table: str, heading: str, baseline: str, planned: int) -> Table:
    """Make a row for each arm that was planned, with the difference of its loss from the
    baseline's.
    """
    rows = []
    for mixer, title in MIXERS.items():
        for name in names:
            seeds = PLANNED.get(name, planned)
            row: dict[str, Any] = {"arm": name, "architecture": title, "seeds": of_planned(0, seeds), "loss": NOT_RUN}
            if (arm := arms.get((mixer, name))) is not None:
                other, lost = arms.get((mixer, baseline)), int(arm["val_loss"].isna().sum())
                row["seeds"] = of_planned(len(arm.runs) - lost, seeds, lost)
                row |= {"loss": arm["val_loss"], "beyond": arm["beyond.loss"].mean()}
                row |= {"tokens": arm["real_tokens"].mean(), "padding": arm["padding_fraction"].mean()}
                row["behind"] = (arm["tokens_behind_another"] / arm["real_tokens"]).mean()
                if other is not None and other is not arm:
                    row["difference"] = estimate(*nats(arm, other, ALL))
            rows.append(row)
    return make_table(
        table,
        heading,
        "!arm | !architecture | seeds = seeds planned | loss = loss loss_sd | loss beyond T = beyond:.4f | "
        f"minus {baseline} [95 %] = difference[]:5 | non-padding tokens = tokens:,.0f | padding:% | "
        "behind another = behind:%",
        rows,
        "Behind another: share of the tokens that stand behind another document in their row.",
    )


def answers(arms: Arms, table: str, heading: str, metrics: Mapping[str, str], pairs: Any, planned: int) -> Table:
    """Make a row for each metric and pair of arms; intervals over seeds."""
    rows = []
    for (metric, what), (mixer, title), (name, baseline) in itertools.product(metrics.items(), MIXERS.items(), pairs):
        sides = [arms[mixer, one][metric] if (mixer, one) in arms else pd.Series() for one in (name, baseline)]
        paired = pd.concat(sides, axis=1, join="inner", keys=["value", "other"]).dropna()
        row: dict[str, Any] = {"task": what, "architecture": title, "arm": name, "minus": baseline}
        row |= {"value": NOT_RUN, "other": NOT_RUN, "seeds": of_planned(len(paired), PLANNED.get(name, planned))}
        if len(paired):
            row |= {**paired, "difference": interval(paired["value"] - paired["other"])}
        rows.append(row)
    return make_table(
        table,
        heading,
        "!task | !architecture | !arm | !minus | value = value value_sd | of the other = other other_sd | "
        "difference [95 %] = difference[]:5 | seeds = seeds planned",
        rows,
        "Intervals are over seeds (Student's t), not adjusted. Four choices: share of right answers, chance 0.25.",
    )


def pilot(arms: Arms) -> list[Table]:
    """Make the table of learning rates, and of the leak's harm with half of it, P1's margin."""
    rates, harms = [], []
    for mixer, title in MIXERS.items():
        for (of, name), arm in arms.items():
            row: dict[str, Any] = {"architecture": title, "lr": arm.says("optimizer.lr"), "seeds": len(arm.runs)}
            row |= {"arm": arm.title, "steps": int(arm.runs["steps"].max()), "loss": arm["val_loss"]}
            rates += [row] * (of == mixer)
            reset = arms.get((mixer, name.replace("packed-leak", "packed-reset")))
            sums, targets = nats(arm, reset if (of, arm.title) == (mixer, "packed-leak") else None, ALL)
            if (found := estimate(sums, targets)) is None or math.isnan(found.low):
                continue
            error = pd.Series(sums.sum(axis=1) / targets.sum()).sem()
            row |= {"harm": found, "half": found.mean / 2, "error": error}
            if found.low > 0 and len(targets) > 1:
                row["least"] = statistics.margin_from_pilot(found)
                row["power"] = statistics.power(sums, targets, found.mean / 2, 16)
            harms.append(row)
    return [
        make_table(
            "rates-pilot",
            "Pilot: learning rates, loss of validation documents",
            "!arm | !architecture | steps:d | learning rate = lr:g | seeds:d | loss = loss loss_sd",
            rates,
        ),
        make_table(
            "harm-pilot",
            "Pilot: the leak's harm, leak minus reset, nats a target",
            "!architecture | steps:d | learning rate = lr:g | seeds:d | harm [95 %] = harm[]:5 | "
            "standard error over seeds = error:.5f | half, P1's margin as registered = half:.5f | "
            "half of the interval's lower end = least:.5f | power of P1 with 16 seeds, at least = power:.2f",
            harms,
            "Half of the lower end is what margin_from_pilot returns. Power: within the margin as registered, at the upper 80 % "
            "confidence bound of the standard deviation, as if pairs of reset and padded spread as these: there are none.",
        ),
    ]


def effect(*factors: int, at: str = "") -> dict[tuple[str, ...], float]:
    """Return weights of runs (layout, micro-batch, precision): first minus second level of these
    factors, averaged.

    Of several factors it is the difference of differences. ``at`` is a level that all runs have.
    """
    runs = [run for run in itertools.product(*FACTORS.values()) if not at or at in run]
    seconds = [tuple(FACTORS.values())[factor][1] for factor in factors]
    return {run: 2 ** len(factors) / len(runs) * (-1) ** sum(level in run for level in seconds) for run in runs}


def effects() -> dict[str, dict[tuple[str, ...], float]]:
    """Return weights of runs by the name of an effect; the first four are primary."""
    names = [*FACTORS]
    found = {f"N{i} {names[k]}": effect(k) for i, k in enumerate((1, 0, 2), start=1)}
    found["N4 layout by micro-batch"] = effect(0, 1)
    for title, level in zip(("float32", "bfloat16"), FACTORS[names[2]]):
        found |= {f"{names[k]}, in {title}": effect(k, at=level) for k in (1, 0)}
        found[f"layout by micro-batch, in {title}"] = effect(0, 1, at=level)
        found[f"reset-131k minus padded-24k, in {title}"] = {
            ("reset", "131k", level): 1.0,
            ("padded", "24k", level): -1.0,
        }
    return found | {"layout by precision": effect(0, 2), "micro-batch by precision": effect(1, 2)}


def combine(arms: Mapping[tuple[str, ...], Arm], weights: Mapping[tuple[str, ...], float], family: str) -> Comparison:
    """Add the runs of a seed with their weights, by group of documents."""
    curves = {run: arms[run].points(IN_FLOAT32) for run in weights if run in arms}
    added, targets = pd.DataFrame(), pd.DataFrame()
    if len(curves) == len(weights) and not any(points.empty for points in curves.values()):
        sums = {}
        for run, points in curves.items():
            finite = statistics.of_finite_runs(points, "nats")
            sums[run] = finite.groupby(["seed", "group"])[["nats", "targets"]].sum()
        added = sum(weight * sums[run]["nats"].unstack("group") for run, weight in weights.items())
        added = added.dropna(how="all").dropna(axis=1)
        targets = sums[run]["targets"].unstack("group").reindex(added.index)[added.columns]
    counts: list[int] = []  # diverged and all runs, of positive and of negative weights
    for sign in (1, -1):
        side = [arms[run] for run in curves if sign * weights[run] > 0]
        counts += [sum(len(arm.diverged) for arm in side), sum(len(arm.runs) for arm in side)]
    complete = set.intersection(*({*arms[run].runs.index} if run in arms else set() for run in weights))
    margins = {arm.sweep.get("margin") for arm in arms.values()}
    return Comparison(
        added.to_numpy(float),
        targets.to_numpy(float)[:1].ravel(),
        next(iter(margins), None),
        Divergence(*counts)._replace(seeds=NUMERICS_SEEDS, missing=NUMERICS_SEEDS - len(complete)),
        family,
    )


def numerics(records: Sequence[Record]) -> Table:
    """Make the table of effects of layout, micro-batch and precision, interim until all runs are
    there.
    """
    arms = {}
    for arm in training_arms(records):
        run = (*arm.title.split("-"), arm.says("trainer.precision"))
        if run in effect(0):
            arms[run] = arm
    families = {name: "primary" if name.startswith("N") else "exploratory" for name in effects()}
    compared = {name: combine(arms, weights, families[name]) for name, weights in effects().items()}
    rows = []
    for name, ruling in rule(compared).items():
        one, it = compared[name], ruling.estimate
        row: dict[str, Any] = {"effect": name, "family": one.family, "verdict": "not run"}
        row |= {"difference": NOT_RUN._replace(values=(None,) * 3), "seeds": of_planned(it.seeds, NUMERICS_SEEDS)}
        if it.seeds:
            row |= {"difference": it, "below": int((one.differences.sum(axis=1) < 0).sum()), "margin": one.margin}
            row |= {"p": ruling.p_difference, "p_same": ruling.p_equivalence, "groups": it.groups}
            row["deviation"] = pd.Series(one.differences.sum(axis=1) / one.weights.sum()).std()
            row["verdict"] = "interim" if one.divergence.missing else ruling.verdict
        rows.append(row)
    return make_table(
        "numerics-text",
        "Effects of layout, micro-batch and precision on the loss of sealed documents, nats a target",
        "!effect | !family | difference [95 %] = difference[]:5 | seeds = seeds planned | "
        "standard deviation over seeds = deviation:.4f | seeds below zero = below:d | groups:d | "
        "p of difference, Holm = p:p | p of equivalence, Holm = p_same:p | margin:.4f | !verdict",
        rows,
        "Mamba-1, learning rate 0.004, deterministic, all read in float32. Each effect is averaged over the factors "
        "that it does not name. Intervals resample seeds and groups of documents; Holm over the family. A verdict "
        "reads *interim* where a planned run is missing.",
    )


def kind_of(records: Sequence[Record]) -> str:
    """Return ``tuned`` (fine-tuning), ``text``, or ``pilot``, whose seeds are for choices alone."""
    if records[0]["config"]["data"]["source"] in ("jsonl", "task"):
        return "tuned"
    return "pilot" if all(record["seed"] >= PILOT for record in records) else "text"


def tables(records: Sequence[Record]) -> list[Table]:
    """``records`` are of one corpus."""
    trials = [record for record in records if record["seed"] >= PILOT]
    made = [table for table in pilot(by_name(trials)) if table.rows]
    if (kind := kind_of(records)) == "pilot":
        return made
    arms = by_name([record for record in records if record["seed"] < PILOT])
    for time in ("second", "third"):
        again = [one for one in read_records(REPEATS / time) if one["corpus_hash"] == records[0]["corpus_hash"]]
        arms |= {(mixer, f"{name}-{time}"): arm for (mixer, name), arm in by_name(again).items()}
    if kind == "tuned":
        return [answers(arms, "finetuning-tuned", "Fine-tuned on questions and answers", TUNED, TUNED_PAIRS, 8)]
    return [
        *made,
        verdicts(arms),
        exploratory(arms),
        numerics([record for record in records if record["seed"] < PILOT]),
        arms_table(arms, PARITY, "parity-text", "Arms of P1 and P2", "padded", 16),
        arms_table(arms, STATES, "states-text", "Arms of P3 and P4", "zero", 12),
        arms_table(arms, PACKERS, "packers-text", "Packers in their own order", PACKERS[0], 8),
        answers(arms, "answers-text", "Questions to pretrained models", TASKS, PAIRS, 16),
    ]


def figures(records: Sequence[Record]) -> list[Figure]:
    """Draw the primaries with the margin as a band."""
    table = verdicts(by_name([r for r in records if r["seed"] < PILOT])) if kind_of(records) == "text" else None
    shown = [row for row in table.rows if not pd.isna(row[2].values[1])] if table else []
    if not shown:
        return []
    fig, (ax,) = axes(1, width=8.0, height=1.2 + 0.4 * len(shown))
    colors = dict(zip(MIXERS.values(), ("#0072B2", "#D55E00")))
    for y, row in enumerate(shown):
        mean, low, high = row[2].values
        color = colors[row[1].text]
        ax.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3, linewidth=1.8)
        if margin := row[6].values[0]:
            ax.fill_betweenx([y - 0.5, y + 0.5], -margin, margin, color=MUTED, alpha=0.2, linewidth=0)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.locator_params(axis="x", nbins=6)
    name_bars(ax, [f"{row[0].text}, {row[1].text} (n = {row[3].values[0]})" for row in shown])
    ax.set(title="Four primaries on natural text", xlabel="nats a target (95 % interval over seeds and groups)")
    return [finish(fig, "primaries-text", "The four primaries; bars are 95 % intervals, bands the margin of P1.")]


KINDS = {"training": Kind(tables, figures, kind_of)}
