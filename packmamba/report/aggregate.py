"""Arms of records: a data frame, runs by arm and seed, the baseline, paired differences and speeds."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from scipy.special import stdtrit

from packmamba.report.statistics import Resampled, bootstrap, over_items

Record = Mapping[str, Any]

SCHEMES = ("single", "padded", "packed-reset", "packed-leak", "packed-leak-conv", "packed-leak-scan", "packed-carry")
BASELINES = ("padded", "single", "packed-reset")
"""Schemes of the baseline, by preference, where the sweep names none."""
OPEN_END = 2**31 - 1
"""End of a range of positions without an end."""
NOT_SETTINGS = {
    f"config.{key}"
    for key in (
        *("name", "experiment", "output", "seed", "runs_dir", "run", "data.cache_dir", "evaluations"),
        *("data.num_workers", "trainer.log_every", "trainer.checkpoint_every", "trainer.threads"),
    )
}
"""Keys in which the runs of one arm may differ."""


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key of a text by the numbers in it."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def frame(records: Iterable[Record], kind: str) -> pd.DataFrame:
    """Return a row for each record of the kind, by time.

    Columns: the record's keys, ``config.<key>`` for every key of the flattened configuration, ``curves.<name>``, and metrics by
    name as floats, NaN where they are null.
    """
    chosen = of_kind(records, kind)
    rows = pd.DataFrame(
        [
            {key: value for key, value in record.items() if key not in ("config", "curves", "metrics")}
            | {f"config.{key}": value for key, value in flatten(record["config"]).items()}
            | {f"curves.{name}": points for name, points in record["curves"].items()}
            for record in chosen
        ],
        dtype=object,
    )
    metrics = pd.DataFrame([record["metrics"] for record in chosen], dtype=float)
    joined = pd.concat([rows.where(rows.notna(), None), metrics], axis=1)
    return joined.sort_values("time", kind="stable", ignore_index=True) if chosen else joined


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval by Student's t; ``low`` and ``high`` are NaN with one value."""

    mean: float
    low: float
    high: float
    n: int


def interval(values: pd.Series) -> Interval | None:
    """Return the interval over the values that are not NaN; None without any."""
    values = values.dropna()
    if values.empty:
        return None
    # The quantile to three decimals, as books print it, so that intervals published before scipy made them stay.
    half = round(stdtrit(len(values) - 1, 0.975), 3) * values.sem() if len(values) > 1 else math.nan
    return Interval(values.mean(), values.mean() - half, values.mean() + half, len(values))


def parts_of(name: str) -> tuple[str, str]:
    """Split an arm's name into its title and the point of a sweep's grid, which begins at the first ``key=``."""
    title, *point = re.split(r" (?=[^ =]+=)", name, maxsplit=1)
    return title, "".join(point)


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs of one arm under one configuration.

    Attributes:
        name: may end in a point of a sweep's grid: ``padded d_model=64``.
        variant: configuration keys, with values, in which records of arms of one name differ.
        runs: rows of ``frame`` by seed; of a repeated run the latest.
    """

    name: str
    variant: tuple[tuple[str, Any], ...]
    runs: pd.DataFrame

    def __getitem__(self, metric: str) -> pd.Series:
        """Return a metric by seed; NaN where it is null or missing."""
        return self.runs[metric] if metric in self.runs else pd.Series(math.nan, self.runs.index)

    @property
    def scheme(self) -> str:
        """One of ``SCHEMES``, or ``packed-`` and the boundary scheme."""
        config = self.runs.iloc[0]
        strategy, boundary = config.get("config.data.strategy"), config.get("config.trainer.boundary") or "reset"
        return strategy if strategy in SCHEMES else f"packed-{boundary.replace('_', '-')}"

    @property
    def setting(self) -> tuple[str, str]:
        """Arms that differ in it are not compared."""
        return repr(self.variant), parts_of(self.name)[1]

    @property
    def title(self) -> str:
        return parts_of(self.name)[0]

    @property
    def label(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.variant)
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def timing(self) -> str | None:
        """The run that timed the arm interleaved with others; None if its speed is of its own training."""
        return self.runs["timing"].iloc[0] if "timing" in self.runs else None

    @property
    def sweep(self) -> Mapping[str, Any]:
        """The sweep's entry for the arm (``packmamba.records``); empty without one."""
        entries = self.runs.get("sweep", pd.Series(dtype=object)).dropna()
        return {} if entries.empty else entries.iloc[0]

    def points(self, curve: str) -> pd.DataFrame:
        """Return the points of a curve of all seeds, with a column ``seed``."""
        curves = self.runs.get(f"curves.{curve}", pd.Series(dtype=object)).dropna()
        return pd.DataFrame([point | {"seed": seed} for seed, each in curves.items() for point in each])


def training_arms(records: Iterable[Record]) -> list[Arm]:
    """Return all trained arms, in the order of tables."""
    runs = frame(records, "training")
    if runs.empty:
        return []
    settings = [key for key in runs if key.startswith("config.") and key not in NOT_SETTINGS]
    differ = runs[settings].map(repr).groupby(runs["arm"]).nunique().gt(1).any()
    keys = sorted(differ.index[differ])
    runs["variant"] = [tuple((key.removeprefix("config."), run[key]) for key in keys) for _, run in runs.iterrows()]
    arms = []
    for (name, _), group in runs.groupby(["arm", runs["variant"].map(repr)]):
        latest = group.drop_duplicates("seed", keep="last").set_index("seed").sort_index()
        arms.append(Arm(name, group["variant"].iloc[0], latest))
    return _in_order(arms)


def timed_arms(records: Iterable[Record]) -> list[Arm]:
    """Return all arms with timed steps, the latest timing first; only arms of one ``timing`` were timed together.

    ``speedup`` is real tokens per second over those of the baseline timed with the arm, of an arm without training over single.
    """
    records = list(records)
    runs, trained = frame(records, "throughput"), training_arms(records)
    if runs.empty:
        return []
    runs["timing"] = runs["config.run"].map(str)
    groups = runs.groupby(["arm", "timing"])
    arms = [Arm(name, (("run", run),), group.tail(1).set_index("seed")) for (name, run), group in groups]
    ended, timed = runs.groupby("timing")["time"].max(), []
    for arm in sorted(_in_order(arms), key=lambda arm: ended[arm.timing], reverse=True):
        names = {baseline_of(one, trained).name for one in trained if one.name == arm.name}
        peers = [peer for peer in arms if peer.setting == arm.setting]
        base = [peer for peer in peers if peer.name in names] or [peer for peer in peers if peer.scheme == "single"]
        rate = base[0]["real_tokens_per_second"].iloc[0] if base else math.nan
        timed.append(replace(arm, runs=arm.runs.assign(speedup=arm.runs["real_tokens_per_second"] / rate)))
    return timed


def with_speeds(arms: Sequence[Arm], timed: Sequence[Arm]) -> list[Arm]:
    """Give arms the speed of the latest of the timings that hold most of them: only arms timed together compare."""

    def matches(arm: Arm, peer: Arm) -> bool:
        run = peer.runs.iloc[0]
        return peer.name == arm.name and all(run.get(f"config.{key}") == value for key, value in arm.variant)

    same = [[peer for peer in timed if matches(arm, peer)] for arm in arms]
    held = Counter(peer.timing for peers in same for peer in peers)
    names = ("real_tokens_per_second", "slots_per_second", "padding_fraction", "speedup", "timing")
    found = []
    for arm, peers in zip(arms, same):
        best = max(peers, key=lambda peer: held[peer.timing], default=None)
        speeds = {name: best.runs[name].iloc[0] for name in names} if best else {"speedup": math.nan, "timing": None}
        if baseline_of(arm, arms).name not in {peer.name for peer in timed if peer.timing == speeds["timing"]}:
            speeds["speedup"] = math.nan
        found.append(replace(arm, runs=arm.runs.assign(**speeds)))
    return found


def timed_together(arms: Iterable[Arm]) -> str | None:
    """Return the timing of most arms; None if none was timed."""
    return next((timing for timing, _ in Counter(arm.timing for arm in arms if arm.timing).most_common(1)), None)


def _in_order(arms: Sequence[Arm]) -> list[Arm]:
    """Sort by setting, then the first arm of each scheme as in SCHEMES, then further arms of these schemes."""
    by_time = sorted(arms, key=lambda arm: (arm.runs["time"].min(), arm.name))
    places = [(arm.setting, arm.scheme) for arm in by_time]
    keyed = [
        (tuple(map(natural, arm.setting)), places[:i].count(places[i]), (*SCHEMES, arm.scheme).index(arm.scheme), i)
        for i, arm in enumerate(by_time)
    ]
    return [by_time[i] for *_, i in sorted(keyed)]


class Seeds(NamedTuple):
    """Number of seeds with a value, of diverged runs, and of seeds without a record or value."""

    finite: int
    diverged: int
    missing: int

    @property
    def expected(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        words = [f"{n} {what}" for n, what in ((self.diverged, "diverged"), (self.missing, "missing")) if n]
        return ", ".join([f"{self.finite} of {self.expected}", *words]) if words else str(self.finite)


def seeds_of(arm: Arm, arms: Sequence[Arm], metric: str = "val_loss") -> Seeds:
    """Count an arm's seeds, of those that its sweep has, or without a sweep's entry that any of the arms has."""
    expected = set(arm.sweep.get("seeds") or {seed for each in arms for seed in each.runs.index}) | set(arm.runs.index)
    finite, diverged = int(arm[metric].count()), int(arm["val_loss"].isna().sum())
    return Seeds(finite, diverged, len(expected) - finite - diverged)


def baseline_of(arm: Arm, arms: Sequence[Arm]) -> Arm:
    """Return the arm that the arms of this setting are compared with: the sweep's ``baseline``, else by scheme."""
    named, apart = arm.sweep.get("baseline"), arm.sweep.get("apart")
    peers = [peer for peer in arms if peer.setting == arm.setting or apart]
    if found := [peer for peer in peers if named == peer.label or (named and peer.title == parts_of(named)[0])]:
        return next((peer for peer in found if peer.label == named), found[0])
    return next((peer for scheme in BASELINES for peer in peers if peer.scheme == scheme), peers[0])


def versus(arms: Sequence[Arm]) -> str:
    """Return the titles of the arms' baselines."""
    baselines = {baseline_of(arm, arms) for arm in arms}
    return " or ".join(sorted({one.label if one.sweep.get("apart") else one.title for one in baselines}))


def difference(arm: Arm, arms: Sequence[Arm], metric: str) -> Interval | None:
    """Return the arm's metric minus its baseline's, paired by seed; None of the baseline."""
    baseline = baseline_of(arm, arms)
    return None if baseline is arm else interval(arm[metric] - baseline[metric])


def difference_by_position(arm: Arm, arms: Sequence[Arm]) -> list[tuple[int, int, Interval]]:
    """Return for each range of positions [start, end) the arm's loss minus its baseline's, paired by seed."""
    baseline = baseline_of(arm, arms)
    sides = [side.points("loss_by_position") for side in (arm, baseline)]
    if baseline is arm or any(points.empty for points in sides):
        return []
    ours, theirs = (points.set_index(["start", "end", "seed"])["loss"].astype(float) for points in sides)
    paired = (ours - theirs).dropna().groupby(level=["start", "end"])
    return [(start, end, one) for (start, end), values in paired if (one := interval(values))]


def with_items(folder: str | Path, records: Sequence[Record]) -> list[Record]:
    """Add ``items``, the path of an evaluation's items (in items/ or items.zip), to a folder's evaluation records."""
    archive = Path(folder) / "items.zip"
    place: Any = zipfile.Path(archive) if archive.is_file() else Path(folder) / "items"
    found = []
    for record in records:
        asked = record["config"].get("evaluation") if record["kind"] == "evaluation" else None
        path = place / f"{asked['name']}-{record['config'].get('id')}.jsonl" if asked else None
        found.append({**record, "items": path} if path and path.is_file() else record)
    return found


def item_difference(ours: Mapping[int, Any], theirs: Mapping[int, Any], metric: str) -> Resampled | None:
    """Return the difference of two models' metric, paired item by item; None if they cannot be paired.

    Each model is given as files of items by seed. The interval is over seeds and groups of items with several common seeds, else
    over groups of items.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(*ours.values(), *theirs.values())]
    if not pairs or metric not in ITEM_MEASURES:
        return None
    sides = [[_by_group(path, *ITEM_MEASURES[metric]) for path in pair] for pair in pairs]
    weights = sides[0][0]["weight"]
    if weights.empty or not all(side["weight"].equals(weights) for pair in sides for side in pair):
        return None  # the items differ
    sums = [one["value"] - other["value"] for one, other in sides]
    return bootstrap(sums, weights) if len(sums) > 1 else over_items(sums[0], weights)


ITEM_MEASURES = {"choice_accuracy": ("correct", "one"), "accuracy": ("right", "answers"), "loss": ("nats", "targets")}
"""An item's part of a metric that is a mean, and its weight there."""


def _by_group(path: Any, value: str, weight: str) -> pd.DataFrame:
    items = pd.DataFrame([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    items = items.assign(one=1, correct=items["choice"] == items["answer"]) if "choice" in items else items
    group = next((items[key] for key in ("group", "document", "index") if key in items), items.index)
    values = items[[value, weight]].astype(float).set_axis(["value", "weight"], axis=1)
    return values.groupby(group, sort=False).sum()
