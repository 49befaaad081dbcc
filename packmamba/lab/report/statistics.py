"""Statistics of paired differences, and the rule that calls two arms different or equivalent.

Runs of two arms are paired by seed: the same seed has the same initial weights and documents. A
contrast is the mean of one arm's metric minus the other's, with a 95 % interval over seeds, or
over seeds and groups of documents where the records have groups. ``rule`` gives a family of
contrasts their verdicts:

- *different*: the interval excludes zero, and p of zero is at most 5 % after Holm's adjustment
  over the family; or one arm diverges more often, by Fisher's exact test, adjusted alike;
- *equivalent*: the interval lies within the margin, and p of the two one-sided tests is at most
  5 % after Holm's adjustment over the family. It takes precedence over *different*;
- *open*: neither is shown.

Both kinds of claims are adjusted over all contrasts of the family, each kind for itself. A verdict
is given only to a claim that its Holm procedure rejects for, so whatever the precedence, at most
5 % of families hold any false *different*, and at most 5 % any false *equivalent*.
docs/statistics.md has the rates in simulations with known truth.

Runs that diverged have no loss, and others may have no finite value of the metric: what is left of
their arm is a selection. Its contrasts are *of survivors*, and never equivalent; nor are contrasts
of which a named seed has no run. A run that breaks down to a finite but absurd loss keeps its loss:
nobody decides afterwards which runs count, and the wide interval that such a loss makes can turn
*equivalent* into *open*, never *open* into *equivalent*.

References: Fisher 1935, The Design of Experiments (the exact test); Holm 1979, Scandinavian
Journal of Statistics 6, 65 (families); Schuirmann 1987, Journal of Pharmacokinetics and
Biopharmaceutics 15, 657 (two one-sided tests); Tarone 1990, Biometrics 46, 515 (tests that cannot
reject); Browne 1995, Statistics in Medicine 14, 1933 (pilots); Owen 2007, Annals of Applied
Statistics 1, 386 (resampling rows and columns).
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import chdtri, ndtri, stdtr, stdtrit
from scipy.stats import fisher_exact

from packmamba.errors import need

DRAWS = 10_000
ALPHA = 0.05  # share of families with a false claim of one kind, at most
FEW_SEEDS = 5  # below: no claim of parity
FEWEST_GROUPS = 15  # with fewer the delta method's intervals are too narrow
PILOT_CONFIDENCE = 0.8  # that a pilot's standard deviation is not larger than assumed (Browne)

Key = TypeVar("Key")


class Estimate(NamedTuple):
    """Hold a mean, its 95 % interval and the two-sided p of zero.

    Interval and p are NaN of too few seeds or groups.
    """

    mean: float
    low: float
    high: float
    seeds: int
    p: float = math.nan
    groups: int = 1


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)  # of two arms without a common seed


def interval(values: Any) -> Estimate | None:
    """Return the finite values' mean with an interval by Student's t, or None without any."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    n = len(values)
    if n < 2:
        return Estimate(float(values[0]), math.nan, math.nan, n) if n else None
    # Three decimals, as books print t: intervals that were published so stay as they are.
    quantile = round(stdtrit(n - 1, 0.975), 3)
    return _by_student(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n), quantile, n)


def _by_student(mean: float, error: float, quantile: float, seeds: int, groups: int = 1) -> Estimate:
    """Estimate by Student's t, over seeds or over groups.

    ``error`` is the mean's standard error.
    """
    degrees = max(seeds, groups) - 1
    p = 2 * float(stdtr(degrees, -abs(mean) / error)) if error else float(mean == 0)
    return Estimate(mean, mean - quantile * error, mean + quantile * error, seeds, p, groups)


def bootstrap(sums: Any, weights: Any, draws: int = DRAWS) -> Estimate:
    """Resample seeds and groups together and estimate sums over weights (Owen 2007).

    ``sums`` (seeds, groups) are an arm's differences, such as nats; ``weights`` (groups,) what
    they are divided by, such as targets. The draws are widened as Student's t is over the normal
    distribution, since resampling alone is too narrow with few seeds. p is that of the interval
    of the level at which zero is its end, widened for that level.
    """
    sums = np.asarray(sums, float)
    weights = np.asarray(weights, float)
    seeds, groups = sums.shape
    mean = float(sums.mean(axis=0).sum() / weights.sum()) if seeds and weights.sum() else math.nan
    if seeds < 2 or groups < 2 or math.isnan(mean):
        return Estimate(mean, math.nan, math.nan, seeds, math.nan, groups)
    # How often each seed and each group is drawn, independently of each other (Owen).
    of_seeds, of_groups = (drawn.astype(float) for drawn in _draws(seeds, groups, draws))
    held = of_groups @ weights
    # The mean of each draw over its seeds and groups; draws that hold no target are left out.
    drawn_sums = ((of_seeds / seeds @ sums) * of_groups).sum(axis=1)
    means = drawn_sums[held > 0] / held[held > 0]
    # Widened about the mean: t over normal, and n / (n - 1) for the resampled variance.
    n = min(seeds, groups)
    t_over_normal = stdtrit(n - 1, 0.975) / ndtri(0.975)
    means = mean + t_over_normal * math.sqrt(n / (n - 1)) * (means - mean)
    low, high = np.quantile(means, [0.025, 0.975])
    # p by the same widened distribution, so that p <= 5 % where the interval excludes zero.
    p = 2 * float(stdtr(n - 1, -t_over_normal * _score_of_zero(mean, means)))
    return Estimate(mean, float(low), float(high), seeds, min(1.0, p), groups)


def _score_of_zero(mean: float, means: NDArray[np.float64]) -> float:
    """Return how many standard deviations of a normal distribution zero lies from the mean.

    By the share of draws beyond zero; where there are none, by the draws' standard deviation, but
    at least what one draw beyond zero would say.
    """
    beyond = min((means <= 0).mean(), (means >= 0).mean())
    if beyond:
        return float(-ndtri(beyond))
    deviation = means.std()
    return max(float(-ndtri(1 / len(means))), abs(mean) / deviation if deviation else math.inf)


@functools.lru_cache(maxsize=16)
def _draws(seeds: int, groups: int, draws: int) -> tuple[NDArray[np.uint8], ...]:
    """Count draws, (draws, seeds) and (draws, groups)."""
    rng = np.random.default_rng(0)
    # Counts of draws with replacement; a fixed generator, so that reports are reproducible.
    return tuple(rng.multinomial(n, np.full(n, 1 / n), draws).astype(np.uint8) for n in (seeds, groups))


def estimate(differences: Any, weights: Any = None, draws: int = DRAWS) -> Estimate | None:
    """Estimate a mean difference: ``interval`` over seeds, or ``bootstrap`` where there are groups.

    ``differences`` are (seeds,), or (seeds, groups) with ``weights`` (groups,). All documents of
    one group are no groups. Returns None without a pair.
    """
    if weights is None:
        return interval(differences)
    sums = np.asarray(differences, float)
    if not len(sums):
        return None
    if len(weights) < 2:
        return interval(sums.sum(axis=1) / np.sum(weights))
    return bootstrap(sums, weights, draws)


def over_items(sums: Any, weights: Any) -> Estimate:
    """Return sums over weights, both (groups,), with an interval by the delta method."""
    sums = np.asarray(sums, float)
    weights = np.asarray(weights, float)
    groups = len(sums)
    mean = float(sums.sum() / weights.sum())
    if groups < FEWEST_GROUPS:
        return Estimate(mean, math.nan, math.nan, 1, math.nan, groups)
    # Delta method: the variance of a ratio of sums, from groups' residuals.
    error = math.sqrt(groups / (groups - 1) * ((sums - mean * weights) ** 2).sum()) / weights.sum()
    return _by_student(mean, error, stdtrit(groups - 1, 0.975), 1, groups)


def difference_by_group(
    arm: Any, baseline: Any, curve: str, value: str, weight: str, where: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``bootstrap``'s arguments from a curve of both arms.

    Points of the curve are summed by seed and group: ``value``, such as nats, and ``weight``, such
    as targets. ``where`` selects points: ``start < 2048``. Both are empty without a common seed.
    """
    curves = [side.points(curve) for side in (arm, baseline)]
    if any(points.empty for points in curves):
        return np.empty((0, 0)), np.empty(0)
    selected = [points.query(where) if where else points for points in curves]
    finite = [of_finite_runs(points, value) for points in selected]
    summed = [points.groupby(["seed", "group"])[[value, weight]].sum() for points in finite]
    ours, theirs = (side[value].unstack("group") for side in summed)
    # Seeds that both finished, then groups that all of these seeds have.
    differences = (ours - theirs).dropna(how="all").dropna(axis=1)
    weights = summed[0][weight].unstack("group").reindex(differences.index)[differences.columns]
    return differences.to_numpy(float), weights.to_numpy(float)[:1].ravel()


def of_finite_runs(points: pd.DataFrame, value: str) -> pd.DataFrame:
    """Drop all points of a seed that lacks a finite value at any of them.

    A sum would skip that point.
    """
    return points[~points["seed"].isin(points.loc[points[value].isna(), "seed"])]


def p_of_equivalence(differences: Any, weights: Any, margin: float, draws: int = DRAWS) -> float:
    """Return the p of two one-sided tests that the mean lies within ± margin (Schuirmann 1987).

    Arguments are ``estimate``'s. Each side is tested at 2.5 %, as the ends of the 95 % interval
    are, so that p is at most 0.05 where that interval lies within the margin: twice the p that
    two one-sided tests at 5 % have. NaN of too few seeds or groups.
    """
    values = np.asarray(differences, float)
    shift = margin if weights is None else margin * np.asarray(weights, float)
    # Shift by the margin up and down: each side tests zero.
    above, below = (estimate(values + side * shift, weights, draws) for side in (1, -1))
    if above is None or below is None or math.isnan(above.p) or math.isnan(below.p):
        return math.nan
    # A mean outside the margin is not equivalent, however small a p is: p is two-sided.
    return max(above.p, below.p) if above.mean > 0 > below.mean else 1.0


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjust p values for their number (Holm 1979); NaN counts among them."""
    p = np.array([*p_values.values()], float)
    ranked = np.argsort(p)  # NaN is last
    adjusted = np.empty(len(p))
    # Step down: the least p times their number, the next times one less, never below the last.
    adjusted[ranked] = np.maximum.accumulate(np.minimum(1, p[ranked] * np.arange(len(p), 0, -1)))
    return dict(zip(p_values, adjusted.tolist()))


class Divergence(NamedTuple):
    """Count the runs of two arms, and how many of each diverged.

    ``seeds`` are those that both arms should have; ``missing`` are those of them that lack a run.
    """

    diverged: int = 0
    runs: int = 0
    other_diverged: int = 0
    other_runs: int = 0
    seeds: int = 0
    missing: int = 0

    @property
    def total(self) -> int:
        """Diverged runs of both arms."""
        return self.diverged + self.other_diverged

    @property
    def p(self) -> float:
        """p that both arms diverge equally often, by Fisher's exact test, two-sided."""
        return _fisher(*self[:4])

    @property
    def can_differ(self) -> bool:
        """Tell if any split of so many diverged runs would have a p of at most 5 % (Tarone 1990).

        A test that cannot reject needs no adjustment, so that a lost run or two cost none.
        """
        # The most extreme splits of the diverged runs have the least p.
        extremes = (max(0, self.total - self.other_runs), min(self.total, self.runs))
        splits = (_fisher(count, self.runs, self.total - count, self.other_runs) for count in extremes)
        return min(splits) <= ALPHA

    def lost(self, pairs: int) -> str:
        """Say why fewer pairs than planned have a value; empty if none is lost.

        A run without a finite value of the metric did not survive, though its loss be finite.
        """
        are_lost = self.total or pairs < self.seeds - self.missing
        missing = f", {self.missing} of {self.seeds} seeds missing" if self.missing else ""
        left = ", of survivors" if pairs else ", no pair has a value"
        return (left if are_lost else "") + missing

    @property
    def worse(self) -> bool:
        """Tell if the first arm diverges more often."""
        return self.diverged * self.other_runs > self.other_diverged * self.runs


@functools.lru_cache(maxsize=4096)
def _fisher(diverged: int, runs: int, other_diverged: int, other_runs: int) -> float:
    table = [[diverged, runs - diverged], [other_diverged, other_runs - other_diverged]]
    return float(fisher_exact(table).pvalue)


@dataclass(frozen=True)
class Comparison:
    """Hold what decides about a contrast: one arm minus another.

    ``differences`` and ``weights`` are ``estimate``'s, of the seeds that both arms finished.
    Without a ``margin`` the contrast is never equivalent. ``family`` names the contrasts that are
    adjusted together. ``is_leak``: the first arm lets documents cross their boundaries and the
    other does not; it vouches for the contrasts of its ``setting``.
    """

    differences: Any
    weights: Any = None
    margin: float | None = None
    divergence: Divergence = Divergence()
    family: Hashable = None
    setting: Hashable = None
    is_leak: bool = False


# What stands beside *equivalent*, the least evidence first. That a study sees arms diverge does not
# show that it sees a difference as small as its margin: only a difference of the metric does.
EVIDENCE = (", leak not caught", ", leak caught by divergence alone", ", leak caught of survivors", "")


class Ruling(NamedTuple):
    """Hold what is claimed of a contrast and what that rests on.

    Each p is adjusted over the family. ``by_interval`` is what the interval alone would claim.
    ``leak_caught`` tells how well the same test, in the same setting, shows a leak's harm: an index
    of ``EVIDENCE``; None without an arm that leaks.
    """

    claim: str
    estimate: Estimate
    p_difference: float = math.nan
    p_equivalence: float = math.nan
    by_interval: str = ""
    leak_caught: int | None = None

    @property
    def verdict(self) -> str:
        """The claim, *equivalent* with all that it lacks: seeds, or a leak that is caught."""
        if self.claim != "equivalent":
            return self.claim
        few_seeds = ", few seeds" * (self.estimate.seeds < FEW_SEEDS)
        lacks = ", no leak arm" if self.leak_caught is None else EVIDENCE[self.leak_caught]
        return f"equivalent{few_seeds}{lacks}"

    def shows_harm(self, higher_is_better: bool = False) -> int:
        """Tell if the first arm is shown to be worse: an index of ``EVIDENCE``, 0 if it is not."""
        if "diverges" in self.claim:
            return int(self.claim == "different (diverges)")
        is_higher = self.estimate.mean > 0
        if not self.claim.startswith("different") or is_higher == higher_is_better:
            return 0
        return 2 if "of survivors" in self.claim else 3


def rule(
    comparisons: Mapping[Key, Comparison], absent: Mapping[Any, int] | None = None, higher_is_better: bool = False
) -> dict[Key, Ruling]:
    """Give each contrast its verdict; the module's docstring says by which rule.

    ``absent`` counts by family the contrasts that were named beforehand and have no runs: Holm's
    adjustment gets no milder where an arm is missing. ``higher_is_better`` says what a leak's harm
    is.
    """
    rulings: dict[Key, Ruling] = {}
    for family in dict.fromkeys(each.family for each in comparisons.values()):
        members = {key: each for key, each in comparisons.items() if each.family == family}
        rulings |= _rule_family(members, (absent or {}).get(family, 0))
    caught: dict[Hashable, int] = {}
    for key, each in comparisons.items():
        if each.is_leak:
            caught[each.setting] = max(caught.get(each.setting, 0), rulings[key].shows_harm(higher_is_better))
    of_setting = {key: caught.get(each.setting) for key, each in comparisons.items()}
    return {key: rulings[key]._replace(leak_caught=index) for key, index in of_setting.items()}


def _rule_family(family: Mapping[Key, Comparison], absent: int) -> dict[Key, Ruling]:
    """Adjust both kinds of p over a family, and give each contrast its claim."""
    estimates = {key: estimate(each.differences, each.weights) or NOTHING for key, each in family.items()}
    lost = {key: each.divergence.lost(estimates[key].seeds) for key, each in family.items()}
    missing: dict[Any, float] = {("absent", place): math.nan for place in range(absent)}
    of_difference = missing | {(key, "mean"): found.p for key, found in estimates.items()}
    of_equivalence = dict(missing)
    for key, each in family.items():
        if each.divergence.can_differ:
            # A test that could reject counts in the family, also where it does not reject.
            of_difference[key, "divergence"] = each.divergence.p
        if each.margin is not None:
            p = p_of_equivalence(each.differences, each.weights, each.margin)
            of_equivalence[key] = math.nan if lost[key] else p  # NaN: counts, claims nothing
    adjusted_difference = holm(of_difference)
    adjusted_equivalence = holm(of_equivalence)
    rulings = {}
    for key, each in family.items():
        found = estimates[key]
        p = adjusted_difference[key, "mean"]
        p_same = adjusted_equivalence.get(key, math.nan)
        # Divergence goes first: losses of an arm whose runs diverge are of survivors.
        if adjusted_difference.get((key, "divergence"), math.nan) <= ALPHA:
            claim = f"different ({'diverges' if each.divergence.worse else 'the other diverges'})"
        else:
            claim = verdict(found, None if lost[key] else each.margin, p, p_same) + lost[key]
        rulings[key] = Ruling(claim, found, p, p_same, verdict(found, each.margin))
    return rulings


def verdict(found: Estimate | None, margin: float | None, p_difference: float = 0, p_same: float = 0) -> str:
    """Return equivalent, different or open, of a contrast in which no run diverged.

    Each p is adjusted for the family, ``p_same`` is that of equivalence; without them, so with p of
    zero, the interval alone decides.
    """
    if found is None or math.isnan(found.low):
        return "open"
    # Checked first: a difference may be shown, and still lie within the margin.
    within = margin is not None and -margin < found.low and found.high < margin
    if within and p_same <= ALPHA:
        return "equivalent"
    return "different" if (found.low > 0 or found.high < 0) and p_difference <= ALPHA else "open"


def margin_from_pilot(harm: Estimate) -> float:
    """Return half of the lower end of the 95 % interval of a failure's harm: a margin.

    ``harm`` is what the failure that a study must exclude, such as a leak, costs in a pilot, above
    zero: its metric minus that of the intact arm, on seeds that the study does not use. The
    estimate itself would be a lax margin: of a pilot of four seeds it is often twice the true harm.

    Raises ConfigError if the interval does not lie above zero: a margin from nothing is no margin.
    """
    got = f"{harm.mean:+.4g} [{harm.low:+.4g}, {harm.high:+.4g}] of {harm.seeds} seeds"
    remedy = "add seeds to the pilot, or raise the dose: shorter documents, longer rows"
    need(harm.low > 0, "harm", "a 95 % interval above zero", f"{got}; {remedy}")
    return harm.low / 2


def power(pilot: Any, weights: Any, margin: float, seeds: int, family: int = 1, draws: int = 2000) -> float:
    """Return a lower bound of how often ``rule`` calls arms without a difference equivalent.

    ``pilot`` are differences of the very contrast that is to be tested, as ``estimate`` takes
    them: pairs of other arms spread otherwise. They are resampled, centred on zero, after widening
    to the upper 80 % confidence bound of their standard deviation (Browne 1995), since few pairs
    often spread less than more of them do. ``seeds`` are the study's, ``family`` its contrasts:
    the first of them that Holm's adjustment accepts is tested at 5 % over their number. NaN of
    fewer than two pairs.
    """
    rng = np.random.default_rng(0)
    values = np.asarray(pilot, float)
    values = values[~np.isnan(values)] if weights is None else values
    pairs = len(values)
    if pairs < 2:
        return math.nan
    # Residuals, scaled to the sample's variance, then to its upper confidence bound.
    deviations = (values - values.mean(axis=0)) * math.sqrt(pairs / (pairs - 1)) * _upper(pairs)
    if weights is None:
        drawn = rng.choice(deviations, (draws, seeds))
        # The first contrast that Holm accepts is tested at ALPHA over their number.
        quantile = stdtrit(seeds - 1, 1 - ALPHA / family / 2)
        half = quantile * drawn.std(axis=1, ddof=1) / math.sqrt(seeds)
        return float((abs(drawn.mean(axis=1)) + half < margin).mean())
    weights = np.asarray(weights, float)
    groups = len(weights)
    centre = values.mean(axis=0)
    centre = (centre - centre.sum() / weights.sum() * weights) * _upper(groups)
    equivalent = 0
    # A bootstrap in each trial: a tenth of the trials.
    trials = draws // 10
    for _ in range(trials):
        rows = rng.integers(pairs, size=(seeds, 1))
        columns = rng.integers(groups, size=groups)
        sums = (centre + deviations)[rows, columns]
        equivalent += p_of_equivalence(sums, weights[columns], margin, draws=400) <= ALPHA / family
    return equivalent / trials


def _upper(count: int) -> float:
    """Return the upper confidence bound of a standard deviation of so many values, over it."""
    return math.sqrt((count - 1) / chdtri(count - 1, PILOT_CONFIDENCE))


def seeds_for(pilot: Any, weights: Any, margin: float, family: int = 1) -> int | None:
    """Return the fewest seeds whose ``power`` reaches 80 %, from 5 to 100, or None."""
    # Bisection: power grows with the number of seeds.
    candidates = range(FEW_SEEDS, 101)
    place = bisect_left(candidates, True, key=lambda seeds: power(pilot, weights, margin, seeds, family) >= 0.8)
    return candidates[place] if place < len(candidates) else None
