"""One training run that goes on for an hour: do memory, open files, disk and the time of a step stay where they are?"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tqdm import tqdm

from experiments.reliability.processes import folder_bytes, held
from experiments.reliability.yardstick import Yardstick
from packmamba.config import ConfigError, above, at_least, between, key, load_config
from packmamba.data.datamodule import PackingDataModule
from packmamba.records import append_record, make_record, provenance
from packmamba.timing import OtherPrograms
from packmamba.training.callbacks import History, Stopped
from packmamba.training.fit import fit
from packmamba.training.runs import decisive
from packmamba.training.signals import Interrupted

WATCHED = {
    "anonymous_bytes": "memory of its own",
    "resident_bytes": "memory, pages of mapped files included",
    "open_files": "open files",
    "disk_bytes": "the run's folder",
    "seconds_per_step": "seconds of a step",
    "cpu_seconds_per_step": "processor seconds of a step",
    "step_over_yardstick": "a step's time over that of the same step in a program beside it",
}


@dataclass
class Config:
    experiment: str = key("reliability", "The question, which the records name.")
    minutes: float = key(60.0, "How long the run goes on.", above(0))
    every_seconds: float = key(10.0, "Time between two looks at it.", above(0))
    warm_up: float = key(0.15, "Share of the looks, the first ones, that are left out of slopes.", between(0, 0.9))
    blocks: int = key(24, "Means of so many stretches of equal time are what a slope is fitted to.", at_least(3))
    keys: list[str] = key([], "The training run, as key=value.")
    folder: Optional[str] = key(None, "Where the run lies meanwhile; null for the system's folder for such.")

    def problems(self) -> Iterator[str]:
        try:
            load_config(None, self.keys)
        except ConfigError as error:
            yield f"keys: {error}"


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record; what was seen at each look are the points of its curve ``samples``.

    metrics: steps, minutes, evaluations, checkpoints are counts of the run; for each name of WATCHED, <name>_begin and
    <name>_end (the first and the last stretch after the warm-up), <name>_slope per hour, and the ends of its 95 % interval,
    <name>_slope_low and <name>_slope_high (least squares over the means of stretches, Student's t); cores_of_others.
    SIGTERM or Ctrl-C ends it before its time, with a record of what was seen.
    """
    provenance()
    others, begun = OtherPrograms(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="soak-", dir=c.folder) as name:
        config = load_config(None, [*c.keys, f"runs_dir={name}/runs", f"data.cache_dir={name}/corpora"])
        samples: list[dict[str, float]] = []
        bar = tqdm(total=round(60 * c.minutes), unit="s", disable=not progress, mininterval=5)
        with bar, Yardstick() as yardstick:
            try:
                fit(config, progress=False, stop=Sampler(c, Path(name) / "runs", samples, bar, yardstick))
            except Stopped:
                pass
            except Interrupted:
                if len(samples) < c.blocks:  # nothing to fit a slope to
                    raise
        corpus = PackingDataModule(config, progress=False).corpora.corpus_hash
    metrics: dict[str, Any] = {"steps": samples[-1]["step"], "minutes": samples[-1]["seconds"] / 60}
    metrics["evaluations"] = samples[-1]["step"] // config.trainer.validate_every
    metrics["checkpoints"] = samples[-1]["step"] // config.trainer.checkpoint_every
    for name in WATCHED:
        metrics |= {f"{name}_{what}": value for what, value in trend(c, samples, name).items()}
    metrics["cores_of_others"] = others.cores()
    record = make_record(
        kind="soak",
        experiment=c.experiment,
        arm="soak",
        config={"keys": c.keys, "blocks": c.blocks, "warm_up": c.warm_up, "run": decisive(config)},
        seed=config.seed,
        corpus_hash=corpus,
        metrics=metrics,
        curves={"samples": samples},
        wall_seconds=time.perf_counter() - begun,
    )
    append_record(records_path, record)


class Sampler:
    """Asked after each step; looks at this process and its children every few seconds, and ends the run when its time is up.

    A look waits for the yardstick, whose time is no step's.
    """

    def __init__(
        self, c: Config, folder: Path, samples: list[dict[str, float]], bar: tqdm, yardstick: Callable[[], float]
    ) -> None:
        self.config, self.folder, self.samples, self.bar, self.yardstick = c, folder, samples, bar, yardstick
        self.begun = self.looked = time.perf_counter()
        self.step, self.cpu = 0, held(os.getpid()).cpu_seconds

    def __call__(self, history: History) -> bool:
        now, step = time.perf_counter(), int(history.totals["steps"])
        if now - self.looked < self.config.every_seconds:
            return False
        found = held(os.getpid())
        steps = step - self.step
        each = (now - self.looked) / steps
        self.samples.append(
            {
                "seconds": now - self.begun,
                "step": step,
                "anonymous_bytes": found.anonymous_bytes,
                "resident_bytes": found.resident_bytes,
                "open_files": found.open_files,
                "disk_bytes": folder_bytes(self.folder),
                "seconds_per_step": each,
                "cpu_seconds_per_step": (found.cpu_seconds - self.cpu) / steps,
                "step_over_yardstick": each / self.yardstick(),
            }
        )
        self.bar.update(round(now - self.begun) - self.bar.n)
        self.looked, self.step, self.cpu = time.perf_counter(), step, held(os.getpid()).cpu_seconds
        return now - self.begun > 60 * self.config.minutes


def trend(c: Config, samples: list[dict[str, float]], name: str) -> dict[str, float]:
    """begin, end, slope per hour and its interval."""
    from scipy import stats

    kept = samples[int(len(samples) * c.warm_up) :]
    hours, values = (np.array([sample[key] for sample in kept]) for key in ("seconds", name))
    hours = hours / 3600
    edges = np.linspace(hours[0], hours[-1], c.blocks + 1)
    block = np.clip(np.searchsorted(edges, hours, side="right") - 1, 0, c.blocks - 1)
    there = [number for number in range(c.blocks) if (block == number).any()]
    x, y = (np.array([of[block == number].mean() for number in there]) for of in (hours, values))
    fitted = stats.linregress(x, y)
    reach = float(stats.t.ppf(0.975, len(x) - 2) * fitted.stderr)
    slope = float(fitted.slope)
    return {"begin": y[0], "end": y[-1], "slope": slope, "slope_low": slope - reach, "slope_high": slope + reach}
