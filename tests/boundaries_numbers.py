"""Numbers behind the sentences of the page of boundaries alone."""

import functools
import json
from math import inf

from study_numbers import EXPERIMENTS, MAIN, again, cells, interval, over_seeds

from experiments.boundaries.runs import arms, by_setting, contrast

PLACES = ("inside", "beyond")
BEYOND = (2048, 65536)
FIVE = range(1, 6)
AT_8192 = {"setting": "T = 8192, 14M, 100M tokens"}
LONG = {"setting": "T = 2048, 14M, 262M tokens"}
LARGER = {"setting": "T = 2048, 47M, 100M tokens"}
RATE = {"setting": "T = 2048, 14M, 100M tokens, rate 0.004"}
AFTER = {"setting": "T = 2048, 14M, 32.8M tokens, post-training"}


@functools.cache
def records():
    return [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("boundaries/records/*")]


def record_of(arm, seed):
    """The latest of boundaries' runs of this name."""
    return max((one for one in records() if (one["arm"], one["seed"]) == (arm, seed)), key=lambda one: one["time"])


def loss_at_places(arm, seed, low, high):
    """Nats a target of a run of boundaries at places from low up to high."""
    return _loss(record_of(arm, seed), low, high)


def _loss(record, low, high):
    points = [p for p in record["curves"]["perplexity.by_group"] if low <= p["start"] < high]
    return sum(point["nats"] for point in points) / sum(point["targets"] for point in points)


def loss_beyond(arm, seed, T=8192):
    return loss_at_places(arm, seed, T, 32 * T)


def over_shuffled(places, of=""):
    """Own minus the pool's rows shuffled, seed by seed."""
    seeds = FIVE if of else range(1, 9)
    return [
        loss_at_places(f"own{of}", seed, *places) - loss_at_places(f"shuffled{of}", seed, *places) for seed in seeds
    ]


def of_noise(what, places="beyond"):
    """A difference from noise, or noise's from zero."""
    return interval("boundaries", "ladder", {"setting": MAIN, "what": what}, places)


def outcomes(setting, places="beyond"):
    """Coverage, continuity and own over zero, each with its interval."""
    three = ("coverage", "continuity", "own over zero")
    return [x for what in three for x in interval("boundaries", "ladder", setting | {"what": what}, places)]


def packages_of_own(setting, *more):
    """In how many packages own minus zero beyond T has its mean's sign."""
    row = setting | {"what": "own over zero", "places": "beyond"}
    return cells("boundaries", "agreement", row, "packages", *more)


def below_zero(setting):
    """In how many seeds own minus zero beyond T is below zero, and of how many."""
    row = setting | {"what": "own over zero", "places": "beyond"}
    difference, agree, every = cells("boundaries", "agreement", row, "difference", "seeds", "of_seeds")
    return [agree if difference < 0 else every - agree, every]


def leaked(what="leak", places="all places", T=2048, unit="files"):
    """A leak minus the same rows with reset, in post-training."""
    setting = f"T = {T}, 14M, 32.8M tokens, post-training"
    return interval("boundaries", f"leak-{unit}", {"setting": setting, "what": what}, places)


def harm_of(arm, rows, seeds, high=inf):
    """An arm minus rows after post-training, at places below high, seed by seed."""
    return [loss_at_places(arm, seed, 0, high) - loss_at_places(rows, seed, 0, high) for seed in seeds]


def harms():
    """A leak minus reset after post-training: at T = 512, 2048 and 8192, and on the mixture."""
    seeds = {"-T512": range(1, 5), "": FIVE, "-T8192": range(1, 5), "-mixture": FIVE}
    return [harm_of(f"leak-post{of}", f"rows-post{of}", some) for of, some in seeds.items()]


def in_each_of_post_training(of, seeds):
    """Training loss of a leak minus that of reset, mean of the logged steps after the first hundred, seed by seed."""
    found = []
    for seed in seeds:
        curves = [record_of(f"{arm}-post{of}", seed)["curves"]["train"] for arm in ("leak", "rows")]
        leak, rows = ({p["step"]: p["loss"] for p in curve if p["step"] > 100} for curve in curves)
        assert leak.keys() == rows.keys()
        found.append(sum(leak[step] - rows[step] for step in leak) / len(leak))
    return found


def in_post_training(of, seeds):
    return over_seeds(in_each_of_post_training(of, seeds))


def borne_by_the_first(unit, of):
    """Of the targets and of a leak's harm, the per cent in the first 256 bytes."""
    points = record_of(f"rows-post{of}", 1)["curves"]["perplexity.by_group"]
    share = sum(p["targets"] for p in points if p["start"] < 256) / sum(p["targets"] for p in points)
    first, every = (leaked(places=where, unit=unit)[0] for where in ("first 256", "all places"))
    return [100 * share, 100 * share * first / every]


def dose_of_the_mixture():
    return cells("boundaries", "leak-mixture", {"what": "leak"}, "dose")[0]


def over_at_twice_the_rate():
    """Own minus shuffled inside and beyond T, seed by seed."""
    return [*over_shuffled((0, 2048), "-rate"), *over_shuffled((2048, 65536), "-rate")]


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


def mean_loss(arm, seeds, places=BEYOND):
    return sum(loss_at_places(arm, seed, *places) for seed in seeds) / len(seeds)


@functools.cache
def made_again(arm, on):
    """Runs of an arm that were made again on such GPUs, by seed; of one seed the latest."""
    paths = EXPERIMENTS.glob(f"boundaries/again/records/{arm}-*.jsonl")
    runs = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    here = [one for one in runs if on in one["hardware"]["gpus"][0]]
    return {one["seed"]: one for one in sorted(here, key=lambda one: one["time"])}


def again_at(seed, places=BEYOND, arm="zero", on="H200"):
    """Loss of an arm of this seed, made again: zero on the kind of GPU on which the others ran."""
    return _loss(made_again(arm, on)[seed], *places)


def again_on(gpu, arm="zero"):
    """By how much an arm, made again on such GPUs, ends above the committed runs."""
    return [difference for *_, difference in again("boundaries", on=gpu, arm=arm)]


def over_again(arm, seeds):
    """An arm's loss beyond T minus that of zero made again, mean over the seeds."""
    return mean_loss(arm, seeds) - sum(map(again_at, seeds)) / len(seeds)


def in_training(first, last, arms=("zero", "shuffled")):
    """Training loss of one arm minus another's, mean over eight seeds and the steps from first up to last."""
    means = []
    for arm in arms:
        points = [
            p for seed in range(1, 9) for p in record_of(arm, seed)["curves"]["train"] if first <= p["step"] < last
        ]
        means.append(sum(point["loss"] for point in points) / len(points))
    return means[0] - means[1]


def gain_of_own(of, last):
    """By how much own is below zero on the targets of the context gain at 8 T, with all context and with T of it before them;
    each with half its interval over the seeds from 1 to the last."""
    found = []
    for seed in range(1, last + 1):
        own, zero = (
            next(p for p in record_of(arm, seed)["curves"]["long_context.context_gain"] if p["windows"] == 8)
            for arm in (f"own{of}", f"zero{of}")
        )
        found.append((zero["loss"] - own["loss"], zero["loss"] + zero["gain"] - own["loss"] - own["gain"]))
    return [x for mean, low, high in map(over_seeds, zip(*found)) for x in (mean, (high - low) / 2)]


@functools.cache
def _at_2048():
    """Arms on files with rows of 2048, by the label of their setting."""
    of_files = [one for one in records() if one["kind"] == "training" and one["config"]["data"]["unit"] == "files"]
    return {setting.label(): here for setting, here in by_setting(arms(of_files)).items() if setting.stagger}


def of_arms(arm, other, places=BEYOND, setting=MAIN):
    """One arm minus another with its interval, at places of which no table tells."""
    here = _at_2048()[setting]
    found = contrast(here[arm], here[other], *places)
    return [found.mean, found.low, found.high]


def over_zero(arm, seeds, T=2048):
    """An arm minus its zero beyond T, seed by seed."""
    of = arm.partition("-")[2]
    zero = f"zero-{of}" if of else "zero"
    return [loss_beyond(arm, seed, T) - loss_beyond(zero, seed, T) for seed in seeds]


def growth_in_loss():
    """By how much own minus zero beyond T changed from 100 to 262 million tokens, seed by seed."""
    return [late - early for late, early in zip(over_zero("own-long", FIVE), over_zero("own", FIVE))]


def growth_of_gain_of(arm, of="-long"):
    """By how much an arm's context gain at 8 T differs there from that after 100 million tokens, seed by seed."""

    def gain(name, seed):
        points = record_of(name, seed)["curves"]["long_context.context_gain"]
        return sum(point["gain"] for point in points if point["windows"] == 8)

    return [gain(f"{arm}{of}", seed) - gain(arm, seed) for seed in FIVE]


def growth_of_the_gain(of):
    """The same of own's over zero's."""
    return [own - zero for own, zero in zip(growth_of_gain_of("own", of), growth_of_gain_of("zero", of))]


def at_one_commit():
    """Seeds of the ladder, and of how many its three arms ran at one commit."""
    commits = [{record_of(arm, seed)["commit"] for arm in ("zero", "foreign", "own")} for seed in range(1, 9)]
    return [sum(len(each) == 1 for each in commits), len(commits)]


def higher_from():
    """From which place on own is above the shuffled rows, in the mean of eight seeds."""
    edges = [2**k for k in range(1, 17)]
    means = [sum(over_shuffled((low, 2 * low))) / 8 for low in edges]
    return next(low for k, low in enumerate(edges) if all(mean > 0 for mean in means[k:]))
