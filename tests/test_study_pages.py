"""Numbers in the sentences of the studies' pages are those of the committed tables and records."""

import csv
import functools
import json
import re
import statistics

import pytest
from scipy.special import chdtri, stdtrit

from processes import ROOT

EXPERIMENTS = ROOT / "experiments"
MAIN = "T = 2048, 14M, 100M tokens"
OURS = {"arm": "packed-reset"}
CONTROL = {"arm": "packed-control"}
LAST = CONTROL | {"weights": "mean of the last"}


@functools.cache
def table(experiment, name):
    with open(EXPERIMENTS / experiment / "tables" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def cells(experiment, name, row, *columns):
    (found,) = (one for one in table(experiment, name) if row.items() <= one.items())
    return [float(found[column]) for column in columns]


def interval(experiment, name, row, column, low="_low", high="_high"):
    return cells(experiment, name, row, column, column + low, column + high)


def parity(row, unit="files"):
    return interval("parity", f"parity-{unit}", row, "difference")


def equal_time(unit):
    """Steps as many times as padded's, and what they gain."""
    arm = "packed-reset" if unit == "files" else f"packed-reset, {unit}"
    (ratio,) = cells("parity", f"equal-time-{unit}", {"arm": arm}, "ratio")
    mean, low, high = parity({"arm": "packed-equal-time"}, unit)
    return [ratio, -mean, -high, -low]


def spread_of_pairs(unit):
    low, high, n = cells("parity", f"parity-{unit}", OURS, "over_seeds_low", "over_seeds_high", "pairs")
    return (high - low) / 2 * n**0.5 / stdtrit(n - 1, 0.975)


def again():
    """Loss of a run that was made again, as committed, and the difference."""
    (path,) = EXPERIMENTS.glob("parity/again/records/*.jsonl")
    new = json.loads(path.read_text().splitlines()[-1])
    same = [one for one in files() if (one["arm"], one["seed"]) == (new["arm"], new["seed"])]
    (old,) = [one for one in same if run_of(one) == run_of(new)]
    losses = [one["metrics"]["perplexity.loss"] for one in (new, old)]
    return [*losses, losses[0] - losses[1], cells("parity", "calibration-files", LAST, "largest")[0]]


def run_of(record):
    return {k: v for k, v in record["config"]["data"].items() if k != "cache_dir"}, record["config"]["optimizer"]


def slower(arm, than):
    of = [cells("boundaries", "throughput", {"arm": one}, "real_tokens_per_second")[0] for one in (arm, than)]
    return 100 * (1 - of[0] / of[1])


def speed(arm):
    return cells("boundaries", "throughput", {"arm": arm}, "real_tokens_per_second")[0] / 1e6


def answers(arm):
    return cells("downstream", "answers", {"arm": arm}, "difference", "low", "high")


def tasks(arm):
    """Metrics of mqar's reported runs."""
    paths = EXPERIMENTS.glob(f"downstream/records/{arm}-*.jsonl")
    found = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(paths)]
    return [one["metrics"] for one in found if one["config"]["data"]["task"] == "mqar"]


def leaked():
    """More nats as trained than from zero state."""
    more = [m["mqar.nats_as_trained"] - m["mqar.nats"] for m in tasks("packed-leak")]
    mean, half = statistics.fmean(more), stdtrit(len(more) - 1, 0.975) * statistics.stdev(more) / len(more) ** 0.5
    return [mean, mean - half, mean + half]


def validated():
    (path,) = sorted(EXPERIMENTS.glob("downstream/records/packed-leak-*.jsonl"))[:1]
    return sum(point["count"] for point in json.loads(path.read_text())["curves"]["loss_by_position"])


def worse_at_each_rate():
    """How much worse leak is than each other arm at the rates tried, in the mean of two seeds: least and most."""
    found = {}
    for path in EXPERIMENTS.glob("downstream/tuning/records/*.jsonl"):
        one = json.loads(path.read_text().splitlines()[-1])
        if one["config"]["data"]["task"] == "mqar":
            place = one["arm"].split()[0], one["config"]["optimizer"]["lr"]
            found.setdefault(place, []).append(one["metrics"]["mqar.nats"])
    means = {place: statistics.fmean(values) for place, values in found.items()}
    others = [(arm, lr) for arm, lr in means if arm != "packed-leak"]
    worse = [means["packed-leak", lr] - means[arm, lr] for arm, lr in others]
    return [min(worse), max(worse)]


def fewer_points():
    mean, low, high = interval("downstream", "evaluation-mqar", {"arm": "packed-leak"}, "difference")
    return [-100 * mean, -100 * high, -100 * low]


def next_line(table_name):
    values = interval("downstream/parity", table_name, {"model": OURS["arm"]}, "difference")
    return [100 * value for value in values]


def primary(outcome, places):
    return interval("boundaries", "primary", {"setting": MAIN, "outcome": outcome, "places": places}, "difference")


def ladder(places):
    return interval("boundaries", "ladder", {"setting": MAIN, "what": "own over zero"}, places)


def seeds():
    return cells(
        "boundaries", "primary", {"setting": MAIN, "outcome": "continuity", "places": "beyond"}, "pairs", "every"
    )


def agreement(column, least=min, **row):
    every = [one for one in table("boundaries", "agreement") if one["setting"] == MAIN]
    return least(abs(float(one[column])) for one in every if row.items() <= one.items() and one["what"] in PRIMARY)


PRIMARY = ("coverage", "continuity")


def gain(arm, k=8):
    return cells("boundaries", "context-gain", {"setting": MAIN, "arm": arm}, f"gain_{k}")


def more_gain(arm):
    return interval("boundaries", "gain-differences", {"setting": MAIN, "arm": arm}, "gain_8")


@functools.cache
def files():
    """Records of parity's runs on files, in their order."""
    lines = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("parity/records/*.jsonl")]
    found = [
        one for one in lines
        if one["kind"] == "training" and one["config"]["data"].get("unit") == "files" and one["metrics"]["steps"] == 500
    ]  # fmt: skip
    assert len(found) == 24
    return sorted(found, key=lambda one: one["time"])


def runs():
    """All of parity's."""
    lines = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("parity/records/*.jsonl")]
    return [one for one in lines if one["kind"] == "training"]


def worse_means(among=None):
    among = files() if among is None else among
    return [one["metrics"]["val_loss"] - one["metrics"]["val_loss_last_weights"] for one in among]


def behind_another(unit):
    """Per cent of tokens, in the mean of packed runs that say so."""
    found = [one["metrics"] for one in runs() if one["config"]["data"]["unit"] == unit]
    shares = [m["tokens_behind_another"] / m["real_tokens"] for m in found if m.get("tokens_behind_another")]
    return 100 * sum(shares) / len(shares)


def over_seeds(unit):
    return cells("parity", f"parity-{unit}", OURS, "over_seeds_low", "over_seeds_high")


def interval_of_sd():
    (sd,) = cells("parity", "calibration-files", LAST, "sd")
    return [sd * (7 / chdtri(7, p)) ** 0.5 for p in (0.025, 0.975)]


def by_place():
    found = table("parity", "loss-by-position-files")
    rows = [one for one in found if one["difference_low"] and one["arm"] != "packed-equal-time"]
    return [len(rows), sum(float(one["difference_low"]) > 0 or float(one["difference_high"]) < 0 for one in rows)]


def elsewhere_by_place():
    tables = [table("parity", f"loss-by-position-{unit}") for unit in ("functions", "mixture")]
    rows = [one for some in tables for one in some if one["arm"] == "packed-reset" and one["difference_low"]]
    return [sum(float(one["difference_low"]) > 0 or float(one["difference_high"]) < 0 for one in rows), len(rows)]


def zero_at(power):
    records = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("boundaries/records/*.jsonl")]
    runs = [one for one in records if one["arm"] == "zero" and one["kind"] == "training"]
    points = [p for one in runs for p in one["curves"]["perplexity.by_group"] if p["start"] == 2048 * 2**power]
    return sum(p["nats"] for p in points) / sum(p["targets"] for p in points)


N = r"([+-]?\d+(?:\.\d+)?)"
SENTENCES = {
    "parity": [
        (rf"The difference is {N} nats \[{N}, {N}\]", lambda: parity(OURS)),
        (rf"tests give p = {N};", lambda: cells("parity", "parity-files", OURS, "p")),
        (rf"what the order of sums does, {N} \[{N}, {N}\]", lambda: parity(CONTROL)),
        (
            rf"deviation of the paired differences is {N}, the largest of eight {N}\.",
            lambda: cells("parity", "calibration-files", LAST, "sd", "largest"),
        ),
        (r"Of (\d+) intervals by place [^|]*? (none) excludes zero", by_place),
        (
            rf"by {N} to {N} in all (\d+) runs",
            lambda: [min(worse_means(runs())), max(worse_means(runs())), len(worse_means(runs()))],
        ),
        (rf"Over seeds alone it lies inside, \[{N}, {N}\]", lambda: over_seeds("functions")),
        (r"mixture (\d+) of (\d+) excludes zero", elsewhere_by_place),
        (
            rf"{N} % of tokens stand behind another document\. It is {N} % on functions and {N} % on the mixture",
            lambda: [behind_another(unit) for unit in ("files", "functions", "mixture")],
        ),
        (
            rf"Right by the estimates, {N} and {N}; open by their intervals, \[{N}, {N}\] and \[{N}, {N}\]",
            lambda: [
                parity(CONTROL)[0],
                *cells("parity", "calibration-files", LAST, "sd"),
                *parity(CONTROL)[1:],
                *interval_of_sd(),
            ],
        ),
        (rf"On functions it is {N} nats \[{N}, {N}\]", lambda: parity(OURS, "functions")),
        (rf"end passes -0\.005 by {N};", lambda: [-parity(OURS, "functions")[1] - 0.005]),
        (
            rf"On the mixture it is {N} \[{N}, {N}\]",
            lambda: parity(OURS, "mixture"),
        ),
        (
            rf"It is {N} on functions and {N} on the mixture\.",
            lambda: [spread_of_pairs("functions"), spread_of_pairs("mixture")],
        ),
        (
            rf"as many steps on functions and {N} times as many on the mixture",
            lambda: equal_time("mixture")[:1],
        ),
        (
            rf"ends {N} nats \[{N}, {N}\] and {N} \[{N}, {N}\] lower",
            lambda: [*equal_time("functions")[1:], *equal_time("mixture")[1:]],
        ),
        (rf"more steps and ends {N} \[{N}, {N}\] lower", lambda: equal_time("files")[1:]),
        (rf"makes {N} % more steps", lambda: [100 * (equal_time("files")[0] - 1)]),
        (rf"has {N} in place of {N}: a difference of {N}, where the control's largest is {N}", again),
        (
            rf"Wrong on files \({N}x\) and on the mixture \({N}x\), right on functions \({N}x\)",
            lambda: [equal_time(unit)[0] for unit in ("files", "mixture", "functions")],
        ),
        (
            rf"Not shown: {N} against {N} for paired differences, {N} against {N} over seeds",
            lambda: [
                cells("parity", "calibration-files", CONTROL | {"weights": weights}, column)[0]
                for column in ("sd", "sd_of_seeds")
                for weights in ("mean of the last, by the trainer", "last, by the trainer")
            ],
        ),
        (
            rf"differ by {N} to {N} nats",
            lambda: [
                limit(abs(one["metrics"]["perplexity.loss"] - one["metrics"]["val_loss"]) for one in files()[:6])
                for limit in (min, max)
            ],
        ),
        (rf"better by {N} to {N} in all six", lambda: [min(worse_means()[:6]), max(worse_means()[:6])]),
    ],
    "boundaries": [
        (r"Differences are of (\w+) seeds of (\w+)\.", seeds),
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
        (rf"Its loss is {N} at places from T to 2 T, {N} and {N}", lambda: [zero_at(power) for power in (0, 1, 2)]),
        (rf"\*\*Right:\*\* {N}, {N}, {N}", lambda: [zero_at(power) for power in (0, 1, 2)]),
        *(
            (
                rf"\*{outcome} {places} T\*[^|]*? \*\*(?:Right|Wrong)\*\*: {N} \[{N}, {N}\]",
                functools.partial(primary, key, places),
            )
            for outcome, key in (("Coverage", "coverage"), ("Continuity", "continuity"))
            for places in ("inside", "beyond")
        ),
        (
            rf"0\.6 GiB of states\. \*\*Right:\*\* {N} and {N} %, timed with 64 streams; {N} GiB",
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
        (rf"Without graphs own is {N} % slower", lambda: [slower("own, eager", "zero, eager")]),
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
    ],
    "downstream": [
        (rf"The difference is {N} nats an answer \[{N}, {N}\]", lambda: answers("packed-reset")),
        (rf"leak lose {N} nats an answer \[{N}, {N}\]", lambda: answers("packed-leak")),
        (rf"and {N} points of accuracy \[{N}, {N}\]", fewer_points),
        (rf"with the leak, they lose {N} nats \[{N}, {N}\] more", leaked),
        (rf"eight of eight seeds, {N} \[{N}, {N}\]; the upper end is", lambda: answers("packed-leak")),
        (rf"the upper end is {N}\.", lambda: answers("packed-leak")[2:]),
        (
            rf"examples \((\d+) answers\) no difference is shown: {N} \[{N}, {N}\]",
            lambda: [validated(), *interval("downstream", "differences", {"arm": "packed-leak"}, "val_loss")],
        ),
        (rf"seeds that choose: by {N} to {N} nats", worse_at_each_rate),
        (
            rf"Seldom: {N} % of its tokens",
            lambda: [100 * tasks("packed-leak")[0]["tokens_behind_another"] / tasks("packed-leak")[0]["real_tokens"]],
        ),
        (rf"as often as padded: {N} points \[{N}, {N}\], five", lambda: next_line("evaluation-next_line-4d5f")),
        (rf"four models have answered: {N} points \[{N}, {N}\]", lambda: next_line("evaluation-next_line-aa54")),
    ],
    "": [
        (r"same order, (\w+) of (\w+) seeds", seeds),
        (r"over zero\. (\w+) of (\w+) seeds", seeds),
        (r"sign is likely: (\w+) of (\w+) seeds", seeds),
        (rf"gained about {N} nats beyond", lambda: [-ladder("beyond")[0]]),
        (
            rf"its size: {N} nats, where rounding moved a pair of parity's runs by up to {N};",
            lambda: [-ladder("beyond")[0], *cells("parity", "calibration-files", LAST, "largest")],
        ),
        (rf"files alone, where {N} % of tokens stand behind", lambda: [behind_another("files")]),
        (rf"{N} % of the speed, as CUDA graphs", lambda: [slower("own", "zero")]),
    ],
}
WORDS = {"none": "0", "three": "3", "six": "6", "seven": "7", "eight": "8"}


@pytest.mark.parametrize(
    ("page", "pattern", "numbers"),
    [pytest.param(page, *one, id=f"{page}: {one[0][:40]}") for page, some in SENTENCES.items() for one in some],
)
def test_a_sentence_rounds_the_records(page, pattern, numbers):
    text = " ".join((EXPERIMENTS / page / "README.md").read_text(encoding="utf-8").split())
    (said,) = re.findall(pattern, text)
    said = [WORDS.get(number.lower(), number) for number in ([said] if isinstance(said, str) else said)]
    digits = [len(number.partition(".")[2]) for number in said]
    found = [f"{value:{'+' * number.startswith('+')}.{n}f}" for value, number, n in zip(numbers(), said, digits)]
    assert said == found
