"""Numbers in the sentences of the page of all answers are those of the committed tables and records."""

import functools
import statistics

import pytest
from boundaries_numbers import (
    AFTER,
    AT_8192,
    LARGER,
    LONG,
    RATE,
    again_at,
    again_on,
    below_zero,
    dose_of_the_mixture,
    leaked,
    made_again,
    outcomes,
    over_at_twice_the_rate,
    packages_of_own,
)
from parity_numbers import behind_another, drift
from study_numbers import (
    AT_512,
    LEAK,
    MAIN,
    N,
    at_512,
    doses,
    gain_of_twice_the_rate,
    interval,
    ladder,
    ordered,
    parity,
    rounded_as,
    row_length,
    said,
    seeds,
    slower,
)

LONGER = ("packed-reset", "packed-reset-long")
LINKED = rf"\[{N} \[{N}, {N}\]\]\([^)]*\)"
"""A headline with its interval."""

SENTENCES = [
    (rf"Rows of 8192 ended {LINKED} nats above", lambda: row_length(8192, "all places")),
    (
        rf"Such runs ended {LINKED} nats above shuffled rows beyond T",
        lambda: ordered("plain streams, shuffled"),
    ),
    (rf"Likely: by {N} nats \[{N}, {N}\], three", lambda: ordered("plain streams, shuffled")),
    (
        rf"costs {N} nats beyond T, and own states gain {N} of it",
        lambda: [-ordered("shuffled", setting=MAIN)[0], -ladder("beyond")[0]],
    ),
    (
        rf"which start from zero: by {LINKED} nats inside T and {LINKED} beyond \(eight",
        lambda: [x for where in ("inside", "beyond") for x in ordered("own, shuffled", where, MAIN)],
    ),
    (
        rf"may be\]\([^)]*\) up to {N} nats\. With other",
        lambda: [max(parity({"arm": arm}, "mixture")[2] for arm in LONGER)],
    ),
    (
        rf"packed and padded: {N} on files, up to {N} on",
        lambda: [drift("packed-reset-float32", "validation", unit=unit)[0] for unit in ("files", "mixture")],
    ),
    (
        rf"{LINKED} nats with {N} % of tokens behind another document, [^|]*? with {N} %; four seeds",
        lambda: [*leaked(T=512), doses()[0], doses()[2]],
    ),
    (rf"{LINKED} nats with {N} %, five seeds", lambda: [*leaked(unit="mixture"), 100 * dose_of_the_mixture()]),
    (r"at twice the rate (\w+) of (\w+) at both", lambda: [sum(d > 0 for d in over_at_twice_the_rate()) / 2, 5]),
    (r"same order: (\w+) of (\w+) seeds", seeds),
    (r"gain a little over zero: (\w+) of (\w+) seeds", seeds),
    (r"Quite sure at T = 2048: (\w+) of (\w+) seeds", seeds),
    (
        r"after 262 million tokens (\w+) of (\w+), and (\d+) of (\d+)\.",
        lambda: [*below_zero(LONG), *packages_of_own(LONG, "of_packages")],
    ),
    (rf"gained about {N} nats beyond", lambda: [-ladder("beyond")[0]]),
    (rf"After 262 million tokens they gained {N} \[{N}, {N}\]", lambda: [-outcomes(LONG)[i] for i in (6, 8, 7)]),
    (
        rf"At 47 million parameters they gained {N} \[{N}, {N}\]; inside",
        lambda: [-interval("boundaries", "ladder", LARGER | {"what": "own over zero"}, "beyond")[i] for i in (0, 2, 1)],
    ),
    (
        rf"from models trained in the pool they ended {N} \[{N}, {N}\] below shuffled rows",
        lambda: [-ordered("own, shuffled", setting=AFTER["setting"])[i] for i in (0, 2, 1)],
    ),
    (
        r"Made again on other GPUs, (\w+) of (\w+) have this sign",
        lambda: [
            sum(again_at(s, arm="own", on="H100") < again_at(s, on="H100") for s in made_again("own", "H100")),
            len(made_again("own", "H100")),
        ],
    ),
    (
        rf"In a whole run by less than {N} nats inside",
        lambda: [0.01] if interval("boundaries", "leak", LEAK, "inside")[2] < 0.01 else [],
    ),
    (
        rf"its size: {N} nats, where a run made again moved by up to {N};",
        lambda: [-ladder("beyond")[0], max(map(abs, (*again_on("H100"), *again_on("H200"))))],
    ),
    (
        rf"on files, where {N} % of tokens stand behind another document, and on functions, where {N} % do",
        lambda: [behind_another(unit) for unit in ("files", "functions")],
    ),
    (
        rf"About {N} % of the speed, as CUDA graphs with 64 streams; {N} to {N} % without",
        lambda: [
            slower("own", "zero"),
            *(limit(slower("own, eager", "zero, eager", timing) for timing in (0, 1, 2)) for limit in (min, max)),
        ],
    ),
    (
        rf"own states gained {N} nats \[{N}, {N}\] beyond the row[^|]*? own is at {N} \[{N}, {N}\] beyond T: [^|]*? "
        rf"Inside T it is worse by {N} \[{N}, {N}\] \(",
        lambda: [
            *(-at_512("own over zero")[i] for i in (0, 2, 1)),
            *(x for where in ("beyond", "inside") for x in ordered("own, shuffled", where, AT_512["setting"])),
        ],
    ),
    (
        rf"loss of zero, foreign and own by {N} nats \(\[five seeds",
        lambda: [statistics.fmean(map(gain_of_twice_the_rate, ("zero", "foreign", "own")))],
    ),
    *(
        (rf"\| {name} \| [^|]* \| {N} of {N} \|", functools.partial(below_zero, setting))
        for name, setting in (
            ("T = 512", AT_512),
            ("twice the rate", RATE),
            ("262 million tokens", LONG),
            ("47 million parameters", LARGER),
            ("T = 8192", AT_8192),
        )
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("", pattern) == rounded_as(said("", pattern), numbers())
