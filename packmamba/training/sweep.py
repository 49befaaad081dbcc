"""A grid of training runs over arms, keys and seeds; a run that is done is not repeated."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig

from packmamba.config import (
    Config,
    assign,
    at_least,
    check_command,
    each,
    key,
    load,
    named,
    parse_override,
    read_yaml,
    resolve,
    some,
)
from packmamba.records import append_record, check_writable
from packmamba.training.fit import check_run, fit
from packmamba.training.runs import record_path
from packmamba.training.throughput import measure_throughput


@dataclass
class SweepConfig:
    output: str = key(
        "runs/sweep",
        "Folder of the sweep's records, tables and report: experiments/<question>, or below runs/ for one's own.",
    )
    base: Optional[str] = key(
        None,
        "A training configuration that every run starts from, beside this file or below; null for the defaults.",
    )
    common: dict[str, Any] = key({}, "Keys that every run sets, such as data.row_length: 512.")
    arms: dict[str, dict[str, Any]] = key({}, "What is compared: for each arm's name, the keys it sets.", some("arm"))
    grid: dict[str, list[Any]] = key(
        {}, "For each key the values it takes, in every combination with every arm, such as seed: [0, 1, 2]."
    )
    evaluations: list[str] = key(
        [],
        "Evaluations that every run's model answers when it is trained, such as [next_line, passkey].",
        each(named("packmamba.evaluation.evaluate:EVALUATIONS")),
    )
    evaluation_options: dict[str, Any] = key({}, "For each of the evaluations its parameters; see the key of a run.")
    plugins: list[str] = key([], "Python modules that every run imports first; see the key of a run.")
    throughput_rounds: int = key(
        0,
        "Before training, time this many interleaved steps of all arms in one process; 0 for none.",
        at_least(0),
    )
    train: bool = key(True, "Train the runs; false: only time them.")

    def problems(self) -> Iterator[str]:
        if not self.train and not self.throughput_rounds:
            yield "train: expected true without throughput_rounds, got false: there is nothing to do"
        for name, values in self.grid.items():
            if not values:
                yield f"grid.{name}: expected at least one value, got none"


SWEEP_KEYS = SweepConfig.__dataclass_fields__
EVALUATED = ("evaluations", "evaluation_options")
"""Keys of a sweep that become those of its runs."""


def load_sweep(path: str | Path, overrides: list[str] | None = None) -> tuple[SweepConfig, list[Config]]:
    """The sweep and the configuration of each of its runs, all checked. Raises ConfigError naming the key.

    Overrides are of the sweep's own keys, such as ``output=runs/mine``, or of every run's.
    """
    own = [override for override in overrides or [] if override.partition("=")[0].partition(".")[0] in SWEEP_KEYS]
    sweep = load(SweepConfig, path, own, "sweep")
    layers = []
    if sweep.base is not None:
        base = Path(path).parent / sweep.base
        layers.append((read_yaml(base), str(base)))
        check_command("train", base, layers[0][0])
    others = [override for override in overrides or [] if override not in own]
    last = [(parse_override(override), f"'{override}'") for override in others]
    configs = [resolve(Config, copy.deepcopy([*layers, *assigned, *last])) for assigned in _runs(sweep)]
    for config in configs:
        check_run(config)
    return sweep, configs


def _runs(sweep: SweepConfig) -> Iterator[list[tuple[DictConfig, str]]]:
    """What each run sets over the base; grid values other than seeds become part of the arm's name."""
    for combination in itertools.product(*sweep.grid.values()):
        point = dict(zip(sweep.grid, combination))
        suffix = "".join(f" {key.rpartition('.')[2]}={value}" for key, value in point.items() if key != "seed")
        for arm, keys in sweep.arms.items():
            place: dict[str, Any] = {"name": arm + suffix, "output": sweep.output, "runs_dir": f"{sweep.output}/runs"}
            place |= {"plugins": sweep.plugins} if sweep.plugins else {}
            asked = {key: value for key in EVALUATED if (value := getattr(sweep, key))}
            values = {**asked, **sweep.common, **keys, **point, **place}
            yield [assign(key, value) for key, value in values.items()]


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
