"""Statistics and verdicts on invented data whose answer is known, and against scipy."""

import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
from scipy import stats

from made_records import table, training
from packmamba.lab.records import append_record, read_records, write_sweep
from packmamba.lab.report import aggregate, statistics
from packmamba.lab.report.html import format_table
from packmamba.lab.report.statistics import Comparison, Divergence, holm, interval, power, rule, verdict
from packmamba.lab.report.tables import findings


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
    """Also with few groups of very unequal size, as validation packages are: twelve that weigh like
    four or five.
    """
    rng, trials, held = np.random.default_rng(11), 200, 0
    for _ in range(trials):
        made = drawn(rng, seeds, groups, of_seeds, of_groups, rest, effect=2.0, unequal=1.5 if groups == 12 else 1.0)
        found = statistics.bootstrap(*made, draws=400)
        held += found.low <= 2.0 <= found.high
    assert held / trials >= 0.90  # 0.95 less three standard deviations of 200 trials


def test_a_clear_effect_has_a_small_p_and_none_has_not():
    clear = statistics.bootstrap(*drawn(np.random.default_rng(2), 8, 30, 0.1, 0.1, 0.1, effect=1.0))
    none = statistics.bootstrap(*drawn(np.random.default_rng(3), 8, 30, 0.1, 0.1, 0.1))
    assert clear.p < 0.001 < 0.05 < none.p
    assert clear.low > 0.8 and clear.high < 1.2


def test_groups_are_paired_by_seed_and_summed():
    def record(arm, seed, nats):
        points = [{"group": g, "start": s, "targets": 10 * (g + 1), "nats": nats + g} for g in (0, 1) for s in (1, 2)]
        return {**training(arm, seed), "curves": {"perplexity.by_group": points}}

    runs = ("padded", 0, 5.0), ("padded", 1, 6.0), ("packed-reset", 1, 6.5), ("packed-reset", 2, 9)
    records = [record(*run) for run in runs]
    padded, packed = aggregate.training_arms(records)
    difference = partial(statistics.difference_by_group, packed, padded, "perplexity.by_group", "nats", "targets")
    sums, weights = difference()
    assert sums.tolist() == [[1.0, 1.0]] and weights.tolist() == [20, 40]
    sums, weights = difference("start == 2")
    assert sums.tolist() == [[0.5, 0.5]] and weights.tolist() == [10, 20]
    sums, weights = difference("group != 0")
    assert sums.tolist() == [[1.0]] and weights.tolist() == [40]
    assert statistics.difference_by_group(packed, padded, "nothing", "nats", "targets")[0].size == 0


def test_over_items_with_equal_weights_is_a_paired_t_test():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(1, 1, 30), rng.normal(0.8, 1, 30)
    expected = stats.ttest_rel(ours, theirs)
    found = statistics.over_items(3 * (ours - theirs), np.full(30, 3.0))
    known = (ours.mean() - theirs.mean(), *expected.confidence_interval(), expected.pvalue)
    assert (*found[:3], found.p) == pytest.approx(known)
    assert math.isnan(statistics.over_items([1.0], [2.0]).low) and statistics.over_items([1.0], [2.0]).mean == 0.5


def test_p_of_equivalence_is_twice_that_of_two_one_sided_t_tests():
    values = np.random.default_rng(4).normal(0.001, 0.002, 8)
    for margin in (0.0005, 0.002, 0.005):
        sides = ((-margin, "greater"), (margin, "less"))
        expected = max(stats.ttest_1samp(values, edge, alternative=side).pvalue for edge, side in sides)
        assert statistics.p_of_equivalence(values, None, margin) == pytest.approx(min(1, 2 * expected), rel=1e-9)
    assert statistics.p_of_equivalence([0.0, 0.0], None, 0.005) == 0
    assert math.isnan(statistics.p_of_equivalence([0.1], None, 1))


@pytest.mark.parametrize("seeds", [3, 8])
def test_p_is_at_most_5_percent_where_the_interval_says_so(seeds):
    """Over seeds and groups, too: zero outside the interval, and the interval within the margin."""
    for trial in range(40):
        sums, weights = drawn(np.random.default_rng(trial), seeds, 20, 0.1, 0.1, 0.1, effect=0.02 * trial)
        found = statistics.bootstrap(sums, weights)
        assert (found.p <= 0.05) == (found.low > 0 or found.high < 0)
        margin = 0.5
        within = -margin < found.low and found.high < margin
        assert (statistics.p_of_equivalence(sums, weights, margin) <= 0.05) == within


def test_holm_by_hand():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    found = holm({"a": 0.02, "b": math.nan})
    assert found["a"] == 0.04 and math.isnan(found["b"])
    assert holm({"a": 0.7, "b": 0.9}) == {"a": 1.0, "b": 1.0}


MARGIN = 0.01


@pytest.mark.parametrize("truth", [0.0, MARGIN, -MARGIN])
def test_verdicts_of_a_known_truth(truth):
    """Different where nothing is, or equivalent at the margin: at most 5 %.

    Equivalent where nothing is: as often as planned.
    """
    rng, seeds, trials = np.random.default_rng(3), 8, 2000
    for deviation in (0.004, 0.009):
        found = [verdict(interval(truth + rng.normal(0, deviation, seeds)), MARGIN) for _ in range(trials)]
        share = {name: found.count(name) / trials for name in ("different", "equivalent")}
        error = 3 * math.sqrt(0.05 * 0.95 / trials)
        if truth:
            assert share["equivalent"] <= 0.05 + error
        else:
            assert share["different"] <= 0.05 + error
            planned = power(rng.normal(0, deviation, 4000), None, MARGIN, seeds)
            assert planned <= share["equivalent"] <= planned + 0.06


def test_seeds_for_have_the_power_that_they_promise():
    rng = np.random.default_rng(5)
    needed = statistics.seeds_for(rng.normal(0, 0.009, 5000), None, MARGIN)
    found = [verdict(interval(rng.normal(0, 0.009, needed)), MARGIN) == "equivalent" for _ in range(2000)]
    assert 0.75 <= np.mean(found) <= 0.92
    assert statistics.seeds_for([0.1], None, MARGIN) is None and statistics.seeds_for([0.0, 1.0], None, MARGIN) is None
    assert statistics.seeds_for([0.0, 1e-6, -1e-6], None, MARGIN) == 5, "claims of parity need five"
    assert statistics.seeds_for(rng.normal(0, 0.009, 5000), None, MARGIN, family=4) > needed


def test_power_of_a_small_pilot_is_a_lower_bound():
    """Four pairs promise no more than there is, in at least four of five pilots."""
    rng, deviation, seeds = np.random.default_rng(6), 0.008, 8
    true = np.mean([verdict(interval(rng.normal(0, deviation, seeds)), MARGIN) == "equivalent" for _ in range(4000)])
    promised = [power(rng.normal(0, deviation, 4), None, MARGIN, seeds, draws=500) for _ in range(200)]
    assert np.mean(np.array(promised) <= true) >= 0.8 - 3 * math.sqrt(0.8 * 0.2 / 200)


def test_a_margin_from_a_pilot_is_half_of_the_harm_s_lower_bound():
    harm = interval([0.010, 0.012, 0.009, 0.013])
    assert statistics.margin_from_pilot(harm) == harm.low / 2 < harm.mean / 2
    with pytest.raises(ValueError, match="^harm: "):
        statistics.margin_from_pilot(interval([0.010, -0.012, 0.009, 0.013]))


@pytest.mark.parametrize("truth", [0.0, MARGIN])
def test_verdicts_over_seeds_and_groups(truth):
    """Type I at most 5 %; power as predicted from a pilot of other seeds, under the same bootstrap."""
    rng, trials, seeds = np.random.default_rng(7), 200, 6
    weights = rng.lognormal(8, 0.5, 20)

    def sums(count):
        per_target = truth + rng.normal(0, 0.004, (count, 1)) + rng.normal(0, 0.006, 20)
        return (per_target + rng.normal(0, 0.004, (count, 20))) * weights

    found = [verdict(statistics.bootstrap(sums(seeds), weights, 400), MARGIN) for _ in range(trials)]
    equivalent, error = found.count("equivalent") / trials, 3 * math.sqrt(0.05 * 0.95 / trials)
    if truth:
        assert equivalent <= 0.05 + error
    else:
        assert found.count("different") / trials <= 0.05 + error
        predicted = np.mean([power(sums(400), weights, MARGIN, seeds, draws=400) for _ in range(10)])
        assert predicted - 0.06 <= equivalent <= predicted + 0.2, "groups are 20, so that the bound is a bound"


FEW = [0.001, -0.001, 0.0005, 0.0]


@pytest.mark.parametrize(
    ("divergence", "ruling"),
    [
        (Divergence(0, 8, 0, 8), "equivalent"),
        (Divergence(1, 8, 0, 8), "open, of survivors"),
        (Divergence(0, 8, 1, 8), "open, of survivors"),
        (Divergence(4, 8, 4, 8), "open, of survivors"),
        (Divergence(6, 8, 0, 8), "different (diverges)"),
        (Divergence(0, 8, 6, 8), "different (the other diverges)"),
        (Divergence(3, 3, 0, 3), "open, of survivors"),  # three runs of each show nothing
        (Divergence(0, 4, 0, 4, seeds=4), "equivalent"),
        (Divergence(0, 5, 0, 5, seeds=5), "open, of survivors"),  # a value of a fifth is not finite
        (Divergence(0, 4, 0, 5, seeds=5, missing=1), "open, 1 of 5 seeds missing"),
        (Divergence(0, 5, 0, 5, seeds=6, missing=1), "open, of survivors, 1 of 6 seeds missing"),
        (Divergence(6, 8, 0, 7, seeds=8, missing=1), "different (diverges)"),
    ],
)
def test_lost_runs_make_no_verdict_easier(divergence, ruling):
    assert rule({"one": Comparison(FEW, margin=MARGIN, divergence=divergence)})["one"].claim == ruling
    shifted = Comparison(np.add(FEW, 1.0), margin=MARGIN, divergence=divergence)
    expected = ruling if "diverges" in ruling else re.sub("open|equivalent", "different", ruling)
    assert rule({"one": shifted})["one"].claim == expected
    assert Divergence(0, 8, 0, 8, seeds=8).lost(pairs=0) == ", no pair has a value"


def test_a_run_that_breaks_down_makes_an_equivalence_open():
    assert rule({"one": Comparison([*FEW, 0.4], margin=MARGIN)})["one"].claim == "open"


def test_divergence_is_tested_as_fisher_does_and_counts_where_it_can_show():
    assert Divergence(6, 8, 0, 8).p == pytest.approx(stats.fisher_exact([[6, 2], [0, 8]]).pvalue)
    assert not Divergence(2, 8, 1, 8).can_differ and Divergence(3, 8, 2, 8).can_differ
    values = np.add(FEW, 0.0021)
    alone = interval(values).p
    for divergence, tests in ((Divergence(1, 8, 0, 8), 1), (Divergence(3, 8, 2, 8), 2)):
        found = rule({"one": Comparison(values, divergence=divergence)})["one"]
        assert found.p_difference == pytest.approx(tests * alone)


def test_both_kinds_of_claims_are_adjusted_over_the_family():
    rng = np.random.default_rng(8)
    family = {name: Comparison(rng.normal(0, 0.004, 8), margin=MARGIN) for name in "abc"}
    alone = {name: statistics.p_of_equivalence(one.differences, None, MARGIN) for name, one in family.items()}
    found = rule(family, {None: 1})
    expected = holm(alone | {"absent": math.nan})
    del expected["absent"]
    assert {name: one.p_equivalence for name, one in found.items()} == pytest.approx(expected)
    edge = Comparison(np.array(FEW) + 0.0085, margin=MARGIN)  # equivalent by itself
    alone = rule({"edge": edge})["edge"]
    assert alone.claim == "equivalent" and 0.0125 < alone.p_equivalence <= 0.05
    assert rule({"edge": edge}, {None: 3})["edge"].claim == "different", "different from zero is shown still"


PLANNED = dict.fromkeys(("padded", "packed-reset", "packed-leak"), range(5))
RULE = {"margin": MARGIN, "primary": ["packed-reset", "packed-leak - packed-reset"], "baseline": "padded"}


def records(seeds=range(5), **streams):
    noise = np.random.default_rng(0).normal(0, 0.001, (3, 5))
    losses = {"padded": 2.0 + noise[0], "packed-reset": 2.0 + noise[1], "packed-leak": 2.05 + noise[2]}
    config = {arm: {"data": {"strategy": "greedy", **streams.get(arm, {})}} if streams else None for arm in losses}
    return [
        training(arm, seed, losses[arm][seed], config=config[arm]) | {"sweep": RULE | {"seeds": list(seeds)}}
        for arm in losses for seed in seeds
    ]  # fmt: skip


def contrasts_of(made):
    return {row["contrast"]: row for row in table(made, "verdicts")}


def verdicts_of(made):
    return {contrast: row["verdict"] for contrast, row in contrasts_of(made).items()}


def test_a_sweep_s_verdicts():
    made = records()
    rows = contrasts_of(made)
    found = [f"{row['primary']}, {row['verdict']}" for row in rows.values()]
    assert found == ["primary, equivalent", "exploratory, different", "primary, different"]
    assert list(rows) == ["packed-reset - padded", "packed-leak - padded", "packed-leak - packed-reset"]
    both = [float(row["p_difference"]) for row in rows.values() if row["primary"] == "primary"]
    alone = interval(aggregate.training_arms(made)[2]["val_loss"] - aggregate.training_arms(made)[1]["val_loss"]).p
    assert max(both) <= 1 and min(both) == pytest.approx(2 * alone, rel=1e-6), "Holm over two"
    assert int(rows["packed-reset - padded"]["seeds_needed"]) <= 5
    assert [row["verdict"] for row in table(made, "training")] == ["-", "equivalent", "different"]
    claims = [finding.claim for finding in findings(made)]
    assert claims == [f"{name}: {row['verdict']}" for name, row in rows.items()], "one contrast a line"
    assert "+0.0491 [" in findings(made)[1].evidence and "validation loss" in findings(made)[1].evidence
    assert f"- {findings(made)[0]}" in format_table(made).splitlines()
    assert "came after runs" not in format_table(made)
    assert "came after runs" in format_table([r | {"sweep": r["sweep"] | {"late": True}} for r in made])
    (claim, *_) = (finding.claim for finding in findings([record | {"sweep": {}} for record in made]))
    assert claim == "packed-reset - padded: open without a margin"


CUT = {"overlong": "truncate", "cut_at_steps": True}


@pytest.mark.parametrize(
    ("changed", "ruling"),
    [
        ({"packed-reset": {"batching": "stream"}}, "open, other documents"),
        ({"packed-reset": {"cut_documents": 64}}, "open, other documents"),
        ({"packed-reset": {"row_length": 64, "max_tokens_per_batch": 128}}, "equivalent"),
        ({"padded": CUT, "packed-reset": CUT | {"row_length": 64}}, "open, other documents"),
        (dict.fromkeys(PLANNED, {"batching": "stream"}), "equivalent"),
    ],
)
def test_arms_that_read_other_documents_are_never_equivalent(changed, ruling):
    assert verdicts_of(records(**changed))["packed-reset - padded"] == ruling


def with_losses(arm, losses):
    """``records`` with an arm's losses; None: that run diverged."""
    found = records()
    for record in found:
        if record["arm"] == arm:
            record["metrics"] = record["metrics"] | {"val_loss": losses[record["seed"]]}
    return found


def test_few_seeds_stand_beside_the_verdict():
    made = records(seeds=range(3))
    assert verdicts_of(made)["packed-reset - padded"] == "equivalent, few seeds"
    assert statistics.seeds_for(*aggregate.paired(*aggregate.training_arms(made)[1::-1], "val_loss"), 0.1) == 5


@pytest.mark.parametrize("boundary", ["leak", "leak_conv", "leak_scan", "of_a_plugin"])
def test_only_where_a_leak_is_caught_equivalence_is_bare(boundary):
    losses = [record["metrics"]["val_loss"] for record in records() if record["arm"] == "packed-reset"]
    cases = {
        "equivalent": records(),
        "equivalent, leak not caught": with_losses("packed-leak", losses),
        "equivalent, no leak arm": [record for record in records() if record["arm"] != "packed-leak"],
    }
    helps = with_losses("packed-leak", [loss - 0.05 for loss in losses])
    for record in (one for made in (*cases.values(), helps) for one in made if one["arm"] == "packed-leak"):
        record["config"] = record["config"] | {"trainer": {"boundary": boundary}}
        if boundary == "of_a_plugin":
            record["leakcheck"] = f"unchecked: trainer.boundary={boundary} lets documents leak"
    for expected, made in cases.items():
        assert verdicts_of(made)["packed-reset - padded"] == expected
    assert verdicts_of(helps)["packed-reset - padded"] == "equivalent, leak not caught", "it does no harm"
    ruling = verdicts_of(with_losses("packed-leak", [None] * 5))["packed-reset - padded"]
    assert ruling == "equivalent, leak caught by divergence alone", "no small difference is shown to be seen"
    worse = [loss + 0.05 + seed / 1000 for seed, loss in enumerate(losses)]
    survivors = with_losses("packed-leak", [*worse[:4], None])
    assert verdicts_of(survivors)["packed-reset - padded"] == "equivalent, leak caught of survivors"


def test_higher_is_better_of_scores_alone():
    scores = ("mqar.accuracy", "hellaswag.acc_norm", "gsm8k.exact_match,strict-match")
    assert all(map(aggregate.higher_is_better, scores))
    assert not any(map(aggregate.higher_is_better, ("val_loss", "perplexity.loss.gains", "wikitext.word_perplexity")))


@pytest.mark.parametrize("groups", [0, 1, 20])
def test_a_metric_that_is_not_finite_is_no_survivor_s(groups):
    """Also with groups of documents, whose sums would skip what is not finite."""
    made = records()
    for number, record in enumerate(made):
        loss = record["metrics"]["val_loss"]
        record["metrics"] |= {"perplexity.loss": loss}
        nats = [10 * loss + math.sin(number * group) / 100 for group in range(groups)]
        points = [{"group": group, "start": 0, "targets": 10, "nats": nats[group]} for group in range(groups)]
        record["curves"]["perplexity.by_group"] = points
        record["sweep"] = record["sweep"] | {"table": {"metrics": ["perplexity.loss"]}}
    assert {"verdict": "equivalent", "seeds_needed": "5"}.items() <= contrasts_of(made)["packed-reset - padded"].items()
    (broken,) = (record for record in made if record["arm"] == "packed-reset" and record["seed"] == 3)
    broken["metrics"]["perplexity.loss"] = None
    for point in broken["curves"]["perplexity.by_group"][:1]:
        point["nats"] = None
    row = contrasts_of(made)["packed-reset - padded"]
    assert (row["verdict"], row["seeds"], row["diverged"]) == ("open, of survivors", "4", "0")
    mixed = [record | {"config": record["config"] | {"data": {"sources": ["a", "b"]}}} for record in made]
    weights = aggregate.paired(*aggregate.training_arms(mixed)[1::-1], "perplexity.loss")[1]
    assert weights is None, "a mixture's sources are no sample"


def test_a_seed_that_has_no_run_stands_beside_the_verdict(tmp_path):
    for record in records():
        if (record["arm"], record["seed"]) != ("padded", 2):
            append_record(tmp_path / "records.jsonl", record)
    for seeds in ([0, 1, 2], [3, 4]):  # by two jobs
        write_sweep(tmp_path, "sweep", dict.fromkeys(PLANNED, seeds), **RULE)
    found = verdicts_of(read_records(tmp_path))
    assert found["packed-reset - padded"] == "open, 1 of 5 seeds missing"
    assert found["packed-leak - padded"] == "different, 1 of 5 seeds missing"
    assert found["packed-leak - packed-reset"] == "different"


def test_variants_of_an_arm_do_not_hide_each_other_s_missing_seeds(tmp_path):
    """Seed 2 of the padded arm ran with the other mixer alone."""
    for mixer, record in itertools.product(("mamba1", "mamba2"), records()):
        if (mixer, record["arm"], record["seed"]) != ("mamba1", "padded", 2):
            config = record["config"] | {"model": {"mixer": mixer}}
            append_record(tmp_path / "records.jsonl", record | {"config": config})
    write_sweep(tmp_path, "sweep", PLANNED, **RULE)
    made = aggregate.contrasts(aggregate.training_arms(read_records(tmp_path)), "val_loss")
    found = {(contrast.arm.label, contrast.other.label): contrast.verdict for contrast in made}
    for mixer, expected in (("mamba1", "open, 1 of 5 seeds missing"), ("mamba2", "equivalent")):
        assert found[f"packed-reset (model.mixer={mixer})", f"padded (model.mixer={mixer})"] == expected


def test_an_arm_with_diverged_runs_is_never_equivalent():
    losses = [record["metrics"]["val_loss"] for record in records() if record["arm"] == "packed-reset"]
    made = with_losses("packed-reset", [*losses[:4], None])
    row = contrasts_of(made)["packed-reset - padded"]
    assert row["verdict"] == "open, of survivors"
    assert (row["diverged"], row["runs"], row["other_diverged"]) == ("1", "5", "0")
    assert row["p_equivalence"] == "" != row["p_difference"]
    recovered = with_losses("padded", losses)
    recovered[0]["metrics"] |= {"diverged_at_step": 3}  # its last loss is finite
    assert verdicts_of(recovered)["packed-reset - padded"] == "open, of survivors"
    made = with_losses("packed-reset", [None] * 5)
    assert verdicts_of(made)["packed-reset - padded"] == "different (diverges)"
    assert "5 of 5 against 0 of 5 runs diverged" in findings(made)[0].evidence


@pytest.mark.parametrize(("lost", "tests"), [("diverged", 3), ("absent", 2)])
def test_a_primary_without_a_pair_counts_for_holm(lost, tests):
    made = with_losses("packed-leak", [None] * 5)
    if lost == "absent":
        made = [record for record in made if record["arm"] != "packed-leak"]
    rows = contrasts_of(made)
    padded, reset, *_ = aggregate.training_arms(made)
    alone = interval(reset["val_loss"] - padded["val_loss"]).p
    adjusted = float(rows["packed-reset - padded"]["p_difference"])
    assert adjusted == pytest.approx(min(1, tests * alone), rel=1e-6), "Holm over two, and over divergence"
    assert ("packed-leak - packed-reset" in rows) == (lost == "diverged")
    # One whose baseline has no run is not compared with another arm, or with itself.
    assert [*contrasts_of([each for each in records() if each["arm"] != "padded"])] == ["packed-leak - packed-reset"]
