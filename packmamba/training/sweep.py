"""Train every run of a grid of arms, keys and seeds; finished runs are skipped."""

from __future__ import annotations

import copy
import itertools
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf

from packmamba.config import Config, key, load, parse_override, read_yaml, resolve, to_dict
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError, Unfinished
from packmamba.records import METRICS, append_record, check_writable, has_records, read_records, write_sweep
from packmamba.training.benchmark import measure_throughput
from packmamba.training.fit import check_accelerator, check_documents, check_run
from packmamba.training.launch import (
    Outcome,
    Slot,
    SlurmConfig,
    check_slurm,
    device_slots,
    run_as_jobs,
    run_here,
    run_in_slots,
)
from packmamba.training.run_id import find_records, flatten, id_of, may_be_raised, record_path, run_id


@dataclass
class TableConfig:
    metrics: list[str] = key([], "Metrics, such as [val_loss, mqar.accuracy]; [] for losses and the first evaluation.")
    columns: Optional[list[str]] = key(None, "Other metrics and keys, such as optimizer.lr; null for the usual ones.")


@dataclass
class TuneConfig:
    grid: dict[str, list[Any]] = key({}, "Keys of which each arm takes its best value, as optimizer.lr: [1e-3, 3e-3].")
    seeds: list[int] = key([], "Seeds that the values are tried with, none of grid.seed.")
    metric: str = key("val_loss", "Metric of a run's record that decides, in the mean over seeds.")
    best: str = key("least", "Whether the least or the most of it is best.", choices=("least", "most"))


@dataclass
class SweepConfig:
    output: str = key("runs/sweep", "Folder of the sweep's records, tables and report.")
    name: Optional[str] = key(None, "Name of the sweep in sweep.json; null for the name of its file.")
    base: Optional[str] = key(None, "Training configuration that every run starts from, relative to this file.")
    common: dict[str, Any] = key({}, "Keys that every run sets, such as data.row_length: 512.")
    arms: dict[str, dict[str, Any]] = key(
        {}, "What is compared: for each arm's name, the keys it sets.", check=("at least one arm", bool)
    )
    grid: dict[str, list[Any]] = key({}, "Values of keys, in every combination with every arm, such as seed: [0, 1].")
    evaluations: list[str] = key([], "Evaluations of every run's trained model, such as [next_line, passkey].")
    evaluation_options: dict[str, Any] = key({}, "For each of the evaluations its parameters; see the key of a run.")
    plugins: list[str] = key([], "Python modules that every run imports first; see the key of a run.")
    throughput_rounds: int = key(0, "Before training, time so many interleaved steps of all arms; 0 for none.", low=0)
    only: dict[str, list[Any]] = key({}, "Train these runs alone now, such as {arm: [padded], seed: [1, 2]}.")
    train: bool = key(True, "Train the runs; false: only time them.")
    baseline: Optional[str] = key(None, "Arm that tables compare with; null: the first of padded, single, packed.")
    table: TableConfig = field(default_factory=TableConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    jobs: Any = key(
        1,
        "Runs at a time, on GPUs or shares of the cores; auto: one on each free GPU, or one on each four cores.",
        check=("auto or an integer of at least 1", lambda jobs: jobs == "auto" or (type(jobs) is int and jobs > 0)),
    )
    launcher: str = key("local", "Run on this machine, or as jobs of the cluster.", choices=("local", "slurm"))
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    deadline: Optional[float] = key(None, "Seconds until runs stop; the same command resumes them.", above=0)

    @property
    def in_slots(self) -> bool:
        """Return whether runs have worker processes on this machine."""
        return self.launcher == "local" and (self.jobs != 1 or self.deadline is not None)

    def problems(self) -> Iterator[str]:
        if not self.train and not self.throughput_rounds:
            yield "train: expected true without throughput_rounds, got false"
        if self.launcher == "slurm" and (self.throughput_rounds or self.deadline is not None):
            yield "launcher: expected local with throughput_rounds or deadline, got slurm"
        if self.baseline is not None and self.baseline not in self.arms:
            yield f"baseline: expected one of {', '.join(self.arms)} or null, got '{self.baseline}'"
        if bool(self.tune.grid) != bool(self.tune.seeds):
            yield "tune: expected both grid and seeds, or neither"
        if both := set(self.tune.seeds).intersection(self.grid.get("seed", [0])):
            yield f"tune.seeds: expected none of grid.seed, got {both.pop()}"
        for where, grid in {"grid": self.grid, "tune.grid": self.tune.grid, "only": self.only}.items():
            for name, values in grid.items():
                if not values or len(values) != len(set(map(str, values))):
                    yield f"{where}.{name}: expected at least one value and none twice, got {values}"
        for name, values in self.only.items():
            known = {"arm": [*self.arms], **self.grid}
            if others := [value for value in values if value not in known.get(name, [])]:
                yield f"only.{name}: expected arm, or a key of the grid, and some of its values, got {others[0]}"
        arms = {f"arms.{arm}": keys for arm, keys in self.arms.items()}
        for where, keys in {"common": self.common, "grid": self.grid, **arms}.items():
            for name in keys.keys() & {"name", "output", "runs_dir"}:
                yield f"{where}.{name}: expected no such key; the sweep sets it for each run"
        named = [*((f"grid.{name}", name, arms) for name in self.grid)]
        named += [(f"tune.grid.{name}", name, arms | {"grid": self.grid}) for name in self.tune.grid]
        for where, name, others in named:
            if other := [other for other, keys in others.items() if any(_overlap(name, one) for one in flatten(keys))]:
                yield f"{where}: expected a key that {other[0]} does not set"


def _overlap(one: str, other: str) -> bool:
    """Return whether setting one key changes the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[SweepConfig, list[Config]]:
    """Load a sweep and the configurations of its runs.

    Args:
        overrides: of the sweep's own keys, such as ``output=runs/mine``, or of every run's.

    Raises:
        ConfigError: naming the key.
    """
    of_runs = Config.__dataclass_fields__.keys() - SweepConfig.__dataclass_fields__.keys()
    own = [override for override in overrides if re.split(r"[.=]", override)[0] not in of_runs]
    # A key of a grid is a whole name: grid.optimizer.lr=[1] is grid={optimizer.lr: [1]}.
    dotted = r"((?:tune\.)?grid|only)\.([\w.-]+)=(.*)"
    sweep = load(SweepConfig, path, [re.sub(dotted, r"\1={\2: \3}", each, flags=re.DOTALL) for each in own], "sweep")
    sweep.name = sweep.name or Path(path).stem
    base = [] if sweep.base is None else [(read_yaml(Path(path).parent / sweep.base, "train"), sweep.base)]
    last = [(parse_override(override), f"'{override}'") for override in overrides if override not in own]
    for layer, origin in last:
        _check_override(sweep, layer, origin)
    layers = [[*base, (_layer(keys), str(path)), *last] for keys in _runs(sweep)]
    configs = [resolve(Config, copy.deepcopy(each)) for each in layers]
    checked: list[Config] = []
    for config in configs:
        if (alike := replace(config, seed=0)) not in checked:
            check_run(config)
            checked.append(alike)
        if config.trainer.num_nodes > 1:
            raise ConfigError(f"trainer.num_nodes: expected 1 in a sweep, got {config.trainer.num_nodes}")
        if config.trainer.devices > 1 and sweep.launcher == "local" and sweep.jobs != 1:
            raise ConfigError(f"jobs: expected 1 with trainer.devices={config.trainer.devices}, got {sweep.jobs}")
    numbers, evaluations = METRICS["training"], tuple(f"{name}." for name in configs[0].evaluations)
    for where, names in {"table.metrics": sweep.table.metrics, "tune.metric": [sweep.tune.metric]}.items():
        for name in names:
            if name not in (*numbers, "val_loss_last_weights") and not name.startswith(evaluations):
                raise ConfigError(f"{where}: expected one of {', '.join((*numbers, *evaluations))}, got '{name}'")
    return sweep, configs


def _check_override(sweep: SweepConfig, layer: DictConfig, origin: str) -> None:
    """Refuse a key for all runs that the grid or the arms give different values."""
    for given in flatten(OmegaConf.to_container(layer)):  # type: ignore[arg-type]
        for where, grid in {"grid": sweep.grid, "tune.grid": sweep.tune.grid}.items():
            for name in grid:
                if _overlap(name, given):
                    raise ConfigError(f"{origin}: expected {where}.{name}=[...], where this sweep has its values")
        values = [value for arm in sweep.arms.values() for name, value in flatten(arm).items() if _overlap(name, given)]
        if len(values) >= len(sweep.arms) > 1 and any(value != values[0] for value in values):
            raise ConfigError(f"{origin}: expected a key in which arms do not differ; set arms.<name>.{given}")


def _points(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def _suffix(point: dict[str, Any]) -> str:
    return "".join(f" {name.rpartition('.')[2]}={value}" for name, value in point.items() if name != "seed")


def _runs(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """Yield the keys that each run sets; grid values other than seeds become part of the arm's name."""
    own = {name: getattr(sweep, name) for name in ("plugins", "evaluations", "evaluation_options")}
    own = {name: value for name, value in own.items() if value}
    for point, (arm, keys) in itertools.product(_points(sweep.grid), sweep.arms.items()):
        place = {"name": arm + _suffix(point), "output": sweep.output, "runs_dir": f"{sweep.output}/runs"}
        yield {**own, **flatten(sweep.common), **flatten(keys), **point, **place}


def _layer(keys: dict[str, Any]) -> DictConfig:
    layer = OmegaConf.create()
    for name, value in keys.items():
        OmegaConf.update(layer, name, value)
    return layer


def chosen(sweep: SweepConfig, configs: list[Config]) -> list[Config]:
    """Return the runs of a sweep that ``only`` names."""
    points = [{"arm": arm, **point} for point in _points(sweep.grid) for arm in sweep.arms]
    some = [all(point[name] in values for name, values in sweep.only.items()) for point in points]
    return [config for config, wanted in zip(configs, some, strict=True) if wanted]


def trials(tune: TuneConfig, config: Config) -> list[list[Config]]:
    """Return the runs that choose an arm's values: for each combination, a run with each seed."""
    points, output = _points(tune.grid) if tune.grid else [], f"{config.output}/tuning"
    keys = [{"name": config.name + _suffix(point), "output": output, **point} for point in points]
    return [[_with(config, {**each, "seed": seed}) for seed in tune.seeds] for each in keys]


def _with(config: Config, keys: dict[str, Any]) -> Config:
    return resolve(Config, [(OmegaConf.create(to_dict(config)), config.name), (_layer(keys), "tune.grid")])


def best(tune: TuneConfig, tried: list[list[Config]]) -> int:
    """Return which combination of values has the best mean of the metric; one with which a run diverged is left out.

    Raises:
        Unfinished: a run diverged with every combination.
        ConfigError: the runs have no such metric.
    """
    means: dict[int, float] = {}
    for number, runs in enumerate(tried):
        metrics = [record["metrics"] for record in find_records(runs) if record is not None]
        metrics = [each for each in metrics if "diverged_at_step" not in each]
        for each in metrics:
            if each.get(tune.metric) is None:
                raise ConfigError(
                    f"tune.metric: expected one of {', '.join(each)}, got '{tune.metric}', which has no value"
                )
        if len(metrics) == len(runs):
            means[number] = statistics.fmean(each[tune.metric] for each in metrics)
    if not means:
        raise Unfinished(f"no {' and '.join(tune.grid)} has a finite {tune.metric} with every seed")
    return (min if tune.best == "least" else max)(means, key=lambda number: means[number])


def run_sweep(sweep: SweepConfig, configs: list[Config], progress: bool = True, begun: float | None = None) -> Path:
    """Run one sweep; see ``run_sweeps``. Return the folder with its records."""
    run_sweeps([(sweep, configs)], progress, begun)
    return Path(sweep.output)


def run_sweeps(
    sweeps: Sequence[tuple[SweepConfig, list[Config]]], progress: bool = True, begun: float | None = None
) -> None:
    """Time the arms of each sweep if ``throughput_rounds`` says so, then train each run that has no record.

    Args:
        begun: of ``time.monotonic``, when the deadline's seconds begin; None: now.

    Raises:
        ConfigError: before any run.
        Unfinished: runs failed, or are not done. The others are.
    """
    first, *others = [sweep for sweep, _ in sweeps]
    for name in ("jobs", "deadline", "launcher"):
        if any(getattr(sweep, name) != getattr(first, name) for sweep in others):
            raise ConfigError(f"{name}: expected one value for all sweeps of a command; set it after the files")
    if others and (first.launcher == "slurm" or any(sweep.tune.grid for sweep, _ in sweeps)):
        raise ConfigError("launcher, tune: expected one sweep with launcher=slurm or tune.grid, got several")
    if first.launcher == "slurm":
        check_slurm()
    trained = [config for sweep, configs in sweeps if sweep.train for config in configs]
    runs = [config for sweep, configs in sweeps if sweep.train for config in chosen(sweep, configs)]
    runs = list({(record_path(c), run_id(c), c.trainer.max_steps): c for c in runs}.values())  # of several sweeps once
    tried = {config.name: trials(first.tune, config) for config in runs}
    trial_runs = [run for arm in tried.values() for point in arm for run in point]
    timed = [config for sweep, configs in sweeps if sweep.throughput_rounds for config in configs[: len(sweep.arms)]]
    for sweep, _ in sweeps:
        check_writable(sweep.output, "output")
    for config in (*runs, *timed) if first.launcher == "local" else ():
        check_accelerator(config)
    deque(_waves(runs), maxlen=0)  # raises
    _check_corpora([*trial_runs, *runs], trained, progress)
    on_gpu = any(config.trainer.accelerator in ("auto", "gpu", "cuda") for config in runs)
    with device_slots(first.jobs, on_gpu) if first.in_slots else nullcontext([]) as slots:
        queue = Queue(first, slots, (begun or time.monotonic()) + (first.deadline or float("inf")), progress)
        try:
            for sweep, configs in sweeps:
                _measure_throughput(sweep, configs[: len(sweep.arms)], progress)
                _write_sweep(sweep, configs)
            queue.train(trial_runs)
            queue.train([tuned for config in runs if (tuned := queue.tune(config, tried[config.name])) is not None])
        finally:
            for sweep, configs in sweeps:
                _write_sweep(sweep, configs)
    queue.check(len(trial_runs) + len(runs))


class Queue:
    """The runs of a command, and their outcomes."""

    def __init__(self, sweep: SweepConfig, slots: list[Slot], deadline: float, progress: bool) -> None:
        self.sweep, self.slots, self.deadline, self.progress = sweep, slots, deadline, progress
        self.outcomes: list[tuple[Config, Outcome]] = []

    def train(self, runs: list[Config]) -> None:
        """Train the runs that have no record."""
        records = find_records(runs)
        done = [run for run, record in zip(runs, records) if record is not None]
        self.outcomes += [(run, Outcome("done")) for run in done]
        for arm in dict.fromkeys(run.name for run in done):
            self._print(f"done before: {arm}, seeds {', '.join(str(run.seed) for run in done if run.name == arm)}")
        for wave in _waves([run for run, record in zip(runs, records) if record is None]):
            if self.sweep.launcher == "slurm":
                run_as_jobs(wave, self.sweep.slurm, self.sweep.jobs, self.sweep.output, self.report)
            elif self.sweep.in_slots:
                run_in_slots(wave, self.slots, self.report, self.deadline)
            else:
                run_here(wave, self.report, self.progress)

    def tune(self, config: Config, tried: list[list[Config]]) -> Config | None:
        """Return a run with the best values of its arm; None if they are not known."""
        if not tried:
            return config
        if any(record is None for runs in tried for record in find_records(runs)):
            return None
        try:
            return _with(config, _points(self.sweep.tune.grid)[best(self.sweep.tune, tried)])
        except Unfinished as error:
            self.report(config, Outcome("failed", str(error)))
            return None

    def report(self, config: Config, outcome: Outcome | None, place: str = "") -> None:
        if outcome is not None:
            self.outcomes.append((config, outcome))
        what, why = ("begins", "") if outcome is None else outcome
        self._print(f"{config.name}, seed {config.seed}: {what}{place and f' on {place}'}{why and f': {why}'}")

    def _print(self, line: str) -> None:
        if self.progress:
            print(line, flush=True)

    def check(self, total: int) -> None:
        """Raise Unfinished unless every run is done."""
        states = [outcome.state for _, outcome in self.outcomes]
        done, failed, locked = (
            states.count("done") + states.count("diverged"),
            states.count("failed"),
            states.count("locked"),
        )
        for config, outcome in self.outcomes:
            if outcome.state == "failed":
                self._print(f"{config.name}, seed {config.seed}: failed: {outcome.why}")
        if failed:
            raise Unfinished(
                f"{failed} of {total} runs failed, {done} are done; the same command tries the others again"
            )
        if done < total:
            elsewhere = f", other processes train {locked}" if locked else ""
            raise Unfinished(
                f"{done} of {total} runs are done{elsewhere}; the same command resumes the others", status=3
            )


def _waves(runs: list[Config]) -> Iterator[list[Config]]:
    """Yield runs in order, those that start from another one's weights in a later wave."""
    while runs:
        names = {(os.path.realpath(str(run.output)), run.name, run.seed) for run in runs}
        wave = []
        for run in runs:
            folder, _, arm = str(run.trainer.init_from).rpartition(":")
            if (os.path.realpath(folder), arm, run.seed) not in names:
                wave.append(run)
        if not wave:
            raise ConfigError(f"trainer.init_from: expected another run's weights, got {runs[0].name}'s own")
        yield wave
        runs = [run for run in runs if run not in wave]


def _check_corpora(runs: list[Config], every: list[Config], progress: bool) -> None:
    """Prepare the corpora of runs, and compare those of finished ones with their records."""
    opened = [run for run, record in zip(runs, find_records(runs)) if record is None]
    done = [(run, record) for run, record in zip([*every, *runs], find_records([*every, *runs])) if record is not None]
    for run in {repr((run.data, run.model.vocab_size)): run for run in opened}.values():
        check_documents(run)
    hashes: dict[str, str | None] = {}
    for run, record in [*((run, None) for run in opened), *done]:
        if (documents := repr(run.data)) not in hashes:
            try:
                hashes[documents] = load_corpora(run.data, progress=progress).corpus_hash
            except ConfigError as error:
                if record is None:
                    raise
                hashes[documents] = None
                print(f"the documents of finished runs cannot be compared: {error}", flush=True)
        if record is not None and hashes[documents] not in (None, record["corpus_hash"]):
            raise ConfigError(
                f"data: the documents have changed since {run.name}, seed {run.seed}, was trained; give another output, or "
                f"remove its record in {record_path(run).parent} and its folder in {run.runs_dir}"
            )


def _measure_throughput(sweep: SweepConfig, arms: list[Config], progress: bool) -> None:
    """Time the arms of a sweep, unless all of them have been timed: only arms that were timed together compare."""
    records = read_records(sweep.output) if has_records(sweep.output) else []
    timed = {id_of(record["arm"], record["config"]) for record in records if record["kind"] == "throughput"}
    if sweep.throughput_rounds and not timed.issuperset(map(run_id, arms)):
        for record in measure_throughput(arms, sweep.throughput_rounds, sweep.output, progress):
            append_record(Path(sweep.output) / "records.jsonl", record)


def _write_sweep(sweep: SweepConfig, configs: list[Config]) -> None:
    """Write the sweep's arms and seeds beside its records, if there are any."""
    if sweep.train and has_records(sweep.output):
        tune, arms = sweep.tune, {c.name: [other.seed for other in configs if other.name == c.name] for c in configs}
        tuned = {"keys": [*tune.grid], "tried": [*tune.grid.values()], "seeds": tune.seeds} if tune.grid else None
        steps = {config.name: config.trainer.max_steps for config in configs if may_be_raised(config)}
        table = asdict(sweep.table) if sweep.table != TableConfig() else None
        write_sweep(sweep.output, str(sweep.name), arms, sweep.baseline, tuned=tuned, steps=steps, table=table)
