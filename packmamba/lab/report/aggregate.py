"""From records to arms, and from arms to contrasts.

A record is one run. An arm holds the runs of one name and configuration by seed, of a repeated run
the latest. An arm has a baseline: what its sweep names, else the padded arm, the single one, or the
one packed with reset, of the same point of the sweep's grid. A contrast is an arm's metric minus
another's, paired by seed, with the verdict that ``statistics.rule`` gives it.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from packmamba.config.load import flatten
from packmamba.lab.records import of_kind
from packmamba.lab.report import statistics
from packmamba.lab.report.statistics import Comparison, Divergence, Estimate, Ruling, difference_by_group, estimate

Record = Mapping[str, Any]
Records = Sequence[Record]

SCHEMES = """single padded padded-sorted packed-reset packed-leak packed-leak-conv packed-leak-scan
    packed-carry""".split()  # in the order of tables
LEAKS = ("leak", "leak_conv", "leak_scan")  # boundary schemes that are failures by design
BASELINES = ("padded", "single", "packed-reset")
# Of ours, and of lm-evaluation-harness, as in ``hellaswag.acc_norm``, without or with a filter.
SCORES = re.compile(r"accuracy|gain|pass@|\.(\w*acc|acc_\w+|exact\w*|em|f1|mcc|bleu|rouge\w*)(,|$)")
OPEN_END = 2**31 - 1  # of the last range of positions
SPEEDS = ("real_tokens_per_second", "slots_per_second", "padding_fraction", "speedup")
NOT_SETTINGS = """name experiment output seed runs_dir run evaluations data.cache_dir data.num_workers
    trainer.log_every trainer.checkpoint_every trainer.threads""".split()  # alike in compared arms


def natural(text: str) -> list[tuple[float, str]]:
    """Return a sort key by the numbers in a text, such as 16, 0.003 or 1e-05."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)
    return [(float(part), "") if part[:1].isdecimal() else (-1, part) for part in parts]


def frame(records: Iterable[Record], kind: str) -> pd.DataFrame:
    """Return a row for each record of a kind, by time, so that a repeated run's latest comes last.

    Columns are the record's keys, ``config.<key>``, ``curves.<name>``, and metrics as floats.
    """
    rows = [record | flatten({key: record[key] for key in ("config", "curves")}) for record in of_kind(records, kind)]
    # Apart, since a column of None and numbers would hold objects, which have no mean.
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
    """Hold rows of ``frame`` by seed.

    ``variant`` are the keys and values in which arms of one name differ. ``arm["val_loss"]`` is a
    metric by seed, NaN where it is missing.
    """

    name: str
    variant: tuple[tuple[str, Any], ...]
    runs: pd.DataFrame
    baseline: Arm = field(init=False, repr=False)

    def __getitem__(self, metric: str) -> pd.Series:
        return self.runs.get(metric, pd.Series(math.nan, self.runs.index))

    def says(self, key: str, absent: Any = None) -> Any:
        """Return a key's value in the arm's configuration, such as ``data.strategy``."""
        value = self.runs.iloc[0].get(f"config.{key}")
        return absent if value is None else value

    def value(self, name: str) -> Any:
        """Return a key's value in the arm's configuration, or a metric by seed."""
        return self.says(name) if f"config.{name}" in self.runs else self[name]

    @cached_property
    def scheme(self) -> str:
        """Return one of ``SCHEMES``, or ``packed-`` and the boundary scheme."""
        strategy = str(self.says("data.strategy")).replace("_", "-")
        boundary = self.says("trainer.boundary", "reset").replace("_", "-")
        return strategy if strategy in SCHEMES else f"packed-{boundary}"

    @property
    def setting(self) -> tuple[str, str]:
        """Return what arms share that are compared: the variant, and the point of the grid."""
        return repr(self.variant), parts_of(self.name)[1]

    @property
    def title(self) -> str:
        """The name without the point of the grid."""
        return parts_of(self.name)[0]

    @property
    def leaks(self) -> bool:
        """Tell if the arm lets documents cross their boundaries: the failure that is looked for."""
        # A plugin's scheme is not in LEAKS: its run said that leakcheck had nothing to look for.
        of_plugin = str(self.runs.iloc[0].get("leakcheck")).endswith("lets documents leak")
        return of_plugin or self.says("trainer.boundary", "reset") in LEAKS

    @property
    def diverged(self) -> set[int]:
        """Seeds of runs whose loss was not finite: they have no validation loss."""
        return set(self.runs.index[self["val_loss"].isna()])

    @property
    def expected(self) -> set[int]:
        """Seeds of its runs, seeds of its sweep without any run, and those of the plan that fits best.

        That plan leaves out the fewest of the arm's seeds; of equal ones it is the smallest.
        """
        misfit = lambda seeds: (len({*self.runs.index}.difference(seeds)), len(seeds))
        plan = min(self.sweep.get("plans", ()), key=misfit, default=())
        return {*self.runs.index, *plan, *self.sweep.get("missing", ())}

    @property
    def label(self) -> str:
        """The name with the variant, as tables show it."""
        settings = ", ".join(f"{key}={value}" for key, value in self.variant)
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def timing(self) -> str | None:
        """Return the run that timed the arm among others, or None."""
        return next(iter(self.runs.get("timing", ())), None)

    @property
    def sweep(self) -> Mapping[str, Any]:
        """The entry of ``sweep.json`` that the arm's runs belong to; empty without one."""
        return next((entry for entry in self.runs.get("sweep", ()) if isinstance(entry, Mapping)), {})

    @lru_cache(maxsize=64)
    def points(self, curve: str) -> pd.DataFrame:
        """Return the points of a curve of all runs, with their seed."""
        curves = self[f"curves.{curve}"].dropna()
        return pd.DataFrame([point | {"seed": seed} for seed, each in curves.items() for point in each])


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
    # Runs of one name that differ in a key, as after a change of the sweep's file, are
    # different arms.
    excluded = {f"config.{key}" for key in NOT_SETTINGS}
    settings = [column for column in runs if column.startswith("config.") and column not in excluded]
    varies = runs[settings].map(repr).groupby(runs["arm"]).nunique().gt(1).any()
    keys = sorted(column.removeprefix("config.") for column in varies.index[varies])
    runs["variant"] = [tuple((key, run[f"config.{key}"]) for key in keys) for _, run in runs.iterrows()]
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
    runs = frame(records, "throughput")
    if runs.empty:
        return []
    trained = training_arms(records)
    # A timing is one process in which arms took turns: only its arms' speeds compare.
    runs["timing"] = runs["config.run"].map(str)
    ended = runs.groupby("timing")["time"].max()
    groups = runs.groupby(["arm", "timing"])
    arms = [Arm(name, (("run", timing),), rows.tail(1).set_index("seed")) for (name, timing), rows in groups]
    for arm in arms:
        # The baselines that the arm has as a trained one, then single, then BASELINES.
        baselines = {each.baseline.name for each in trained if each.name == arm.name}
        peers = [peer for peer in arms if peer.setting == arm.setting]
        candidates = [peer for peer in peers if peer.name in baselines]
        candidates += [peer for scheme in ("single", *BASELINES) for peer in peers if peer.scheme == scheme]
        rates = arm.runs["real_tokens_per_second"]
        base = candidates[0]["real_tokens_per_second"].iloc[0] if candidates else math.nan
        arm.runs = arm.runs.assign(speedup=rates / base)
    return sorted(_in_order(arms), key=lambda arm: ended[arm.timing], reverse=True)


def arms_with_speeds(records: Records) -> list[Arm]:
    """Return trained arms, with speeds of the latest timing that holds most of them."""
    arms = training_arms(records)
    names = {arm.name for arm in arms}
    timed = [each for each in timed_arms(records) if each.name in names]
    arms_of = Counter(each.timing for each in timed)
    # Of equal counts the first, which is the latest.
    timing = max(arms_of, key=arms_of.__getitem__, default=None)
    # Speeds of another timing do not compare.
    timed = [each for each in timed if each.timing == timing]
    for arm in arms:
        speeds: dict[str, Any] = {"speedup": math.nan, "timing": None}
        for each in reversed(timed):
            if each.name == arm.name and all(each.says(key) == value for key, value in arm.variant):
                speeds = dict(each.runs.iloc[0][[*SPEEDS, "timing"]])
        # Over another arm than the baseline a speedup would not be what its column says.
        if arm.baseline.name not in [each.name for each in timed]:
            speeds["speedup"] = math.nan
        arm.runs = arm.runs.assign(**speeds)
    return arms


def _in_order(arms: Arms) -> list[Arm]:
    """Sort arms by setting, then by scheme; further arms of one scheme, by time, come after all."""
    ranks: dict[Arm, Any] = {}
    seen: Counter[Any] = Counter()  # further arms of one scheme
    for arm in sorted(arms, key=lambda arm: (arm.runs["time"].min(), arm.name)):
        # In the order of SCHEMES; a plugin's scheme after them.
        scheme = (*SCHEMES, arm.scheme).index(arm.scheme)
        ranks[arm] = tuple(map(natural, arm.setting)), seen[arm.setting, arm.scheme], scheme
        seen[arm.setting, arm.scheme] += 1
    return sorted(ranks, key=ranks.__getitem__)


class Seeds(NamedTuple):
    """Count seeds with a value, diverged runs, and seeds without record or value."""

    finite: int
    diverged: int
    missing: int

    def __str__(self) -> str:
        if self.finite == sum(self):
            return str(self.finite)
        diverged = f", {self.diverged} diverged" if self.diverged else ""
        missing = f", {self.missing} missing" if self.missing else ""
        return f"{self.finite} of {sum(self)}{diverged}{missing}"


def seeds_of(arm: Arm, arms: Arms, metric: str = "val_loss") -> Seeds:
    """Count an arm's seeds, of those that its sweep names or that any arm has."""
    # Seeds that the sweep names, or else that any arm has: an arm that lacks one is incomplete.
    of_all = {seed for each in arms for seed in each.runs.index}
    expected = {*arm.sweep.get("seeds", of_all), *arm.runs.index}
    finite = int(arm[metric].drop(index=list(arm.diverged)).count())
    diverged = len(arm.diverged)
    return Seeds(finite, diverged, len(expected) - finite - diverged)


def _baseline(arm: Arm, arms: Arms) -> Arm:
    """Return the arm that the sweep names, else the first of ``BASELINES``, else the first arm.

    Runs that were trained apart, not by a sweep, have one baseline whatever their settings.
    """
    named = arm.sweep.get("baseline") or ""
    peers = [peer for peer in arms if peer.setting == arm.setting or arm.sweep.get("apart")]
    candidates = [peer for peer in peers if peer.label == named]
    # A sweep names arms without the point of its grid.
    candidates += [peer for peer in peers if peer.title == parts_of(named)[0]]
    candidates += [peer for scheme in BASELINES for peer in peers if peer.scheme == scheme]
    return [*candidates, *peers][0]


def versus(arms: Arms) -> str:
    """Name the baselines of arms, for a column's title."""
    baselines = {arm.baseline for arm in arms}
    names = {baseline.label if baseline.sweep.get("apart") else baseline.title for baseline in baselines}
    return " or ".join(sorted(names))


def paired(arm: Arm, other: Arm, metric: str) -> tuple[Any, Any]:
    """Return ``estimate``'s arguments: differences of the seeds that both arms finished.

    They are nats (seeds, groups) and targets (groups,) if the metric is a loss whose documents have
    groups; else differences by seed, and None. A mixture's groups are its sources, which are fixed,
    and no sample of others.
    """
    if metric.endswith(".loss") and not arm.says("data.sources"):
        curve = f"{metric.rpartition('.')[0]}.by_group"
        sums, weights = difference_by_group(arm, other, curve, "nats", "targets")
        if len(sums) > 1 and len(weights) > 1:  # one group is none: intervals over seeds
            return sums, weights
    return arm[metric] - other[metric], None


def difference(arm: Arm, metric: str) -> Estimate | None:
    """Estimate an arm's metric minus its baseline's; None of the baseline itself."""
    return None if arm.baseline is arm else estimate(*paired(arm, arm.baseline, metric))


def divergence(arm: Any, other: Any) -> Divergence:
    """Count the runs of two arms, the diverged ones among them, and seeds that lack a run.

    Each is an Arm, or has its ``runs``, ``diverged`` and ``expected``.
    """
    counts = len(arm.diverged), len(arm.runs), len(other.diverged), len(other.runs)
    # Seeds that both should have, and those of them that either lacks.
    seeds = arm.expected & other.expected
    return Divergence(*counts, len(seeds), len(seeds - ({*arm.runs.index} & {*other.runs.index})))


class Contrast(NamedTuple):
    """Hold an arm's metric minus another's, and the ruling on it."""

    arm: Arm
    other: Arm
    comparison: Comparison
    ruling: Ruling

    @property
    def name(self) -> str:
        """Both arms, as sweeps name a primary contrast."""
        return f"{self.arm.label} - {self.other.title}"

    @property
    def margin(self) -> float | None:
        """The margin that the sweep names, in the metric's unit."""
        return self.arm.sweep.get("margin")

    @property
    def verdict(self) -> str:
        """The ruling's verdict, and whether the arms read other documents."""
        return self.ruling.verdict + ", other documents" * (not same_documents(self.arm, self.other))


def contrasts(arms: Arms, metric: str) -> list[Contrast]:
    """Rule on each arm minus its baseline, and on the contrasts that the sweep names as primary.

    Primary contrasts are one family, over all points of a grid, and the others, which explore, are
    another.
    """
    pairs, absent = _named_pairs(arms)
    comparisons = {}
    for (arm, other), family in pairs.items():
        same = same_documents(arm, other)
        # Of other documents no equivalence is claimed.
        margin = arm.sweep.get("margin") if same else None
        is_leak = same and arm.leaks and not other.leaks
        differences = paired(arm, other, metric)
        more: Any = {"margin": margin, "divergence": divergence(arm, other), "family": family}
        comparisons[arm, other] = Comparison(*differences, **more, setting=arm.setting, is_leak=is_leak)
    rulings = statistics.rule(comparisons, {"primary": absent}, higher_is_better(metric))
    return [Contrast(*pair, comparisons[pair], rulings[pair]) for pair in pairs]


def _named_pairs(arms: Arms) -> tuple[dict[tuple[Arm, Arm], str], int]:
    """Return pairs of arms with their family, and the number of primary ones without runs."""
    pairs = {(arm, arm.baseline): "exploratory" for arm in arms if arm is not arm.baseline}
    absent = set()
    primaries = [(arm, name) for arm in arms for name in arm.sweep.get("primary", ())]
    # Each once at each point of the grid, in order.
    named = dict.fromkeys((arm.setting, name, arm.sweep.get("baseline")) for arm, name in primaries)
    for setting, name, baseline in named:
        first, _, second = name.partition(" - ")
        # Reversed, so that of equal titles the first counts.
        by_title = {arm.title: arm for arm in reversed(arms) if arm.setting == setting}
        minuend = by_title.get(first)
        # A named baseline without runs is absent: the arm's own ``baseline`` is then a substitute,
        # which may be the arm itself.
        second = second or baseline
        subtrahend = by_title.get(str(second)) if second or not minuend else minuend.baseline
        if minuend and subtrahend and subtrahend is not minuend:
            pairs[minuend, subtrahend] = "primary"
        else:
            absent.add((setting, first, second))
    return pairs, len(absent)


def higher_is_better(metric: str) -> bool:
    """Tell if a metric is a share of right answers, a score or a gain, and no loss."""
    # A mixture's loss ends in the name of its source, which may be any word.
    return ".loss" not in metric and SCORES.search(metric) is not None


def same_documents(arm: Arm, other: Arm) -> bool:
    """Tell if the steps of two arms hold the same documents.

    With matched batching a step's documents are drawn before they are arranged, so that arms may
    arrange them in other rows.
    """
    free = {*NOT_SETTINGS, "data.max_tokens_per_batch"}
    # Steps of exact size hold what truncate leaves, which depends on rows.
    truncated = [side for side in (arm, other) if side.says("data.overlong") == "truncate"]
    depends_on_rows = any(side.says("data.cut_at_steps") for side in truncated)
    are_matched = all(side.says("data.batching", "matched") == "matched" for side in (arm, other))
    if are_matched and not depends_on_rows:
        free |= {"data.strategy", "data.row_length", "data.buffer", "data.streams"}
    columns = [column for column in {*arm.runs, *other.runs} if column.startswith("config.data.")]
    keys = {column.removeprefix("config.") for column in columns} - free
    return all(arm.says(key) == other.says(key) for key in keys)


def difference_along(arm: Arm, curve: str, *places: str) -> list[tuple[tuple[int, ...], Any]]:
    """Estimate an arm's loss minus its baseline's at each place of a curve that both have.

    Places are the ``step`` of ``validation``, or ``start`` and ``end`` of ``loss_by_position``.
    These are of the document, so a leak shows at the first and a longer memory at the last.
    """
    curves = [side.points(curve) for side in (arm, arm.baseline)]
    if arm.baseline is arm or any(points.empty for points in curves):
        return []
    ours, theirs = (points.groupby([*places, "seed"])["loss"].last().astype(float) for points in curves)
    # As headline losses: without runs that diverged, also where they were still finite.
    diverged = [*arm.diverged | arm.baseline.diverged]
    differences = (ours - theirs).dropna().drop(diverged, level="seed", errors="ignore").groupby(level=list(places))
    return [(place, statistics.interval(values)) for place, values in differences]


def with_items(folder: str | Path, records: Records) -> list[Record]:
    """Add ``items``, the path of their items (in items/ or items.zip), to evaluation records."""
    archive = Path(folder) / "items.zip"
    place: Any = zipfile.Path(archive) if archive.is_file() else Path(folder) / "items"
    result = []
    for record in records:
        config = record["config"]
        path = place / f"{config.get('evaluation', {}).get('name')}-{config.get('id')}.jsonl"
        has_items = record["kind"] == "evaluation" and path.is_file()
        result.append({**record, "items": path} if has_items else record)
    return result


# A metric's numerator and denominator among the keys of an item; an evaluation's main metric goes
# first.
MEASURES = {"choice_accuracy": ("correct", "choices"), "accuracy": ("right", "answers"), "loss": ("nats", "targets")}


def item_difference(arm: Arm, baseline: Arm, metric: str) -> Estimate | None:
    """Return the difference of two models' metric, paired by item, or None.

    Runs are paired by seed; one run of each is a pair whatever the seeds.
    """
    ours, theirs = (side["items"].dropna() for side in (arm, baseline))
    pairs = [(ours[seed], theirs[seed]) for seed in sorted({*ours.index} & {*theirs.index})]
    # Models evaluated once each, under whatever seeds.
    if not pairs and len(ours) == len(theirs) == 1:
        pairs = [(ours.iloc[0], theirs.iloc[0])]
    if not pairs or metric not in MEASURES:
        return None
    # A mixture's groups are its sources, which are fixed, and no sample of others.
    units = ("document", "index") if arm.says("evaluation.data.sources") else ("group", "document", "index")
    summed = [[_by_unit(path, units, *MEASURES[metric]) for path in pair] for pair in pairs]
    weights = summed[0][0]["weight"]
    alike = all(side["weight"].equals(weights) for pair in summed for side in pair)
    if weights.empty or not alike:
        return None  # models of other tokenizers, or evaluated on other documents
    sums = [mine["value"] - theirs["value"] for mine, theirs in summed]
    return statistics.bootstrap(sums, weights) if len(sums) > 1 else statistics.over_items(sums[0], weights)


def _by_unit(path: Any, units: Sequence[str], value: str, weight: str) -> pd.DataFrame:
    """Sum an item file's value and weight by the first of ``units`` among its keys, else by item."""
    items = pd.DataFrame(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    if "choice" in items:
        items = items.assign(choices=1, correct=items["choice"] == items["answer"])
    # Items of one document are not independent, nor are documents of one package.
    keys = [key for key in units if key in items]
    group = items[keys[0]] if keys else items.index
    values = items[[value, weight]].astype(float).set_axis(["value", "weight"], axis=1)
    return values.groupby(group, sort=False).sum()
