"""Tables of parity: equivalence, calibration, drift, gradients, steps of equal time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import of_planned, ruled_columns, unit, without_speeds
from packmamba.lab.report import aggregate, statistics
from packmamba.lab.report.aggregate import Arm, Record, divergence
from packmamba.lab.report.html import KINDS as LIBRARY
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import Comparison, Ruling, bootstrap, estimate, interval, rule
from packmamba.lab.report.tables import Cell, Table, make_table, ruled

# Optimizer steps of the prediction on float32.
EARLY = 200
PRECISIONS = {"32-true": "float32", "bf16-mixed": "bfloat16"}
Pair = tuple[Arm, Arm]


def apart(arm: Arm, other: Arm, curve: str = "train") -> pd.Series:
    """Size of the difference of two arms' losses, nats per target, by (seed, step); empty without a
    seed of both.
    """
    both = [one.points(curve) for one in (arm, other)]
    if any(points.empty for points in both):
        return pd.Series(dtype=float)
    mine, theirs = (points.set_index(["seed", "step"])["loss"] for points in both)
    return (mine - theirs).abs().dropna()


def drift_table(pairs: Sequence[Pair]) -> Table:
    rows = []
    for arm, other in pairs:
        steps = apart(arm, other)
        if steps.empty:
            continue
        at, read = steps.index.get_level_values("step"), apart(arm, other, "validation")
        end = read[read.index.get_level_values("step") == at.max()]
        precision = arm.says("trainer.precision")
        row = {"arm": arm.name, "minus": other.name, "precision": PRECISIONS.get(precision, precision)}
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


# Nats per target, named before the runs.
MARGIN = 0.005
# That every arm should have; others are counted as missing.
SEEDS = 8
LOSS, STEPS = "perplexity.loss", "trainer.max_steps"
BY_PACKAGE = "perplexity.by_group"
# Minus padded, on each of three distributions, which are one family.
PRIMARY = "packed-reset"
DISTRIBUTIONS = 3
# Keys of a setting: arms that differ in one of them are not compared.
ALIKE = ("trainer.precision", "optimizer.lr", "data.validation_documents", STEPS)
WEIGHTS = {
    "mean of the last": LOSS,
    "mean of the last, by the trainer": "val_loss",
    "last, by the trainer": "val_loss_last_weights",
}


def parity_tables(records: Sequence[Record], others: Sequence[Sequence[Record]] = ()) -> list[Table]:
    """``records`` are of one corpus, ``others`` those of the other distributions."""
    arms = aggregate.training_arms(records)
    found = [_parity(records, arms, others), _places(records, arms)]
    by_name = {arm.name: arm for arm in arms}
    if {"packed-reset", "packed-control"} <= by_name.keys():
        found.append(_calibration(by_name["packed-reset"], by_name["packed-control"]))
    found += [_leak(arms), drift_table(_pairs(arms))]
    return [table for table in found if table.rows]


def _pairs(arms: Sequence[Arm]) -> list[Pair]:
    """Arms of as many steps as what they are compared with."""
    found = [(arm, _baseline(arm, arms)) for arm in arms]
    return [(arm, other) for arm, other in found if other is not None and arm.says(STEPS) == other.says(STEPS)]


def _rule(arms: Sequence[Arm], others: Sequence[Sequence[Record]]) -> dict[Arm, Ruling]:
    """Rule on each arm minus its baseline.

    The primary is one family with those of the other distributions; the rest explores.
    """
    comparisons = _comparisons(arms)
    for records in others:
        found = _comparisons(aggregate.training_arms(records))
        comparisons |= {arm: one for arm, one in found.items() if arm.name == PRIMARY}
    primaries = sum(arm.name == PRIMARY for arm in comparisons)
    return rule(comparisons, {PRIMARY: max(0, DISTRIBUTIONS - primaries)})


def _comparisons(arms: Sequence[Arm]) -> dict[Arm, Comparison]:
    comparisons = {}
    for arm, other in _pairs(arms):
        family = PRIMARY if arm.name == PRIMARY else "others"
        setting = tuple(repr(arm.says(key)) for key in ALIKE)
        lost = divergence(arm, other)
        comparisons[arm] = Comparison(*_sums(arm, other), MARGIN, lost, family, setting, arm.leaks)
    return comparisons


def _parity(records: Sequence[Record], arms: Sequence[Arm], others: Sequence[Sequence[Record]]) -> Table:
    rows, rulings = [], _rule(arms, others)
    for arm in arms:
        baseline = _baseline(arm, arms)
        row = {"arm": arm.name, "minus": baseline.name if baseline else "-", "runs": _runs(arm), "loss": arm[LOSS]}
        row |= {"verdict": "-", "registered": "-", "targets": arm["targets"].mean()}
        if baseline is not None:
            row |= {"difference": estimate(*_sums(arm, baseline)), "over_seeds": interval(arm[LOSS] - baseline[LOSS])}
            if arm in rulings:  # else another question than whether they are as accurate
                row |= ruled(rulings[arm])
        rows.append(row)
    notes = [
        "Every arm has the same documents in every step, cut alike. It is evaluated on whole documents of other packages, one at "
        "a time from zero state, with the mean of its last weights. Differences are paired by seed. The first interval resamples "
        "seeds and packages (without packages it is the second); the second is Student's t over seeds.",
        f"As registered: equivalent if the first interval lies within ± {MARGIN}, else different if it excludes zero, else open; "
        f"of arms with as many steps. Verdict: by p after Holm, too, over the three distributions ({PRIMARY}) or over the "
        "table's other rows. Leak not caught, no leak arm: the test could not have failed.",
        f"Runs: of {SEEDS} seeds those with a loss, then those that diverged and those that are missing.",
    ]
    trained = [arm["targets"][arm[LOSS].notna()] for arm in arms]  # who diverged had fewer
    if len({round(targets.mean()) for targets in trained if targets.notna().any()}) > 1:
        notes.append("Arms were trained on different numbers of targets: they are not compared token for token.")
    return make_table(
        "parity",
        f"{unit(records)}: paired differences of the validation loss, nats per target",
        "!arm | !minus | runs = runs diverged missing | validation loss = loss loss_sd | "
        "difference [95 %: seeds and packages] = difference[]:5 | [95 %: seeds] = over_seeds[] pairs:5 | "
        f"{ruled_columns(MARGIN)} | targets a run = targets:,.0f",
        rows,
        *notes,
    )


def _sums(arm: Arm, other: Arm, where: str = "") -> tuple[np.ndarray, np.ndarray]:
    return statistics.difference_by_group(arm, other, BY_PACKAGE, "nats", "targets", where)


def _places(records: Sequence[Record], arms: Sequence[Arm]) -> Table:
    """Tabulate arms of as many steps as their baseline: as far as pieces reach, farther on, and all
    without one package.
    """
    rows = []
    for arm, baseline in _pairs(arms):
        points, cut = arm.points(BY_PACKAGE), arm.says("data.cut_documents")
        if points.empty or pd.isna(cut):
            continue
        # Every seed has as many: of the largest and the sum only the ratio is used.
        targets = points.query(f"start >= {cut}").groupby("group")["targets"].sum()
        if targets.empty:
            continue
        wheres = {"inside": f"start < {cut}", "beyond": f"start >= {cut}", "others": f"group != {targets.idxmax()}"}
        sums = {name: _sums(arm, baseline, where) for name, where in wheres.items()}
        if (pairs := len(sums["inside"][0])) > 1:
            row = {"arm": arm.name, "minus": baseline.name, "pairs": pairs, "cut": cut}
            row |= {name: bootstrap(*one) for name, one in sums.items()} | {"largest": targets.max() / targets.sum()}
            near, far = (sums[name][1].sum() for name in ("inside", "beyond"))
            rows.append(row | {"share": far / (near + far)})
    return make_table(
        "places",
        f"{unit(records)}: paired differences by place in the document, nats per target",
        "!arm | !minus | pairs:d | longest piece in training = cut:,d | as far as pieces reach [95 %] = inside[]:5 | "
        "farther on [95 %] = beyond[]:5 | all, without one package [95 %] = others[]:5 | "
        "targets farther on = share:% | of them in that package = largest:%",
        rows,
        "Training cuts documents into pieces and reads each from zero; evaluation reads documents whole. The package left out is "
        "the one with most targets farther on than pieces reach. Exploratory; intervals resample seeds and packages and are not "
        "adjusted for their number.",
    )


def _leak(arms: Sequence[Arm]) -> Table:
    """Make a row for each leak arm and stretch of places, over padded and over the same rows with
    reset.
    """
    by_name = {arm.name: arm for arm in arms}
    rows: list[dict[str, Any]] = []
    family: dict[int, Comparison] = {}
    for arm in (arm for arm in arms if arm.name.startswith("packed-leak")):
        padded, reset = (by_name[arm.name.replace("packed-leak", name)] for name in ("padded", "packed-reset"))
        for one, other in ((arm, padded), (arm, reset), (reset, padded)):
            for places, where in {"all": "", "first 256": "start < 256", "first 2048": "start < 2048"}.items():
                sums, weights = _sums(one, other, where)
                rows.append({"arm": one.name, "minus": other.name, "places": places, "pairs": len(sums)})
                rows[-1]["above"] = int((sums.sum(axis=1) > 0).sum())
                lost = divergence(one, other)
                family[len(family)] = Comparison(sums, weights, MARGIN, lost, is_leak=one is arm)
    for row, ruling in zip(rows, rule(family).values()):
        row |= ruled(ruling)
    return make_table(
        "leak",
        "Packed with a leak, each document read from zero: paired differences of the validation loss, nats per target",
        "!arm | !minus | !places | difference [95 %] = difference[]:5 | pairs:d | above:d | "
        + ruled_columns(MARGIN, "by the interval alone"),
        rows,
        "Intervals resample seeds and packages. Above: seeds above zero. Exploratory. Verdict: by the interval, and by p after "
        f"Holm over the {len(rows)} rows.",
    )


def _baseline(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """Padded, else packed with reset; of the control packed with reset, else padded.

    Of the arm's own precision, rate and validation documents.
    """
    wanted = ["greedy", "padded"] if arm.says("data.strategy") == "next_fit" else ["padded", "greedy"]
    alike = [peer for peer in arms if all(peer.says(key) == arm.says(key) for key in ALIKE[:-1])]
    alike = [peer for peer in alike if not peer.leaks]
    alike.sort(key=lambda peer: peer.says(STEPS) != arm.says(STEPS))  # else of equal compute
    found = next((peer for name in wanted for peer in alike if peer.says("data.strategy") == name), None)
    return None if found is arm else found


def _runs(arm: Arm) -> Cell:
    have = int(arm[LOSS].notna().sum())
    diverged, missing = len(arm.runs) - have, max(SEEDS - len(arm.runs), 0)
    return of_planned(have, SEEDS, diverged)._replace(values=(have, diverged, missing))


def _calibration(reset: Arm, control: Arm) -> Table:
    """Tabulate the effect of rounding, and what it takes to see more than that."""
    rows = []
    for weights, metric in WEIGHTS.items():
        pairs = (control[metric] - reset[metric]).dropna()
        one, sd = interval(pairs), pairs.std()
        if one is None or pd.isna(sd):
            continue
        row = {"arm": control.name, "weights": weights, "pairs": one.seeds, "loss": reset[metric].mean(), "sd": sd}
        row |= {"difference": one, "largest": pairs.abs().max()}
        row |= {f"seeds_{effect}": statistics.seeds_for(pairs, None, effect) for effect in EFFECTS}
        rows.append(row | {"sd_of_seeds": reset[metric].std()})
    seeds = " | ".join(f"seeds for ± {effect} = seeds_{effect}:d" for effect in EFFECTS)
    return make_table(
        "calibration",
        "Packed with reset, its sums in another order, minus itself: how many seeds equivalence needs",
        "!arm | !weights | pairs:d | loss of packed-reset = loss:.5f | "
        "difference [95 %] = difference[]:5 | standard deviation of differences = sd:.5f | "
        f"largest:.5f | of seeds = sd_of_seeds:.5f | {seeds}",
        rows,
        "Seeds with which arms without a difference are equivalent within that margin in four of five tries, at the upper 80 % "
        "confidence bound of the standard deviation. Of seeds: the standard deviation of the loss over seeds. "
        "By the trainer: in the run's precision; else in float32.",
    )


EFFECTS = (0.01, 0.005, 0.002)
# As many have columns of their own.
MOST_PLACES = 6


def gradient_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate differences of gradients between arms, at places along a run, a table for each;
    ``records`` are of one corpus.
    """
    of_seeds: dict[int, dict[tuple[str, str], Record]] = {}
    for record in aggregate.of_kind(records, "gradients"):
        of_seeds.setdefault(record["seed"], {})[record["arm"], record["config"]["computed_in"]] = record
    tables = [_gradient_table(seed, latest) for seed, latest in sorted(of_seeds.items())]
    return [table for table in tables if table.rows]


def _gradient_table(seed: int, latest: Mapping[tuple[str, str], Record]) -> Table:
    """Tabulate one run: every place has a column, or with many only the place where a difference is
    largest.
    """
    places = sorted({point["step"] for r in latest.values() for point in r["curves"]["gradients"]})
    shown = places if len(places) <= MOST_PLACES else []
    rows = []
    for (arm, precision), record in latest.items():
        if against := record["config"]["against"]:
            found = {point["step"]: point["relative_difference"] for point in record["curves"]["gradients"]}
            row = {"arm": arm, "precision": precision, "minus": against, "steps": len(found)}
            row |= {"largest_at": max(found, key=found.__getitem__), **record["metrics"]}
            rows.append(row | {f"step_{place}": found.get(place) for place in shown})
    steps = [f"step {place} = step_{place}:.1e" for place in shown] or ["steps:d", "largest at step = largest_at:d"]
    return make_table(
        f"gradients-seed-{seed}" if seed else "gradients",
        f"{unit(list(latest.values()))}: gradients of the same step from the same weights, relative difference",
        f"!arm | !precision | !minus | {' | '.join(steps)} | at most = relative_difference:.1e | "
        "of a parameter, at most = largest_of_a_tensor:.1e | loss, nats = loss_difference:.1e",
        rows,
        "The norm of the difference over the norm, all parameters together, and of the parameter where it is largest. One model "
        "trains in the first precision; every arm computes the gradient of the same documents from its weights."
        + ("" if shown else f" Steps are from {places[0]} to {places[-1]}, seed {seed}."),
    )


def speed_tables(records: Sequence[Record]) -> list[Table]:
    """Tabulate how many steps of each arm take as long as one of padded or packed; ``records`` are
    of one corpus.
    """
    rows, timed, median = [], aggregate.timed_arms(records), "seconds_per_step_median"
    for arm in timed:
        peers = {peer.name.split(",")[0]: peer[median].mean() for peer in timed if peer.setting == arm.setting}
        if peers.keys() >= {"padded", "packed-reset"}:
            row = {"arm": arm.name, "run": str(arm.timing)[:8], "seconds": (seconds := arm[median].mean())}
            row |= {name: arm[name].mean() for name in ("padding_fraction", "seconds_per_step_spread")}
            rows.append(row | {"ratio": peers["padded"] / seconds, "packed": seconds / peers["packed-reset"]})
    table = make_table(
        "equal-time",
        f"{unit(records)}: optimizer steps of the same documents in the time of padded's",
        "!arm | seconds/step, median = seconds:.4g | interquartile range = seconds_per_step_spread:.2g | "
        "padding = padding_fraction:% | times as fast as padded = ratio:.3f x | packed over it = packed:.3f x | !run",
        rows,
        "Whole optimizer steps in turns in one process, alone on its GPU; arms have the same documents in every step.",
    )
    return [table] if table.rows else []


KINDS = {
    "training": replace(without_speeds(LIBRARY["training"], parity_tables), label=unit, over_corpora=True),
    "throughput": replace(without_speeds(LIBRARY["throughput"], speed_tables), label=unit),
    "gradients": Kind(gradient_tables, label=unit),
}
