"""Numbers in the sentences of parity's page are those of the committed tables and records."""

import statistics

import pytest
from parity_numbers import (
    above_zero,
    at_higher_rate,
    behind_another,
    below_zero,
    by_place,
    elsewhere_by_place,
    equal_time,
    excluding_zero,
    files,
    interval_of_sd,
    loss_at_rate,
    pairs,
    placed,
    resampled,
    runs,
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
    interval,
    over_seeds,
    parity,
    rounded_as,
    said,
)
from timing_numbers import BESIDE, millions, spread

from packmamba.report.inference import seeds_for_equivalence

MIXTURE = ("packed-reset", "padded", "mixture")
LONG = ("packed-reset-long", "padded-long", "mixture")
CONTROLS = ("packed-control", "padded", "mixture")
AT_004 = ("packed-reset-rate", "padded-rate")
CONTROLS_AT_004 = ("packed-control-rate", "padded-rate")
LONGER = {"arm": "packed-reset-long"}
MORE, LEAK = {"arm": "packed-reset-more"}, {"arm": "packed-leak-more"}


def points(arm):
    """Of next_line: an arm minus padded, in points, with its interval over seeds."""
    return [100 * x for x in interval("parity", "evaluation-next_line-mixture", {"arm": arm}, "difference")]


def chosen(arm):
    """Per cent of next_line's questions."""
    return 100 * cells("parity", "evaluation-next_line-mixture", {"arm": arm}, "choice_accuracy")[0]


def test_the_mixture_once_more_has_seeds_and_documents_that_no_other_run_has():
    again = [one for one in runs() if one["arm"].endswith("-more")]
    others = {one["seed"] for one in runs() if not one["arm"].endswith("-more")}
    assert len(again) == 24 and not {one["seed"] for one in again} & others
    assert {one["metrics"]["perplexity.documents"] for one in again} == {4000}
    packages = [{point["group"] for point in one["curves"]["perplexity.by_group"]} for one in again]
    assert all(one == packages[0] for one in packages) and len({one["commit"] for one in again}) == 1


def loss_of(arm):
    """On files, of every seed."""
    return [
        one["metrics"]["perplexity.loss"]
        for one in runs()
        if (one["arm"], one["config"]["data"]["unit"], one["metrics"]["steps"]) == (arm, "files", 500)
    ]


def spreads():
    """Standard deviation of pairs on the mixture: control, packed minus padded, the same in longer runs."""
    return [statistics.stdev(pairs(*some)) for some in (("packed-control", *OURS.values(), "mixture"), MIXTURE, LONG)]


def longest_document():
    """Its targets: of the last places, which no other document reaches."""
    last = max(padded_long(), key=lambda point: point["start"])
    assert last["documents"] == 1
    return last["start"] + last["targets"]


@pytest.mark.parametrize(
    "arms", [("packed-reset", "padded", "mixture"), ("packed-reset-long", "padded-long", "mixture")]
)
def test_the_table_by_place_has_what_the_records_say(arms):
    """Means are made here by another way than the table's."""
    (whole,), (far,) = ([statistics.fmean(pairs(*arms, place=place))] for place in (0, 2048))
    (share,) = cells("parity", "places-mixture", {"arm": arms[0]}, "share")
    near, beyond = (placed({"arm": arms[0]}, places)[0] for places in ("inside", "beyond"))
    assert beyond == pytest.approx(far, abs=1e-8)
    assert (1 - share) * near + share * beyond == pytest.approx(whole, abs=1e-8)


def test_the_longest_file_has_a_quarter_of_the_later_targets_and_more_than_twice_the_loss():
    far = [point for point in padded_long() if point["start"] >= 2048]
    package = max(far, key=lambda point: point["start"])["group"]
    own, others = ([p for p in far if (p["group"] == package) == its] for its in (True, False))
    own_targets, targets = (sum(p["targets"] for p in some) for some in (own, others))
    assert 0.24 < own_targets / (own_targets + targets) < 0.26
    losses = [sum(p["nats"] for p in some) / sum(p["targets"] for p in some) for some in (own, others)]
    assert losses[0] > 2 * losses[1]


def documents_beyond(place):
    return sum(point["documents"] for point in padded_long() if point["start"] == place)


def padded_long():
    (found,) = (one for one in runs() if (one["arm"], one["seed"]) == ("padded-long", 1))
    return found["curves"]["perplexity.by_group"]


def mean_of_the_last():
    """In how many runs it is worse than the last weights, of how many, by how much at most; in how many a bit better."""
    worse = worse_means(runs())
    better = [more for more in worse if more <= 0]
    assert min(worse) > -0.0002
    return [len(worse) - len(better), len(worse), max(worse), len(better)]


def test_where_and_at_which_commits_the_runs_at_twice_the_rate_ran():
    at = {(one["arm"], one["seed"]): one for one in runs() if one["arm"] in AT_004}
    other = [seed for seed in range(1, 9) if len({at[arm, seed]["commit"] for arm in AT_004}) == 2]
    on_h200 = {key for key, one in at.items() if "H200" in one["hardware"]["gpus"][0]}
    assert other == [2, 3, 6] and on_h200 == {("padded-rate", 3), *((arm, seed) for arm in AT_004 for seed in (1, 2))}


def test_the_control_at_twice_the_rate_is_equivalent_to_padded():
    assert all(abs(end) < 0.005 for end in resampled(*CONTROLS_AT_004))


@pytest.mark.parametrize("unit", ["files", "functions", "mixture"])
def test_in_the_first_2048_bytes_packed_and_padded_are_equivalent(unit):
    for arm in {"mixture": ("packed-reset", "packed-reset-long")}.get(unit, ("packed-reset",)):
        assert all(abs(end) < 0.005 for end in placed({"arm": arm}, unit=unit))


SENTENCES = [
    (
        rf"it is equivalent: {N} \[{N}, {N}\] \(exploratory, predicted\)",
        lambda: parity(MORE, "mixture"),
    ),
    (
        rf"Packed minus padded is {N} \[{N}, {N}\], eight pairs, p = {N}\. It is {N} \[{N}, {N}\] in the first 2048 bytes "
        rf"and {N} \[{N}, {N}\] farther on [^|]*? Pairs have a standard deviation of {N}\.",
        lambda: [
            *parity(MORE, "mixture"),
            *cells("parity", "parity-mixture", MORE, "p"),
            *placed(MORE),
            *placed(MORE, "beyond"),
            statistics.stdev(pairs("packed-reset-more", "padded-more", "mixture")),
        ],
    ),
    (
        rf"packed is right in {N} %, padded in {N} %: {N} points \[{N}, {N}\]",
        lambda: [chosen("packed-reset-more"), chosen("padded-more"), *points("packed-reset-more")],
    ),
    (
        rf"is at {N} \[{N}, {N}\] over padded; over seeds alone at \[{N}, {N}\]\. On `next_line` it is at {N} "
        rf"points \[{N}, {N}\]",
        lambda: [
            *parity(LEAK, "mixture"),
            *over_seeds(pairs("packed-leak-more", "padded-more", "mixture"))[1:],
            *points("packed-leak-more"),
        ],
    ),
    (rf"by its whole interval\. \*\*Right:\*\* {N} \[{N}, {N}\]\.", lambda: parity(MORE, "mixture")),
    (rf"\*\*Right\*\*, over seeds: {N} points \[{N}, {N}\]", lambda: points("packed-reset-more")),
    (
        rf"\*Right by the estimate, {N}; its interval just holds zero\.\* \*\*Right\*\* of `next_line`: {N} points \[{N}, {N}\]",
        lambda: [parity(LEAK, "mixture")[0], *points("packed-leak-more")],
    ),
    (
        rf"On the mixture that is open: {N} \[{N}, {N}\], above padded in (\w+) of (\w+) seeds; [^|]*? in (\w+) of (\w+)\.",
        lambda: [*parity(OURS, "mixture"), *above_zero(*MIXTURE)[::-1], *above_zero(*LONG)[::-1]],
    ),
    (
        rf"the control ends up to {N} from packed on files, up to {N} on the mixture",
        lambda: [cells("parity", f"calibration-{unit}", LAST, "largest")[0] for unit in ("files", "mixture")],
    ),
    (
        rf"lowers both losses by {N} to {N} nats, far more",
        lambda: sorted(
            statistics.fmean(loss_of(arm)) - statistics.fmean(loss_of(f"{arm}-rate"))
            for arm in ("padded", "packed-reset")
        ),
    ),
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
        rf"Packed minus padded is {N} \[{N}, {N}\], below [^|]*? and its control minus itself {N} \[{N}, {N}\]\.",
        lambda: [*at_higher_rate("packed-reset"), *at_higher_rate("packed-control")],
    ),
    (rf"There the difference is {N} nats \[{N}, {N}\], eight pairs", lambda: parity(OURS, "functions")),
    (
        rf"over seeds give p = {N}, Holm's {N}\.",
        lambda: [cells("parity", "parity-functions", OURS, "p")[0] * times for times in (1, 2)],
    ),
    (rf"order do as little there: {N} \[{N}, {N}\], five", lambda: parity(CONTROL, "functions")),
    (
        r"On the mixture (\w+) of (\w+) seeds have one sign, [^|]*? longer runs (\w+) of (\w+)\.",
        lambda: [*above_zero(*MIXTURE)[::-1], *above_zero(*LONG)[::-1]],
    ),
    (rf"\*Open:\* {N} \[{N}, {N}\]\.", lambda: parity({"arm": "packed-reset-long"}, "mixture")),
    (
        rf"\[{N}, {N}\], below zero in (\w+) of (\w+), and its control",
        lambda: [*at_higher_rate("packed-reset")[1:], below_zero(AT_004), len(pairs(*AT_004))],
    ),
    (
        rf"Rounding moves single runs farther there than at 0\.002, once by {N}\.",
        lambda: [max(map(abs, pairs("packed-control-rate", "packed-reset-rate")))],
    ),
    (rf"too\.\*\* There {N} % of the tokens stand behind another document", lambda: [behind_another("functions")]),
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
    (
        rf"Whole documents are at {N} \[{N}, {N}\] after 33 million bytes, above zero in (\w+) of (\w+) seeds\. [^|]*? "
        rf"they are at {N} \[{N}, {N}\], above zero in (\w+) of (\w+)\.",
        lambda: [
            *parity(OURS, "mixture"),
            *above_zero(*MIXTURE)[::-1],
            *parity(LONGER, "mixture"),
            *above_zero(*LONG)[::-1],
        ],
    ),
    (
        rf"There packed is at {N} \[{N}, {N}\], and in the longer runs at {N} \[{N}, {N}\] \(\[table",
        lambda: [*placed(OURS), *placed(LONGER)],
    ),
    (
        rf"The later bytes hold {N} % of the targets\. There it is at {N} \[{N}, {N}\], above zero in (\w+) of (\w+) seeds, "
        rf"and in the longer runs at {N} \[{N}, {N}\]\.",
        lambda: [
            *(100 * share for share in cells("parity", "places-mixture", OURS, "share")),
            *placed(OURS, "beyond"),
            *above_zero(*MIXTURE, place=2048)[::-1],
            *placed(LONGER, "beyond"),
        ],
    ),
    (r"It has ([\d,]+) bytes, a quarter", lambda: [1000 * round(longest_document() / 1000)]),
    (
        rf"Without its package whole documents are at {N} \[{N}, {N}\], and in the longer runs at {N} \[{N}, {N}\]",
        lambda: [*placed(OURS, "others"), *placed(LONGER, "others")],
    ),
    (
        rf"differ by up to {N} in one seed; the mean is {N} \[{N}, {N}\] \(five",
        lambda: [*cells("parity", "calibration-mixture", LAST, "largest"), *parity(CONTROL, "mixture")],
    ),
    (
        rf"above padded, in (\w+) of (\w+) seeds, by {N} \[{N}, {N}\]; over seeds alone the interval, \[{N}, {N}\]",
        lambda: [
            *above_zero(*CONTROLS)[::-1],
            *resampled(*CONTROLS),
            *over_seeds(pairs(*CONTROLS))[1:],
        ],
    ),
    (
        rf"deviation of {N}, as on files\. On the mixture it is {N} for the control, and {N} for packed minus padded\. "
        rf"The longer runs have {N}: [^|]*? By the rule that takes {N} to {N} seeds",
        lambda: [
            *cells("parity", "calibration-files", LAST, "sd"),
            *spreads(),
            *(limit(seeds_for_equivalence(one, 0.005) for one in spreads()) for limit in (min, max)),
        ],
    ),
    (
        rf"help most: {N} are read here, and (\w+) of them reach beyond 32,768 bytes",
        lambda: [400, documents_beyond(32768)],
    ),
    (
        rf"Control minus padded is {N} \[{N}, {N}\]\s+\((\w+) pairs\), inside",
        lambda: [*resampled(*CONTROLS_AT_004), len(pairs(*CONTROLS_AT_004))],
    ),
    (
        rf"without these seeds packed minus padded is {N}\.",
        lambda: [statistics.fmean(one for seed, one in enumerate(pairs(*AT_004), 1) if seed not in (2, 3, 6))],
    ),
    (
        rf"the standard deviation of pairs is {N} in place of {N}",
        lambda: [statistics.stdev(pairs(*AT_004)), statistics.stdev(pairs("packed-reset", "padded"))],
    ),
    (r"and (none) of (\d+) in the mixture's longer runs", lambda: excluding_zero("mixture", LONGER["arm"])),
    (rf"packed is lower, by {N} in the mean", lambda: [-statistics.fmean(pairs(*AT_004))]),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("parity", pattern) == rounded_as(said("parity", pattern), numbers())
