"""A grid of training runs over arms, keys and seeds; a run that is done is not repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packmamba.config import (
    Config,
    ConfigError,
    check_command,
    load_config,
    parse_override,
    read_yaml,
    suggest,
    wrong_value,
)
from packmamba.data.schedule import check_data
from packmamba.records import append_record, check_writable
from packmamba.training.fit import check_run, fit
from packmamba.training.runs import record_path
from packmamba.training.throughput import measure_throughput


@dataclass
class SweepConfig:
    output: str = "runs/sweep"
    """Folder of the sweep's records, tables and report: experiments/<question>, or below runs/ for one's own."""
    base: Optional[str] = None
    """A training configuration that every run starts from, beside this file or below; null for the defaults."""
    common: dict[str, Any] = field(default_factory=dict)
    """Keys that every run sets, such as data.row_length: 512."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What is compared: for each arm's name, the keys it sets."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """For each key the values it takes, in every combination with every arm, such as seed: [0, 1, 2]."""
    throughput_rounds: int = 0
    """Before training, time this many interleaved steps of all arms in one process; 0 for none."""
    train: bool = True
    """Train the runs; false: only time them."""


SWEEP_KEYS = SweepConfig.__dataclass_fields__


def load_sweep(path: str | Path, overrides: list[str] | None = None) -> tuple[SweepConfig, list[Config]]:
    """The sweep and the configuration of each of its runs, all checked. Raises ConfigError naming the key.

    Overrides are of the sweep's own keys, such as ``output=runs/mine``, or of every run's.
    """
    file = read_yaml(path)
    check_command("sweep", path, file)
    own = [override for override in overrides or [] if override.partition("=")[0].partition(".")[0] in SWEEP_KEYS]
    loaded = OmegaConf.merge(file, *map(parse_override, own))
    assert isinstance(loaded, DictConfig)
    for key in map(str, loaded):
        if key not in SWEEP_KEYS:
            raise ConfigError(f"unknown key '{key}' in {path}{suggest(key, SWEEP_KEYS)}")
    try:
        sweep = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SweepConfig), loaded))
    except OmegaConfBaseException as error:
        raise wrong_value(error, path) from None
    assert isinstance(sweep, SweepConfig)
    if not sweep.arms:
        raise ConfigError(f"{path}: arms: expected at least one arm, got none")
    if sweep.throughput_rounds < 0:
        raise ConfigError(f"{path}: throughput_rounds: expected at least 0, got {sweep.throughput_rounds}")
    if not sweep.train and not sweep.throughput_rounds:
        raise ConfigError(f"{path}: train: expected true without throughput_rounds, got false: there is nothing to do")
    for key, values in sweep.grid.items():
        if not values:
            raise ConfigError(f"{path}: grid.{key}: expected at least one value, got none")
    base = None if sweep.base is None else Path(path).parent / sweep.base
    others = [override for override in overrides or [] if override not in own]
    configs = [load_config(base, [*assignments, *others]) for assignments in _runs(sweep)]
    for config in configs:
        check_run(config)
        check_data(config.data, config.trainer.boundary == "carry", config.trainer.devices * config.trainer.num_nodes)
    return sweep, configs


def _runs(sweep: SweepConfig) -> Iterator[list[str]]:
    """Each run's ``key=value`` assignments; grid values other than seeds become part of the arm's name."""
    for values in itertools.product(*sweep.grid.values()):
        point = dict(zip(sweep.grid, values))
        suffix = "".join(f" {key.rpartition('.')[2]}={value}" for key, value in point.items() if key != "seed")
        for arm, keys in sweep.arms.items():
            place = {"name": arm + suffix, "experiment": sweep.output, "runs_dir": f"{sweep.output}/runs"}
            yield [f"{key}={_literal(value)}" for key, value in {**sweep.common, **keys, **point, **place}.items()]


def _literal(value: Any) -> str:
    return "null" if value is None else str(value)


def run_sweep(sweep: SweepConfig, configs: list[Config], progress: bool = True) -> Path:
    """Times the arms if asked, then trains each run that has no record yet. Returns the folder with the records."""
    output = Path(sweep.output)
    check_writable(output / "records", "output")
    timings = output / "records" / "throughput.jsonl"
    if sweep.throughput_rounds and not timings.is_file():
        first = configs[: len(sweep.arms)]
        for record in measure_throughput(first, sweep.throughput_rounds, sweep.output, progress):
            append_record(timings, record)
    for number, config in enumerate(configs if sweep.train else [], start=1):
        done = record_path(config).is_file()
        if progress:
            print(
                f"[{number}/{len(configs)}] {config.name}, seed {config.seed}{': done before' if done else ''}",
                flush=True,
            )
        if not done:
            fit(config, progress)
    return output
