"""Numbers in the sentences of the page of boundaries on sums in another order, and on a larger model."""

from math import inf

import pytest
from boundaries_numbers import FIVE, below_zero, loss_at_places, of_arms, packages_of_own, record_of
from study_numbers import MAIN, N, gain, interval, more_gain, over_seeds, rounded_as, said

LARGER = "T = 2048, 47M, 100M tokens"
SETTING = {"setting": LARGER}
PLACES = ("inside", "beyond")
RANGES = {"inside": (0, 2048), "beyond": (2048, 32 * 2048)}


def minus_zero(where, arm="control", of="", seeds=range(1, 9)):
    """An arm minus zero, seed by seed."""
    return [loss_at_places(arm + of, s, *RANGES[where]) - loss_at_places("zero" + of, s, *RANGES[where]) for s in seeds]


def ladder(what, setting=MAIN):
    return [x for where in PLACES for x in interval("boundaries", "ladder", {"setting": setting, "what": what}, where)]


def most():
    return [max(map(abs, minus_zero(where))) for where in PLACES]


SENTENCES = [
    (rf"minus zero is {N} \[{N}, {N}\] inside T and {N} \[{N}, {N}\] beyond \(\[table", lambda: ladder("control")),
    (
        rf"of the mean: {N} \[{N}, {N}\] inside and {N} \[{N}, {N}\] beyond\.\* \*\*Wrong\*\* of each seed: one is {N} "
        rf"away inside, another {N} beyond\.",
        lambda: [*ladder("control"), *most()],
    ),
    (
        rf"differ by up to {N} inside and {N} beyond, (\w+) below zero of (\w+) beyond\.",
        lambda: [*most(), sum(x < 0 for x in minus_zero("beyond")), len(minus_zero("beyond"))],
    ),
    (
        rf"Its eight pairs differ by up to {N}, and have no one sign: (\w+) of (\w+) are below zero beyond T\. In the mean "
        rf"it is at {N} \[{N}, {N}\] beyond T, where own is at {N} and foreign at {N}\.",
        lambda: [
            max(most()), sum(x < 0 for x in minus_zero("beyond")), 8, *ladder("control")[3:],
            ladder("own over zero")[3], ladder("coverage")[3],
        ],
    ),
    (
        rf"Own minus zero is {N} \[{N}, {N}\] inside T and {N} \[{N}, {N}\] beyond\. Beyond T it is below zero in (\w+) of "
        rf"(\w+) seeds and in {N} of {N} packages; [^|]*? At 8 T own's context gain is {N} and zero's {N} "
        rf"\(\[table\]\([^)]*\)\): {N} \[{N}, {N}\] more\.",
        lambda: [
            *ladder("own over zero", LARGER), *below_zero(SETTING), *packages_of_own(SETTING, "of_packages"),
            *(gain(arm, setting=LARGER)[0] for arm in ("own", "zero")), *more_gain("own", setting=SETTING),
        ],
    ),
    (
        rf"\*Open; wrong by the estimate: {N} \[{N}, {N}\], and at 14 million {N}\. [^|]*? smaller by {N} \[{N}, {N}\], over",
        lambda: [
            *ladder("own over zero", LARGER)[3:], ladder("own over zero")[3],
            *over_seeds([
                late - first
                for late, first in zip(minus_zero("beyond", "own", "-47M", FIVE), minus_zero("beyond", "own", "", FIVE))
            ]),
        ],
    ),
    (
        rf"Over all places it is at {N} \[{N}, {N}\]: open by a hair\. The arms",
        lambda: of_arms("own", "zero", (0, inf), LARGER),
    ),
    (
        rf"At 47 million parameters it gains {N} \[{N}, {N}\]; inside T",
        lambda: [-ladder("own over zero", LARGER)[i] for i in (3, 5, 4)],
    ),
]  # fmt: skip


def test_where_the_controls_ran():
    gpus = [record_of("control", seed)["hardware"]["gpus"][0] for seed in range(1, 9)]
    assert sum("H100" in gpu for gpu in gpus) == 7
    assert all("H200" in record_of("zero", seed)["hardware"]["gpus"][0] for seed in range(1, 9))


def test_the_larger_models_have_one_sign_and_a_commit_for_each_seed():
    assert all(x < 0 for x in minus_zero("beyond", "own", "-47M", FIVE))
    assert all(x > 0 for x in minus_zero("inside", "own", "-47M", FIVE))
    for seed in FIVE:
        arms = [record_of(f"{arm}-47M", seed) for arm in ("own", "zero")]
        assert len({one["commit"] for one in arms}) == 1
        assert all("H100" in one["hardware"]["gpus"][0] for one in arms)


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())
