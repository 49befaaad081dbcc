"""Numbers in the sentences of the page of boundaries are those of the committed tables and records."""

import functools
import json

import pytest
from study_numbers import (
    AT_512,
    LEAK,
    MAIN,
    N,
    again,
    agreement,
    at_512,
    cells,
    common_rates,
    doses,
    gain,
    interval,
    ladder,
    loss_at,
    lower_at_the_end,
    more_gain,
    more_of_a_leak,
    of_tuning,
    ordered,
    primary,
    rounded_as,
    row_length,
    said,
    seeds,
    slower,
    speed,
    step_loss,
    table,
    trained,
    worse_means,
)

from processes import ROOT

PLACES = ("inside", "beyond")
AT_8192 = {"setting": "T = 8192, 14M, 100M tokens"}
LONG = {"setting": "T = 2048, 14M, 262M tokens"}
AFTER = {"setting": "T = 2048, 14M, 32.8M tokens, post-training"}


@functools.cache
def record_of(arm, seed):
    """The latest of boundaries' runs of this name."""
    records = [json.loads(path.read_text().splitlines()[-1]) for path in ROOT.glob("experiments/boundaries/records/*")]
    return max((one for one in records if (one["arm"], one["seed"]) == (arm, seed)), key=lambda one: one["time"])


def loss_at_places(arm, seed, low, high):
    """Nats a target of a run of boundaries at places from low up to high."""
    points = [p for p in record_of(arm, seed)["curves"]["perplexity.by_group"] if low <= p["start"] < high]
    return sum(point["nats"] for point in points) / sum(point["targets"] for point in points)


def loss_beyond(arm, seed, T=8192):
    return loss_at_places(arm, seed, T, 32 * T)


def over_shuffled(places):
    """Own minus the pool's rows shuffled, seed by seed."""
    return [loss_at_places("own", seed, *places) - loss_at_places("shuffled", seed, *places) for seed in range(1, 9)]


def after(what, places="beyond"):
    """Of the runs that go on from zero's weights."""
    return interval("boundaries", "ladder", AFTER | {"what": what}, places)


def begun(arm, seed):
    """Documents that a run began: the first token of each is no target."""
    metrics = record_of(arm, seed)["metrics"]
    return metrics["real_tokens"] - metrics["targets"]


def firsts():
    """How much lower rows of 512 are than rows of 2048 at the first 512 places, at least and at most, and how many of three
    intervals exclude zero."""
    found = [
        interval("boundaries", "row-length", {"arm": arm, "rows": "512"}, "first 512")
        for arm in ("rows", "leak", "zero")
    ]
    return [min(-mean for mean, *_ in found), max(-mean for mean, *_ in found), sum(high < 0 for *_, high in found)]


SENTENCES = [
    (r"Differences are of (\w+) seeds of (\w+)\. Those with", seeds),
    (rf"mean was worse, by {N} to {N}, and", lambda: [min(worse_means()[:6]), max(worse_means()[:6])]),
    (
        rf"Without any one package they are {N} to {N} in size",
        lambda: [agreement("least"), agreement("least", max)],
    ),
    (r"in each of the (\d+) packages inside T", lambda: [agreement("packages", places="inside")]),
    (r"packages inside T and the (\d+) beyond", lambda: [agreement("packages", places="beyond")]),
    (rf"worse by {N} nats beyond T, and by", lambda: primary("coverage", "beyond")[:1]),
    (rf"beyond T, and by {N} inside T", lambda: primary("coverage", "inside")[:1]),
    (rf"Own beats foreign by {N} beyond T", lambda: [-primary("continuity", "beyond")[0]]),
    (rf"beats zero beyond T by {N} \[{N}, {N}\]", lambda: [-x for x in (ladder("beyond")[i] for i in (0, 2, 1))]),
    (rf"last 2048 by {N} in own, by {N} in zero", lambda: [*gain("own"), *gain("zero")]),
    (rf"in zero: by {N} \[{N}, {N}\] more", lambda: more_gain("own")),
    (rf"larger than zero's: {N} \[{N}, {N}\]", lambda: more_gain("foreign")),
    (rf"Its loss is {N} at places from T to 2 T, {N} and {N}", lambda: [loss_at(power) for power in (0, 1, 2)]),
    (rf"\*\*Right:\*\* {N}, {N}, {N}", lambda: [loss_at(power) for power in (0, 1, 2)]),
    *(
        (
            rf"\*{outcome} {places} T\*[^|]*? \*\*(?:Right|Wrong)\*\*: {N} \[{N}, {N}\]",
            functools.partial(primary, key, places),
        )
        for outcome, key in (("Coverage", "coverage"), ("Continuity", "continuity"))
        for places in ("inside", "beyond")
    ),
    (
        rf"0\.6 GiB of states\. \*\*Right:\*\* own {N} and foreign {N} %, timed with 64 streams; {N} GiB",
        lambda: [
            *(slower(arm, "zero") for arm in ("own", "foreign")),
            cells("boundaries", "arms", {"setting": MAIN, "arm": "own"}, "state_bytes")[0] / 2**30,
        ],
    ),
    (
        rf"own trains at {N} million tokens a second, foreign at {N} and zero at {N}: {N} and {N} % less",
        lambda: [*map(speed, ("own", "foreign", "zero")), *(slower(arm, "zero") for arm in ("own", "foreign"))],
    ),
    (
        rf"all of it inside T, {N} of {N} beyond",
        lambda: [primary("coverage", "beyond")[0], -primary("continuity", "beyond")[0]],
    ),
    (
        rf"zero's context gain is {N} to {N} at 4, 8 and 16 T",
        lambda: [limit(gain("zero", k)[0] for k in (4, 8, 16)) for limit in (min, max)],
    ),
    (
        rf"Leak minus the same rows with reset is {N} \[{N}, {N}\] inside T and {N} \[{N}, {N}\] beyond at 2048",
        lambda: [x for places in ("inside", "beyond") for x in interval("boundaries", "leak", LEAK, places)],
    ),
    (rf"Leak minus reset is {N} \[{N}, {N}\] at 4 T of 2048", lambda: more_of_a_leak(2048)),
    (rf"as large as own's, {N}, is excluded", lambda: more_gain("own", "gain_4")[:1]),
    (
        rf"At T = 512 the interval is ±{N}, as",
        lambda: [(more_of_a_leak(512)[2] - more_of_a_leak(512)[1]) / 2],
    ),
    (rf"rows\. So {N}, {N} and {N} % of the tokens stand behind", doses),
    (
        rf"they end {N} nats \[{N}, {N}\] above the pool's rows shuffled, beyond T, and {N} \[{N}, {N}\] above the pool",
        lambda: [*ordered("plain streams, shuffled"), *ordered("plain streams")],
    ),
    (
        rf"two sets of shuffled rows, [^|]*? differ by {N} \[{N}, {N}\]\.",
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
    (
        rf"Their context gain at 8 T is {N}, zero's {N}, own's {N} ",
        lambda: [value for arm in ("shuffled", "zero", "own") for value in gain(arm)],
    ),
    (
        rf"Own ends at {N} \[{N}, {N}\] over zero beyond T and at {N} \[{N}, {N}\] inside\. Both seeds and {N} of {N} packages",
        lambda: [
            *after("own over zero"),
            *after("own over zero", "inside"),
            *cells(
                "boundaries",
                "agreement",
                AFTER | {"what": "own over zero", "places": "beyond"},
                "packages",
                "of_packages",
            ),
        ],
    ),
    (rf"It is {N} of what own gains when", lambda: [after("own over zero")[0] / ladder("beyond")[0]]),
    (
        rf"Own's context gain at 8 T is {N}, zero's {N}\.\s+Foreign is at {N} \[{N}, {N}\]",
        lambda: [*(gain(arm, setting=AFTER["setting"])[0] for arm in ("own", "zero")), *after("coverage")],
    ),
    (
        rf"foreign starts 500 steps harm by {N}, with own starts they gain {N};",
        lambda: [after("coverage")[0], -after("own over zero")[0]],
    ),
    (
        rf"Zero in the pool is {N} \[{N}, {N}\] above these rows, beyond T\.",
        lambda: [-ordered("shuffled", setting=MAIN)[i] for i in (0, 2, 1)],
    ),
    (
        rf"On the three tuning seeds it is {N} \[{N}, {N}\]\.",
        lambda: [-ordered("shuffled")[i] for i in (0, 2, 1)],
    ),
    (rf"rows of `leak\.yaml` own is at {N} \[{N}, {N}\]", lambda: ordered("own, other rows", setting=MAIN)),
    (
        r"Inside T own is above in all (\w+), beyond T in (\w+)\.",
        lambda: [sum(d > 0 for d in over_shuffled(places)) for places in ((0, 2048), (2048, 65536))],
    ),
    (
        rf"Own beats noise beyond T by {N} \[{N}, {N}\]",
        lambda: [
            -interval("boundaries", "ladder", {"setting": MAIN, "what": "own over noise"}, "beyond")[i]
            for i in (0, 2, 1)
        ],
    ),
    (
        rf"2048 to 16,384, own gains {N} \[{N}, {N}\] more",
        lambda: [
            -interval("boundaries", "row-length", {"arm": "own over zero", "rows": "512"}, "2048 to 16,384")[i]
            for i in (0, 2, 1)
        ],
    ),
    (
        r"begin more documents, ([\d,]+) in place of ([\d,]+), which",
        lambda: [round(sum(begun(arm, seed) for seed in (1, 2, 3)) / 3, -2) for arm in ("zero-T512", "zero")],
    ),
    (
        rf"own gains {N}\. That is more than the mean of eight seeds after 100 million, {N}, "
        rf"and less than this seed's then, {N}\.",
        lambda: [
            -cells("boundaries", "ladder", LONG | {"what": "own over zero"}, "beyond")[0],
            -ladder("beyond")[0],
            loss_beyond("zero", 1, 2048) - loss_beyond("own", 1, 2048),
        ],
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
        rf"estimates of these seeds, {N} and {N}, and open [^|]*? at \[{N}, {N}\] inside T and \[{N}, {N}\] beyond",
        lambda: [
            *(-ordered("shuffled", places)[0] for places in ("inside", "beyond")),
            *ordered("8 streams a row", "inside")[1:],
            *ordered("8 streams a row")[1:],
        ],
    ),
    (rf"all start from zero: {N} nats \[{N}, {N}\] over all places", lambda: row_length(8192, "all places")),
    (rf"Rows of 512 are at {N} \[{N}, {N}\]", lambda: row_length(512, "all places")),
    (rf"Measured since: {N} nats for plain", lambda: ordered("plain streams, shuffled")[:1]),
    (
        rf"Beyond T it is worse by {N} to {N} at 0\.001, 0\.002 and 0\.004",
        lambda: [limit(of_tuning("coverage")[:3]) for limit in (min, max)],
    ),
    (
        rf"Own minus zero beyond T is {N}, {N}, {N} and {N} at the four rates",
        lambda: of_tuning("own over zero"),
    ),
    (
        rf"Zero has a loss of {N}, {N}, {N} and {N}\.",
        lambda: [trained(f"zero lr={rate}", 101)[0] for rate in (0.001, 0.002, 0.004, 0.008)],
    ),
    (rf"the last tried, by {N} and {N}\.", lambda: [lower_at_the_end(arm) for arm in ("zero", "own")]),
    (rf"which are lower by {N} and {N}, less", lambda: [lower_at_the_end(arm) for arm in ("zero", "own")]),
    (
        rf"it ends at {N}, where zero has {N} and own {N} ",
        lambda: [trained(f"{arm} lr=0.008", 101)[0] for arm in ("foreign", "zero", "own")],
    ),
    (
        rf"Beyond T coverage is {N} \[{N}, {N}\], continuity {N} \[{N}, {N}\], and own minus zero {N} \[{N}, {N}\] ",
        lambda: [
            value
            for what in ("coverage", "continuity", "own over zero")
            for value in interval("boundaries", "ladder", {"setting": f"{MAIN}, rate 0.004", "what": what}, "beyond")
        ],
    ),
    (
        rf"Beyond T continuity is {N} \[{N}, {N}\] and own minus zero {N} \[{N}, {N}\]: {N} and {N} times "
        rf"[^|]*? all {N} packages",
        lambda: [
            *at_512("continuity"),
            *at_512("own over zero"),
            at_512("continuity")[0] / primary("continuity", "beyond")[0],
            at_512("own over zero")[0] / ladder("beyond")[0],
            *cells("boundaries", "agreement", {**AT_512, "what": "own over zero", "places": "beyond"}, "packages"),
        ],
    ),
    (rf"Coverage is above zero there, too: {N} \[{N}, {N}\]", lambda: at_512("coverage")),
    (
        rf"Own minus zero is {N} in one and {N} in the other",
        lambda: [loss_beyond("own-T8192", seed) - loss_beyond("zero-T8192", seed) for seed in (1, 2)],
    ),
    (
        rf"At 8192 continuity beyond T is {N}, two seeds: at the edge of ±0\.005\. Its interval is \[{N}, {N}\]",
        lambda: interval("boundaries", "ladder", AT_8192 | {"what": "continuity"}, "beyond"),
    ),
    (
        rf"It is at {N} \[{N}, {N}\] over zero beyond T and at {N} \[{N}, {N}\] inside",
        lambda: [
            x
            for where in reversed(PLACES)
            for x in interval("boundaries", "ladder", {"setting": MAIN, "what": "noise"}, where)
        ],
    ),
    (
        rf"own is at {N} \[{N}, {N}\] inside T and at {N} \[{N}, {N}\] beyond",
        lambda: [x for where in PLACES for x in ordered("own, shuffled", where, MAIN)],
    ),
    (
        rf"shuffling is better, by 0\.002 to 0\.020\. \*\*Right:\*\* {N} \[{N}, {N}\]",
        lambda: ordered("own, shuffled", setting=MAIN),
    ),
    (
        r"order costs (\w+) times what own gains\. On",
        lambda: [ordered("shuffled", setting=MAIN)[0] / ladder("beyond")[0]],
    ),
    (
        rf"there either: {N} from T to 2 T, {N} and {N} at",
        lambda: [loss_at(power, "zero-long") for power in (0, 1, 2)],
    ),
    (
        rf"Beyond T coverage is {N}, continuity {N} and own minus zero {N}\. "
        rf"Own's context gain at 8 T has grown to {N}, zero's to {N}",
        lambda: [
            *(
                cells("boundaries", "ladder", LONG | {"what": what}, "beyond")[0]
                for what in ("coverage", "continuity", "own over zero")
            ),
            *(gain(arm, setting=LONG["setting"])[0] for arm in ("own", "zero")),
        ],
    ),
    (
        rf"gain at 8 T is {N}, zero's {N} ",
        lambda: [value for arm in ("own", "zero") for value in gain(arm, setting=AT_512["setting"])],
    ),
    (
        rf"Foreign's seed 3 is {N} above zero at places from 4096 to 8192, and {N} and {N} above",
        lambda: [loss_at(k, "foreign-rate", [3]) - loss_at(k, "zero-rate", [3]) for k in (1, 2, 3)],
    ),
    (
        rf"stays there: no other rate is within {N} of the lowest",
        lambda: [0.005] if common_rates(0.005) == [0.004] else [],
    ),
    (
        rf"Two earlier timings had {N} to {N} and {N} to {N} %\. Noise is {N} % slower, whole {N} %\.",
        lambda: [
            *(slower(arm, "zero", timing=timing) for arm in ("own", "foreign") for timing in (2, 1)),
            *(slower(arm, "zero") for arm in ("noise", "whole")),
        ],
    ),
    (
        rf"no slower than the same rows with reset, within {N} %",
        lambda: [max(abs(slower(arm, "rows")) for arm in ("leak", "leak-conv", "leak-scan"))],
    ),
    (
        rf"its loss leaps from {N} at step 370 to {N} at step 390",
        lambda: step_loss("foreign lr=0.008", 101, 370, 390),
    ),
    (rf"Foreign heads cost {N} %", lambda: [slower("foreign-heads", "rows")]),
    (
        rf"two sweeps and has {N} and {N}: a difference of {N}\.",
        lambda: [
            *trained("pool-32", 101),
            *trained("zero lr=0.002", 101),
            trained("zero lr=0.002", 101)[0] - trained("pool-32", 101)[0],
        ],
    ),
    (
        rf"ends {N} and {N} above the committed run of seed 1\. It ends {N} above that of seed 2 and {N} above that of seed 3",
        lambda: [differences[2] for differences in again("boundaries")],
    ),
    (
        rf"Without graphs own is {N} % slower than zero, in the timing before {N} %",
        lambda: [slower("own, eager", "zero, eager", timing) for timing in (0, 1)],
    ),
    (
        r"in each of eight seeds and in (\d+) of (\d+) packages",
        lambda: [
            next(
                float(one[column])
                for one in table("boundaries", "agreement")
                if (one["setting"], one["what"], one["places"]) == (MAIN, "own over zero", "beyond")
            )
            for column in ("packages", "of_packages")
        ],
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())
