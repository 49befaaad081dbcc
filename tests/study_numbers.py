"""Numbers behind the sentences of the studies' pages, from the committed tables and records."""

import csv
import functools
import json
import re
import statistics

from scipy.special import stdtrit

from processes import ROOT

EXPERIMENTS = ROOT / "experiments"
MAIN = "T = 2048, 14M, 100M tokens"
AT_512 = {"setting": "T = 512, 14M, 100M tokens"}
OURS = {"arm": "packed-reset"}
LEAK = {"setting": MAIN, "what": "leak"}
CONTROL = {"arm": "packed-control"}
GREEDY = ("packed-reset", "packed-equal-time")
LAST = CONTROL | {"weights": "mean of the last"}


N = r"([+-]?\d+(?:\.\d+)?)"
"""A number in a sentence."""
WORDS = {"none": "0", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "eleven": "11", "twelve": "12", "thirteen": "13", "fifteen": "15"}  # fmt: skip


def said(page, pattern):
    """The numbers of the one place of a page that the pattern matches, as they are written."""
    text = " ".join((EXPERIMENTS / page / "README.md").read_text(encoding="utf-8").split())
    (found,) = re.findall(pattern, text)
    return [
        WORDS.get(number.lower(), number.replace(",", "")) for number in ([found] if isinstance(found, str) else found)
    ]


def rounded_as(said, numbers):
    """The numbers, with as many digits as were said."""
    digits = [len(number.partition(".")[2]) for number in said]
    return [
        f"{value:{'+' * number.startswith('+')}.{n}f}" for value, number, n in zip(numbers, said, digits, strict=True)
    ]


@functools.cache
def table(experiment, name):
    """Of an experiment with several corpora that of its files, unless the name says which."""
    folder = EXPERIMENTS / experiment / "tables"
    path = folder / f"{name}.csv"
    with open(path if path.is_file() else folder / f"{name}-files.csv", newline="") as file:
        return list(csv.DictReader(file))


def cells(experiment, name, row, *columns):
    (found,) = (one for one in table(experiment, name) if row.items() <= one.items())
    return [float(found[column]) for column in columns]


def interval(experiment, name, row, column, low="_low", high="_high"):
    return cells(experiment, name, row, column, column + low, column + high)


def parity(row, unit="files"):
    return interval("parity", f"parity-{unit}", row, "difference")


def gain_of_twice_the_rate(arm):
    """Validation loss of an arm of the ladder minus that at twice the rate, mean over the seeds that have both."""
    rates = [trained(f"{arm}-rate", seed) for seed in range(1, 6)]
    return statistics.fmean(trained(arm, seed)[0] - twice[0] for seed, twice in enumerate(rates, 1) if twice)


def ordered(what, places="beyond", setting=f"{MAIN}, tuning seeds"):
    row = {"setting": setting, "what": what}
    return interval("boundaries", "order", row, places)


def at_512(what):
    return interval("boundaries", "ladder", AT_512 | {"what": what}, "beyond")


def row_length(T, *columns):
    row = {"arm": "rows", "rows": str(T)}
    return [x for column in columns for x in interval("boundaries", "row-length", row, column)]


def of_tuning(what, places="beyond"):
    """At rates 0.001, 0.002, 0.004 and 0.008, of one seed."""
    rows = [one for one in table("boundaries", "ladder") if one["what"] == what and "tuning" in one["setting"]]
    return [float(one[places]) for one in sorted(rows, key=lambda one: one["setting"])]


def trained(arm, seed):
    """Validation losses of boundaries' runs of this name, the earlier first."""
    records = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("boundaries/records/*.jsonl")]
    found = [one for one in records if (one["arm"], one["seed"]) == (arm, seed)]
    return [one["metrics"]["val_loss"] for one in sorted(found, key=lambda one: one["time"])]


def lower_at_the_end(arm):
    """How much lower the loss is at the last rate tried than at the one before."""
    return trained(f"{arm} lr=0.004", 101)[0] - trained(f"{arm} lr=0.008", 101)[0]


def common_rates(margin):
    """Learning rates at which each arm of the ladder is within the margin of its lowest loss."""
    rates, arms = (0.001, 0.002, 0.004, 0.008), ("zero", "foreign", "own")
    losses = {arm: {rate: trained(f"{arm} lr={rate}", 101)[0] for rate in rates} for arm in arms}
    return [rate for rate in rates if all(losses[arm][rate] - min(losses[arm].values()) <= margin for arm in arms)]


def doses():
    """Per cent of the tokens behind another document, by T."""
    return [
        100 * cells("boundaries", "arms", {"setting": f"T = {T}, 14M, 100M tokens", "arm": "leak"}, "dose")[0]
        for T in (512, 2048, 8192)
    ]


def more_of_a_leak(T):
    """Context gain at 4 T, leak minus reset."""
    row = {"setting": f"T = {T}, 14M, 100M tokens", "arm": "leak"}
    return interval("boundaries", "gain-differences", row, "gain_4")


def again(experiment, metric="perplexity.loss", on="", arm=None):
    """Of each run that was made again, of that arm and on GPUs of that name, its loss, the committed one, and the difference; by
    seed, then by time."""
    paths = EXPERIMENTS.glob(f"{experiment}/again/records/*.jsonl")
    new = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    paths = EXPERIMENTS.glob(f"{experiment}/records/*.jsonl")
    last = [json.loads(path.read_text().splitlines()[-1]) for path in paths]
    committed = {repr(run_of(one)): one["metrics"].get(metric) for one in last if one["kind"] == "training"}
    assert len(committed) == sum(one["kind"] == "training" for one in last)
    pairs = [
        (one["metrics"][metric], committed[repr(run_of(one))])
        for one in sorted(new, key=lambda one: (one["seed"], one["time"]))
        if on in one["hardware"]["gpus"][0] and arm in (None, one["arm"])
    ]
    return [(loss, before, loss - before) for loss, before in pairs]


def run_of(record):
    sections = ("data", "model", "optimizer", "trainer")
    kept = [{k: v for k, v in record["config"][name].items() if k != "cache_dir"} for name in sections]
    return record["arm"], record["seed"], *kept


def slower(arm, than, timing=0):
    return 100 * (1 - speed(arm, timing) / speed(than, timing))


def speed(arm, timing=0):
    """Million tokens a second; the latest timing is 0, the one before it 1."""
    run = list(dict.fromkeys(one["run"] for one in table("boundaries", "throughput")))[timing]
    return cells("boundaries", "throughput", {"arm": arm, "run": run}, "real_tokens_per_second")[0] / 1e6


def step_loss(arm, seed, *steps):
    """Training losses of a run of boundaries at these steps."""
    (path,) = EXPERIMENTS.glob(f"boundaries/records/{arm.replace(' ', '-').replace('=', '-')}-*.jsonl")
    record = json.loads(path.read_text().splitlines()[-1])
    assert (record["arm"], record["seed"]) == (arm, seed)
    losses = {point["step"]: point["loss"] for point in record["curves"]["train"]}
    return [losses[step] for step in steps]


def answers(arm, task="mqar"):
    return cells("downstream", f"answers-{task}", {"arm": arm}, "difference", "low", "high")


def of_task(arm="packed-leak", task="mqar"):
    """Records of its reported runs."""
    paths = EXPERIMENTS.glob(f"downstream/records/{arm}-*.jsonl")
    found = [json.loads(path.read_text().splitlines()[-1]) for path in sorted(paths)]
    return [one for one in found if (one["arm"], one["config"]["data"]["task"]) == (arm, task)]


def tasks(arm):
    """Metrics of mqar's reported runs."""
    return [one["metrics"] for one in of_task(arm)]


def leaked():
    """More nats as trained than from zero state."""
    return over_seeds([m["mqar.nats_as_trained"] - m["mqar.nats"] for m in tasks("packed-leak")])


def over_seeds(pairs):
    """Mean, and its interval by Student's t."""
    mean, half = statistics.fmean(pairs), stdtrit(len(pairs) - 1, 0.975) * statistics.stdev(pairs) / len(pairs) ** 0.5
    return [mean, mean - half, mean + half]


def nats_over(arm, other, task="mqar"):
    """Nats an answer, an arm's over another's, on the seeds that both have."""
    found = [{one["seed"]: one["metrics"][f"{task}.nats"] for one in of_task(name, task)} for name in (arm, other)]
    return over_seeds([found[0][seed] - found[1][seed] for seed in found[0].keys() & found[1].keys()])


def validated():
    return sum(point["count"] for point in of_task()[0]["curves"]["loss_by_position"])


def tried(task):
    """Nats an answer by arm and learning rate, of the two seeds that choose."""
    found = {}
    for path in EXPERIMENTS.glob("downstream/tuning/records/*.jsonl"):
        one = json.loads(path.read_text().splitlines()[-1])
        if one["config"]["data"]["task"] == task:
            place = one["arm"].split()[0], one["config"]["optimizer"]["lr"]
            found.setdefault(place, {})[one["seed"]] = one["metrics"][f"{task}.nats"]
    return {place: [values[seed] for seed in sorted(values)] for place, values in found.items()}


def worse_at_each_rate():
    """At how many rates leak was tried, and how much worse it is at least than another arm, in the mean of two seeds."""
    tuned = {place: values for place, values in tried("mqar").items() if "row-means" not in place[0]}
    means = {place: statistics.fmean(values) for place, values in tuned.items()}
    others = [(arm, lr) for arm, lr in means if arm != "packed-leak"]
    return [len({lr for _, lr in means}), min(means["packed-leak", lr] - means[arm, lr] for arm, lr in others)]


def fewer_points(task="mqar"):
    mean, low, high = interval("downstream", f"evaluation-{task}", {"arm": "packed-leak"}, "difference")
    return [-100 * mean, -100 * high, -100 * low]


def contradicted(*columns):
    row = {"arm": "packed-leak"}
    return [100 * x for x in cells("downstream", "evaluation-contradiction", row, *columns)]


def solved(arm):
    return cells("downstream", "answers-contradiction", {"arm": arm}, "solved")


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


def gain(arm, k=8, setting=MAIN):
    return cells("boundaries", "context-gain", {"setting": setting, "arm": arm}, f"gain_{k}")


def more_gain(arm, column="gain_8", setting=None):
    return interval("boundaries", "gain-differences", (setting or {"setting": MAIN}) | {"arm": arm}, column)


def loss_at(power, arm="zero", seeds=None):
    """Nats a target at places from 2048 times this power of two to the next."""
    records = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("boundaries/records/*.jsonl")]
    trained = [one for one in records if one["arm"] == arm and one["kind"] == "training"]
    runs = [one for one in trained if not seeds or one["seed"] in seeds]
    points = [p for one in runs for p in one["curves"]["perplexity.by_group"] if p["start"] == 2048 * 2**power]
    return sum(p["nats"] for p in points) / sum(p["targets"] for p in points)
