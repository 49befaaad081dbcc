"""Numbers in that page's sentences on leaks, and on shuffled rows at twice the rate."""

import pytest
from boundaries_numbers import (
    RATE,
    borne_by_the_first,
    harm_of,
    harms,
    leaked,
    over_at_twice_the_rate,
    records,
)
from study_numbers import (
    LEAK,
    N,
    cells,
    doses,
    interval,
    more_gain,
    more_of_a_leak,
    ordered,
    rounded_as,
    said,
)

from experiments.boundaries.runs import arms, by_setting, contrast

CI = rf"{N} \[{N}, {N}\]"
"""A number and its interval."""
AFTER = "T = 2048, 14M, 32.8M tokens, post-training"
THREE = (1, 2, 3)


def dose(T):
    setting = {"setting": AFTER.replace("2048", str(T)), "what": "leak"}
    return 100 * cells("boundaries", "leak", setting, "dose")[0]


def gains_in_post_training(T):
    return interval(
        "boundaries", "gain-differences", {"setting": AFTER.replace("2048", str(T)), "arm": "leak"}, "gain_4"
    )


SENTENCES = [
    (
        rf"the leak adds {N} nats \[{N}, {N}\] with {N} % of the tokens behind another document, {CI} with {N} %, and "
        rf"{CI} with {N} % ",
        lambda: [x for T in (512, 2048, 8192) for x in (*leaked(T=T), dose(T))],
    ),
    (rf"the five lie between {N} and {N}\.", lambda: [limit(harms()[1]) for limit in (min, max)]),
    (r"T = 512, 2048, 8192; (\w+), (\w+) and (\w+) seeds", lambda: [len(some) for some in harms()[:3]]),
    (r"worse in each of these (\d+) pairs", lambda: [sum(one > 0 for some in harms()[:3] for one in some)]),
    (
        rf"There the leak adds {N} nats \[{N}, {N}\] over all places and {CI} inside T = 2048, worse in each of (\w+) "
        rf"seeds [^|]*? adds {CI} inside T\.",
        lambda: [
            *leaked(unit="mixture"),
            *leaked(places="inside", unit="mixture"),
            sum(one > 0 for one in harms()[3]),
            *leaked(places="inside"),
        ],
    ),
    (
        rf"256 bytes the leak adds {N} nats \[{N}, {N}\] [^|]*? after them {CI}\. On the mixture it is {CI} "
        rf"and {CI}\.",
        lambda: [
            x
            for unit in ("files", "mixture")
            for where in ("first 256", "from 256 on")
            for x in leaked(places=where, unit=unit)
        ],
    ),
    (
        rf"bytes are {N} % of the targets on files and bear {N} % of the harm; on the mixture they are {N} % and bear {N} %",
        lambda: [*borne_by_the_first("files", ""), *borne_by_the_first("mixture", "-mixture")],
    ),
    (
        rf"scan alone the leak adds {N} nats \[{N}, {N}\] over all places, in the convolution alone {CI}; whole, on the "
        rf"same three seeds, {N}\. [^|]*? lose {CI}:",
        lambda: [
            *leaked("leak, scan"),
            *leaked("leak, convolution"),
            sum(harms()[1][:3]) / 3,
            *leaked("foreign heads"),
        ],
    ),
    (
        r"(\w+) seeds; each of these arms is worse than reset in each",
        lambda: [
            min(
                sum(one > 0 for one in harm_of(f"{arm}-post", "rows-post", THREE))
                for arm in ("leak-scan", "leak-conv", "foreign-heads")
            )
        ],
    ),
    (
        rf"In post-training leak minus reset is {CI} at 4 T of 2048",
        lambda: gains_in_post_training(2048),
    ),
    (
        rf"and within ±{N} at T = 512 and 8192 \(",
        lambda: [max(abs(x) for T in (512, 8192) for x in gains_in_post_training(T))],
    ),
    (rf"\*\*Right:\*\* {CI}\. 27\.", lambda: gains_in_post_training(2048)),
    (
        rf"\*\*Right\*\* of its size, {CI}, and beyond T, {CI}\. [^|]*? estimates: {N} at 512 and {N} at 8192",
        lambda: [
            *leaked(places="inside"),
            *leaked(places="beyond"),
            *(leaked(places="inside", T=T)[0] for T in (512, 8192)),
        ],
    ),
    (
        rf"of the convolution, {CI}\. [^|]*? inside T {N} in the scan alone, {N} for foreign heads, {N} for the whole leak",
        lambda: [
            *leaked("leak, convolution", "inside"),
            leaked("leak, scan", "inside")[0],
            leaked("foreign heads", "inside")[0],
            sum(harm_of("leak-post", "rows-post", THREE, 2048)) / 3,
        ],
    ),
    (
        rf"\*\*Right:\*\* {CI} against {CI} inside T",
        lambda: [*leaked(places="inside", unit="mixture"), *leaked(places="inside")],
    ),
    (
        rf"Leak minus the same rows with reset is {CI} inside T and {CI} beyond at 2048",
        lambda: [x for places in ("inside", "beyond") for x in interval("boundaries", "leak", LEAK, places)],
    ),
    (rf"Leak minus reset is {CI} at 4 T of 2048", lambda: more_of_a_leak(2048)),
    (rf"as large as own's, {N}, is excluded", lambda: more_gain("own", "gain_4")[:1]),
    (rf"rows\. So {N}, {N} and {N} % of the tokens stand behind", doses),
    (
        rf"There own is at {CI} over the pool's rows shuffled beyond T and at {CI} inside, above them in each "
        rf"of (\w+) seeds at both\. The pool's order costs {CI} beyond T",
        lambda: [
            *(x for where in ("beyond", "inside") for x in ordered("own, shuffled", where, RATE["setting"])),
            sum(one > 0 for one in over_at_twice_the_rate()) / 2,
            *(-ordered("shuffled", setting=RATE["setting"])[i] for i in (0, 2, 1)),
        ],
    ),
    (
        rf"0\.002 to 0\.020\. \*\*Right:\*\* {CI}; its size",
        lambda: ordered("own, shuffled", setting=RATE["setting"]),
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())


def test_the_harm_on_the_mixture_reaches_as_far_as_the_page_says():
    mixture = [one for one in records() if one["kind"] == "training" and one["config"]["data"]["unit"] == "mixture"]
    (here,) = by_setting(arms(mixture)).values()
    low = {power: contrast(here["leak"], here["rows"], 2**power, 2 ** (power + 1)).low for power in range(5, 12)}
    (said_so,) = said("boundaries", r"By place the harm on the mixture reaches to byte (\d+) ")
    assert [power for power in low if low[power] > 0] == list(range(5, int(said_so).bit_length() - 1))
