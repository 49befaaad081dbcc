"""Numbers in the sentences of the studies' pages are those of the committed tables and records."""

import csv
import functools
import json
import re

import pytest

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


def parity(row):
    return interval("parity", "parity-files", row, "difference")


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
    found = [one for one in lines if one["kind"] == "training" and one["config"]["data"].get("unit") == "files"]
    assert len(found) == 24
    return sorted(found, key=lambda one: one["time"])


def worse_means():
    return [one["metrics"]["val_loss"] - one["metrics"]["val_loss_last_weights"] for one in files()]


def by_place():
    rows = [one for one in table("parity", "loss-by-position-files") if one["difference_low"]]
    return [len(rows), sum(float(one["difference_low"]) > 0 or float(one["difference_high"]) < 0 for one in rows)]


def zero_at(power):
    records = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("boundaries/records/*.jsonl")]
    runs = [one for one in records if one["config"]["trainer"]["boundary"] == "reset"]
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
        (r"of (\d+) intervals by place [^|]*? (none) excludes zero", by_place),
        (rf"by {N} to {N} in all 24 runs", lambda: [min(worse_means()), max(worse_means())]),
        (
            rf"Right: {N} \[{N}, {N}\] and {N}\.",
            lambda: [*parity(CONTROL), *cells("parity", "calibration-files", LAST, "sd")],
        ),
        (
            rf"Wrong: {N} against {N}\.",
            lambda: [
                cells("parity", "calibration-files", CONTROL | {"weights": weights}, "sd")[0]
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
        (rf"its loss is {N} at places from T to 2 T, {N} and {N}", lambda: [zero_at(power) for power in (0, 1, 2)]),
        (rf"\*\*Right:\*\* {N}, {N}, {N}", lambda: [zero_at(power) for power in (0, 1, 2)]),
        *(
            (
                rf"\*{outcome} {places} T\*[^|]*? with six seeds: {N} \[{N}, {N}\]",
                functools.partial(primary, key, places),
            )
            for outcome, key in (("Coverage", "coverage"), ("Continuity", "continuity"))
            for places in ("inside", "beyond")
        ),
        (
            rf"0\.6 GiB of states\. \*{N} GiB",
            lambda: [cells("boundaries", "arms", {"setting": MAIN, "arm": "own"}, "state_bytes")[0] / 2**30],
        ),
    ],
    "": [
        (r"same order; (\w+) of (\w+) seeds", seeds),
        (r"do harm\. (\w+) of (\w+) seeds", seeds),
        (r"in each of (\w+) of (\w+) seeds", seeds),
        (rf"gained about {N} nats beyond", lambda: [-ladder("beyond")[0]]),
        (rf"its size, {N} nats, is three times", lambda: [-ladder("beyond")[0]]),
        (
            r"is (three) times what rounding does to one run",
            lambda: [-ladder("beyond")[0] / cells("parity", "calibration-files", LAST, "sd")[0]],
        ),
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
