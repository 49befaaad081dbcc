"""Statistics of paired differences, by seed and perhaps by group of documents."""

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

DRAWS = 10_000
FEWEST_GROUPS = 15  # with fewer the delta method's intervals are too narrow


class Estimate(NamedTuple):
    """Hold a mean, its 95 % interval and the two-sided p of zero; NaN of too few seeds or groups."""

    mean: float
    low: float
    high: float
    seeds: int
    p: float = math.nan
    groups: int = 1


def interval(values: Any) -> Estimate | None:
    """Return the finite values' mean with an interval by Student's t, or None."""
    values = pd.Series(values, dtype=float).dropna()
    n, mean, error = len(values), values.mean(), values.sem()
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n) if n else None
    half = round(stdtrit(n - 1, 0.975), 3) * error
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, n, p)


def bootstrap(sums: Any, weights: Any, draws: int = DRAWS) -> Estimate:
    """Bootstrap sums (seeds, groups) over weights (groups,) by seeds and groups (Owen 2007)."""
    sums, weights = np.asarray(sums, float), np.asarray(weights, float)
    seeds, groups = sums.shape
    mean = float(sums.mean(axis=0).sum() / weights.sum()) if seeds and weights.sum() else math.nan
    if seeds < 2 or groups < 2 or math.isnan(mean):
        return Estimate(mean, math.nan, math.nan, seeds, math.nan, groups)
    of_seeds, of_groups = (drawn.astype(float) for drawn in _draws(seeds, groups, draws))
    held = of_groups @ weights
    means = ((of_seeds / seeds @ sums) * of_groups).sum(axis=1)[held > 0] / held[held > 0]
    # Wider, to cover from five seeds on.
    n = min(seeds, groups)
    few = stdtrit(n - 1, 0.975) / stdtrit(math.inf, 0.975) * math.sqrt(n / (n - 1))
    means = mean + few * (means - mean)
    low, high = np.quantile(means, [0.025, 0.975])
    beyond = min((means <= 0).mean(), (means >= 0).mean())
    return Estimate(
        mean, float(low), float(high), seeds, float(min(1.0, 2 * max(beyond, 1 / draws))), groups
    )


@functools.lru_cache(maxsize=16)
def _draws(seeds: int, groups: int, draws: int) -> tuple[NDArray[np.uint8], ...]:
    """Count draws, (draws, seeds) and (draws, groups)."""
    rng = np.random.default_rng(0)
    return tuple(
        rng.multinomial(n, np.full(n, 1 / n), draws).astype(np.uint8) for n in (seeds, groups)
    )


def over_items(sums: Any, weights: Any) -> Estimate:
    """Return sums over weights (groups,) with an interval by the delta method."""
    sums, weights = np.asarray(sums, float), np.asarray(weights, float)
    groups, mean = len(sums), float(sums.sum() / weights.sum())
    if groups < FEWEST_GROUPS:
        return Estimate(mean, math.nan, math.nan, 1, math.nan, groups)
    error = math.sqrt(groups / (groups - 1) * ((sums - mean * weights) ** 2).sum()) / weights.sum()
    half = stdtrit(groups - 1, 0.975) * error
    p = 2 * stdtr(groups - 1, -abs(mean) / error) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, 1, float(p), groups)


def difference_by_group(
    arm: Any, baseline: Any, curve: str, value: str, weight: str, where: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``bootstrap``'s arguments from a curve of both arms; ``where``: ``start < 2048``."""
    sides = [side.points(curve) for side in (arm, baseline)]
    if any(points.empty for points in sides):
        return np.empty((0, 0)), np.empty(0)
    sides = [points.query(where) if where else points for points in sides]
    sides = [points.groupby(["seed", "group"])[[value, weight]].sum() for points in sides]
    ours, theirs = (side[value].unstack("group") for side in sides)
    both = (ours - theirs).dropna(how="all").dropna(axis=1)
    weights = sides[0][weight].unstack("group").reindex(both.index)[both.columns]
    return both.to_numpy(float), weights.to_numpy(float)[:1].ravel()


def verdict(estimate: Estimate | None, margin: float | None, p: float | None = None) -> str:
    """Return equivalent if within ± margin, different if the interval excludes zero and p <= 0.05, else open."""
    if estimate is None or math.isnan(estimate.low):
        return "open"
    if margin is not None and -margin < estimate.low and estimate.high < margin:
        return "equivalent"
    return (
        "different"
        if (estimate.low > 0 or estimate.high < 0) and (p is None or not p > 0.05)
        else "open"
    )


def power(pilot: Any, weights: Any, margin: float, seeds: int, draws: int = 2000) -> float:
    """Resample a pilot (seeds,) or (seeds, groups): how often ``verdict`` is equivalent at no difference."""
    pilot, rng = np.asarray(pilot, float), np.random.default_rng(0)
    pilot = pilot[~np.isnan(pilot)] if weights is None else pilot
    if len(pilot) < 2:
        return math.nan
    deviations = (pilot - pilot.mean(axis=0)) * math.sqrt(len(pilot) / (len(pilot) - 1))
    if weights is None:
        drawn = rng.choice(deviations, (draws, seeds))
        half = round(stdtrit(seeds - 1, 0.975), 3) * drawn.std(axis=1, ddof=1) / math.sqrt(seeds)
        return float((abs(drawn.mean(axis=1)) + half < margin).mean())
    centre, groups = pilot.mean(axis=0), len(weights)
    centre = centre - centre.sum() / weights.sum() * weights
    verdicts = []
    for _ in range(draws // 10):
        rows, columns = rng.integers(len(pilot), size=(seeds, 1)), rng.integers(groups, size=groups)
        sums = (centre + deviations)[rows, columns]
        verdicts.append(verdict(bootstrap(sums, weights[columns], 400), margin) == "equivalent")
    return float(np.mean(verdicts))


def seeds_for(pilot: Any, weights: Any, margin: float) -> int | None:
    """Return the fewest seeds, 2 to 100, whose ``power`` reaches 80 %, or None."""
    few = 2 + bisect_left(
        range(2, 101), True, key=lambda seeds: power(pilot, weights, margin, seeds) >= 0.8
    )
    return few if few <= 100 else None


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Adjust p values for their number (Holm 1979); NaN counts among them."""
    ranked = pd.Series([*p_values.values()], dtype=float).sort_values()
    adjusted = (ranked * np.arange(len(ranked), 0, -1)).clip(upper=1).cummax()
    return dict(zip(p_values, adjusted.sort_index().tolist()))
