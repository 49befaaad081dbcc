"""Numbers in the sentences of the page of boundaries on runs that were made again, and on what is held against them."""

import pytest
from boundaries_numbers import (
    BEYOND,
    again_at,
    again_on,
    loss_at_places,
    made_again,
    mean_loss,
    of_arms,
    over_zero,
    record_of,
)
from study_numbers import MAIN, N, again, gain, interval, more_gain, over_seeds, rounded_as, said

CI = rf"{N} \[{N}, {N}\]"
INSIDE = (0, 2048)
SEEDS = (1, 2, 5, 6, 7, 8)
"""Of own."""


def over(arm, seeds=range(1, 9), places=BEYOND, other="zero"):
    """An arm minus another made again on H100s, seed by seed."""
    return [loss_at_places(arm, seed, *places) - again_at(seed, places, other, "H100") for seed in seeds]


def own_minus_zero(places=BEYOND):
    """Both made again on H100s, seed by seed."""
    return [again_at(seed, places, "own", "H100") - again_at(seed, places, "zero", "H100") for seed in SEEDS]


def of_zero():
    return [difference for *_, difference in again("boundaries", arm="zero")]


def gain_at_8(arm, seed):
    points = record_of(arm, seed)["curves"]["long_context.context_gain"]
    return next(point["gain"] for point in points if point["windows"] == 8)


def of_the_ladder(what):
    setting = {"setting": MAIN, "what": what}
    return [x for where in ("inside", "beyond") for x in interval("boundaries", "ladder", setting, where)]


SENTENCES = [
    (
        rf"end {N} above the committed run at most: {N} and {N} above that of seed 1, {N} above [^|]*? 2, {N} above [^|]*? 4, "
        rf"{N} above [^|]*? 5; on seed 3 {N} above and {N} below\.",
        lambda: [
            max(again_on("H200")),
            *(again_on("H200")[k] for k in (0, 1, 2, 5, 6, 3)),
            -again_on("H200")[4],
        ],
    ),
    (
        rf"seeds 1 to 8, are at {N}, {N}, {N}, {N}, {N}, {N}, {N} and {N}\.",
        lambda: again_on("H100"),
    ),
    (
        rf"seeds 1, 2 and 5 to 8 are at {N}, {N}, {N}, {N}, {N} and {N}\.",
        lambda: again_on("H100", "own"),
    ),
    (r"(\w+) runs of zero were made again", lambda: [len(of_zero())]),
    (r"(\w+) of (\w+) are higher: a small", lambda: [sum(one > 0 for one in of_zero()), len(of_zero())]),
    (
        rf"Own scan's minus own's is {CI} \(over",
        lambda: over_seeds([gain_at_8("own-scan", seed) - gain_at_8("own", seed) for seed in range(1, 9)]),
    ),
    (
        rf"Over zero it is at {CI} beyond: open\. [^|]*? it is at {CI}, below it in (\w+) of (\w+)\. That",
        lambda: [
            *of_arms("own scan", "zero"),
            *over_seeds(over("own-scan")),
            sum(one < 0 for one in over("own-scan")),
            len(over("own-scan")),
        ],
    ),
    (
        rf"the change is {CI}\.",
        lambda: over_seeds([late - first for late, first in zip(own_minus_zero(), over_zero("own", SEEDS))]),
    ),
    (
        rf"made again: own is below zero beyond T in the mean again, by {N} \[{N}, {N}\]",
        lambda: [-over_seeds(own_minus_zero())[i] for i in (0, 2, 1)],
    ),
    (
        rf"(\w+) of (\w+) of these were higher, so [^|]*? own minus zero is at {CI} beyond T there, over (\w+) seeds, three",
        lambda: [sum(one > 0 for one in of_zero()), len(of_zero()), *over_seeds(own_minus_zero()), len(SEEDS)],
    ),
    (
        rf"Own minus zero is {CI} beyond T, just below zero, and below it in (\w+) of (\w+)\. The first time it was {N} on these "
        rf"seeds; [^|]*? Inside T it is at {CI} \(all over",
        lambda: [
            *over_seeds(own_minus_zero()),
            sum(one < 0 for one in own_minus_zero()),
            len(SEEDS),
            mean_loss("own", SEEDS) - mean_loss("zero", SEEDS),
            *over_seeds(own_minus_zero(INSIDE)),
        ],
    ),
    (
        rf"beyond T by the estimate: {CI}; (\w+) of (\w+) are below zero, [^|]*? did not run\.\* "
        rf"\*\*Right\*\* inside T: {CI}, over",
        lambda: [
            *over_seeds(own_minus_zero()),
            sum(one < 0 for one in own_minus_zero()),
            len(SEEDS),
            *over_seeds(own_minus_zero(INSIDE)),
        ],
    ),
    (
        rf"Over zero made again on H100s it is at {CI} \(over seeds alone\), above it in each of (\w+)\.",
        lambda: [*over_seeds(over("noise")), sum(one > 0 for one in over("noise"))],
    ),
    (
        rf"Whole is at {CI} over own inside T and at {CI} beyond \(three",
        lambda: of_the_ladder("whole"),
    ),
    (rf"\*\*Wrong\*\*, far: {CI}, three seeds", lambda: of_the_ladder("whole")[3:]),
    (rf"as small as zero's: {CI} more at 8 T", lambda: more_gain("whole")),
    (
        rf"as large as with both:\*\* {N} at 8 T, as own's \(eight seeds each\), and {N} \[{N}, {N}\] above zero's",
        lambda: [gain("own scan")[0], *more_gain("own scan")],
    ),
    (rf"as large as with both:\*\* {N} at 8 T", lambda: [gain("own")[0]]),
    (
        rf"Own scan is at {CI} over own inside T and at {CI} beyond, above it in (\w+) of eight seeds at both\.",
        lambda: [*of_the_ladder("own scan"), 6],
    ),
    (
        rf"Over own made again on H100s it is at {CI} beyond, above it in (\w+) of (\w+)\.",
        lambda: [
            *over_seeds(over("own-scan", SEEDS, other="own")),
            sum(one > 0 for one in over("own-scan", SEEDS, other="own")),
            len(SEEDS),
        ],
    ),
    (
        rf"\*Open: {CI} inside T and {CI} beyond; wrong by the estimate beyond T",
        lambda: of_the_ladder("own scan"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())


def test_own_scan_is_above_own_in_as_many_seeds_as_the_page_says():
    for places in (INSIDE, BEYOND):
        pairs = [loss_at_places("own-scan", s, *places) - loss_at_places("own", s, *places) for s in range(1, 9)]
        assert sum(one > 0 for one in pairs) == 6


def test_where_and_at_which_commits_they_ran():
    assert set(made_again("own", "H100")) == set(SEEDS) and set(made_again("zero", "H100")) == set(range(1, 9))
    assert len({one["commit"] for one in made_again("own", "H100").values()}) == 1
    (ours,) = {one["commit"] for one in made_again("own", "H100").values()}
    zeros = {seed: one["commit"] for seed, one in made_again("zero", "H100").items()}
    assert len(set(zeros.values())) == 2 and {seed for seed in zeros if zeros[seed] == ours} == {6, 7, 8}
    for arm, gpu in (("own-scan", "H100"), ("own", "H200"), ("noise", "H200")):
        assert all(gpu in record_of(arm, seed)["hardware"]["gpus"][0] for seed in range(1, 9)), arm
