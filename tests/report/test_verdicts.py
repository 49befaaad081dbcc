"""Verdicts of sweeps on invented data whose truth is known."""

import math

import numpy as np
import pytest

from made_records import table, training
from packmamba.report import aggregate
from packmamba.report.html import format_table
from packmamba.report.statistics import bootstrap, interval, power, seeds_for, verdict
from packmamba.report.tables import sentence

MARGIN = 0.01


@pytest.mark.parametrize("truth", [0.0, MARGIN, -MARGIN])
def test_verdicts_of_a_known_truth(truth):
    """Different where nothing is, or equivalent at the margin: at most 5 %. Equivalent where nothing is: as often as planned."""
    rng, seeds, trials = np.random.default_rng(3), 8, 2000
    for deviation in (0.004, 0.009):
        found = [verdict(interval(truth + rng.normal(0, deviation, seeds)), MARGIN) for _ in range(trials)]
        share = {name: found.count(name) / trials for name in ("different", "equivalent")}
        error = 3 * math.sqrt(0.05 * 0.95 / trials)
        if truth:
            assert share["equivalent"] <= 0.05 + error
        else:
            assert share["different"] <= 0.05 + error
            planned = power(rng.normal(0, deviation, 400), None, MARGIN, seeds)
            assert share["equivalent"] == pytest.approx(planned, abs=0.06)


def test_seeds_for_have_the_power_that_they_promise():
    rng = np.random.default_rng(5)
    needed = seeds_for(rng.normal(0, 0.009, 5000), None, MARGIN)
    found = [verdict(interval(rng.normal(0, 0.009, needed)), MARGIN) == "equivalent" for _ in range(2000)]
    assert 0.75 <= np.mean(found) <= 0.92
    assert seeds_for([0.1], None, MARGIN) is None and seeds_for([0.0, 1.0], None, MARGIN) is None


@pytest.mark.parametrize("truth", [0.0, MARGIN])
def test_verdicts_over_seeds_and_groups(truth):
    """Type I at most 5 %; power as predicted from a pilot of other seeds, under the same bootstrap."""
    rng, trials, seeds = np.random.default_rng(7), 200, 6
    weights = rng.lognormal(8, 0.5, 20)

    def sums(count):
        per_target = truth + rng.normal(0, 0.004, (count, 1)) + rng.normal(0, 0.006, 20)
        return (per_target + rng.normal(0, 0.004, (count, 20))) * weights

    found = [verdict(bootstrap(sums(seeds), weights, 400), MARGIN) for _ in range(trials)]
    equivalent, error = found.count("equivalent") / trials, 3 * math.sqrt(0.05 * 0.95 / trials)
    if truth:
        assert equivalent <= 0.05 + error
    else:
        assert found.count("different") / trials <= 0.05 + error
        predicted = np.mean([power(sums(40), weights, MARGIN, seeds, draws=400) for _ in range(10)])
        assert equivalent == pytest.approx(predicted, abs=0.12)


RULE = {"margin": MARGIN, "primary": ["packed-reset", "packed-leak - packed-reset"], "baseline": "padded"}


def records(**streams):
    seeds = range(5)
    noise = np.random.default_rng(0).normal(0, 0.001, (3, 5))
    losses = {"padded": 2.0 + noise[0], "packed-reset": 2.0 + noise[1], "packed-leak": 2.05 + noise[2]}
    config = {arm: {"data": {"strategy": "greedy", **streams.get(arm, {})}} if streams else None for arm in losses}
    return [
        training(arm, seed, losses[arm][seed], config=config[arm]) | {"sweep": RULE | {"seeds": list(seeds)}}
        for arm in losses for seed in seeds
    ]  # fmt: skip


def test_a_sweep_s_verdicts():
    made = records()
    rows = {row["contrast"]: row for row in table(made, "verdicts")}
    found = [f"{row['primary']}, {row['verdict']}" for row in rows.values()]
    assert found == ["primary, equivalent", "exploratory, different", "primary, different"]
    assert list(rows) == ["packed-reset - padded", "packed-leak - padded", "packed-leak - packed-reset"]
    both = [float(row["p_holm"]) for row in rows.values() if row["primary"] == "primary"]
    alone = interval(aggregate.training_arms(made)[2]["val_loss"] - aggregate.training_arms(made)[1]["val_loss"]).p
    assert max(both) <= 1 and min(both) == pytest.approx(2 * alone, rel=1e-6), "Holm over two"
    assert int(rows["packed-reset - padded"]["seeds_needed"]) <= 5
    assert [row["verdict"] for row in table(made, "training")] == ["-", "equivalent", "different"]
    said = sentence(made)
    assert "packed-reset is equivalent (+0.0001" in said and "packed-leak is different (+0.0491" in said
    assert said in format_table(made) and "Verdicts on validation loss" in format_table(made)


def test_arms_that_read_other_documents_are_never_equivalent():
    made = records(**{"packed-reset": {"batching": "stream"}})
    rows = {row["contrast"]: row["verdict"] for row in table(made, "verdicts")}
    assert rows["packed-reset - padded"] == "open, other documents"
    made = records(**{"packed-reset": {"cut_documents": 64}})
    rows = {row["contrast"]: row["verdict"] for row in table(made, "verdicts")}
    assert rows["packed-reset - padded"] == "open, other documents"
    made = records(**{"packed-reset": {"row_length": 64, "max_tokens_per_batch": 128}})
    assert {row["contrast"]: row["verdict"] for row in table(made, "verdicts")}["packed-reset - padded"] == "equivalent"
    made = records(**{name: {"batching": "stream"} for name in ("padded", "packed-reset", "packed-leak")})
    assert {row["contrast"]: row["verdict"] for row in table(made, "verdicts")}["packed-reset - padded"] == "equivalent"
