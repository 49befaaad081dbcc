"""Keys of which each arm of a sweep takes its own best value, chosen on seeds that are not reported."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from packmamba.config import Config, ConfigError, key, one_of, resolve, to_dict, unique
from packmamba.errors import Unfinished
from packmamba.training.run_id import find_record, records_of


@dataclass
class TuneConfig:
    grid: dict[str, list[Any]] = key(
        {}, "For each key the values of which an arm takes the best, such as optimizer.lr: [1e-3, 3e-3]; {} for none."
    )
    seeds: list[int] = key(
        [], "Seeds that the values are tried with; none of them is among those of grid.seed.", unique
    )
    metric: str = key("val_loss", "What of a run's record decides, in the mean over seeds.")
    best: str = key("least", "Whether the least or the most of it is best.", one_of("least", "most"))

    def problems(self) -> Iterator[str]:
        for name, values in self.grid.items():
            if not values:
                yield f"tune.grid.{name}: expected at least one value, got none"
            if len(values) != len(set(map(str, values))):
                yield f"tune.grid.{name}: expected distinct values, got {values}"
        if bool(self.grid) != bool(self.seeds):
            yield "tune: expected both grid and seeds, or neither"


class Point(NamedTuple):
    """One combination of values for one arm, and its runs, one a seed."""

    values: dict[str, Any]
    runs: list[Config]


class Tuning:
    """The runs that choose for the runs of a sweep: for each arm, at each point of the sweep's grid, all combinations of values.

    Raises:
        ConfigError: naming a key that is wrong.
    """

    def __init__(self, tune: TuneConfig, configs: list[Config]) -> None:
        self.tune = tune
        of_arms = {config.name: config for config in configs} if tune.grid else {}
        self.points = {name: self._points(config) for name, config in of_arms.items()}
        self._checked = False

    def _points(self, config: Config) -> list[Point]:
        found = []
        for combination in itertools.product(*self.tune.grid.values()):
            values = dict(zip(self.tune.grid, combination))
            said = "".join(f" {name.rpartition('.')[2]}={value}" for name, value in values.items())
            place = {"name": config.name + said, "output": f"{config.output}/tuning"}
            seeds = self.tune.seeds
            found.append(Point(values, [with_keys(config, values | place | {"seed": seed}) for seed in seeds]))
        return found

    @property
    def runs(self) -> list[Config]:
        return [run for points in self.points.values() for point in points for run in point.runs]

    def decided(self, config: Config) -> bool:
        """Whether all runs that choose for this one have their records."""
        return all(find_record(run) is not None for point in self.points.get(config.name, []) for run in point.runs)

    def check(self, run: Config) -> None:
        """Raises ConfigError if the first run that has helped to choose has no such number: the others would have none."""
        if not self._checked and any(run is one for one in self.runs):
            self._checked = True
            _number(run, self.tune.metric)

    def choose(self, config: Config) -> Config:
        """The run with its best values: of those whose runs all have a finite number, the best in the mean.

        Raises:
            Unfinished: there are none.
        """
        if config.name not in self.points:
            return config
        means: dict[int, float] = {}
        tried = self.points[config.name]
        for number, point in enumerate(tried):
            numbers = [_number(run, self.tune.metric) for run in point.runs]
            if all(math.isfinite(one) for one in numbers):
                means[number] = statistics.fmean(numbers)
        if not means:
            raise Unfinished(
                f"tune: for arm '{config.name}' no {' and '.join(self.tune.grid)} has a finite {self.tune.metric} with every seed"
            )
        best = (min if self.tune.best == "least" else max)(means, key=lambda number: means[number])
        return with_keys(config, tried[best].values)


def with_keys(config: Config, values: dict[str, Any]) -> Config:
    """The configuration with some keys set, checked."""
    update = OmegaConf.create()
    for name, value in values.items():
        OmegaConf.update(update, name, value)
    return resolve(Config, [(OmegaConf.create(to_dict(config)), config.name), (update, "tune.grid")])


def _number(run: Config, metric: str) -> float:
    """Of a run that is done; NaN if it diverged. Raises ConfigError if its record has no such number."""
    metrics = records_of(run)[run.trainer.max_steps]["metrics"]
    if metric not in metrics and "diverged_at_step" not in metrics:
        raise ConfigError(f"tune.metric: expected one of {', '.join(metrics)}, got '{metric}'")
    value = metrics.get(metric)
    if value is None and "diverged_at_step" not in metrics:
        raise ConfigError(
            f"tune.metric: expected a number of the records, got '{metric}', which is null in that of {run.name}"
        )
    return math.nan if value is None else value
