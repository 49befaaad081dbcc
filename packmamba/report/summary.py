"""What records say when they are put together: arms, seeds, paired differences, speedups.

Tables and figures take every number from here, so that both show the same.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

ARM_ORDER = ("single", "padded", "packed-reset", "packed-leak", "packed-leak-conv", "packed-leak-scan", "packed-carry")
BASELINES = ("padded", "single")
PARITY_SEEDS = 5
"""A claim of parity needs at least this many seeds (three for other claims on accuracy)."""

# Differences in these keys do not make another experiment of the same arm.
_BOOKKEEPING = {"name", "experiment", "seed", "runs_dir", "run", "data.cache_dir", "trainer.checkpoint_every"}
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom from 1.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass
class Arm:
    """The records of one arm under one configuration, by seed; of a repeated run the latest.

    What follows the first space of an arm's name is its setting, a point of a sweep's grid: ``padded d_model=64``.
    """

    name: str
    variant: tuple[tuple[str, Any], ...] = ()
    """The configuration keys, with their values, in which records of one arm differ."""
    by_seed: dict[int, Record] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def setting(self) -> str:
        return self.name.partition(" ")[2]

    @property
    def label(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.variant)
        return f"{self.name} ({settings})" if settings else self.name

    def values(self, metric: str) -> list[float]:
        """The metric of every seed in which it is finite, by seed."""
        found = (self.by_seed[seed]["metrics"].get(metric) for seed in sorted(self.by_seed))
        return [value for value in found if value is not None]

    def mean(self, metric: str) -> float | None:
        """Over seeds; None if no seed has the metric."""
        values = self.values(metric)
        return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Difference:
    """Mean of one arm's metric minus another's over the seeds they share, with its 95 % confidence interval."""

    mean: float
    half_width: float | None
    """None with one seed: no interval, no claim."""
    seeds: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True)
class Speed:
    """How fast an arm goes. ``speedup`` compares real tokens per second with ``single`` timed in the same run."""

    real_tokens_per_second: float | None
    slots_per_second: float | None
    padding_fraction: float | None
    speedup: float | None
    interleaved: bool


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def by_corpus(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by corpus hash, hashes sorted: what may be compared."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["corpus_hash"]):
        groups.setdefault(record["corpus_hash"], []).append(record)
    return groups


def arm_rank(name: str) -> tuple[list[tuple[int, str]], int, str]:
    """Sorts arms: by setting, then the known ones as ARM_ORDER has them, then others by name."""
    scheme, _, setting = name.partition(" ")
    return (natural(setting), ARM_ORDER.index(scheme) if scheme in ARM_ORDER else len(ARM_ORDER), name)


def training_arms(records: Iterable[Record]) -> list[Arm]:
    """The arms of training records of one corpus; an arm run under several configurations appears once for each."""
    training = sorted(of_kind(records, "training"), key=lambda record: record["time"])
    keys = _varying_keys(training)
    arms: dict[tuple[str, str], Arm] = {}
    for record in training:
        flat = flatten(record["config"])
        variant = tuple((key, flat.get(key)) for key in keys)
        arm = arms.setdefault((record["arm"], repr(variant)), Arm(record["arm"], variant))
        arm.by_seed[record["seed"]] = record
    return sorted(arms.values(), key=lambda arm: (natural(repr(arm.variant)), arm_rank(arm.name)))


def baseline_of(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The arm that the others of the same setting are compared with: padded, else single."""
    peers = {peer.scheme: peer for peer in arms if (peer.setting, peer.variant) == (arm.setting, arm.variant)}
    return next((peers[name] for name in BASELINES if name in peers), None)


def paired_difference(arm: Arm, baseline: Arm, metric: str) -> Difference | None:
    """Seed by seed; None if they share no seed in which both are finite."""
    differences = []
    for seed in sorted(arm.by_seed.keys() & baseline.by_seed.keys()):
        a, b = (side.by_seed[seed]["metrics"].get(metric) for side in (arm, baseline))
        if a is not None and b is not None:
            differences.append(a - b)
    n = len(differences)
    if n == 0:
        return None
    half_width = t95(n - 1) * statistics.stdev(differences) / n**0.5 if n > 1 else None
    return Difference(statistics.fmean(differences), half_width, n)


def t95(degrees: int) -> float:
    """Half width of a 95 % interval in standard errors (Student's t)."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.95996 + 2.3722 / degrees + 2.8225 / degrees**2


def throughput_runs(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """Throughput records by config["run"], then arm: only arms of one run were timed together."""
    runs: dict[str, dict[str, Record]] = {}
    for record in sorted(of_kind(records, "throughput"), key=lambda record: record["time"]):
        runs.setdefault(str(record["config"].get("run")), {})[record["arm"]] = record
    return {run: dict(sorted(runs[run].items(), key=lambda item: arm_rank(item[0]))) for run in sorted(runs)}


def speedup(arms: Mapping[str, Record], name: str) -> float | None:
    """Real tokens per second of an arm over those of single of the same setting, both timed in one run."""
    single = " ".join(["single", *name.split(" ")[1:]])
    rates = [arms[arm]["metrics"]["real_tokens_per_second"] if arm in arms else None for arm in (name, single)]
    return rates[0] / rates[1] if rates[0] and rates[1] else None


def speed_of(arm: Arm, records: Iterable[Record]) -> Speed:
    """From interleaved timings of the same configuration if there are any (the median run), else from the training."""
    timed = []
    for arms in throughput_runs(records).values():
        if arm.name in arms:
            flat = flatten(arms[arm.name]["config"])
            if all(flat.get(key) == value for key, value in arm.variant):
                timed.append((speedup(arms, arm.name), arms[arm.name]["metrics"]))
    if not timed:
        names = ("real_tokens_per_second", "slots_per_second", "padding_fraction")
        real, slots, padding = (arm.mean(name) for name in names)
        return Speed(real, slots, padding, None, interleaved=False)
    timed.sort(key=lambda item: item[0] or 0.0)
    ratio, metrics = timed[(len(timed) - 1) // 2]
    return Speed(
        metrics["real_tokens_per_second"], metrics["slots_per_second"], metrics["padding_fraction"], ratio, True
    )


def fewest_seeds(records: Iterable[Record]) -> int | None:
    """Seeds of the training arm that has the fewest; None without training records."""
    counts = [len(arm.by_seed) for group in by_corpus(records).values() for arm in training_arms(group)]
    return min(counts, default=None)


def natural(text: str) -> list[tuple[int, str]]:
    """Sorts texts with numbers in them by the numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _varying_keys(records: Sequence[Record]) -> list[str]:
    seen: dict[tuple[str, str], set[str]] = {}
    flat = [(record["arm"], flatten(record["config"])) for record in records]
    keys = {key for _, config in flat for key in config if key not in _BOOKKEEPING}
    for arm, config in flat:
        for key in keys:  # one that a record does not have differs too
            seen.setdefault((key, arm), set()).add(repr(config.get(key)))
    return sorted({key for (key, _), values in seen.items() if len(values) > 1})
