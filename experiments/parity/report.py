"""Tables of parity: equivalence, calibration, drift, gradients, steps of equal time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from experiments.common import SMALL, interval_cell, make_columns, make_table, without_speeds
from packmamba.report import aggregate
from packmamba.report.aggregate import Arm, Record
from packmamba.report.html import KINDS as LIBRARY
from packmamba.report.html import Kind
from packmamba.report.statistics import (
    bootstrap,
    difference_by_group,
    equivalence,
    interval,
    seeds_for_equivalence,
    seeds_needed,
    verdict,
)
from packmamba.report.tables import Cell, Column, Table, mean_sd, number, percent, word

EARLY = 200
"""Optimizer steps of the prediction on float32."""
Pair = tuple[Arm, Arm]


def apart(arm: Arm, other: Arm, curve: str = "train") -> pd.Series:
    """Size of the difference of two arms' losses, nats per target, by (seed, step); empty without a seed of both."""
    both = [one.points(curve) for one in (arm, other)]
    if any(points.empty for points in both):
        return pd.Series(dtype=float)
    mine, theirs = (points.set_index(["seed", "step"])["loss"] for points in both)
    return (mine - theirs).abs().dropna()


def precision(arm: Arm) -> str:
    name = arm.runs.iloc[0]["config.trainer.precision"]
    return {"32-true": "float32", "bf16-mixed": "bfloat16"}.get(name, name)


def drift_table(pairs: Sequence[Pair]) -> Table:
    rows = []
    for arm, other in pairs:
        steps = apart(arm, other)
        if steps.empty:
            continue
        at, read = steps.index.get_level_values("step"), apart(arm, other, "validation")
        end = read[read.index.get_level_values("step") == at.max()]
        row = {"arm": arm.name, "minus": other.name, "precision": precision(arm)}
        row |= {"pairs": steps.index.get_level_values("seed").nunique(), "first": steps[at == 1].max()}
        row |= {"early": steps[at <= EARLY].max(), "later": steps[at > 1].median(), "largest": steps.max()}
        rows.append(row | {"validation": end.max() if len(end) else None})
    return make_table(
        "drift",
        "How far apart the losses of the same documents lie, nats per target",
        f"!arm | !minus | !precision | pairs:d | step 1 = first:.1e | largest to step {EARLY} = early:.1e | "
        "median after step 1 = later:.1e | largest:.1e | validation, largest at the end = validation:.1e",
        rows,
        "The first step and every fiftieth; median or largest over steps and seeds. Every arm has the same documents in "
        "every step, so that without rounding all differences were zero.",
    )


MARGIN = 0.005
"""Nats per target, named before the runs."""
SEEDS = 8
"""That every arm should have; others are counted as missing."""
LOSS = "perplexity.loss"
BY_PACKAGE = "perplexity.by_group"
WEIGHTS = {
    "mean of the last": LOSS,
    "mean of the last, by the trainer": "val_loss",
    "last, by the trainer": "val_loss_last_weights",
}
DIFFERENCE = ("difference", "difference_low", "difference_high")
OVER_SEEDS = ("over_seeds", "over_seeds_low", "over_seeds_high", "pairs")


def unit(records: Sequence[Record]) -> str:
    """Name the unit of a document."""
    data = records[0]["config"]["data"]
    return data.get("unit") or data["source"]


def parity_tables(records: Sequence[Record]) -> list[Table]:
    """``records`` are of one corpus."""
    arms = aggregate.training_arms(records)
    if not any(arm[LOSS].notna().any() for arm in arms):
        return []
    found = [_parity(records, arms), _places(records, arms)]
    by_name = {arm.name: arm for arm in arms}
    if {"packed-reset", "packed-control"} <= by_name.keys():
        found.append(_calibration(by_name["packed-reset"], by_name["packed-control"]))
    found += [_leak(arms), drift_table(_pairs(arms))]
    return [table for table in found if table.rows]


def _pairs(arms: Sequence[Arm]) -> list[Pair]:
    """Arms of as many steps as what they are compared with."""
    found = [(arm, _baseline(arm, arms)) for arm in arms]
    return [(arm, other) for arm, other in found if other is not None and _steps(arm) == _steps(other)]


def _parity(records: Sequence[Record], arms: Sequence[Arm]) -> Table:
    table = Table(
        "parity",
        f"{unit(records)}: paired differences of the validation loss, nats per target",
        [
            *make_columns("!arm | !minus | runs = runs diverged missing | validation loss = loss loss_sd"),
            Column("difference [95 %: seeds and packages]", DIFFERENCE),
            Column("[95 %: seeds]", OVER_SEEDS),
            Column(f"verdict, margin ± {MARGIN}", ("verdict",), False),
            *make_columns("p of equivalence = p | targets a run = targets"),
        ],
    )
    for arm in arms:
        baseline = _baseline(arm, arms)
        head = [
            word(arm.name),
            word(baseline.name if baseline else "-"),
            _runs(arm),
            mean_sd(arm[LOSS]),
        ]
        tail = number(arm["targets"].mean(), ",.0f")
        if baseline is None:
            none = [Cell("-", (None,) * 3), Cell("-", (None,) * 4), word("-"), number(None, "")]
            table.rows.append([*head, *none, tail])
            continue
        pairs = (arm[LOSS] - baseline[LOSS]).dropna()
        over_seeds = interval(pairs)
        found = bootstrap(*difference_by_group(arm, baseline, BY_PACKAGE, "nats", "targets"))
        main = over_seeds if math.isnan(found.low) else found  # documents without packages
        differences = [interval_cell(main, 5, 3, SMALL), interval_cell(over_seeds, 5, 4, SMALL)]
        asked = [word(verdict(main, MARGIN)), number(equivalence(pairs, MARGIN), ".2g")]
        if _steps(arm) != _steps(baseline):  # another question than whether they are as accurate
            asked = [word("-"), number(None, "")]
        table.rows.append([*head, *differences, *asked, tail])
    table.notes = [
        "Every arm has the same documents in every step, cut alike. It is evaluated on whole documents of other packages, one at "
        "a time from zero state, with the mean of its last weights. Differences are paired by seed. The first interval resamples "
        "seeds and packages (without packages it is the second); the second is Student's t over seeds. "
        f"Verdict: equivalent if the first interval lies within ± {MARGIN}, else different if it excludes zero, else open; of "
        "arms with as many steps. p: two one-sided t tests; "
        "Holm over the three distributions asks for at most three times as much.",
        f"Runs: of {SEEDS} seeds those with a loss, then those that diverged and those that are missing.",
    ]
    trained = [arm["targets"][arm[LOSS].notna()] for arm in arms]  # who diverged had fewer
    if len({round(targets.mean()) for targets in trained if targets.notna().any()}) > 1:
        table.notes.append("Arms were trained on different numbers of targets: they are not compared token for token.")
    return table


def _places(records: Sequence[Record], arms: Sequence[Arm]) -> Table:
    """Tabulate arms of as many steps as their baseline: as far as pieces reach, farther on, and all without one package."""
    titles = {"inside": "as far as pieces reach", "beyond": "farther on", "others": "all, without one package"}
    table = Table(
        "places",
        f"{unit(records)}: paired differences by place in the document, nats per target",
        [
            *make_columns("!arm | !minus | pairs | longest piece in training = cut"),
            *(Column(f"{title} [95 %]", (name, f"{name}_low", f"{name}_high")) for name, title in titles.items()),
            *make_columns("targets farther on = share | of them in that package = largest"),
        ],
    )
    for arm, baseline in _pairs(arms):
        if pd.isna(cut := arm.runs.iloc[0].get("config.data.cut_documents")):
            continue
        targets = _targets(arm, cut)
        if targets.empty:
            continue
        inside, beyond, others = (
            difference_by_group(arm, baseline, BY_PACKAGE, "nats", "targets", where)
            for where in (f"start < {cut}", f"start >= {cut}", f"group != {targets.idxmax()}")
        )
        if len(inside[0]) > 1:
            table.rows.append([
                word(arm.name), word(baseline.name), number(len(inside[0]), "d"), number(cut, ",d"),
                *(interval_cell(bootstrap(*one), 5, 3, SMALL) for one in (inside, beyond, others)),
                percent(beyond[1].sum() / (inside[1].sum() + beyond[1].sum())), percent(targets.max() / targets.sum()),
            ])  # fmt: skip
    table.notes = [
        "Training cuts documents into pieces and reads each from zero; evaluation reads documents whole. The package left out is "
        "the one with most targets farther on than pieces reach. Exploratory; intervals resample seeds and packages and are not "
        "adjusted for their number."
    ]
    return table


def _leak(arms: Sequence[Arm]) -> Table:
    """Make a row for each leak arm and stretch of places, over padded and over the same rows with reset."""
    table = Table(
        "leak",
        "Packed with a leak, each document read from zero: paired differences of the validation loss, nats per target",
        make_columns(
            "!arm | !minus | !places | difference [95 %] = difference difference_low difference_high | pairs | above"
        ),
    )
    by_name = {arm.name: arm for arm in arms}
    for arm in (arm for arm in arms if arm.name.startswith("packed-leak")):
        padded, reset = (by_name[arm.name.replace("packed-leak", name)] for name in ("padded", "packed-reset"))
        for one, other in ((arm, padded), (arm, reset), (reset, padded)):
            for places, where in {"all": "", "first 256": "start < 256", "first 2048": "start < 2048"}.items():
                sums, weights = difference_by_group(one, other, BY_PACKAGE, "nats", "targets", where)
                found, above = bootstrap(sums, weights), int((sums.sum(axis=1) > 0).sum())
                head, counts = [word(one.name), word(other.name), word(places)], (found.seeds, above)
                table.rows.append([*head, interval_cell(found, 5, 3, SMALL), *(number(count, "d") for count in counts)])
    table.notes = ["Intervals resample seeds and packages. Above: seeds above zero. Exploratory."]
    return table


def _targets(arm: Arm, place: float) -> pd.Series:
    """By package, of places from this one on."""
    points = arm.runs.get(f"curves.{BY_PACKAGE}", pd.Series(dtype=object)).dropna()
    found = pd.DataFrame(points.iloc[0] if len(points) else [], columns=["group", "start", "targets"])
    return found[found["start"] >= place].groupby("group")["targets"].sum()


def _baseline(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """Padded, else packed with reset; of the control packed with reset, else padded. Of the arm's own precision, rate and
    validation documents."""

    def says(peer: Arm, key: str) -> object:
        return peer.runs.iloc[0].get(f"config.{key}")

    wanted = ["padded", "greedy"]
    if says(arm, "data.strategy") == "next_fit":
        wanted.reverse()
    own = ("trainer.precision", "optimizer.lr", "data.validation_documents")
    alike = [peer for peer in arms if all(says(peer, key) == says(arm, key) for key in own)]
    alike = [peer for peer in alike if says(peer, "trainer.boundary") != "leak"]
    alike.sort(key=lambda peer: _steps(peer) != _steps(arm))  # else of equal compute
    found = next((peer for name in wanted for peer in alike if says(peer, "data.strategy") == name), None)
    return None if found is arm else found


def _steps(arm: Arm) -> object:
    return arm.runs.iloc[0].get("config.trainer.max_steps")


def _runs(arm: Arm) -> Cell:
    have = int(arm[LOSS].notna().sum())
    diverged, missing = len(arm.runs) - have, max(SEEDS - len(arm.runs), 0)
    text = f"{have} of {SEEDS}" if have < SEEDS else str(have)
    return Cell(text + f", {diverged} diverged" * (diverged > 0), (have, diverged, missing))


def _calibration(reset: Arm, control: Arm) -> Table:
    """Tabulate the effect of rounding, and what it takes to see more than that."""
    rows = []
    for weights, metric in WEIGHTS.items():
        pairs = (control[metric] - reset[metric]).dropna()
        one, sd = interval(pairs), pairs.std()
        if one is None or pd.isna(sd):
            continue
        row = {"arm": control.name, "weights": weights, "pairs": one.seeds, "loss": reset[metric].mean(), "sd": sd}
        row |= {"difference": interval_cell(one, 5, 3, SMALL), "largest": pairs.abs().max()}
        row |= {f"seeds_{effect}": seeds_needed(sd, effect) for effect in EFFECTS}
        rows.append(row | {"sd_of_seeds": reset[metric].std(), "seeds_equivalence": seeds_for_equivalence(sd, MARGIN)})
    seeds = " | ".join(f"seeds to see {effect} = seeds_{effect}:d" for effect in EFFECTS)
    return make_table(
        "calibration",
        "Packed with reset, its sums in another order, minus itself: how many seeds a difference needs",
        "!arm | !weights | pairs:d | loss of packed-reset = loss:.5f | "
        "difference [95 %] = difference difference_low difference_high | standard deviation of differences = sd:.5f | "
        f"largest:.5f | of seeds = sd_of_seeds:.5f | {seeds} | seeds for equivalence within {MARGIN} = seeds_equivalence:d",
        rows,
        "Seeds with which a paired t test at 5 % sees a true difference of that size in four of five tries, and with which two "
        "one-sided tests show that there is none beyond the margin. Of seeds: the standard deviation of the loss over seeds. "
        "By the trainer: in the run's precision; else in float32.",
    )


EFFECTS = (0.01, 0.005, 0.002)
MOST_PLACES = 6
"""As many have columns of their own."""
GRADIENT_METRICS = ("relative_difference", "largest_of_a_tensor", "loss_difference")


def gradient_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate differences of gradients between arms, at places along a run, a table for each; ``records`` are of one corpus."""
    of_seeds: dict[int, dict[tuple[str, str], Record]] = {}
    for record in aggregate.of_kind(records, "gradients"):
        of_seeds.setdefault(record["seed"], {})[record["arm"], record["config"]["computed_in"]] = record
    tables = [_gradient_table(seed, latest) for seed, latest in sorted(of_seeds.items())]
    return [table for table in tables if table.rows]


def _gradient_table(seed: int, latest: Mapping[tuple[str, str], Record]) -> Table:
    """Tabulate one run: every place has a column, or with many only the place where a difference is largest."""
    places = sorted({point["step"] for r in latest.values() for point in r["curves"]["gradients"]})
    shown = places if len(places) <= MOST_PLACES else []
    table = Table(
        f"gradients-seed-{seed}" if seed else "gradients",
        f"{unit(list(latest.values()))}: gradients of the same step from the same weights, relative difference",
        [
            *make_columns("!arm | !precision | !minus"),
            *(Column(f"step {place}", (f"step_{place}",)) for place in shown),
            *([] if shown else [Column("steps", ("steps",)), Column("largest at step", ("largest_at",))]),
            *make_columns(
                "at most = relative_difference | of a parameter, at most = largest_of_a_tensor | "
                "loss, nats = loss_difference"
            ),
        ],
    )
    for (arm, precision), record in latest.items():
        if not (other := record["config"]["against"]):
            continue
        found = {point["step"]: point["relative_difference"] for point in record["curves"]["gradients"]}
        largest = (record["metrics"][name] for name in GRADIENT_METRICS)
        sizes = [number(size, ".1e") for size in (*(found.get(place) for place in shown), *largest)]
        where = [] if shown else [number(len(found), "d"), number(max(found, key=found.__getitem__), "d")]
        table.rows.append([word(arm), word(precision), word(other), *where, *sizes])
    table.notes = [
        "The norm of the difference over the norm, all parameters together, and of the parameter where it is largest. One model "
        "trains in the first precision; every arm computes the gradient of the same documents from its weights."
        + ("" if shown else f" Steps are from {places[0]} to {places[-1]}, seed {seed}.")
    ]
    return table


def speed_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate how many steps of each arm take as long as one of padded; ``records`` are of one corpus."""
    timed = aggregate.timed_arms(records)
    rows = []
    for arm in timed:
        padded = next((p for p in timed if p.setting == arm.setting and p.scheme == "padded"), None)
        if padded is not None:
            seconds, spread = (arm[f"seconds_per_step_{name}"].mean() for name in ("median", "spread"))
            ratio = padded["seconds_per_step_median"].mean() / seconds
            row = {"arm": arm.name, "seconds": seconds, "spread": spread, "padding": arm["padding_fraction"].mean()}
            rows.append(row | {"ratio": ratio, "steps": round(500 * ratio)})
    table = make_table(
        "equal-time",
        f"{unit(records)}: optimizer steps of the same documents in the time of padded's",
        "!arm | seconds/step, median = seconds:.4g | interquartile range = spread:.2g | padding:% | "
        "times as fast as padded = ratio:.3f x | steps in the time of 500 = steps:d",
        rows,
        "Whole optimizer steps in turns in one process, alone on its GPU; arms have the same documents in every step.",
    )
    return [table] if table.rows else []


KINDS = {
    "training": without_speeds(replace(LIBRARY["training"].extended(parity_tables), label=unit)),
    "throughput": replace(LIBRARY["throughput"].extended(speed_tables), label=unit),
    "gradients": Kind(gradient_tables, label=unit),
}
