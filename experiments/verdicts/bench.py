"""Simulate studies whose truth is known, and count the verdicts that are wrong.

A study has a baseline and some arms, all with as many seeds. A run's loss is its seed's, plus its
arm's effect, plus noise of its own; contrasts of one study share the baseline, as those of a sweep
do. ``packmamba.lab.report.statistics.rule``, which every report calls, gives the study its
verdicts.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from tqdm import tqdm

from experiments.by_name import Bench
from packmamba.config import key
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.lab.report.statistics import Comparison, Divergence, rule

SOME = ("at least one", bool)
# In standard deviations of a run's noise, so that even three seeds can show equivalence.
MARGIN = 4.0
GROUPS = 30
# A share of wrong studies that chance may have moved across 5 %.
NEAR = 0.04
# Of the runs that diverge, on average, where both arms diverge alike.
SHARE = 0.2
TAILS = ("normal", "heavy")
HIGHEST = {"normal": float(stats.norm.isf(SHARE)), "heavy": float(stats.t.isf(SHARE, 2))}
DIVERGING = ("none", "alike", "highest losses")


@dataclass
class Config:
    experiment: str = key("verdicts", "The question, which the records name.")
    seeds: list[int] = key([3, 5, 8, 16], "Seeds of each arm.", low=2, check=SOME)
    trials: int = key(4000, "Studies of each kind, with intervals over seeds.", low=1)
    group_trials: int = key(1000, "Studies of each kind, with intervals over seeds and groups.", low=1)
    factor: int = key(10, "Times as many studies of a kind whose share of wrong ones is above 4 %.", low=1)
    seed: int = key(0, "Seed of the simulation.", low=0)


@dataclass(frozen=True)
class Study:
    """Hold a kind of study; its records hold these fields.

    ``effect`` is 0, of which *different* is wrong, or 1, the margin's edge, of which *equivalent*
    is. The first ``shown`` contrasts have the other claim's clear truth, so that Holm's adjustment
    rejects for them and gets milder for the rest. ``diverging`` says which runs diverge: none;
    alike, a fifth of the runs of each arm at random; or those with the highest losses, a fifth of
    each arm. ``share`` is the share of the first arm's runs that diverge besides, at random.
    """

    seeds: int
    effect: int
    contrasts: int = 1
    shown: int = 0
    tails: str = "normal"
    diverging: str = "none"
    groups: int = 1
    share: float = 0.0

    def noise(self, rng: np.random.Generator, *shape: int) -> NDArray[np.float64]:
        """Draw from a normal distribution, or Student's t with two degrees of freedom."""
        return rng.standard_normal(shape) if self.tails == "normal" else rng.standard_t(2, shape)

    def effects(self) -> NDArray[np.float64]:
        """Return each contrast's true effect, in standard deviations of a run's noise."""
        effects = np.full(self.contrasts, MARGIN * self.effect)
        effects[: self.shown] = 0.0 if self.effect else 100.0
        return effects

    def diverged(self, losses: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return which runs (arms, seeds) diverge; the baseline's are last."""
        lost = np.zeros(losses.shape, bool)
        if self.diverging == "alike":
            lost = rng.random(losses.shape) < SHARE
        elif self.diverging == "highest losses":
            lost = losses > HIGHEST[self.tails]
        lost[0] |= rng.random(self.seeds) < self.share
        return lost


def verdicts(study: Study, rng: np.random.Generator) -> list[str]:
    """Simulate a study and return what is claimed of each contrast."""
    arms = study.contrasts + 1
    own = study.noise(rng, arms, study.seeds)
    lost = study.diverged(own, rng)
    weights = rng.lognormal(8, 1, study.groups)
    shared = 0.3 * study.noise(rng, arms, 1, study.groups) if study.groups > 1 else 0.0
    rest = 0.3 * study.noise(rng, arms, study.seeds, study.groups) if study.groups > 1 else 0.0
    losses = own[:, :, None] + shared + rest
    family = {}
    for arm, effect in enumerate(study.effects()):
        both = ~lost[arm] & ~lost[-1]
        differences = (losses[arm] - losses[-1] + effect)[both]
        counts = Divergence(int(lost[arm].sum()), study.seeds, int(lost[-1].sum()), study.seeds)
        margin = MARGIN if study.effect else None
        sums: tuple[Any, Any] = (differences * weights, weights) if study.groups > 1 else (differences[:, 0], None)
        family[arm] = Comparison(*sums, margin, counts)
    return [ruling.claim for ruling in rule(family).values()]


def is_wrong(study: Study, found: list[str]) -> bool:
    """Tell if a study holds any false claim, of the contrasts whose truth makes it one."""
    claim = "equivalent" if study.effect else "different"
    return any(verdict.startswith(claim) for verdict in found[study.shown :])


def studies(seeds: list[int]) -> Iterator[Study]:
    """Yield the kinds of studies, those with groups last."""
    families = ((1, 0), (4, 0), (4, 2))
    for n, effect, (contrasts, shown), tails, diverging in itertools.product(seeds, (0, 1), families, TAILS, DIVERGING):
        yield Study(n, effect, contrasts, shown, tails, diverging)
    for n, share in itertools.product(seeds, (0.25, 0.5, 0.75, 1.0)):
        yield Study(n, 1, share=share)
    for n, effect, (contrasts, shown), tails in itertools.product(seeds, (0, 1), families[:2], TAILS):
        yield Study(n, effect, contrasts, shown, tails, groups=GROUPS)


def simulate(study: Study, trials: int, seed: int) -> Counter[str]:
    """Count the studies with a wrong claim, and the verdicts of each study's first contrast."""
    found: Counter[str] = Counter()
    kind = zlib.crc32(repr(study).encode())
    for trial in range(trials):
        given = verdicts(study, np.random.default_rng([seed, kind, trial]))
        found["wrong"] += is_wrong(study, given)
        found[given[0]] += 1
    return found


def measure(c: Config, study: Study) -> dict[str, Any]:
    """Return the record of a kind of study: the share of studies with a wrong claim, and how many
    there were.

    Where the share is near 5 % it is counted again over ``factor`` times as many studies, since
    chance moves 5 % of 4,000 studies by 0.7 % either way.
    """
    began = time.perf_counter()
    trials = c.trials if study.groups == 1 else c.group_trials
    found = simulate(study, trials, c.seed)
    if found["wrong"] > NEAR * trials:
        trials *= c.factor
        found = simulate(study, trials, c.seed)
    metrics = {"wrong": found["wrong"] / trials, "trials": trials}
    metrics |= {verdict: count / trials for verdict, count in found.items() if verdict != "wrong"}
    claim = "equivalent" if study.effect else "different"
    return make_record(
        "verdicts", c.experiment, f"false {claim}", asdict(study), c.seed, "simulated", metrics,
        time.perf_counter() - began,
    )  # fmt: skip


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append one record per kind of study."""
    provenance()  # of the code as it is now, not as it may be after minutes
    for study in tqdm([*studies(c.seeds)], unit="study", disable=not progress):
        append_record(records_path, measure(c, study))


BENCHES = {"verdicts": Bench(Config, run)}
