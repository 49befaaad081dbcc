"""Numbers in that page's sentences on order, shuffled rows and the length of rows."""

import pytest
from boundaries_numbers import PLACES, begun, firsts, higher_from, in_training, mean_loss, over_shuffled
from study_numbers import (
    AT_512,
    MAIN,
    N,
    interval,
    ladder,
    more_gain,
    ordered,
    rounded_as,
    row_length,
    said,
)

SENTENCES = [
    (
        rf"they end {N} nats \[{N}, {N}\] above the pool's rows shuffled, beyond T, and {N} \[{N}, {N}\] above the pool",
        lambda: [*ordered("plain streams, shuffled"), *ordered("plain streams")],
    ),
    (
        rf"two sets of shuffled rows, [^|]*? differ by {N} \[{N}, {N}\] \(five seeds\)",
        lambda: ordered("rows, shuffled", setting=MAIN),
    ),
    (
        r"plain streams begin ([\d,]+) to ([\d,]+) documents, and a pool ([\d,]+) to ([\d,]+)\.",
        lambda: [
            limit(round(begun(arm, seed), -2) for seed in (101, 102, 103))
            for arm in ("plain", "pool-32")
            for limit in (min, max)
        ],
    ),
    (
        r"shuffled rows, of ([\d,]+) and of ([\d,]+) documents",
        lambda: [round(sum(begun(arm, seed) for seed in (1, 2, 3)) / 3, -2) for arm in ("rows", "shuffled")],
    ),
    (rf"their context gain at 8 T is {N} \[{N}, {N}\] over zero's", lambda: more_gain("shuffled")),
    (rf"better than own at all places from {N} on, by the means", lambda: [higher_from()]),
    (
        rf"from step 300 to 600, by {N}, and from 600 to 900, by {N}\. From step 1400 on it is above, by {N},",
        lambda: [-in_training(300, 600), -in_training(600, 900), in_training(1400, 1527)],
    ),
    (
        rf"Beyond T seeds 1 to 4 have {N}, and 5 to 8, which ran later, {N}\.",
        lambda: [mean_loss("own", some) - mean_loss("shuffled", some) for some in (range(1, 5), range(5, 9))],
    ),
    (
        rf"{N} nats beyond T for the pool over its own rows shuffled, and {N} for plain",
        lambda: [-ordered("shuffled", setting=MAIN)[0], *ordered("plain streams, shuffled")[:1]],
    ),
    (
        rf"worse by {N} \[{N}, {N}\] inside T, right, and by {N} \[{N}, {N}\] beyond, right by the estimate",
        lambda: [-ordered("shuffled", where, MAIN)[i] for where in PLACES for i in (0, 2, 1)],
    ),
    (
        rf"together they give {N}\.",
        lambda: [-ordered("shuffled")[0] + ladder("beyond")[0]],
    ),
    (
        rf"Zero in the pool is {N} \[{N}, {N}\] above these rows, beyond T\.",
        lambda: [-ordered("shuffled", setting=MAIN)[i] for i in (0, 2, 1)],
    ),
    (
        rf"On the three tuning seeds the order costs {N} \[{N}, {N}\]\.",
        lambda: [-ordered("shuffled")[i] for i in (0, 2, 1)],
    ),
    (rf"rows of `leak\.yaml` own is at {N} \[{N}, {N}\]", lambda: ordered("own, other rows", setting=MAIN)),
    (
        r"Inside T own is above in all (\w+), beyond T in (\w+)\.",
        lambda: [sum(d > 0 for d in over_shuffled(places)) for places in ((0, 2048), (2048, 65536))],
    ),
    (
        r"begin more documents, ([\d,]+) in place of ([\d,]+), which",
        lambda: [round(sum(begun(arm, seed) for seed in (1, 2, 3)) / 3, -2) for arm in ("zero-T512", "zero")],
    ),
    (
        rf"places rows of 512 look better: {N} to {N} lower in three arms, and (two) intervals",
        lambda: [*firsts()[:2], firsts()[2]],
    ),
    (
        rf"worse by {N} to {N}, the whole intervals below 0\.05",
        lambda: sorted(ordered("plain streams", places)[0] for places in ("inside", "beyond")),
    ),
    (
        rf"The rest is open: [^|]*? at \[{N}, {N}\] inside T and \[{N}, {N}\] beyond",
        lambda: [*ordered("8 streams a row", "inside")[1:], *ordered("8 streams a row")[1:]],
    ),
    (rf"all start from zero: {N} nats \[{N}, {N}\] over all places", lambda: row_length(8192, "all places")),
    (rf"Rows of 512 are at {N} \[{N}, {N}\]", lambda: row_length(512, "all places")),
    (
        rf"own is at {N} \[{N}, {N}\] inside T and at {N} \[{N}, {N}\] beyond",
        lambda: [x for where in PLACES for x in ordered("own, shuffled", where, MAIN)],
    ),
    (
        rf"shuffling is better, by 0\.002 to 0\.020\. \*\*Right:\*\* {N} \[{N}, {N}\]",
        lambda: ordered("own, shuffled", setting=MAIN),
    ),
    (
        r"So the pool's order costs about (\w+) times what own gains\.",
        lambda: [ordered("shuffled", setting=MAIN)[0] / ladder("beyond")[0]],
    ),
    (
        rf"Own is at {N} \[{N}, {N}\] over the pool's rows shuffled beyond T: in (\w+) seeds below them, by up to {N}, and in "
        rf"one above, by {N}\. Inside T it is at {N} \[{N}, {N}\], above in all (\w+) ",
        lambda: [
            *ordered("own, shuffled", setting=AT_512["setting"]),
            sum(difference < 0 for difference in over_shuffled((512, 16384), "-T512")),
            -min(over_shuffled((512, 16384), "-T512")),
            max(over_shuffled((512, 16384), "-T512")),
            *ordered("own, shuffled", "inside", AT_512["setting"]),
            sum(difference > 0 for difference in over_shuffled((0, 512), "-T512")),
        ],
    ),
    (
        rf"What carrying gains there, {N}, the pool's order costs: {N} \[{N}, {N}\] beyond T",
        lambda: [
            -interval("boundaries", "ladder", AT_512 | {"what": "own over zero"}, "beyond")[0],
            *(-ordered("shuffled", setting=AT_512["setting"])[i] for i in (0, 2, 1)),
        ],
    ),
    (rf"It is so at T = 512, too: {N} \[{N}, {N}\]\.", lambda: more_gain("shuffled", setting=AT_512)),
    (
        rf"estimate beyond T, {N}; open by the interval, \[{N}, {N}\]\. [^|]*? \*\*right\*\*: {N} \[{N}, {N}\];",
        lambda: [x for where in reversed(PLACES) for x in ordered("own, shuffled", where, AT_512["setting"])],
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())
