"""Numbers in the sentences of the page of boundaries are those of the committed tables and records."""

import functools

import pytest
from boundaries_numbers import (
    AFTER,
    AT_8192,
    LONG,
    PLACES,
    RATE,
    after,
    at_one_commit,
    begun,
    firsts,
    gain_of_own,
    higher_from,
    in_training,
    loss_beyond,
    mean_loss,
    outcomes,
    over_again,
    over_shuffled,
    packages_of_own,
)
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
    trained,
    worse_means,
)

SENTENCES = [
    (r"Differences are of (\w+) seeds of (\w+)\. Those at", seeds),
    (rf"mean was worse, by {N} to {N}, and", lambda: [min(worse_means()[:6]), max(worse_means()[:6])]),
    (
        rf"Without any one package they are {N} to {N} in size",
        lambda: [agreement("least"), agreement("least", max)],
    ),
    (
        r"in each of the (\d+) packages inside T and the (\d+) beyond",
        lambda: [agreement("packages", places=where) for where in PLACES],
    ),
    (
        rf"worse by {N} nats beyond T, and by {N} inside T",
        lambda: [primary("coverage", where)[0] for where in reversed(PLACES)],
    ),
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
        rf"0\.6 GiB of states\. \*\*Right\*\* of own, {N} %, [^|]*? {N} to {N} % in three [^|]*? {N} GiB",
        lambda: [
            slower("own", "zero"),
            *(limit(slower("foreign", "zero", timing) for timing in (0, 1, 2)) for limit in (min, max)),
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
        rf"gain at 8 T own is {N} below zero with all context, and {N} below when both [^|]*? numbers are {N} and {N} "
        rf"at T = 512, {N} and {N} at a rate of 0\.004, and {N} and {N} after",
        lambda: [
            x
            for of, last in (("", 8), ("-T512", 5), ("-rate", 5), ("-long", 3))
            for x in gain_of_own(of, range(1, last + 1))
        ],
    ),
    (
        rf"after 262 million tokens, zero's {N}: {N} \[{N}, {N}\] more, where it was {N} after",
        lambda: [*gain("zero", setting=LONG["setting"]), *more_gain("own", setting=LONG), *more_gain("own")[:1]],
    ),
    (
        rf"ladder's own is {N} below its zero, and {N} below the zero made again",
        lambda: [mean_loss("zero", (1, 2)) - mean_loss("own", (1, 2)), -over_again("own", (1, 2))],
    ),
    (rf"Over it noise is at {N} beyond T", lambda: [over_again("noise", (1, 2, 3))]),
    (r"in (\w+) of (\w+) seeds zero, foreign and own ran at one commit", at_one_commit),
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
        rf"Own ends at {N} \[{N}, {N}\] over zero beyond T and at {N} \[{N}, {N}\] inside\. Beyond T both seeds and {N} of {N} ",
        lambda: [
            *after("own over zero"),
            *after("own over zero", "inside"),
            *packages_of_own(AFTER, "of_packages"),
        ],
    ),
    (
        rf"Own's context gain at 8 T is\s+{N} \[{N}, {N}\] over zero's\. Foreign is at {N} \[{N}, {N}\] over zero beyond T",
        lambda: [
            *interval("boundaries", "gain-differences", {"setting": AFTER["setting"], "arm": "own"}, "gain_8"),
            *after("coverage"),
        ],
    ),
    (
        rf"500 steps with foreign starts harm by {N} and with own starts gain {N};",
        lambda: [after("coverage")[0], -after("own over zero")[0]],
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
        rf"own gains {N}\. That is a little less than the mean of eight seeds after 100 million, {N}, "
        rf"and than these three seeds' then, {N}\.",
        lambda: [-outcomes(LONG)[6], -ladder("beyond")[0], mean_loss("zero", (1, 2, 3)) - mean_loss("own", (1, 2, 3))],
    ),
    (
        rf"own minus zero is {N} in one \(",
        lambda: [loss_beyond("own-long", 2, 2048) - loss_beyond("zero-long", 2, 2048)],
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
        lambda: outcomes(RATE),
    ),
    (
        rf"So they are inside T: {N} \[{N}, {N}\] and {N} \[{N}, {N}\]\. [^|]*? gain at 8 T is {N}, zero's {N}\. Expl",
        lambda: [*outcomes(RATE, "inside")[:6], *(gain(arm, setting=RATE["setting"])[0] for arm in ("own", "zero"))],
    ),
    (
        rf"continuity beyond T is {N} \[{N}, {N}\] and own minus zero {N} \[{N}, {N}\]: {N} and {N} times "
        rf"[^|]*? all {N} packages",
        lambda: [
            *at_512("continuity"),
            *at_512("own over zero"),
            at_512("continuity")[0] / primary("continuity", "beyond")[0],
            at_512("own over zero")[0] / ladder("beyond")[0],
            *packages_of_own(AT_512),
        ],
    ),
    (
        rf"coverage is {N} \[{N}, {N}\] beyond T and {N} \[{N}, {N}\] inside\. Inside [^|]*? mean, {N} \[{N}, {N}\]",
        lambda: [*at_512("coverage"), *outcomes(AT_512, "inside")[:3], *outcomes(AT_512, "inside")[6:]],
    ),
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
        r"So the pool's order costs about (\w+) times what own gains\.",
        lambda: [ordered("shuffled", setting=MAIN)[0] / ladder("beyond")[0]],
    ),
    (
        rf"there either: {N} from T to 2 T, {N} and {N} at",
        lambda: [loss_at(power, "zero-long") for power in (0, 1, 2)],
    ),
    (
        rf"Beyond T coverage is {N} \[{N}, {N}\], continuity {N} \[{N}, {N}\] and own minus zero {N} \[{N}, {N}\]: by .*? "
        rf"Inside T own is at {N} \[{N}, {N}\] over zero: open\. .*? Its context gain at 8 T is {N} after",
        lambda: [*outcomes(LONG), *outcomes(LONG, "inside")[6:], *gain("own", setting=LONG["setting"])],
    ),
    (
        rf"gain at 8 T is {N}, zero's {N} \(\[table\]",
        lambda: [value for arm in ("own", "zero") for value in gain(arm, setting=AT_512["setting"])],
    ),
    (
        rf"One run of foreign \(seed 3\) is {N} above zero at places from 4096 to 8192, and {N} and {N} above",
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
        rf"Zero made again ends {N} to {N} higher on seeds 1 to 3",
        lambda: [limit(again("boundaries")[n][2] for n in (1, 2, 3)) for limit in (min, max)],
    ),
    (
        rf"Without graphs own is {N} to {N} % slower than zero in three timings; the last, with {N},",
        lambda: [
            *(limit(slower("own, eager", "zero, eager", timing) for timing in (0, 1, 2)) for limit in (min, max)),
            slower("own, eager", "zero, eager"),
        ],
    ),
    (
        r"in each of eight seeds and in (\d+) of (\d+) packages",
        lambda: packages_of_own({"setting": MAIN}, "of_packages"),
    ),
]


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())
