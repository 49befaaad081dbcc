"""A grid of training runs over arms, keys and seeds; a run that is done is not repeated."""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf

from packmamba.config import (
    Config,
    ConfigError,
    Holds,
    above,
    assign,
    at_least,
    each,
    key,
    load,
    named,
    one_of,
    parse_override,
    read_yaml,
    resolve,
    some,
    suggest,
)
from packmamba.records import append_record, check_writable, has_records, write_sweep
from packmamba.training.checks import check_accelerator, check_all_documents, check_run
from packmamba.training.dotted import by_dotted_names, keys_of, meet
from packmamba.training.places import places, several_devices, speaks
from packmamba.training.process import imports
from packmamba.training.run_id import may_be_raised, record_path, run_id
from packmamba.training.slurm import SlurmConfig, run_as_jobs, slurm_executor
from packmamba.training.table import TableConfig, check_table, check_tuned
from packmamba.training.tune import TuneConfig, Tuning
from packmamba.training.worker import Place


@dataclass
class SweepConfig:
    output: str = key(
        "runs/sweep",
        "Folder of the sweep's records, tables and report: experiments/<question>, or below runs/ for one's own.",
    )
    name: Optional[str] = key(
        None, "What sweep.json, beside the records, calls the sweep; null for the name of its file."
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
        each(named("packmamba.evaluation.registry:EVALUATIONS")),
    )
    evaluation_options: dict[str, Any] = key({}, "For each of the evaluations its parameters; see the key of a run.")
    plugins: list[str] = key([], "Python modules that every run imports first; see the key of a run.")
    throughput_rounds: int = key(
        0,
        "Before training, time this many interleaved steps of all arms in one process; 0 for none.",
        at_least(0),
    )
    only: dict[str, list[Any]] = key(
        {},
        "Of arm, and of keys of the grid, the values whose runs this command trains, such as {arm: [padded], seed: [1, 2]}; "
        "the sweep still has the others.",
    )
    train: bool = key(True, "Train the runs; false: only time them.")
    baseline: Optional[str] = key(
        None,
        "The arm that tables compare the others with; null: the first there is of padded, single, packed with reset.",
    )
    table: TableConfig = field(default_factory=TableConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    jobs: Any = key(
        1,
        "Runs at a time, each in a process of its own on its own GPU or share of the cores; auto: one on each GPU that is free, "
        "or without a GPU one for each four cores.",
        Holds("auto or an integer of at least 1", lambda value: value == "auto" or (type(value) is int and value >= 1)),
    )
    launcher: str = key(
        "local",
        "Where runs go: local, processes of this machine; slurm, jobs of the cluster.",
        one_of("local", "slurm"),
    )
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    deadline: Optional[float] = key(
        None, "Seconds after which all runs have stopped, with checkpoints; the same command goes on later.", above(0)
    )

    def problems(self) -> Iterator[str]:
        if not self.train and not self.throughput_rounds:
            yield "train: expected true without throughput_rounds, got false: there is nothing to do"
        if self.launcher == "slurm" and self.throughput_rounds:
            yield f"throughput_rounds: expected 0 with launcher=slurm, whose jobs only train, got {self.throughput_rounds}"
        if self.launcher == "slurm" and self.deadline is not None:
            yield f"deadline: expected null with launcher=slurm, whose jobs have slurm.time, got {self.deadline}"
        for name, values in self.grid.items():
            if not values:
                yield f"grid.{name}: expected at least one value, got none"
            if len(values) != len(set(map(str, values))):
                yield f"grid.{name}: expected distinct values, got {values}"
        for where, section in {
            "common": self.common,
            **{f"arms.{arm}": keys for arm, keys in self.arms.items()},
        }.items():
            for name in ("data", "optimizer", "trainer", "ops"):
                if not isinstance(value := section.get(name, {}), dict):
                    yield f"{where}.{name}: expected keys and their values, got {value!r}"
        for where, keys in {
            "common": self.common,
            **{f"arms.{arm}": keys for arm, keys in self.arms.items()},
            "grid": self.grid,
        }.items():
            yield from (
                f"{where}.{name}: expected no such key, a sweep sets it for each run"
                for name in OF_RUNS
                if name in keys
            )
        if self.baseline is not None and self.baseline not in self.arms:
            yield f"baseline: expected one of {', '.join(self.arms)} or null, got '{self.baseline}'"
        for name, values in self.only.items():
            known = {"arm": [*self.arms], **self.grid}.get(name)
            if known is None:
                yield f"only.{name}: expected arm or a key of the grid{suggest(name, ['arm', *self.grid])}"
            elif not values:
                yield f"only.{name}: expected at least one value, got none"
            elif others := [value for value in values if value not in known]:
                yield f"only.{name}: expected some of {', '.join(map(str, known))}, got {others[0]!r}"
        for name in self.grid:
            if of := self._arms_with(name):
                yield f"grid.{name}: expected a key that no arm sets, but {of[0]} does; give it in one of the two places"
        if both := [seed for seed in self.tune.seeds if seed in self.grid.get("seed", [0])]:
            yield f"tune.seeds: expected none of grid.seed, whose runs are reported, got {both[0]}"
        for name in self.tune.grid:
            if of := [*self._arms_with(name), *("grid" for key in self.grid if meet(name, key))]:
                yield f"tune.grid.{name}: expected a key that no arm and no grid sets, but {of[0]} does"

    def _arms_with(self, name: str) -> list[str]:
        return [arm for arm, keys in self.arms.items() if any(meet(name, key) for key in by_dotted_names(keys))]

    @property
    def apart(self) -> bool:
        """Whether runs have processes of their own on this machine."""
        return self.launcher == "local" and (self.jobs != 1 or self.deadline is not None)


SWEEP_KEYS = (*SweepConfig.__dataclass_fields__,)
OF_RUNS = ("name", "output", "experiment", "runs_dir")
"""Keys of a run that its sweep sets."""
EVALUATED = ("evaluations", "evaluation_options")
"""Keys of a sweep that become those of its runs."""


def load_sweep(
    path: str | Path, overrides: list[str] | None = None, runs_here: bool = True
) -> tuple[SweepConfig, list[Config]]:
    """The sweep and the configuration of each of its runs, all checked. Raises ConfigError naming the key.

    Overrides are of the sweep's own keys, such as ``output=runs/mine``, or of every run's. ``runs_here``: whether this
    machine must be able to train them, if it is the one that would.
    """
    own = [override for override in overrides or [] if override.partition("=")[0].partition(".")[0] in SWEEP_KEYS]
    sweep = load(SweepConfig, path, map(_of_a_grid, own), "sweep")
    sweep.name = sweep.name or Path(path).stem
    layers = []
    if sweep.base is not None:
        base = Path(path).parent / sweep.base
        layers.append((read_yaml(base, "train"), str(base)))
    others = [override for override in overrides or [] if override not in own]
    for override in others:
        _refuse_a_typo_of_the_sweep_s(override)
    last = [(parse_override(override), f"'{override}'") for override in others]
    _refuse_what_is_compared(sweep, last)
    configs = [_resolve(layers, assigned, last) for assigned in _runs(sweep)]
    checked: list[tuple[Config, bool]] = []
    now = {id(config) for config in chosen(sweep, configs)}
    for config in configs:
        here = runs_here and sweep.launcher == "local" and id(config) in now
        if (alike := (replace(config, seed=0), here)) not in checked:
            check_run(config, here)
            checked.append(alike)
        if sweep.launcher == "slurm" and config.trainer.num_nodes > 1:
            raise ConfigError(
                f"launcher: slurm trains each run on one machine, got trainer.num_nodes={config.trainer.num_nodes}"
            )
        if sweep.apart and several_devices(config):
            raise ConfigError(
                "jobs: expected 1, and no deadline, where a run takes several devices, got "
                f"{sweep.jobs} with trainer.devices={config.trainer.devices}"
            )
    Tuning(sweep.tune, configs)  # refuses its keys
    check_table(sweep.table, configs)
    if sweep.tune.grid:
        check_tuned(sweep.tune.metric, configs)
    return sweep, configs


def _of_a_grid(override: str) -> str:
    """``grid.optimizer.lr=[...]`` as what it means: the grid's key is the whole name. Raises ConfigError for an empty mapping."""
    if re.fullmatch(r"(tune\.)?grid=\s*\{\s*\}", override):
        raise ConfigError(f"'{override}': expected keys with their values; these are added to the file's, key by key")
    found = re.fullmatch(r"((?:tune\.)?grid|only)\.([\w.-]+)=(.*)", override, re.DOTALL)
    return "{}={{{}: {}}}".format(*found.groups()) if found else override


def _refuse_a_typo_of_the_sweep_s(override: str) -> None:
    """Else what the runs know would be listed, where a key of the sweep was meant."""
    key = override.partition("=")[0].partition(".")[0]
    hint = suggest(key, (*Config.__dataclass_fields__, *SWEEP_KEYS))
    if key not in Config.__dataclass_fields__ and "did you mean" in hint:
        raise ConfigError(f"unknown key '{key}' in '{override}'{hint}")


def _refuse_what_is_compared(sweep: SweepConfig, last: list[tuple[DictConfig, str]]) -> None:
    """Refuses a key for all runs that the grid, or every arm, gives a value: what is compared would be one."""
    for layer, said in last:
        for given in keys_of(layer):
            for grid, keys in (("grid", sweep.grid), ("tune.grid", sweep.tune.grid)):
                for name in keys:
                    if meet(name, given):
                        raise ConfigError(
                            f"{said}: expected {grid}.{name}=[...], which is where this sweep has its values"
                        )
            values = [value for keys in sweep.arms.values() for name, value in keys.items() if meet(name, given)]
            if len(values) >= len(sweep.arms) > 1 and any(value != values[0] for value in values):
                raise ConfigError(f"{said}: expected a key in which arms do not differ; set it as arms.<name>.{given}")


def _resolve(
    first: list[tuple[DictConfig, str]], assigned: dict[str, Any], last: list[tuple[DictConfig, str]]
) -> Config:
    """A run's configuration. Its keys are one layer, which is quick; where that is refused, one each, to name the wrong one."""
    with suppress(Exception):
        together = OmegaConf.create()
        for name, value in assigned.items():
            OmegaConf.update(together, name, value)
        return resolve(Config, copy.deepcopy([*first, (together, "")]) + copy.deepcopy(last))
    return resolve(Config, copy.deepcopy([*first, *(assign(name, value) for name, value in assigned.items()), *last]))


def _runs(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """What each run sets over the base; grid values other than seeds become part of the arm's name."""
    for combination in itertools.product(*sweep.grid.values()):
        point = dict(zip(sweep.grid, combination))
        suffix = "".join(f" {key.rpartition('.')[2]}={value}" for key, value in point.items() if key != "seed")
        for arm, keys in sweep.arms.items():
            place: dict[str, Any] = {"name": arm + suffix, "output": sweep.output, "runs_dir": f"{sweep.output}/runs"}
            place |= {"plugins": sweep.plugins} if sweep.plugins else {}
            asked = {key: value for key in EVALUATED if (value := getattr(sweep, key))}
            yield {**asked, **by_dotted_names(sweep.common), **by_dotted_names(keys), **point, **place}


def chosen(sweep: SweepConfig, configs: list[Config]) -> list[Config]:
    """Those of all runs of a sweep that ``only`` asks for."""
    if not sweep.only:
        return configs
    points = [
        {"arm": arm, **dict(zip(sweep.grid, values))}
        for values in itertools.product(*sweep.grid.values())
        for arm in sweep.arms
    ]
    asked = sweep.only.items()
    return [c for c, point in zip(configs, points, strict=True) if all(point[name] in some for name, some in asked)]


def runs_of(sweep: SweepConfig, configs: list[Config]) -> list[Config]:
    """All runs of a sweep in their order: first those that choose values, then the others, with their values once known."""
    from packmamba.training.pool import Queue

    return Queue(configs, False, tuning=Tuning(sweep.tune, configs)).configs


def run_sweep(sweep: SweepConfig, configs: list[Config], progress: bool = True, begun: float | None = None) -> Path:
    """``run_sweeps`` of one. Returns the folder with the records."""
    run_sweeps([(sweep, configs)], progress, begun)
    return Path(sweep.output)


def run_sweeps(
    sweeps: Sequence[tuple[SweepConfig, list[Config]]], progress: bool = True, begun: float | None = None
) -> None:
    """Times the arms of each sweep if asked, then trains each run that has no record yet, those of all sweeps in one queue.

    Args:
        begun: of ``time.monotonic``, where the deadline's seconds begin; None: now.

    Raises:
        ConfigError: the sweeps cannot share a queue.
        Unfinished: runs failed, or are left. Those that could be trained are.
    """
    first, _ = sweeps[0]
    _check_together([sweep for sweep, _ in sweeps])
    for sweep, _ in sweeps:
        check_writable(Path(sweep.output) / "records", "output")
    with imports():  # takes seconds: a wrong key has been refused
        from packmamba.training.benchmark import measure_throughput
        from packmamba.training.pool import Queue, run_one_by_one, run_side_by_side
        from packmamba.training.unchanged import check_unchanged
    executor = None
    if first.launcher == "slurm":
        executor = slurm_executor(first.slurm, first.jobs, first.name or "sweep", first.output)
    else:
        for sweep, configs in sweeps:
            for config in chosen(sweep, configs) if sweep.train else configs:
                check_accelerator(config)
    every = [config for _, configs in sweeps for config in configs]
    begun = time.monotonic() if begun is None else begun
    wanted = (config for sweep, configs in sweeps if sweep.train for config in chosen(sweep, configs))
    runs = {(run_id(config), record_path(config), config.trainer.max_steps): config for config in wanted}
    trained = list(runs.values())  # two sweeps may have the same run
    queue = Queue(trained, progress, begun, first.deadline, Tuning(first.tune, trained))
    others = [c for sweep, configs in sweeps if sweep.train for c in configs if c not in trained]
    check_all_documents(queue.configs[number] for number in queue.open())
    check_unchanged([*queue.configs, *others], queue.configs, progress)
    on_gpu = any(config.trainer.accelerator in ("auto", "gpu", "cuda") for config in every)
    where: AbstractContextManager[list[Place]] = places(first.jobs, on_gpu) if first.apart else nullcontext([])
    with where as side_by_side:
        for sweep, configs in sweeps:
            timings = Path(sweep.output) / "records" / f"{'throughput' if sweep.train else sweep.name}.jsonl"
            arms = configs[: len(sweep.arms)]
            timed = not sweep.throughput_rounds or {config.name for config in arms} <= _timed(timings)
            if not timed and speaks(configs[0]):
                for record in measure_throughput(arms, sweep.throughput_rounds, sweep.output, progress):
                    append_record(timings, record)
        queue.say_what_is_done()
        for sweep, configs in sweeps:
            _say_which(sweep, configs if sweep.train else [])
        try:
            if executor is not None:
                run_as_jobs(queue, executor, first.slurm.grace)
            elif first.apart:
                run_side_by_side(queue, side_by_side)
            else:
                run_one_by_one(queue)
        finally:
            for sweep, configs in sweeps:
                _say_which(sweep, configs if sweep.train else [])
    queue.check()


def _check_together(sweeps: list[SweepConfig]) -> None:
    """Refuses sweeps that differ in what one queue has once. Raises ConfigError naming the key."""
    first, *others = sweeps
    for other in others:
        for name in ("jobs", "deadline", "launcher"):
            one, two = getattr(first, name), getattr(other, name)
            if one != two:
                raise ConfigError(
                    f"{name}: expected one value for all sweeps of a command, got {one} in {first.name} and {two} in "
                    f"{other.name}; set it after the files, {name}=..."
                )
    for sweep in sweeps if others else []:
        if sweep.launcher == "slurm":
            raise ConfigError("launcher: slurm takes one sweep, got several files")
        if sweep.tune.grid:
            raise ConfigError(
                f"tune: a sweep that chooses values is a command of its own, got {sweep.name} beside others"
            )


def _timed(path: Path) -> set[str]:
    """The arms whose steps were timed: with new ones, all are timed again, since only arms timed together compare."""
    return {json.loads(line)["arm"] for line in path.read_text().splitlines() if line} if path.is_file() else set()


def _say_which(sweep: SweepConfig, configs: list[Config]) -> None:
    """Beside the records, if there are any: which runs the sweep has, its baseline, and what was tuned."""
    arms: dict[str, set[int]] = {}
    for config in configs:
        arms.setdefault(config.name, set()).add(config.seed)
    if arms and has_records(sweep.output):
        tune, steps = sweep.tune, {config.name: config.trainer.max_steps for config in configs if may_be_raised(config)}
        tuned: dict[str, list[Any]] | None = (
            {"keys": [*tune.grid], "tried": [*tune.grid.values()], "seeds": tune.seeds} if tune.grid else None
        )
        write_sweep(
            sweep.output, sweep.name or "sweep", arms, sweep.baseline, tuned=tuned, steps=steps, table=sweep.table.said
        )
