"""Numbers in the sentences of parity's page are those of the committed tables and records."""

import statistics

import pytest
from parity_numbers import (
    above_zero,
    at_higher_rate,
    at_places,
    behind_another,
    by_place,
    drift,
    elsewhere_by_place,
    equal_time,
    files,
    float32_to,
    gradients,
    inside,
    interval_of_sd,
    loss_at_rate,
    pairs,
    resampled,
    runs,
    spread_of_pairs,
    times_less,
    tuned_pairs,
    worse_means,
)
from study_numbers import (
    CONTROL,
    LAST,
    OURS,
    N,
    again,
    cells,
    parity,
    rounded_as,
    said,
)
from timing_numbers import BESIDE, millions, spread

MIXTURE = ("packed-reset", "padded", "mixture")
LONG = ("packed-reset-long", "padded-long", "mixture")
AT_004 = ("packed-reset-rate", "padded-rate")


def beyond_2048():
    """Per cent of the mixture's targets, and packages that have any, of all."""
    (found,) = (one for one in runs() if (one["arm"], one["seed"]) == ("padded-long", 1))
    points = found["curves"]["perplexity.by_group"]
    far = [point for point in points if point["start"] >= 2048]
    share = sum(point["targets"] for point in far) / sum(point["targets"] for point in points)
    return [100 * share, *(len({point["group"] for point in some}) for some in (far, points))]


def mean_of_the_last():
    """In how many runs it is worse than the last weights, of how many, by how much at most; in how many a bit better."""
    worse = worse_means(runs())
    better = [more for more in worse if more <= 0]
    assert min(worse) > -0.0002
    return [len(worse) - len(better), len(worse), max(worse), len(better)]


def below_zero(arms):
    return sum(difference < 0 for difference in pairs(*arms))


def test_at_each_place_mamba_ssm_is_no_farther_from_padded_than_bfloat16():
    rounded, own = (at_places(arm, "bf16-mixed") for arm in ("single-mamba-ssm", "padded"))
    assert all(one < other for one, other in zip(rounded, own))


@pytest.mark.parametrize("unit", ["files", "functions", "mixture"])
def test_inside_2048_bytes_packed_and_padded_are_equivalent(unit):
    for arm in {"mixture": ("packed-reset", "packed-reset-long")}.get(unit, ("packed-reset",)):
        assert all(abs(end) < 0.005 for end in inside(arm, unit))


SENTENCES = [
    (
        rf"trains {N} million tokens a second, [^|]*? has {N} million with CUDA graphs, and {N} million without\. "
        rf"That is {N} and {N} times",
        lambda: [
            *(millions(arm) for arm in ("packed-reset, beside single", "single", "single, eager")),
            *(millions("packed-reset, beside single") / millions(arm) for arm in ("single", "single, eager")),
        ],
    ),
    (rf"quartiles lie at most {N} % of a median apart", lambda: [100 * max(map(spread, BESIDE))]),
    (rf"The difference is {N} nats \[{N}, {N}\]", lambda: parity(OURS)),
    (rf"tests give p = {N};", lambda: cells("parity", "parity-files", OURS, "p")),
    (rf"what the order of sums does, {N} \[{N}, {N}\]", lambda: parity(CONTROL)),
    (
        rf"deviation of the paired differences is {N}, the largest of eight {N}\.",
        lambda: cells("parity", "calibration-files", LAST, "sd", "largest"),
    ),
    (r"Of (\d+) intervals by place [^|]*? (none) excludes zero", by_place),
    (
        rf"last weights in (\d+) of (\d+) runs, by up to {N}; in (\w+) it is better by less than 0\.0002",
        mean_of_the_last,
    ),
    (r"mixture (\d+) of (\d+) exclude zero", elsewhere_by_place),
    (
        rf"{N} % of tokens stand behind another document\. It is {N} % on functions, [^|]*?, and {N} % on the mixture",
        lambda: [behind_another(unit) for unit in ("files", "functions", "mixture")],
    ),
    (
        rf"Right by the estimates, {N} and {N}; open by their intervals, \[{N}, {N}\] and \[{N}, {N}\]",
        lambda: [
            parity(CONTROL)[0],
            *cells("parity", "calibration-files", LAST, "sd"),
            *parity(CONTROL)[1:],
            *interval_of_sd(),
        ],
    ),
    (
        rf"they differ by {N} to {N} of the gradient's norm",
        lambda: [limit(at_places()) for limit in (min, max)],
    ),
    (
        rf"order do as much: {N}\. In bfloat16 they differ by about {N} at most, where [^|]*? is up to {N} from",
        lambda: [
            max(at_places("packed-control")),
            *(gradients(arm, "bf16-mixed", "relative_difference")[0] for arm in ("packed-reset", "padded")),
        ],
    ),
    (rf"at least {N} times less at each place", lambda: [min(times_less())]),
    (rf"Right in its second: at least {N} times less", lambda: [min(times_less())]),
    (
        rf"Sums in another order move it by up to {N} there",
        lambda: [max(at_places("packed-control", "bf16-mixed"))],
    ),
    (rf"first half: {N} and {N} at two of four places", lambda: [x for x in at_places() if x >= 1e-6]),
    (
        rf"packed minus padded is {N} \[{N}, {N}\], below [^|]*? and its control minus itself {N} \[{N}, {N}\]\.",
        lambda: [*at_higher_rate("packed-reset"), *at_higher_rate("packed-control")],
    ),
    (rf"There the difference is {N} nats \[{N}, {N}\], eight pairs", lambda: parity(OURS, "functions")),
    (
        rf"over seeds give p = {N}, Holm's {N}\.",
        lambda: [cells("parity", "parity-functions", OURS, "p")[0] * times for times in (1, 2)],
    ),
    (rf"order do as little there: {N} \[{N}, {N}\], five", lambda: parity(CONTROL, "functions")),
    (
        rf"Whole documents are at {N} \[{N}, {N}\] after 33 million bytes, above zero in (\w+) of (\w+) seeds\. [^|]*? "
        rf"they are at {N} \[{N}, {N}\], above zero in (\w+) of (\w+)\.",
        lambda: [
            *parity(OURS, "mixture"),
            *above_zero(*MIXTURE)[::-1],
            *parity({"arm": "packed-reset-long"}, "mixture"),
            *above_zero(*LONG)[::-1],
        ],
    ),
    (
        rf"Over seeds alone the longer runs do \(p = {N}\)",
        lambda: cells("parity", "parity-mixture", {"arm": "packed-reset-long"}, "p"),
    ),
    (
        rf"Inside these bytes packed minus padded is {N} \[{N}, {N}\], and {N} \[{N}, {N}\] in the longer",
        lambda: [*inside("packed-reset", "mixture"), *inside("packed-reset-long", "mixture")],
    ),
    (
        rf"The places beyond hold {N} % of the targets, in (\w+) of (\w+) packages\. [^|]*? open: {N} \[{N}, {N}\] in the",
        lambda: [*beyond_2048(), *inside("packed-reset-long", "mixture", "beyond")],
    ),
    (
        r"On the mixture (\w+) of (\w+) seeds have one sign, [^|]*? longer runs (\w+) of (\w+)\.",
        lambda: [*above_zero(*MIXTURE)[::-1], *above_zero(*LONG)[::-1]],
    ),
    (
        rf"control, which is packed too, is above padded in (\w+) of (\w+) seeds, by {N} \[{N}, {N}\]",
        lambda: [
            *above_zero("packed-control", "padded", "mixture")[::-1],
            *resampled("packed-control", "padded", "mixture"),
        ],
    ),
    (
        rf"Longer runs did not lower it: {N}\.",
        lambda: [statistics.stdev(pairs(*LONG))],
    ),
    (
        rf"within {N} of padded's with ours and within {N} with mamba-ssm's, [^|]*? ours differs by up to {N}, [^|]*? differs by "
        rf"{N} to {N}\.",
        lambda: [
            *(max(at_places(arm)) for arm in ("single", "single-mamba-ssm")),
            max(at_places("single", "bf16-mixed")),
            *(limit(at_places("single-mamba-ssm", "bf16-mixed")) for limit in (min, max)),
        ],
    ),
    (
        rf"\*\*Right:\*\* {N} with mamba-ssm's and {N} with ours\. In bfloat16 {N} at most, at each place below",
        lambda: [
            *(max(at_places(arm)) for arm in ("single-mamba-ssm", "single")),
            max(at_places("single-mamba-ssm", "bf16-mixed")),
        ],
    ),
    (rf"\*Open:\* {N} \[{N}, {N}\]\.", lambda: parity({"arm": "packed-reset-long"}, "mixture")),
    (
        r"they overlap, and spread (\w+) times as much",
        lambda: [statistics.stdev(pairs(*AT_004)) / statistics.stdev(pairs("packed-reset", "padded"))],
    ),
    (rf"first five that report have it better, by {N} in the mean", lambda: [-statistics.fmean(pairs(*AT_004))]),
    (
        rf"\[{N}, {N}\], below zero in (\w+) of (\w+), and its control",
        lambda: [*at_higher_rate("packed-reset")[1:], below_zero(AT_004), len(pairs(*AT_004))],
    ),
    (
        rf"Rounding moves single runs farther there, once by {N}\.",
        lambda: [max(map(abs, pairs("packed-control-rate", "packed-reset-rate")))],
    ),
    (
        rf"pairs as far there, by up to {N}, with a mean of {N} \[{N}, {N}\] \(five",
        lambda: [*cells("parity", "calibration-mixture", LAST, "largest"), *parity(CONTROL, "mixture")],
    ),
    (
        rf"deviation of {N}, as on files\. On the mixture it is {N} for the control, and {N} for packed",
        lambda: [
            *cells("parity", "calibration-files", LAST, "sd"),
            *cells("parity", "calibration-mixture", LAST, "sd"),
            spread_of_pairs("mixture"),
        ],
    ),
    (
        rf"differ by {N} nats \(median over steps and seeds\)\. [^|]*? order differ by {N}\.",
        lambda: [*drift("packed-reset", "later"), *drift("packed-control", "later")],
    ),
    (
        rf"Functions \({N} and {N}\) and the mixture \({N} and {N}\) are alike",
        lambda: [
            drift(arm, "later", unit=unit)[0]
            for unit in ("functions", "mixture")
            for arm in ("packed-reset", "packed-control")
        ],
    ),
    (
        rf"farther on files, once {N} \(seed 1\) against {N}\.",
        lambda: [*drift("packed-reset", "largest"), *drift("packed-control", "largest")],
    ),
    (
        rf"at most {N}, later by up to {N}, and their validation losses by {N} at the end",
        lambda: drift("packed-reset-float32", "early", "largest", "validation"),
    ),
    (
        rf"with one pair: {N} up to step 150, and {N} at step 200",
        lambda: [float32_to(150), float32_to(200)],
    ),
    (
        rf"Padded has {N} at 0\.004, and packed with reset {N}\. [^|]*? they have {N} and {N}\.",
        lambda: [loss_at_rate(arm, rate) for rate in (0.004, 0.002) for arm in ("padded", "packed-reset")],
    ),
    (
        rf"worse in both seeds, by {N} and {N}\. Two seeds decide nothing: {N} \[{N}, {N}\]",
        lambda: tuned_pairs(0.004),
    ),
    (rf"seeds have packed worse, by {N} and {N}\.", lambda: tuned_pairs(0.004)[:2]),
    (rf"Single minus padded is {N} nats \[{N}, {N}\], five seeds", lambda: parity({"arm": "single"})),
    (rf"as CUDA graphs \(p = {N}; exploratory", lambda: cells("parity", "parity-files", {"arm": "single"}, "p")),
    (
        rf"as many steps on functions and {N} times as many on the mixture\.",
        lambda: equal_time("mixture")[:1],
    ),
    (
        rf"It ends {N} nats \[{N}, {N}\] and {N} \[{N}, {N}\] lower",
        lambda: [*equal_time("functions")[1:], *equal_time("mixture")[1:]],
    ),
    (rf"more steps and ends {N} \[{N}, {N}\] lower", lambda: equal_time("files")[1:]),
    (rf"makes {N} % more steps", lambda: [100 * (equal_time("files")[0] - 1)]),
    (
        rf"has {N} in place of {N}: a difference of {N}, where the control's largest is {N}",
        lambda: [*again("parity")[0], *cells("parity", "calibration-files", LAST, "largest")],
    ),
    (
        rf"Wrong on files \({N}x by forty rounds, and by ten beside single\) and on the mixture \({N}x\), "
        rf"right on functions \({N}x\)",
        lambda: [
            equal_time("files")[0],
            *(equal_time(unit)[0] for unit in ("mixture", "functions")),
        ],
    ),
    (
        rf"Not shown: {N} against {N} for paired differences, {N} against {N} over seeds",
        lambda: [
            cells("parity", "calibration-files", CONTROL | {"weights": weights}, column)[0]
            for column in ("sd", "sd_of_seeds")
            for weights in ("mean of the last, by the trainer", "last, by the trainer")
        ],
    ),
    (
        rf"differ by {N} to {N} nats",
        lambda: [
            limit(abs(one["metrics"]["perplexity.loss"] - one["metrics"]["val_loss"]) for one in files()[:6])
            for limit in (min, max)
        ],
    ),
    (rf"better by {N} to {N} in all six", lambda: [min(worse_means()[:6]), max(worse_means()[:6])]),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("parity", pattern) == rounded_as(said("parity", pattern), numbers())
