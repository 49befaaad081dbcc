"""Numbers in the sentences of the page of boundaries are those of the committed tables and records."""

import functools
from math import inf

import pytest
from boundaries_numbers import (
    AT_8192,
    FIVE,
    LONG,
    PLACES,
    RATE,
    again_at,
    again_on,
    at_one_commit,
    begun,
    below_zero,
    gain_of_own,
    growth_in_loss,
    growth_of_gain_of,
    growth_of_the_gain,
    mean_loss,
    of_noise,
    outcomes,
    over_again,
    over_zero,
    packages_of_own,
    record_of,
)
from parity_numbers import worse_means
from study_numbers import (
    AT_512,
    MAIN,
    N,
    agreement,
    at_512,
    cells,
    common_rates,
    gain,
    interval,
    ladder,
    loss_at,
    lower_at_the_end,
    more_gain,
    of_tuning,
    over_seeds,
    primary,
    rounded_as,
    said,
    seeds,
    slower,
    speed,
    step_loss,
    trained,
)

SENTENCES = [
    (
        rf"a foreign state harms \({N} beyond T; primary, (\w+) of (\w+) seeds",
        lambda: [*primary("coverage", "beyond")[:1], *seeds()],
    ),
    (
        rf"the own state gains {N} \[{N}, {N}\] beyond T after 100 million tokens and {N} \[{N}, {N}\] after 262 [^|]*? "
        rf"At T = 512 it gains {N} \[{N}, {N}\]",
        lambda: [
            -gained[i] for gained in (ladder("beyond"), outcomes(LONG)[6:], at_512("own over zero")) for i in (0, 2, 1)
        ],
    ),
    (r"Differences are of (\w+) seeds of (\w+), but for these", seeds),
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
        rf"8 T own is {N} ± {N} below zero with all context, and {N} ± {N} below when each [^|]*? numbers are {N} ± {N} and "
        rf"{N} ± {N}\. [^|]*? a third: {N} ± {N} and {N} ± {N}\.",
        lambda: [x for of, last in (("", 8), ("-T512", 5), ("-post", 8)) for x in gain_of_own(of, last)],
    ),
    (
        rf"After 262 million tokens they are {N} ± {N} and {N} ± {N}: most [^|]*? 0\.004 they are {N} ± {N} and {N} ± {N}\.",
        lambda: [x for of in ("-long", "-rate") for x in gain_of_own(of, 5)],
    ),
    (
        rf"At 8 T it is {N} after 262 million tokens, zero's {N}: {N} \[{N}, {N}\] more, where it was {N} after",
        lambda: [
            *(gain(arm, setting=LONG["setting"])[0] for arm in ("own", "zero")),
            *more_gain("own", setting=LONG),
            *more_gain("own")[:1],
        ],
    ),
    (
        rf"on seeds 1 to 5, it is at {N} beyond T, in place of {N}, and above [^|]*? worse than noise [^|]*? by {N} \[{N}, {N}\]",
        lambda: [
            over_again("noise", FIVE),
            mean_loss("noise", FIVE) - mean_loss("zero", FIVE),
            *of_noise("foreign over noise"),
        ],
    ),
    (
        r"in place of [^|]*? above zero in each of the (\w+)\. Over zero made",
        lambda: [sum(mean_loss("noise", [seed]) > again_at(seed) for seed in FIVE)],
    ),
    (
        rf"it is a harm, {N} \[{N}, {N}\], and larger than at 2048 by the estimate alone",
        lambda: at_512("coverage"),
    ),
    (rf"Noise harms {N} times as much\.", lambda: [of_noise("noise")[0] / primary("coverage", "beyond")[0]]),
    (
        rf"eight of eight seeds too, its harm is {N} of foreign's",
        lambda: [of_noise("noise")[0] / primary("coverage", "beyond")[0]],
    ),
    (
        r"noise in each of (\w+) seeds, by 0\.005[^|]*? beats noise [^|]*? in each of (\w+) seeds",
        lambda: [
            cells("boundaries", "agreement", {"setting": MAIN, "what": what, "places": "beyond"}, "seeds")[0]
            for what in ("foreign over noise", "own over noise")
        ],
    ),
    (r"in (\w+) of (\w+) seeds zero, foreign and own ran at one commit", at_one_commit),
    (rf"Own beats noise beyond T by {N} \[{N}, {N}\]", lambda: [-of_noise("own over noise")[i] for i in (0, 2, 1)]),
    (
        rf"2048 to 16,384, own gains {N} \[{N}, {N}\] more",
        lambda: [
            -interval("boundaries", "row-length", {"arm": "own over zero", "rows": "512"}, "2048 to 16,384")[i]
            for i in (0, 2, 1)
        ],
    ),
    (
        rf"own gains {N}, and after 100 million\s+tokens {N} in the mean of eight seeds, {N} of these five",
        lambda: [-outcomes(LONG)[6], -ladder("beyond")[0], mean_loss("zero", FIVE) - mean_loss("own", FIVE)],
    ),
    (
        rf"below zero in (\w+) of (\w+) seeds and in {N} of {N} packages; in one seed by {N} alone",
        lambda: [*below_zero(LONG), *packages_of_own(LONG, "of_packages"), -max(over_zero("own-long", FIVE))],
    ),
    (
        rf"this difference grew by {N} \[{N}, {N}\], in each [^|]*? own gain grew by {N} \[{N}, {N}\], too\. [^|]*? have "
        rf"{N} \[{N}, {N}\] more than [^|]*? changed by {N} \[{N}, {N}\]",
        lambda: [
            *over_seeds(growth_of_the_gain("-long")),
            *over_seeds(growth_of_gain_of("zero")),
            *over_seeds(growth_of_the_gain("-rate")),
            *over_seeds(growth_in_loss()),
        ],
    ),
    (
        rf"Beyond T coverage is {N} \[{N}, {N}\], with five seeds\. Continuity is {N} \[{N}, {N}\] and own minus zero "
        rf"{N} \[{N}, {N}\], with five: {N}, {N}, {N}, {N} and {N}\. Foreign and own stray from zero together, by up to {N}",
        lambda: [
            *outcomes(AT_8192),
            *over_zero("own-T8192", FIVE, 8192),
            max(map(abs, over_zero("foreign-T8192", FIVE, 8192))),
        ],
    ),
    (
        rf"Few files reach that far: {N} packages,\s+which weigh like {N}\.",
        lambda: cells(
            "boundaries", "agreement", AT_8192 | {"what": "coverage", "places": "beyond"}, "of_packages", "like"
        ),
    ),
    (
        rf"In the pool zero shows the same: {N} \[{N}, {N}\]",
        lambda: interval("boundaries", "row-length", {"arm": "zero", "rows": "8192"}, "all places"),
    ),
    (
        r"the run begins ([\d,]+) of them in place of ([\d,]+)\.",
        lambda: [round(sum(begun(arm, seed) for seed in (1, 2, 3)) / 3, -2) for arm in ("whole", "own")],
    ),
    (rf"\(their loss is {N}\)", lambda: [mean_loss(f"{arm}-T8192", range(1, 5), (0, inf)) for arm in ("own",)]),
    (
        rf"Beyond T it is worse by {N} to {N} at 0\.001, 0\.002 and 0\.004",
        lambda: [limit(of_tuning("coverage")[:3]) for limit in (min, max)],
    ),
    (
        rf"Own minus zero beyond T is {N}, {N}, {N} and {N} at the four rates",
        lambda: of_tuning("own over zero"),
    ),
    (
        rf"Over all places zero has a loss of {N}, {N}, {N} and {N}\.",
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
        rf"coverage is {N} \[{N}, {N}\] beyond T and {N} \[{N}, {N}\] inside\. Inside [^|]*? is shown, {N} \[{N}, {N}\]",
        lambda: [*at_512("coverage"), *outcomes(AT_512, "inside")[:3], *outcomes(AT_512, "inside")[6:]],
    ),
    (
        rf"beyond T is right by the estimate, {N}; open by its interval, \[{N}, {N}\]",
        lambda: interval("boundaries", "ladder", AT_8192 | {"what": "continuity"}, "beyond"),
    ),
    (
        rf"It is at {N} \[{N}, {N}\] over zero beyond T and at {N} \[{N}, {N}\] inside",
        lambda: [x for where in reversed(PLACES) for x in of_noise("noise", where)],
    ),
    (
        rf"there either: {N} from T to 2 T, {N} and {N} at",
        lambda: [loss_at(power, "zero-long") for power in (0, 1, 2)],
    ),
    (
        rf"Own minus zero is {N} \[{N}, {N}\] beyond T\. It is below [^|]*? Coverage is {N} \[{N}, {N}\] and continuity {N} "
        rf"\[{N}, {N}\] there\. [^|]*? Inside T own is at {N} \[{N}, {N}\] over zero: open\.",
        lambda: [
            *outcomes(LONG)[6:],
            *outcomes(LONG)[:6],
            *outcomes(LONG, "inside")[6:],
        ],
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
        rf"A run made again here differs by up to {N}, at a later commit on another kind of GPU by up to {N}\.",
        lambda: [max(map(abs, differences)) for differences in (again_on("H200"), again_on("H100"))],
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


@pytest.mark.parametrize("seed", FIVE)
def test_the_long_runs_of_a_seed_have_one_commit_and_one_kind_of_gpu(seed):
    arms = [record_of(f"{arm}-long", seed) for arm in ("zero", "foreign", "own")]
    (gpu,) = {gpu for one in arms for gpu in one["hardware"]["gpus"]}
    assert len({one["commit"] for one in arms}) == 1 and ("H200" if seed <= 3 else "H100") in gpu


@pytest.mark.parametrize(("pattern", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in SENTENCES])
def test_a_sentence_rounds_the_records(pattern, numbers):
    assert said("boundaries", pattern) == rounded_as(said("boundaries", pattern), numbers())
