"""Numbers behind the sentences of parity's page, from its committed tables and records."""

import functools
import json

import numpy as np
from scipy.special import chdtri
from study_numbers import EXPERIMENTS, GREEDY, LAST, cells, interval, parity, table

from packmamba.report.inference import bootstrap

FLOAT32 = ("packed-reset-float32", "padded-float32", "mixture")
"""Of the mixture."""


def equal_time(unit):
    """Steps as many times as padded's, and what they gain."""
    arm = "packed-reset" if unit == "files" else f"packed-reset, {unit}"
    (ratio,) = cells("parity", f"equal-time-{unit}", {"arm": arm}, "ratio")
    mean, low, high = parity({"arm": "packed-equal-time"}, unit)
    return [ratio, -mean, -high, -low]


def drift(arm, *columns, unit="files"):
    return cells("parity", f"drift-{unit}", {"arm": arm}, *columns)


def float32_to(step, seed=1, unit="files", pair=("padded-float32", "packed-reset-float32")):
    """Largest difference of the pair's losses of a step, up to this one."""
    alike = [one for one in runs() if (one["seed"], one["config"]["data"]["unit"]) == (seed, unit)]
    found = {one["arm"]: one["curves"]["train"] for one in alike}
    both = zip(*(found[arm] for arm in pair))
    return max(abs(a["loss"] - b["loss"]) for a, b in both if a["step"] <= step)


def pairs(arm, other, unit="files", place=0):
    """An arm's loss minus another's, of each seed that both have, at places from this one on."""
    losses = {}
    for one in runs():
        if one["config"]["data"]["unit"] == unit and one["arm"] in (arm, other):
            far = [point for point in one["curves"]["perplexity.by_group"] if point["start"] >= place]
            losses[one["arm"], one["seed"]] = sum(p["nats"] for p in far) / sum(p["targets"] for p in far)
    both = sorted(seed for name, seed in losses if name == arm and (other, seed) in losses)
    return [losses[arm, seed] - losses[other, seed] for seed in both]


def below_zero(arms):
    return sum(difference < 0 for difference in pairs(*arms))


def above_zero(arm, other, unit="files", place=0):
    """Of how many pairs, how many are above zero."""
    found = pairs(arm, other, unit, place)
    return [len(found), sum(difference > 0 for difference in found)]


def resampled(arm, other, unit="files"):
    """The mean of these differences, with its interval over seeds and packages."""
    alike = [one for one in runs() if one["config"]["data"]["unit"] == unit and one["arm"] in (arm, other)]
    curves = {(one["arm"], one["seed"]): one["curves"]["perplexity.by_group"] for one in alike}
    both = sorted(seed for name, seed in curves if name == arm and (other, seed) in curves)
    packages = sorted({point["group"] for point in curves[arm, both[0]]})

    def of(name, seed, key):
        return [sum(point[key] for point in curves[name, seed] if point["group"] == one) for one in packages]

    nats = [np.subtract(of(arm, seed, "nats"), of(other, seed, "nats")) for seed in both]
    found = bootstrap(np.array(nats), np.array(of(arm, both[0], "targets")))
    return [found.mean, found.low, found.high]


def placed(row, places="inside", unit="mixture"):
    return interval("parity", f"places-{unit}", row, places)


def tuned_pairs(rate):
    """Packed with reset minus padded, of each tuning seed, and the interval."""
    losses = {}
    for path in EXPERIMENTS.glob("parity/tuning/records/*.jsonl"):
        one = json.loads(path.read_text().splitlines()[-1])
        losses[one["arm"], one["seed"]] = one["metrics"]["val_loss"]
    pairs = [losses[f"packed-reset lr={rate}", seed] - losses[f"padded lr={rate}", seed] for seed in (100, 101)]
    return [*pairs, *interval("parity/tuning", "differences", {"arm": f"packed-reset lr={rate}"}, "val_loss")]


def gradients(arm, precision, *columns, unit="files"):
    return cells("parity", f"gradients-{unit}", {"arm": arm, "precision": precision}, *columns)


def at_places(arm="packed-reset", precision="32-true", unit="files"):
    """Of the gradient's norm, at four places along a run."""
    return gradients(arm, precision, *(f"step_{place}" for place in (0, 100, 200, 499)), unit=unit)


def times_less(unit="files"):
    """How much less packed differs from padded than padded from its own gradient in float32, in bfloat16, at four places."""
    return [
        own / other for other, own in zip(*(at_places(arm, "bf16-mixed", unit) for arm in ("packed-reset", "padded")))
    ]


def at_higher_rate(arm):
    return interval("parity", "parity-files", {"arm": f"{arm}-rate"}, "difference")


def loss_at_rate(arm, rate):
    return cells("parity/tuning", "training", {"arm": f"{arm} lr={rate}"}, "val_loss")[0]


@functools.cache
def files():
    """Records of parity's runs on files, in their order."""
    lines = [json.loads(path.read_text().splitlines()[-1]) for path in EXPERIMENTS.glob("parity/records/*.jsonl")]
    found = [
        one for one in lines
        if one["kind"] == "training" and one["config"]["data"].get("unit") == "files" and one["metrics"]["steps"] == 500
        and one["arm"] in ("padded", "packed-reset", "packed-control")
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
    found = [one["metrics"] for one in runs() if one["config"]["data"]["unit"] == unit and one["arm"] in GREEDY]
    shares = [m["tokens_behind_another"] / m["real_tokens"] for m in found if m.get("tokens_behind_another")]
    return 100 * sum(shares) / len(shares)


def interval_of_sd():
    (sd,) = cells("parity", "calibration-files", LAST, "sd")
    return [sd * (7 / chdtri(7, p)) ** 0.5 for p in (0.025, 0.975)]


def by_place():
    found = table("parity", "loss-by-position-files")
    rows = [
        one for one in found if one["difference_low"] and one["arm"] in ("packed-reset", "packed-control", "single")
    ]
    return [len(rows), sum(float(one["difference_low"]) > 0 or float(one["difference_high"]) < 0 for one in rows)]


def elsewhere_by_place():
    found = [
        excluding_zero(unit, arm) for unit in ("functions", "mixture") for arm in ("packed-reset", "packed-control")
    ]
    return [sum(counts) for counts in zip(*found)]


def excluding_zero(unit, arm):
    """How many of the arm's intervals by place exclude zero, and how many there are."""
    rows = [one for one in table("parity", f"loss-by-position-{unit}") if one["arm"] == arm and one["difference_low"]]
    return [sum(float(one["difference_low"]) > 0 or float(one["difference_high"]) < 0 for one in rows), len(rows)]
