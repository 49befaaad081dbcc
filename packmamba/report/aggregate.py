"""Arms of records: runs by arm and seed, baselines, paired differences and speeds."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from packmamba.errors import ConfigError
from packmamba.report.statistics import (
    NOTHING,
    Comparison,
    Divergence,
    Estimate,
    Ruling,
    bootstrap,
    difference_by_group,
    estimate,
    interval,
    margin_from_pilot,
    over_items,
    rule,
)

Record = Mapping[str, Any]
Records = Sequence[Record]

SCHEMES = "single padded padded-sorted packed-reset packed-leak packed-leak-conv packed-leak-scan packed-carry".split()
LEAKS = ("leak", "leak_conv", "leak_scan")  # boundary schemes that are failures by design
HIGHER_IS_BETTER = ("accuracy", "gain")  # words in the names of such metrics
BASELINES = ("padded", "single", "packed-reset")
OPEN_END = 2**31 - 1
SPEEDS = ["real_tokens_per_second", "slots_per_second", "padding_fraction", "speedup", "timing"]
NOT_SETTINGS = """name experiment output seed runs_dir run evaluations data.cache_dir data.num_workers
    trainer.log_every trainer.checkpoint_every trainer.threads""".split()


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key by the numbers in a text."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def frame(records: Iterable[Record], kind: str) -> pd.DataFrame:
    """Return a row for each record, by time: its keys, ``config.<key>``, ``curves.<name>``, and metrics as floats."""
    rows = [
        {**r, **flatten({key: r[key] for key in ("config", "curves")})}
        for r in of_kind(records, kind)
    ]
    metrics = pd.DataFrame([row.pop("metrics") for row in rows], dtype=float)
    others = pd.DataFrame(rows, dtype=object)
    joined = pd.concat([others.where(others.notna(), None), metrics], axis=1)
    return joined.sort_values("time", kind="stable", ignore_index=True) if rows else joined


def parts_of(name: str) -> tuple[str, str]:
    """Split an arm's name into its title and, from the first ``key=`` on, the point of a grid."""
    title, *point = re.split(r" (?=[^ =]+=)", name, maxsplit=1)
    return title, "".join(point)


@dataclass(eq=False)
class Arm:
    """Hold rows of ``frame`` by seed; ``variant``: keys and values in which arms of one name differ."""

    name: str
    variant: tuple[tuple[str, Any], ...]
    runs: pd.DataFrame
    baseline: Arm = field(init=False, repr=False)

    def __getitem__(self, metric: str) -> pd.Series:
        return self.runs.get(metric, pd.Series(math.nan, self.runs.index))

    def says(self, key: str, absent: Any = None) -> Any:
        value = self.runs.iloc[0].get(f"config.{key}")
        return absent if value is None else value

    @cached_property
    def scheme(self) -> str:
        """Return one of ``SCHEMES``, or ``packed-`` and the boundary scheme."""
        strategy = str(self.says("data.strategy")).replace("_", "-")
        boundary = self.says("trainer.boundary", "reset").replace("_", "-")
        return strategy if strategy in SCHEMES else f"packed-{boundary}"

    @property
    def setting(self) -> tuple[str, str]:
        return repr(self.variant), parts_of(self.name)[1]

    @property
    def title(self) -> str:
        return parts_of(self.name)[0]

    @property
    def leaks(self) -> bool:
        """Tell if the arm lets documents cross their boundaries: the failure that is looked for."""
        return self.says("trainer.boundary", "reset") in LEAKS

    @property
    def diverged(self) -> set[int]:
        """Seeds of runs whose loss was not finite: they have no validation loss."""
        return set(self.runs.index[self["val_loss"].isna()])

    @property
    def label(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.variant)
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def timing(self) -> str | None:
        """Return the run that timed the arm among others, or None."""
        return next(iter(self.runs.get("timing", ())), None)

    @property
    def sweep(self) -> Mapping[str, Any]:
        return next((one for one in self.runs.get("sweep", ()) if isinstance(one, Mapping)), {})

    @lru_cache(maxsize=64)
    def points(self, curve: str) -> pd.DataFrame:
        curves = self.runs.get(f"curves.{curve}", pd.Series(dtype=object)).dropna()
        return pd.DataFrame(
            [point | {"seed": seed} for seed, each in curves.items() for point in each]
        )


Arms = Sequence[Arm]


def training_arms(records: Iterable[Record]) -> list[Arm]:
    """Group training runs by arm, with the baseline of each; of a repeated run the latest counts.

    A run whose loss was not finite at some step has diverged, whatever its last loss is: its
    validation losses become NaN.
    """
    runs = frame(records, "training")
    if runs.empty:
        return []
    if "diverged_at_step" in runs:
        losses = [column for column in runs if column.startswith("val_loss")]
        runs.loc[runs["diverged_at_step"].notna(), losses] = math.nan
    settings = [
        key
        for key in runs
        if key.startswith("config.") and key.removeprefix("config.") not in NOT_SETTINGS
    ]
    differ = runs[settings].map(repr).groupby(runs["arm"]).nunique().gt(1).any()
    keys = sorted(differ.index[differ])
    runs["variant"] = [
        tuple((key.removeprefix("config."), run[key]) for key in keys) for _, run in runs.iterrows()
    ]
    arms = []
    for (name, _), group in runs.groupby(["arm", runs["variant"].map(repr)]):
        latest = group.drop_duplicates("seed", keep="last").set_index("seed").sort_index()
        arms.append(Arm(name, group["variant"].iloc[0], latest))
    arms = _in_order(arms)
    for arm in arms:
        arm.baseline = _baseline(arm, arms)
    return arms


def timed_arms(records: Records) -> list[Arm]:
    """Return timed arms, the latest first, with ``speedup`` over the baseline or single."""
    runs, trained = frame(records, "throughput"), training_arms(records)
    if runs.empty:
        return []
    runs["timing"] = runs["config.run"].map(str)
    groups = runs.groupby(["arm", "timing"])
    arms = [
        Arm(name, (("run", run),), group.tail(1).set_index("seed")) for (name, run), group in groups
    ]
    ended, timed = runs.groupby("timing")["time"].max(), []
    for arm in sorted(_in_order(arms), key=lambda arm: ended[arm.timing], reverse=True):
        names = {one.baseline.name for one in trained if one.name == arm.name}
        peers = [peer for peer in arms if peer.setting == arm.setting]
        base = [peer for peer in peers if peer.name in names]
        base += [
            peer for scheme in ("single", *BASELINES) for peer in peers if peer.scheme == scheme
        ]
        rate = base[0]["real_tokens_per_second"].iloc[0] if base else math.nan
        timed.append(
            replace(arm, runs=arm.runs.assign(speedup=arm.runs["real_tokens_per_second"] / rate))
        )
    return timed


def arms_with_speeds(records: Records) -> list[Arm]:
    """Return trained arms, with speeds of the latest timing that holds most of them."""
    arms, timed = training_arms(records), timed_arms(records)
    names = {arm.name for arm in arms}
    timing = next(
        iter(Counter(one.timing for one in timed if one.name in names).most_common(1)), (None,)
    )[0]
    timed = [one for one in timed if one.timing == timing]
    for arm in arms:
        its = [
            t
            for t in timed
            if t.name == arm.name and all(t.says(key) == value for key, value in arm.variant)
        ]
        speeds = dict(its[0].runs.iloc[0][SPEEDS]) if its else {"speedup": math.nan, "timing": None}
        if arm.baseline.name not in [one.name for one in timed]:
            speeds["speedup"] = math.nan
        arm.runs = arm.runs.assign(**speeds)
    return arms


def _in_order(arms: Arms) -> list[Arm]:
    ranks, seen = dict[Arm, Any](), Counter[Any]()
    for arm in sorted(arms, key=lambda arm: (arm.runs["time"].min(), arm.name)):
        again, scheme = seen[arm.setting, arm.scheme], (*SCHEMES, arm.scheme).index(arm.scheme)
        ranks[arm] = tuple(map(natural, arm.setting)), again, scheme
        seen[arm.setting, arm.scheme] += 1
    return sorted(ranks, key=ranks.__getitem__)


class Seeds(NamedTuple):
    """Count seeds with a value, diverged runs, and seeds without record or value."""

    finite: int
    diverged: int
    missing: int

    def __str__(self) -> str:
        words = [
            f"{n} {what}"
            for n, what in ((self.diverged, "diverged"), (self.missing, "missing"))
            if n
        ]
        return ", ".join([f"{self.finite} of {sum(self)}", *words]) if words else str(self.finite)


def seeds_of(arm: Arm, arms: Arms, metric: str = "val_loss") -> Seeds:
    """Count an arm's seeds, of those that its sweep names or that any arm has."""
    expected = set(arm.sweep.get("seeds") or {seed for each in arms for seed in each.runs.index})
    expected |= set(arm.runs.index)
    finite = int(arm[metric].drop(index=list(arm.diverged)).count())
    diverged = len(arm.diverged)
    return Seeds(finite, diverged, len(expected) - finite - diverged)


def _baseline(arm: Arm, arms: Arms) -> Arm:
    named = arm.sweep.get("baseline") or ""
    peers = [peer for peer in arms if peer.setting == arm.setting or arm.sweep.get("apart")]
    matches = [peer for peer in peers if peer.label == named] + [
        p for p in peers if p.title == parts_of(named)[0]
    ]
    return [
        *matches,
        *(peer for scheme in BASELINES for peer in peers if peer.scheme == scheme),
        *peers,
    ][0]


def versus(arms: Arms) -> str:
    baselines = {arm.baseline for arm in arms}
    return " or ".join(
        sorted({one.label if one.sweep.get("apart") else one.title for one in baselines})
    )


def paired(arm: Arm, other: Arm, metric: str) -> tuple[Any, Any]:
    """Return ``estimate``'s arguments: differences of the seeds that both arms finished.

    They are nats (seeds, groups) and targets (groups,) if the metric is a loss whose documents have
    groups; else differences by seed, and None.
    """
    if metric.endswith(".loss"):
        curve = f"{metric.rpartition('.')[0]}.by_group"
        sums, weights = difference_by_group(arm, other, curve, "nats", "targets")
        if len(sums) > 1:
            return sums, weights
    return arm[metric] - other[metric], None


def difference(arm: Arm, metric: str, other: Arm | None = None) -> Estimate | None:
    """Estimate an arm's metric minus its baseline's, or another's; None of an arm and itself."""
    other = other or arm.baseline
    return None if other is arm else estimate(*paired(arm, other, metric))


def divergence(arm: Arm, other: Arm) -> Divergence:
    """Count the runs of two arms, and the diverged ones among them."""
    return Divergence(len(arm.diverged), len(arm.runs), len(other.diverged), len(other.runs))


class Contrast(NamedTuple):
    """Hold an arm's metric minus another's, and the ruling on it."""

    arm: Arm
    other: Arm
    same_documents: bool
    comparison: Comparison
    ruling: Ruling

    @property
    def name(self) -> str:
        return f"{self.arm.label} - {self.other.title}"

    @property
    def primary(self) -> bool:
        """Whether the sweep named it beforehand."""
        return self.comparison.family == "primary"

    @property
    def margin(self) -> float | None:
        return self.arm.sweep.get("margin")

    @property
    def verdict(self) -> str:
        """The ruling's verdict, and whether the arms read other documents."""
        return self.ruling.verdict + ", other documents" * (not self.same_documents)


def contrasts(arms: Arms, metric: str) -> list[Contrast]:
    """Rule on each arm minus its baseline, and on the contrasts that the sweep names as primary.

    Primary contrasts are one family, over all points of a grid, and the others, which explore, are
    another.
    """
    pairs, absent = _named_pairs(arms)
    comparisons = {}
    for (arm, other), primary in pairs.items():
        same = same_documents(arm, other)
        comparisons[arm, other] = Comparison(
            *paired(arm, other, metric),
            margin=arm.sweep.get("margin") if same else None,
            divergence=divergence(arm, other),
            family="primary" if primary else "exploratory",
            setting=arm.setting,
            is_leak=same and arm.leaks and not other.leaks,
        )
    rulings = rule(comparisons, {"primary": absent}, higher_is_better(metric))
    return [
        Contrast(arm, other, same_documents(arm, other), comparison, rulings[arm, other])
        for (arm, other), comparison in comparisons.items()
    ]


def _named_pairs(arms: Arms) -> tuple[dict[tuple[Arm, Arm], bool], int]:
    """Return pairs of arms, true if primary, and the number of primary ones without runs."""
    pairs = {(arm, arm.baseline): False for arm in arms if arm is not arm.baseline}
    absent = 0
    named = [(arm.setting, name) for arm in arms for name in arm.sweep.get("primary", ())]
    for setting, name in dict.fromkeys(named):
        first, _, second = name.partition(" - ")
        titles = {arm.title: arm for arm in reversed(arms) if arm.setting == setting}
        if first in titles and (second in titles or not second):
            arm = titles[first]
            pairs[arm, titles.get(second, arm.baseline)] = True
        else:
            absent += 1
    return pairs, absent


def higher_is_better(metric: str) -> bool:
    """Tell if a metric is a share of right answers or a gain, and no loss."""
    return any(word in metric for word in HIGHER_IS_BETTER)


def pilot_margin(
    arms: Arms, leak: str = "packed-leak", intact: str = "packed-reset", metric: str = "val_loss"
) -> float:
    """Return a margin from a pilot's arms: half of the lower bound of the leak's harm.

    ``leak`` and ``intact`` are names of arms, ``arms`` those of ``training_arms``. Raises
    ConfigError as ``margin_from_pilot`` does.
    """
    by_name = {arm.name: arm for arm in arms}
    for key, name in (("leak", leak), ("intact", intact)):
        if name not in by_name:
            raise ConfigError(f"{key}: expected one of {', '.join(by_name)}, got {name}")
    values, weights = paired(by_name[leak], by_name[intact], metric)
    harm = estimate(-values if higher_is_better(metric) else values, weights) or NOTHING
    return margin_from_pilot(harm)


def same_documents(arm: Arm, other: Arm) -> bool:
    """Tell if the steps of two arms hold the same documents."""
    free = {*NOT_SETTINGS, "data.max_tokens_per_batch"}
    if {arm.says("data.batching", "matched"), other.says("data.batching", "matched")} == {
        "matched"
    }:
        free |= {"data.strategy", "data.row_length", "data.buffer", "data.streams"}
    keys = {
        key.removeprefix("config.")
        for key in {*arm.runs, *other.runs}
        if key.startswith("config.data.")
    }
    return all(arm.says(key) == other.says(key) for key in keys - free)


def difference_by_position(arm: Arm) -> list[tuple[int, int, Estimate]]:
    """Return (start, end, the arm's loss minus its baseline's) by range of positions."""
    sides = [side.points("loss_by_position") for side in (arm, arm.baseline)]
    if arm.baseline is arm or any(points.empty for points in sides):
        return []
    ours, theirs = (
        points.set_index(["start", "end", "seed"])["loss"].astype(float) for points in sides
    )
    by_place = (ours - theirs).dropna().groupby(level=["start", "end"])
    return [(start, end, one) for (start, end), values in by_place if (one := interval(values))]


def with_items(folder: str | Path, records: Records) -> list[Record]:
    """Add ``items``, the path of their items (in items/ or items.zip), to evaluation records."""
    archive = Path(folder) / "items.zip"
    place: Any = zipfile.Path(archive) if archive.is_file() else Path(folder) / "items"
    result = []
    for record in records:
        config = record["config"]
        path = place / f"{config.get('evaluation', {}).get('name')}-{config.get('id')}.jsonl"
        result.append(
            {**record, "items": path}
            if record["kind"] == "evaluation" and path.is_file()
            else record
        )
    return result


ITEM_MEASURES = {
    "choice_accuracy": ("correct", "one"),
    "accuracy": ("right", "answers"),
    "loss": ("nats", "targets"),
}


def item_difference(arm: Arm, baseline: Arm, metric: str) -> Estimate | None:
    """Return the difference of two models' metric, paired by item, or None."""
    ours, theirs = (
        side.runs.get("items", pd.Series(dtype=object)).dropna() for side in (arm, baseline)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in sorted({*ours.index} & {*theirs.index})]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(ours.iloc[0], theirs.iloc[0])]
    if not pairs or metric not in ITEM_MEASURES:
        return None
    sides = [[_by_group(path, *ITEM_MEASURES[metric]) for path in pair] for pair in pairs]
    weights = sides[0][0]["weight"]
    if weights.empty or not all(side["weight"].equals(weights) for pair in sides for side in pair):
        return None
    sums = [one["value"] - other["value"] for one, other in sides]
    return bootstrap(sums, weights) if len(sums) > 1 else over_items(sums[0], weights)


def _by_group(path: Any, value: str, weight: str) -> pd.DataFrame:
    items = pd.DataFrame(
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    )
    items = (
        items.assign(one=1, correct=items["choice"] == items["answer"])
        if "choice" in items
        else items
    )
    group = next(
        (items[key] for key in ("group", "document", "index") if key in items), items.index
    )
    values = items[[value, weight]].astype(float).set_axis(["value", "weight"], axis=1)
    return values.groupby(group, sort=False).sum()
