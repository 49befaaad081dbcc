"""Statistics and verdicts on invented data whose answer is known, and against scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.common import equivalence
from experiments.parity.report import seeds_needed
from made_records import table, training
from packmamba.report import aggregate
from packmamba.report.html import format_table
from packmamba.report.statistics import (
    bootstrap,
    difference_by_group,
    holm,
    interval,
    over_items,
    power,
    seeds_for,
    verdict,
)
from packmamba.report.tables import sentence


def drawn(rng, seeds, groups, of_seeds, of_groups, rest, effect=0.0, unequal=1.0):
    """Differences of nats, and targets: each is effect + seed + group + rest per target."""
    weights = rng.lognormal(8, unequal, groups)
    per_target = effect + rng.normal(0, of_seeds, (seeds, 1)) + rng.normal(0, of_groups, (1, groups))
    return (per_target + rng.normal(0, rest, (seeds, groups))) * weights, weights


@pytest.mark.parametrize(
    ("seeds", "of_seeds", "of_groups", "rest", "groups"),
    [(8, 1, 1, 1, 30), (5, 1, 0.3, 0.3, 30), (8, 0, 1, 0, 12), (3, 1, 0.3, 0.3, 30), (8, 0, 1, 0, 3)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(seeds, of_seeds, of_groups, rest, groups):
    """Also with few groups of very unequal size, as validation packages are: twelve that weigh like four or five."""
    rng, trials, held = np.random.default_rng(11), 200, 0
    for _ in range(trials):
        made = drawn(rng, seeds, groups, of_seeds, of_groups, rest, effect=2.0, unequal=1.5 if groups == 12 else 1.0)
        found = bootstrap(*made, draws=400)
        held += found.low <= 2.0 <= found.high
    assert held / trials >= 0.90  # 0.95 less three standard deviations of 200 trials


def test_a_clear_effect_has_a_small_p_and_none_has_not():
    clear = bootstrap(*drawn(np.random.default_rng(2), 8, 30, 0.1, 0.1, 0.1, effect=1.0))
    none = bootstrap(*drawn(np.random.default_rng(3), 8, 30, 0.1, 0.1, 0.1))
    assert clear.p < 0.001 < 0.05 < none.p
    assert clear.low > 0.8 and clear.high < 1.2


def test_groups_are_paired_by_seed_and_summed():
    def record(arm, seed, nats):
        points = [{"group": g, "start": s, "targets": 10 * (g + 1), "nats": nats + g} for g in (0, 1) for s in (1, 2)]
        return {**training(arm, seed), "curves": {"perplexity.by_group": points}}

    runs = ("padded", 0, 5.0), ("padded", 1, 6.0), ("packed-reset", 1, 6.5), ("packed-reset", 2, 9)
    records = [record(*run) for run in runs]
    padded, packed = aggregate.training_arms(records)
    sums, weights = difference_by_group(packed, padded, "perplexity.by_group", "nats", "targets")
    assert sums.tolist() == [[1.0, 1.0]] and weights.tolist() == [20, 40]
    sums, weights = difference_by_group(packed, padded, "perplexity.by_group", "nats", "targets", "start == 2")
    assert sums.tolist() == [[0.5, 0.5]] and weights.tolist() == [10, 20]
    sums, weights = difference_by_group(packed, padded, "perplexity.by_group", "nats", "targets", "group != 0")
    assert sums.tolist() == [[1.0]] and weights.tolist() == [40]
    assert difference_by_group(packed, padded, "nothing", "nats", "targets")[0].size == 0


def test_over_items_with_equal_weights_is_a_paired_t_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1, 1, 30), rng.normal(0.8, 1, 30)
    expected = stats.ttest_rel(ours, theirs)
    found = over_items(3 * (ours - theirs), np.full(30, 3.0))
    assert (*found[:3], found.p) == pytest.approx(
        (ours.mean() - theirs.mean(), *expected.confidence_interval(), expected.pvalue)
    )
    assert math.isnan(over_items([1.0], [2.0]).low) and over_items([1.0], [2.0]).mean == 0.5


def test_equivalence_is_two_one_sided_t_tests():
    values = np.random.default_rng(4).normal(0.001, 0.002, 8)
    for margin in (0.0005, 0.002, 0.005):
        expected = max(
            stats.ttest_1samp(values, -margin, alternative="greater").pvalue,
            stats.ttest_1samp(values, margin, alternative="less").pvalue,
        )
        assert equivalence(values, margin) == pytest.approx(expected, rel=1e-9)
    assert equivalence(values, 0.005) < 0.05 < equivalence(values, 0.0005)
    assert equivalence([0.0, 0.0], 0.005) == 0 and math.isnan(equivalence([0.1], 1))


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    found = holm({"a": 0.02, "b": math.nan})
    assert found["a"] == 0.04 and math.isnan(found["b"])
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("deviation", [0.005, 0.013])
def test_seeds_needed_have_the_power_that_they_promise(deviation):
    for effect in (0.01, 0.005):
        n = seeds_needed(deviation, effect)
        noncentral = effect / deviation * math.sqrt(n)
        power = 1 - stats.nct.cdf(stats.t.ppf(0.975, n - 1), n - 1, noncentral)
        assert 0.78 <= power <= 0.92 or n <= 4


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


def test_a_family_of_primaries_errs_as_often_as_one():
    """Three primaries of which none is true: any is called different in 5 % of families by Holm, in 14 % without."""
    rng, trials, wrong = np.random.default_rng(9), 600, {True: 0, False: 0}
    for _ in range(trials):
        estimates = {name: interval(rng.normal(0, 0.01, 8)) for name in "abc"}
        adjusted = holm({name: one.p for name, one in estimates.items()})
        for corrected in wrong:
            p = {name: adjusted[name] if corrected else one.p for name, one in estimates.items()}
            wrong[corrected] += any(verdict(one, None, p[name]) == "different" for name, one in estimates.items())
    assert wrong[True] / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials) < 0.10 < wrong[False] / trials


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
    assert said in format_table(made) and "came after runs" not in format_table(made)
    assert "came after runs" in format_table([r | {"sweep": r["sweep"] | {"late": True}} for r in made])


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


def test_few_seeds_and_a_leak_that_passes_stand_beside_the_verdict():
    made = [record for record in records() if record["seed"] < 3]
    found = {row["contrast"]: row for row in table(made, "verdicts")}
    assert found["packed-reset - padded"]["verdict"] == "equivalent, few seeds"
    made = [record | {"arm": "packed-leak"} for record in records() if record["arm"] == "packed-reset"]
    for record in made:
        record["config"] = record["config"] | {"trainer": record["config"]["trainer"] | {"boundary": "leak"}}
    made += [record for record in records() if record["arm"] != "packed-leak"]
    found = {row["contrast"]: row["verdict"] for row in table(made, "verdicts")}
    assert found["packed-reset - padded"] == "equivalent, as is a leak"
    assert "packed-reset is equivalent, as is a leak (" in sentence(made)
    assert "packed-reset is open without a margin (" in sentence([r | {"sweep": {}} for r in records()])


@pytest.mark.parametrize("lost", ["diverged", "absent"])
def test_a_primary_without_a_pair_counts_for_holm(lost):
    made = records()
    if lost == "absent":
        made = [record for record in made if record["arm"] != "packed-leak"]
    for record in made:
        if record["arm"] == "packed-leak":
            record["metrics"] = record["metrics"] | {"val_loss": None}
    rows = {row["contrast"]: row for row in table(made, "verdicts")}
    alone = interval(aggregate.training_arms(made)[1]["val_loss"] - aggregate.training_arms(made)[0]["val_loss"]).p
    assert float(rows["packed-reset - padded"]["p_holm"]) == pytest.approx(min(1, 2 * alone), rel=1e-6), "Holm over two"
    assert ("packed-leak - packed-reset" in rows) == (lost == "diverged")
