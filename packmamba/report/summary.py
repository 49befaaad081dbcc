"""What records say when they are put together: a data frame, arms, intervals, speedups.

Tables and figures take every number from here, so that both show the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

Record = Mapping[str, Any]

SCHEMES = ("single", "padded", "packed-reset", "packed-leak", "packed-leak-conv", "packed-leak-scan", "packed-carry")
BASELINES = ("padded", "single", "packed-reset")
"""The scheme that the others of the same setting are compared with: the first of these that is there, else the first arm."""
PARITY_SEEDS = 5
"""A claim of parity needs at least this many seeds (three for other claims on accuracy)."""

# Differences in these keys do not make another experiment of the same arm.
_BOOKKEEPING = (
    *("name", "experiment", "output", "seed", "runs_dir", "run"),
    *("data.cache_dir", "evaluations"),
    *("data.num_workers", "trainer.log_every", "trainer.checkpoint_every", "trainer.threads"),
)


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def by_corpus(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by corpus hash, hashes sorted: what may be compared."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["corpus_hash"]):
        groups.setdefault(record["corpus_hash"], []).append(record)
    return groups


def frame(records: Iterable[Record], kind: str) -> pd.DataFrame:
    """One row for each record of the kind, by time. Columns: the record's own keys, ``config.<key>`` for every key of the
    flattened configuration, ``curves.<name>``, and the metrics by their names: floats, NaN where they are null."""
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
    """A mean with its 95 % confidence interval by Student's t; ``low`` and ``high`` are NaN with one value: no claim."""

    mean: float
    low: float
    high: float
    n: int


def interval(values: pd.Series) -> Interval | None:
    """Over the values that are not NaN; None without any. The difference of two arms' metrics is paired by seed."""
    values = values.dropna()
    if values.empty:
        return None
    # The quantile to three decimals, as books print it, so that intervals published before scipy made them stay.
    half = round(stdtrit(len(values) - 1, 0.975), 3) * values.sem() if len(values) > 1 else math.nan
    return Interval(values.mean(), values.mean() - half, values.mean() + half, len(values))


def parts_of(name: str) -> tuple[str, str]:
    """What a sweep calls an arm, and the point of its grid, which begins at the first ``key=``; without a grid it is empty."""
    title, *point = re.split(r" (?=[^ =]+=)", name, maxsplit=1)
    return title, "".join(point)


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs of one arm under one configuration.

    A name may end in a setting, a point of a sweep's grid: ``padded d_model=64``.
    """

    name: str
    variant: tuple[tuple[str, Any], ...]
    """The configuration keys, with their values, in which records of one arm differ."""
    runs: pd.DataFrame
    """Rows of ``frame`` by seed; of a repeated run the latest."""

    @property
    def scheme(self) -> str:
        """What the arm does with documents, by its configuration: one of ``SCHEMES`` unless its boundary is another."""
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

    def __getitem__(self, metric: str) -> pd.Series:
        """By seed; NaN where it was null or is missing."""
        return self.runs[metric] if metric in self.runs else pd.Series(math.nan, self.runs.index)

    @property
    def sweep(self) -> Mapping[str, Any]:
        """What its sweep says of it (``packmamba.records``); empty if that is not known."""
        said = self.runs.get("sweep", pd.Series(dtype=object)).dropna()
        return {} if said.empty else said.iloc[0]

    @property
    def at_an_end(self) -> list[str]:
        """Tuned keys whose value is the least or the greatest number that a sweep tried: a better one may lie beyond."""
        ends = {
            key: [value for value in (min(numbers), max(numbers)) if len(numbers) > 1]
            for tried in self.sweep.get("tried", ())
            for key, values in tried.items()
            if self.runs.iloc[0].get(f"config.{key}") in values
            and (numbers := [value for value in values if isinstance(value, (int, float))])
        }
        return [key for key, values in ends.items() if self.runs.iloc[0].get(f"config.{key}") in values]

    def has(self, settings: Iterable[tuple[str, Any]]) -> bool:
        """Whether these configuration keys have these values."""
        return all(self.runs.iloc[0].get(f"config.{key}") == value for key, value in settings)

    def points(self, curve: str) -> pd.DataFrame:
        """The curve's points with a finite loss, of all seeds, with a column ``seed``."""
        curves = self.runs.get(f"curves.{curve}", pd.Series(dtype=object)).dropna()
        points = pd.DataFrame([point | {"seed": seed} for seed, each in curves.items() for point in each])
        return points if points.empty else points[points["loss"].notna()]


class Speed(NamedTuple):
    """How fast an arm goes. ``speedup`` compares real tokens per second with single timed in the same run; NaN if unknown."""

    real_tokens_per_second: float
    slots_per_second: float
    padding_fraction: float
    speedup: float
    timing: str | None
    """The run that timed it in turns with others; None: it is of the arm's own training."""


def training_arms(records: Iterable[Record]) -> list[Arm]:
    """All arms that were trained, as tables show them."""
    runs = frame([record for record in records if asked_for(record)], "training")
    if runs.empty:
        return []
    settings = [key for key in runs if key.startswith("config.") and key.removeprefix("config.") not in _BOOKKEEPING]
    differ = runs[settings].map(repr).groupby(runs["arm"]).nunique().gt(1).any()
    keys = sorted(differ.index[differ])
    runs["variant"] = [tuple((key.removeprefix("config."), run[key]) for key in keys) for _, run in runs.iterrows()]
    arms = []
    for (name, _), group in runs.groupby(["arm", runs["variant"].map(repr)]):
        latest = group.drop_duplicates("seed", keep="last").set_index("seed").sort_index()
        arms.append(Arm(name, group["variant"].iloc[0], latest))
    return _in_order(arms)


def asked_for(record: Record) -> bool:
    """Whether a run ended after as many steps as its sweep asks for, where that is known."""
    steps = record.get("sweep", {}).get("steps")
    return not steps or record["kind"] != "training" or record["config"]["trainer"]["max_steps"] in steps


def timed_arms(records: Iterable[Record]) -> list[Arm]:
    """All arms whose steps were timed, the latest timing first; arms of one ``config["run"]`` were timed together, and only those
    are one setting."""
    runs = frame(records, "throughput")
    if runs.empty:
        return []
    arms = [
        Arm(name, (("run", run),), group.tail(1).set_index("seed"))
        for (name, run), group in runs.groupby(["arm", runs["config.run"].map(str)])
    ]
    ended = runs.groupby(runs["config.run"].map(str))["time"].max()
    return sorted(_in_order(arms), key=lambda arm: ended[dict(arm.variant)["run"]], reverse=True)


def _in_order(arms: Sequence[Arm]) -> list[Arm]:
    """By setting, then the first arm of each scheme as in SCHEMES, then further arms of these schemes; first is by time."""
    by_time = sorted(arms, key=lambda arm: (arm.runs["time"].min(), arm.name))
    places = [(arm.setting, arm.scheme) for arm in by_time]
    keyed = [
        (tuple(map(natural, arm.setting)), places[:i].count(places[i]), (*SCHEMES, arm.scheme).index(arm.scheme), i)
        for i, arm in enumerate(by_time)
    ]
    return [by_time[i] for *_, i in sorted(keyed)]


class Seeds(NamedTuple):
    """How many seeds a mean over an arm's runs is of; those without a number have diverged, or are missing."""

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
    """Of the seeds that the arm's sweep has, or where that is not known, that any of the arms has."""
    expected = set(arm.sweep.get("seeds") or {seed for each in arms for seed in each.runs.index}) | set(arm.runs.index)
    finite, diverged = int(arm[metric].count()), int(arm["val_loss"].isna().sum())
    return Seeds(finite, diverged, len(expected) - finite - diverged)


def absent_arms(arms: Sequence[Arm]) -> dict[str, int]:
    """Arms of the sweeps without any run, and how many seeds each should have."""
    return {name: len(seeds) for arm in arms for name, seeds in arm.sweep.get("absent", {}).items()}


def baseline_of(arm: Arm, arms: Sequence[Arm]) -> Arm:
    """The arm that the others of the same setting are compared with: the one that its sweep names, else by scheme. Runs trained
    apart are compared with the arm of the label that was given, whatever else differs."""
    peers = [peer for peer in arms if peer.setting == arm.setting or arm.sweep.get("apart")]
    named = arm.sweep.get("baseline")
    if arm.sweep.get("apart") and named is not None:
        return next(peer for peer in peers if peer.label == named)
    if found := [peer for peer in peers if named is not None and peer.title == parts_of(named)[0]]:
        return found[0]
    return next((peer for scheme in BASELINES for peer in peers if peer.scheme == scheme), peers[0])


def speedup(arm: Arm, timed: Sequence[Arm]) -> float:
    """Real tokens per second of a timed arm over those of single in the same setting; NaN without one."""
    single = [peer for peer in timed if peer.setting == arm.setting and peer.scheme == "single"]
    rate = "real_tokens_per_second"
    return arm[rate].mean() / single[0][rate].mean() if single else math.nan


def speed_of(arm: Arm, timed: Sequence[Arm]) -> Speed:
    """From timed steps of the same configuration if there are any (of several runs the median), else from the training."""
    same = [peer for peer in timed if peer.name == arm.name and peer.has(arm.variant)]
    same.sort(key=lambda peer: np.nan_to_num(speedup(peer, timed)))
    chosen = same[(len(same) - 1) // 2] if same else arm
    names = ("real_tokens_per_second", "slots_per_second", "padding_fraction")
    real, slots, padding = (chosen[name].mean() for name in names)
    if not same:
        return Speed(real, slots, padding, math.nan, None)
    return Speed(real, slots, padding, speedup(chosen, timed), dict(chosen.variant)["run"])


def speeds_of(arms: Sequence[Arm], timed: Sequence[Arm]) -> list[Speed]:
    """Of each arm; where they hold it, from the timings that hold most of these arms, since only arms timed together compare."""
    holds: dict[str, set[int]] = {}
    for peer in timed:
        found = {n for n, arm in enumerate(arms) if peer.name == arm.name and peer.has(arm.variant)}
        holds.setdefault(dict(peer.variant)["run"], set()).update(found)
    most = max(map(len, holds.values()), default=0)
    together = {run for run, held in holds.items() if len(held) == most}
    first = [peer for peer in timed if dict(peer.variant)["run"] in together]
    inside = set().union(*(holds[run] for run in together))
    return [speed_of(arm, first if n in inside else timed) for n, arm in enumerate(arms)]


def timed_together(speeds: Sequence[Speed]) -> str | None:
    """The timing that most of them are of; None: none was timed."""
    return next(iter(Counter(speed.timing for speed in speeds if speed.timing).most_common(1)), (None,))[0]


def natural(text: str) -> list[tuple[int, str]]:
    """Sorts texts with numbers in them by the numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
