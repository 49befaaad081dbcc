"""Numbers in the sentences of the page of boundaries on post-training with each start, and with shuffled rows."""

from math import inf

import pytest
from boundaries_numbers import (
    AFTER,
    FIVE,
    PLACES,
    after,
    loss_at_places,
    mean_loss,
    of_arms,
    over_again,
    packages_of_own,
    record_of,
)
from study_numbers import N, cells, interval, ordered, primary, rounded_as, said

CI = rf"{N} \[{N}, {N}\]"
LAST = (6, 7, 8)


def shuffled(what, places="beyond"):
    return ordered(what, places, AFTER["setting"])


def seed_by_seed(arm, other, places=(2048, 65536)):
    return [
        loss_at_places(f"{arm}-post", seed, *places) - loss_at_places(f"{other}-post", seed, *places) for seed in LAST
    ]


SENTENCES = [
    (
        rf"On seeds 1 to 5 the ladder's own is {N} below its zero, and {N} below the zero made again",
        lambda: [mean_loss("zero", FIVE) - mean_loss("own", FIVE), -over_again("own", FIVE)],
    ),
    (
        rf"Own ends at {CI} over zero beyond T and at {CI} inside\. Beyond T all (\w+) seeds and {N} of {N} packages",
        lambda: [
            *after("own over zero"),
            *after("own over zero", "inside"),
            *cells("boundaries", "agreement", AFTER | {"what": "own over zero", "places": "beyond"}, "seeds"),
            *packages_of_own(AFTER, "of_packages"),
        ],
    ),
    (
        rf"Own's context gain at 8 T is {CI} over zero's\. Exploratory\. [^|]*? loss beyond T by {N}, from zero by {N}\*\* "
        rf"\(seeds 1 to 5\)\. With all eight foreign ends at {CI} over zero there\. After a whole run it is at {N}\.",
        lambda: [
            *interval("boundaries", "gain-differences", {"setting": AFTER["setting"], "arm": "own"}, "gain_8"),
            *(-over_again(arm, FIVE) for arm in ("foreign-post", "zero-post")),
            *after("coverage"),
            primary("coverage", "beyond")[0],
        ],
    ),
    (
        rf"500 steps with foreign starts harm by {CI}, and with own starts gain {CI}\.",
        lambda: [*after("coverage"), *(-after("own over zero")[i] for i in (0, 2, 1))],
    ),
    (
        rf"It ends at {CI} over zero beyond T and at {CI} inside, in each of (\w+) seeds and in all packages\. "
        rf"Foreign is {CI} above it beyond T\.",
        lambda: [*after("noise"), *after("noise", "inside"), len(LAST), *after("foreign over noise")],
    ),
    (
        rf"Own minus shuffled is {CI} there, in each of (\w+) seeds\. Inside T it is at {CI}: open, above in "
        rf"all (\w+)\. Over all places it is at {CI}, just below zero\. [^|]*? Shuffled rows "
        rf"are at {CI} over zero in the pool beyond T\.",
        lambda: [
            *shuffled("own, shuffled"),
            sum(one < 0 for one in seed_by_seed("own", "shuffled")),
            *shuffled("own, shuffled", "inside"),
            sum(one > 0 for one in seed_by_seed("own", "shuffled", (0, 2048))),
            *of_arms("own", "shuffled", (0, inf), AFTER["setting"]),
            *shuffled("shuffled"),
        ],
    ),
    (rf"own ends {N} \[{N}, {N}\] below shuffled", lambda: [-shuffled("own, shuffled")[i] for i in (0, 2, 1)]),
    (
        rf"of noise, {CI}\. \*Right of the rest by the estimates of three seeds: shuffled rows at {CI} over zero, own minus "
        rf"shuffled at {CI}\.",
        lambda: [*after("noise"), *shuffled("shuffled"), *shuffled("own, shuffled")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())


def test_noise_harms_in_each_seed_and_package():
    for places in PLACES:
        row = AFTER | {"what": "noise", "places": places}
        seeds, of_seeds, some, every = cells(
            "boundaries", "agreement", row, "seeds", "of_seeds", "packages", "of_packages"
        )
        assert (seeds, some) == (of_seeds, every) == (3, every)


def test_arms_of_a_seed_begin_with_the_same_weights_at_one_commit():
    for seed in LAST:
        arms = [record_of(f"{arm}-post", seed) for arm in ("zero", "foreign", "own", "noise", "shuffled")]
        assert len({one["metrics"]["started_from_checksum"] for one in arms}) == 1
        assert len({one["commit"] for one in arms}) == 1


def test_these_steps_in_the_pool_cost_less_than_own_states_gain():
    assert -shuffled("shuffled")[0] < -after("own over zero")[0]
