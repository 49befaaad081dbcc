"""Numbers in that page's sentences on leaks, and on shuffled rows at twice the rate."""

import functools
from math import inf

import numpy as np
import pytest
from boundaries_numbers import (
    FIVE,
    RATE,
    again_on,
    borne_by_the_first,
    dose_of_the_mixture,
    harm_of,
    harms,
    in_each_of_post_training,
    in_post_training,
    leaked,
    mean_loss,
    over_at_twice_the_rate,
    record_of,
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

from experiments.boundaries.runs import arms, by_setting, contrast, paired
from packmamba.report.inference import bootstrap

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


def row_of(T, of, unit="files"):
    """A setting's doses, its harm read from zero and in training, each with its interval, and its seeds."""
    tokens = dose(T) if unit == "files" else 100 * dose_of_the_mixture()
    seeds = range(1, len(harms()[[512, 2048, 8192, "mixture"].index(T if unit == "files" else unit)]) + 1)
    behind = [record_of(f"leak-post{of}", seed)["metrics"]["documents_behind_another"] for seed in seeds]
    return [tokens, sum(behind) / len(behind), *leaked(T=T, unit=unit), *in_post_training(of, seeds), len(seeds)]


def more_in_longer_rows():
    """A leak's harm at T = 8192 minus that at 512."""
    of = {s.T: here for s, here in of_unit("files").items() if s.after and "leak" in here}
    long, short = ((of[T]["leak"], of[T]["rows"]) for T in (8192, 512))
    found = contrast(*long, 0, inf, less=short)
    return [found.mean, found.low, found.high]


def of_unit(unit):
    trained = (one for one in records() if one["kind"] == "training" and one["config"]["data"]["unit"] == unit)
    return by_setting(arms(list(trained)))


def on_the_mixture(low, high=inf):
    (here,) = of_unit("mixture").values()
    found = contrast(here["leak"], here["rows"], low, high)
    return [found.mean, found.low, found.high]


def borne_by_seven_bytes():
    """Per cent of the mixture's targets, and of the harm."""
    (here,) = of_unit("mixture").values()
    differences, targets = paired(here["leak"], here["rows"], 0, inf)
    first, some = paired(here["leak"], here["rows"], 0, 8)
    return [100 * some.sum() / targets.sum(), 100 * first.sum() / differences.sum()]


def without_the_longest_file():
    """The mixture's harm from byte 8 on without the package that has most targets behind place 65,536."""
    (here,) = of_unit("mixture").values()
    differences, targets = paired(here["leak"], here["rows"], 8, inf)
    points = record_of("rows-post-mixture", 1)["curves"]["perplexity.by_group"]
    longest = max((p for p in points if p["start"] == 65536), key=lambda p: p["targets"])["group"]
    others = np.array(sorted({p["group"] for p in points if p["start"] >= 8})) != longest
    found = bootstrap(differences[:, others], targets[others])
    return [found.mean, found.low, found.high]


SENTENCES = [
    *(
        (rf"\| {name}, T = {T} \| {N} % \| ([\d,]+) \| {CI} \| {CI} \| (\d) \|", functools.partial(row_of, T, of, name))
        for name, T, of in (("files", 512, "-T512"), ("files", 2048, ""), ("files", 8192, "-T8192"))
    ),
    (
        rf"\| mixture, T = 2048 \| {N} % \| ([\d,]+) \| {CI} \| {CI} \| (\d) \|",
        functools.partial(row_of, 2048, "-mixture", "mixture"),
    ),
    (rf"T = 8192 minus T = 512 is {CI};", more_in_longer_rows),
    (
        rf"{N} times as much over all places, {N} times inside T \({CI} against {CI}\), {N} times in training",
        lambda: [
            leaked(unit="mixture")[0] / leaked()[0],
            leaked(places="inside", unit="mixture")[0] / leaked(places="inside")[0],
            *leaked(places="inside", unit="mixture"),
            *leaked(places="inside"),
            in_post_training("-mixture", FIVE)[0] / in_post_training("", FIVE)[0],
        ],
    ),
    (
        rf"256 bytes it is {N} nats \[{N}, {N}\] on files at T = 2048\. After them it is {N}:",
        lambda: [*leaked(places="first 256"), leaked(places="from 256 on")[0]],
    ),
    (
        rf"bytes are {N} % of the targets on files and bear {N} % of the harm; on the mixture they are {N} % and bear {N} %",
        lambda: [*borne_by_the_first("files", ""), *borne_by_the_first("mixture", "-mixture")],
    ),
    (rf"seven of each document, {N} % of the targets, bear {N} % of it", borne_by_seven_bytes),
    (rf"From byte 8 on it is {CI}: open\.", lambda: on_the_mixture(8)),
    (rf"without it, looked at afterwards, it is {CI}", without_the_longest_file),
    (
        rf"beside them, ended {N} higher in the mean, and higher in (\w+) of (\w+)\.",
        lambda: [sum(again_on("H100")[:5]) / 5, sum(one > 0 for one in again_on("H100")[:5]), 5],
    ),
    (rf"Inside T it is {CI} from byte 8 on", lambda: on_the_mixture(8, 2048)),
    (
        rf"scan alone the leak adds {N} nats \[{N}, {N}\], in the convolution alone {CI}; whole, on the "
        rf"same three seeds, {N}\. [^|]*? lose {CI}\.",
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
        rf"and within ±{N} at T = 512 and 8192, four seeds",
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
        rf"of the convolution inside T, {CI}; [^|]*? inside T {N} in the scan alone, {N} for foreign heads, {N} for the whole ",
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
        rf"Leak minus the same rows with reset is {CI} inside T and {CI} beyond at 2048 [^|]*? Over all places it is at {CI}\.",
        lambda: [
            x for places in ("inside", "beyond", "all places") for x in interval("boundaries", "leak", LEAK, places)
        ],
    ),
    (
        rf"made on H100s at one commit, have {N} there, seeds 1 to 3 of H200s {N}\.",
        lambda: [mean_loss("leak", some, (0, inf)) - mean_loss("rows", some, (0, inf)) for some in ((4, 5), (1, 2, 3))],
    ),
    (
        rf"harm is shown in whole runs, too:\*\* {CI} at T = 2048",
        lambda: interval("boundaries", "leak", LEAK, "first 256"),
    ),
    (rf"Leak minus reset is {CI} at 4 T of 2048", lambda: more_of_a_leak(2048)),
    (rf"as large as own's, {N}, is excluded", lambda: more_gain("own", "gain_4")[:1]),
    (rf"rows\. So {N}, {N} and {N} % of the tokens stand behind", doses),
    (
        rf"There own is at {CI} over the pool's rows shuffled beyond T\. Inside it is at {CI}\. It is above them in each "
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


def test_a_leak_is_worse_in_each_seed_of_each_setting():
    assert min(map(min, harms())) > 0
    seeds = {"-T512": range(1, 5), "": FIVE, "-T8192": range(1, 5), "-mixture": FIVE}
    assert min(one for of, some in seeds.items() for one in in_each_of_post_training(of, some)) > 0


def test_the_harm_on_the_mixture_reaches_as_far_as_the_page_says():
    low = {power: on_the_mixture(2**power, 2 ** (power + 1))[1] for power in range(5, 12)}
    (said_so,) = said("boundaries", r"By place the harm on the mixture reaches to byte (\d+) ")
    assert [power for power in low if low[power] > 0] == list(range(5, int(said_so).bit_length() - 1))
