"""What the runs of this experiment are: arms by their configuration, and losses by place in the document and by package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtr

from packmamba.report.aggregate import Record, frame, interval
from packmamba.report.statistics import Resampled, bootstrap, difference_by_group

STARTS = {
    "reset": "zero",
    "fitted_noise": "noise",
    "state_passing": "foreign",
    "carry": "own",
    "carry_scan": "own scan",
}
LEAKS = {
    "reset": "rows",
    "leak": "leak",
    "leak_conv": "leak, convolution",
    "leak_scan": "leak, scan",
    "state_passing_within_row": "foreign heads",
}
EXPLAINED = {
    "zero": "a piece that goes on with a document starts from zero",
    "fitted_noise": "from noise with the mean and variance of the states that rows leave",
    "state_passing": "from the state that another stream left in the same step as its own did",
    "own": "from the state that its document's last piece left",
    "own scan": "from that state in the scan, from zero in the convolution",
    "whole": "documents in rows of 65,536 tokens, not cut at T",
    "shuffled": "the pool's rows in random order, all from zero",
    "rows": "documents end to end in shuffled rows, all from zero",
    "leak": "the same rows; states run on from document to document inside a row",
    "foreign heads": "the same rows; a document behind another starts from a third one's state",
    "learned": "the same rows; documents start from a learned state",
}
"""What arms do, whose names begin so."""
RATE = 2e-3
"""Learning rate of all runs that name none."""
TUNING = 100
"""Seeds from here on are for choices, and are not reported."""
REACH = 32
"""Beyond: from T to this many times T."""
GAINS = "long_context.by_group"


def _config(run: Any, key: str, absent: Any = None) -> Any:
    value = run.get(f"config.{key}")
    return absent if value is None or value is pd.NA else value


def streams_per_row(run: Any) -> float:
    """Streams for each row of a step; 0 where rows do not go on."""
    if _config(run, "data.strategy") != "concat_split":
        return 0
    return _config(run, "data.streams") * _config(run, "data.row_length") / _config(run, "data.tokens_per_step")


def name_of(run: Any) -> str:
    """What an arm does, read from its configuration."""
    boundary, pool = _config(run, "trainer.boundary"), streams_per_row(run)
    if not pool:
        return "whole"
    if _config(run, "data.stagger", False) and not _config(run, "data.shuffle_steps"):
        control = _config(run, "data.max_tokens_per_batch") < _config(run, "data.tokens_per_step")
        place = "" if pool >= 32 else f", {pool:g} streams a row" if pool > 1 else ", plain streams"
        return STARTS.get(boundary, boundary) + (", control" if control else "") + place
    if _config(run, "data.stagger", False):
        return "shuffled"
    return "learned" if _config(run, "model.learned_initial_state", False) else LEAKS.get(boundary, boundary)


@dataclass(frozen=True)
class Setting:
    """What arms that are compared have in common; T is the length of rows, or of the rows that whole is compared with."""

    T: int
    tokens: int
    width: int
    lr: float
    stagger: bool
    after: bool
    """From the weights of another run."""
    tuning: bool
    """Seeds on which things were chosen."""
    tried: bool
    """Of a sweep that tries learning rates: compared inside it alone."""

    def label(self) -> str:
        size = {512: "14M", 768: "47M"}.get(self.width, f"width {self.width}")
        marks = [", post-training"] * self.after + [", tuning seeds"] * self.tuning
        marks += [f", rate {self.lr:g}"] * (self.tried or (self.lr != RATE and not self.after))
        return f"T = {self.T}, {size}, {self.tokens / 1e6:.3g}M tokens" + "".join(marks)


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs of one arm, by seed."""

    name: str
    setting: Setting
    runs: pd.DataFrame

    @property
    def expected(self) -> set[int]:
        """Seeds that it has or that sweeps say it should have, of which one may have tuning seeds and another those reported."""
        said = [sweep["seeds"] for sweep in self.runs.get("sweep", ()) if isinstance(sweep, dict)]
        wanted = (seed for seeds in said for seed in seeds if (seed >= TUNING) == self.setting.tuning)
        return {*self.runs.index, *wanted}

    @property
    def diverged(self) -> set[int]:
        """Seeds whose runs have no loss."""
        return set(self.runs.index[self.runs["val_loss"].isna()])

    def losses(self, low: float, high: float) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Nats (seeds, packages) at places from low up to high, targets (packages,), and the seeds that did not diverge."""
        found, targets = {}, pd.Series(dtype=float)
        for seed, run in self.runs[self.runs["val_loss"].notna()].iterrows():
            places = pd.DataFrame(_places(run))
            here = (
                places[(places["start"] >= low) & (places["start"] < high)].groupby("group")[["nats", "targets"]].sum()
            )
            found[seed], targets = here["nats"], here["targets"]
        nats = pd.DataFrame(found).sort_index()
        return nats.to_numpy().T, targets.reindex(nats.index).to_numpy(), list(nats.columns)


def _places(run: Any) -> list[dict[str, Any]]:
    """By package where the record says so, else all packages as one: losses at places from start to twice start."""
    by_group = run.get("curves.perplexity.by_group")
    if isinstance(by_group, list) and by_group and "start" in by_group[0]:
        return by_group
    return [
        {"group": 0, "start": point["start"], "nats": point["loss"] * point["count"], "targets": point["count"]}
        for point in run["curves.loss_by_position"]
    ]


def arms(records: Sequence[Record]) -> list[Arm]:
    """All arms that were trained, those of one setting one after another; of a repeated run the latest."""
    runs = frame(records, "training")
    if runs.empty:
        return []
    runs["tried"] = runs["arm"].str.contains(" lr=", regex=False)
    runs["arm"] = [name_of(run) for _, run in runs.iterrows()]
    steps, size = runs["config.trainer.max_steps"], runs["config.data.tokens_per_step"]
    runs["budget"] = steps * size
    whole = runs["arm"] == "whole"
    rows = runs["config.data.row_length"].astype(float)
    window = runs.get("config.evaluation_options.long_context.window", pd.Series(np.nan, runs.index)).astype(float)
    runs["T"] = rows.where(~whole, window.fillna(rows))
    runs["staggered"] = runs.get("config.data.stagger", pd.Series(False, runs.index)).fillna(False).astype(bool) | whole
    runs["tuning"] = runs["seed"] >= TUNING
    runs["after"] = runs.get("config.trainer.init_from", pd.Series(None, runs.index)).notna()
    keys = ["T", "budget", "config.model.d_model", "config.optimizer.lr", "staggered", "after", "tuning", "tried"]
    found = []
    for (*setting, name), group in runs.groupby([*keys, "arm"], sort=True):
        latest = group.drop_duplicates("seed", keep="last").set_index("seed").sort_index()
        T, tokens, width, lr, *marks = setting
        place = Setting(int(T), int(tokens), int(width), float(lr), *map(bool, marks))
        found.append(Arm(name, place, latest))
    return found


def by_setting(found: Iterable[Arm]) -> dict[Setting, dict[str, Arm]]:
    settings: dict[Setting, dict[str, Arm]] = {}
    for arm in found:
        settings.setdefault(arm.setting, {})[arm.name] = arm
    return settings


def of_one_start(*some: Arm) -> list[Arm]:
    """Each without the seeds of which these arms' runs went on from different weights: they are no pairs."""
    starts = [arm.runs["started_from_checksum"] for arm in some if "started_from_checksum" in arm.runs]
    if not starts:
        return list(some)
    apart = pd.concat(starts, axis=1).nunique(axis=1) > 1
    return [replace(arm, runs=arm.runs.drop(index=apart.index[apart], errors="ignore")) for arm in some]


def paired(
    arm: Arm, other: Arm, low: float, high: float, less: tuple[Arm, Arm] | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Nats of one arm minus the other's (seeds, packages) at places from low up to high, and targets (packages,); with ``less``
    also minus the difference of these two. Runs that went on from different weights are no pair. None without a seed and target
    of all."""
    first, *others = (one.losses(low, high) for one in of_one_start(arm, other, *reversed(less or ())))
    nats, targets, seeds = first
    both = [seed for seed in seeds if all(seed in theirs for _, _, theirs in others)]
    if not both or not targets.size or not all(np.array_equal(targets, theirs) for _, theirs, _ in others):
        return None
    differences = nats[[seeds.index(seed) for seed in both]]
    for sign, (nats, _, seeds) in zip((-1, 1, -1), others):
        differences = differences + sign * nats[[seeds.index(seed) for seed in both]]
    return differences[np.isfinite(differences).all(axis=1)], targets


def contrast(arm: Arm, other: Arm, low: float, high: float, less: tuple[Arm, Arm] | None = None) -> Resampled | None:
    """One arm's loss minus the other's at places from low up to high, nats per target, as ``paired`` has it.

    Of records that do not tell packages apart the interval is Student's t over seeds.
    """
    both = paired(arm, other, low, high, less)
    if both is None:
        return None
    found = bootstrap(*both)
    if found.groups > 1 or found.seeds < 2:
        return found
    differences, targets = both
    means = pd.Series(differences.sum(axis=1) / targets.sum())
    mean, bottom, top, count = interval(means) or (found.mean, np.nan, np.nan, found.seeds)
    error = means.sem()
    p = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Resampled(mean, bottom, top, p, count, 1)


def gain_pairs(arm: Arm, other: Arm, windows: int) -> tuple[np.ndarray, np.ndarray]:
    arm, other = of_one_start(arm, other)
    return difference_by_group(arm, other, GAINS, "gain", "documents", {"windows": windows})


def dose(arm: Arm) -> float | None:
    """Share of the tokens that stand behind another document in their row."""
    behind = mean_of(arm, "tokens_behind_another")
    return None if behind is None else behind / arm.runs["real_tokens"].mean()


def mean_of(arm: Arm, metric: str) -> float | None:
    return arm.runs[metric].mean() if metric in arm.runs else None


def spans(T: int) -> dict[str, tuple[float, float]]:
    return {"inside": (0, T), "beyond": (T, REACH * T)}
