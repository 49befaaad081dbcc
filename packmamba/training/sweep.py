"""Train every run of a grid of arms, keys and seeds."""

import copy
import itertools
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf

from packmamba.config import (
    AUTO,
    Config,
    key,
    load,
    need,
    parse_override,
    read_yaml,
    resolve,
    to_dict,
)
from packmamba.config.load import CONFIGURATION, ON_GPU
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError, Unfinished
from packmamba.records import METRICS, append_record, check_writable, write_sweep
from packmamba.training import launch
from packmamba.training.benchmark import measure_throughput
from packmamba.training.fit import check_accelerator, check_run
from packmamba.training.run_id import find_records, flatten, id_of, records_of, run_folder, run_id


@dataclass
class TableConfig:
    metrics: list[str] = key([], "Metrics, such as [val_loss, mqar.accuracy]; []: val_loss.")
    columns: Optional[list[str]] = key(
        None, "Further metrics and keys, such as optimizer.lr; null: the usual ones."
    )


@dataclass
class TuneConfig:
    grid: dict[str, list[Any]] = key(
        {}, "Keys of which each arm takes its best value, as optimizer.lr: [1e-3, 3e-3]."
    )
    seeds: list[int] = key([], "Seeds of the trials, none of grid.seed.")
    metric: str = key("val_loss", "Metric that decides, in the mean over seeds.")
    best: str = key("least", "The best value of the metric.", choices=("least", "most"))


@dataclass
class SweepConfig:
    output: str = key("runs/sweep", "Folder of records, tables and report.")
    name: Optional[str] = key(None, "Name in sweep.json; null for the file's.")
    base: Optional[str] = key(None, "Configuration that runs start from, relative to this file.")
    common: dict[str, Any] = key({}, "Keys of every run, such as data.row_length: 512.")
    arms: dict[str, dict[str, Any]] = key(
        {}, "Keys of each arm that is compared.", check=("at least one arm", bool)
    )
    grid: dict[str, list[Any]] = key(
        {}, "Values of keys, combined with every arm, such as seed: [0, 1]."
    )
    evaluations: list[str] = key([], "Run on every model, such as [next_line, passkey].")
    evaluation_options: dict[str, Any] = key({}, "Parameters of each evaluation.")
    plugins: list[str] = key([], "Python modules to import first.")
    throughput_rounds: int = key(0, "Time this many interleaved steps of all arms first.", low=0)
    train: bool = key(True, "Train the runs; false: only time them.")
    baseline: Optional[str] = key(
        None, "Arm to compare with; null: the first of padded, single, packed."
    )
    margin: Optional[float] = key(None, "Differences within ± this are equivalent.", above=0)
    primary: list[str] = key(
        [], "Contrasts that Holm adjusts: an arm, minus the baseline, or 'arm - other'."
    )
    table: TableConfig = field(default_factory=TableConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    jobs: Any = key(1, "Runs at a time; auto: one on each GPU, or on each four cores.", check=AUTO)
    launcher: str = key(
        "local", "Run on this machine, or as jobs of the cluster.", choices=("local", "slurm")
    )
    slurm: dict[str, Any] = key(
        {}, "Parameters of submitit's SlurmExecutor: partition, time (minutes), mem, ..."
    )
    deadline: Optional[float] = key(
        None, "Seconds until runs stop; the same command resumes them.", above=0
    )

    def check(self) -> None:
        need(
            self.train or self.throughput_rounds, "train", "true without throughput_rounds", "false"
        )
        here = self.launcher == "local" or not self.throughput_rounds and self.deadline is None
        need(here, "launcher", "local with throughput_rounds or deadline", self.launcher)
        for arm in self.arms:
            need(not re.search(r" \S+=", arm), "arms", "names without ' key='", f"'{arm}'")
        need(
            bool(self.tune.grid) == bool(self.tune.seeds),
            "tune",
            "both grid and seeds, or neither",
            "one",
        )
        both = set(self.tune.seeds).intersection(self.grid.get("seed", [0]))
        need(not both, "tune.seeds", "none of grid.seed", ", ".join(map(str, both)))
        for where, grid in {"grid": self.grid, "tune.grid": self.tune.grid}.items():
            for name, values in grid.items():
                once = values and len(values) == len(set(map(str, values)))
                need(once, f"{where}.{name}", "at least one value and none twice", values)


def _check_places(sweep: SweepConfig, overrides: dict[str, dict[str, Any]]) -> None:
    """Refuse a grid's key that is set elsewhere too, and overrides of keys in which arms differ."""
    arms = {f"arms.{arm}": flatten(keys) for arm, keys in sweep.arms.items()}
    others = arms | overrides
    for where, grid in {"grid": sweep.grid, "tune.grid": sweep.tune.grid}.items():
        for name, (other, keys) in itertools.product(grid, others.items()):
            place, alone = f"{where}.{name}", not _overlapping(name, keys)
            need(alone, place, f"a key that {other} does not set", f"one; give {place}=[...]")
        others["grid"] = sweep.grid
    for origin, name in [(origin, name) for origin, keys in overrides.items() for name in keys]:
        values = [[keys[one] for one in _overlapping(name, keys)] for keys in arms.values()]
        alike = not all(values) or all(value == values[0] for value in values)
        need(alike, origin, "a key in which arms do not differ", f"one; set arms.<name>.{name}")


def _overlapping(name: str, keys: Iterable[str]) -> list[str]:
    return [
        key for key in keys if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
    ]


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[SweepConfig, list[Config]]:
    """Load a sweep and its runs; overrides are of its own keys, or of every run's."""
    of_runs = Config.__dataclass_fields__.keys() - SweepConfig.__dataclass_fields__.keys()
    own = [override for override in overrides if re.split(r"[.=]", override)[0] not in of_runs]
    # grid.optimizer.lr=[1] is grid={optimizer.lr: [1]}.
    dotted = r"((?:tune\.)?grid)\.([\w.-]+)=(.*)"
    given = [re.sub(dotted, r"\1={\2: \3}", each, flags=re.DOTALL) for each in own]
    sweep = load(SweepConfig, path, given, "sweep")
    sweep.check()
    every = load(
        SweepConfig, path, [each for each in given if not each.startswith("arms=[")], "sweep"
    ).arms
    arms = ", ".join(every)
    need(
        sweep.baseline in (None, *every),
        "baseline",
        f"one of {arms} or null",
        f"'{sweep.baseline}'",
    )
    for contrast in sweep.primary:
        names = str(contrast).split(" - ", 1)
        known = {sweep.baseline} != {*names} <= every.keys() and len({*names}) == len(names)
        need(
            known,
            "primary",
            f"arms ({arms}), not the baseline, or '<arm> - <arm>'",
            f"'{contrast}'",
        )
    sweep.name = sweep.name or Path(path).stem
    base = (
        []
        if sweep.base is None
        else [(read_yaml(Path(path).parent / sweep.base, "train"), sweep.base)]
    )
    last = [
        (parse_override(override), f"'{override}'") for override in overrides if override not in own
    ]
    _check_places(sweep, {origin: flatten(OmegaConf.to_container(layer)) for layer, origin in last})
    configs = [
        resolve(Config, copy.deepcopy([*base, (_layer(keys), str(path)), *last]))
        for keys in _runs(sweep)
    ]
    for config in {repr(replace(config, seed=0)): config for config in configs}.values():
        check_run(config)
        devices = config.trainer.devices * config.trainer.num_nodes
        need(devices == 1, "trainer.devices", "1 in a sweep", devices)
    evaluations = tuple(f"{name}." for name in configs[0].evaluations)
    for where, names in {
        "table.metrics": sweep.table.metrics,
        "tune.metric": [sweep.tune.metric],
    }.items():
        for name in names:
            known = name in (*METRICS, "val_loss_last_weights") or name.startswith(evaluations)
            need(known, where, f"one of {', '.join((*METRICS, *evaluations))}", f"'{name}'")
    return sweep, configs


def _points(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values)) for values in itertools.product(*grid.values())]


def _suffix(point: dict[str, Any]) -> str:
    return "".join(
        f" {name.rpartition('.')[2]}={value}" for name, value in point.items() if name != "seed"
    )


def _runs(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    own = {
        name: it
        for name in ("plugins", "evaluations", "evaluation_options")
        if (it := getattr(sweep, name))
    }
    for point, (arm, keys) in itertools.product(_points(sweep.grid), sweep.arms.items()):
        place = {
            "name": arm + _suffix(point),
            "output": sweep.output,
            "runs_dir": f"{sweep.output}/runs",
        }
        yield {**own, **flatten(sweep.common), **flatten(keys), **point, **place}


def _layer(keys: dict[str, Any]) -> DictConfig:
    layer = OmegaConf.create()
    for name, value in keys.items():
        OmegaConf.update(layer, name, value)
    return layer


def trials(tune: TuneConfig, config: Config) -> list[list[Config]]:
    """Return the runs that choose an arm's values, by combination and seed."""
    output, points = f"{config.output}/tuning", _points(tune.grid) if tune.grid else []
    keys = [{"name": config.name + _suffix(point), "output": output, **point} for point in points]
    return [[_with(config, **each, seed=seed) for seed in tune.seeds] for each in keys]


def _with(config: Config, **keys: Any) -> Config:
    return resolve(Config, [(to_dict(config), CONFIGURATION), (_layer(keys), "tune.grid")])


def tuned(tune: TuneConfig, config: Config, tried: list[list[Config]]) -> Config | None:
    """Return a run with its arm's best values, None while trials are not done. Raises Unfinished if all diverged."""
    means: dict[int, float] = {}
    for number, runs in enumerate(tried):
        records: list[Any] = find_records(runs)
        if None in records:
            return None
        metrics = [record["metrics"] for record in records]
        if not any("diverged_at_step" in each for each in metrics):
            values: list[Any] = [each.get(tune.metric) for each in metrics]
            need(
                None not in values,
                "tune.metric",
                f"one of {', '.join(metrics[0])}",
                f"'{tune.metric}': null",
            )
            means[number] = statistics.fmean(values)
    if not means:
        raise Unfinished(f"no {' and '.join(tune.grid)} has a finite {tune.metric} with every seed")
    best = (min if tune.best == "least" else max)(means, key=means.__getitem__)
    return _with(config, **_points(tune.grid)[best])


def run_sweep(
    sweep: SweepConfig, configs: list[Config], progress: bool = True, begun: float | None = None
) -> Path:
    """Time a sweep's arms and train its runs; return the folder of records.

    The deadline counts from ``begun``, of ``time.monotonic``. Raises Unfinished.
    """
    runs, arms = configs if sweep.train else [], configs[: len(sweep.arms)]
    tried = {config.name: trials(sweep.tune, config) for config in runs}
    trial_runs = [run for arm in tried.values() for point in arm for run in point]
    check_writable(sweep.output, "output")
    start: Any
    if sweep.launcher == "slurm":
        launch.check_slurm()
        start = partial(launch.run_as_jobs, slurm=sweep.slurm, jobs=sweep.jobs, output=sweep.output)
    else:
        for config in [*runs, *arms]:
            check_accelerator(config)
        start = partial(launch.run_here, progress=progress)
        if sweep.jobs != 1 or sweep.deadline is not None:
            on_gpu = any(config.trainer.accelerator in ON_GPU for config in runs)
            deadline = (begun or time.monotonic()) + (sweep.deadline or float("inf"))
            start = partial(
                launch.run_in_slots,
                slots=launch.device_slots(sweep.jobs, on_gpu),
                deadline=deadline,
            )
    _check_corpora([*trial_runs, *runs], progress)
    states: Counter[str] = Counter()

    def report(config: Config, status: launch.Status = launch.BEGINS, place: str = "") -> None:
        states[status.state] += 1
        if progress:
            line = f"{status.state}{place and f' on {place}'}{status.why and f': {status.why}'}"
            print(f"{config.name}, seed {config.seed}: {line}", flush=True)

    def train(wanted: list[Config]) -> None:
        """Train runs without a record, last those that start from others' weights."""
        waves: tuple[list[Config], list[Config]] = [], []
        names = {(os.path.realpath(str(run.output)), run.name) for run in wanted}
        for run, record in zip(wanted, find_records(wanted)):
            folder, _, arm = str(run.trainer.init_from).rpartition(":")
            if record is None:
                waves[(os.path.realpath(folder), arm) in names].append(run)
            else:
                report(run, launch.Status("done", "before"))
        for wave in filter(None, waves):
            start(wave, report=report)

    timed = {
        id_of(record["arm"], record["config"]) for record in records_of(sweep.output, "throughput")
    }
    if sweep.throughput_rounds and not timed.issuperset(map(run_id, arms)):
        for record in measure_throughput(arms, sweep.throughput_rounds, sweep.output, progress):
            append_record(Path(sweep.output) / "records.jsonl", record)
    if sweep.train:
        tune, seeds = (
            sweep.tune,
            {c.name: [one.seed for one in configs if one.name == c.name] for c in configs},
        )
        more: dict[str, Any] = {"margin": sweep.margin, "primary": sweep.primary}
        if tune.grid:
            more["tuned"] = {
                "keys": [*tune.grid],
                "tried": [*tune.grid.values()],
                "seeds": tune.seeds,
            }
        if sweep.table != TableConfig():
            more["table"] = vars(sweep.table)
        write_sweep(sweep.output, str(sweep.name), seeds, sweep.baseline, **more)
    train(trial_runs)
    final = []
    for config in runs:
        try:
            final.append(
                tuned(sweep.tune, config, tried[config.name]) if sweep.tune.grid else config
            )
        except Unfinished as error:
            report(config, launch.Status("failed", str(error)))
    train([config for config in final if config is not None])
    done, failed, total = states["done"], states["failed"], len(trial_runs) + len(runs)
    if failed:
        raise Unfinished(
            f"{failed} of {total} runs failed, {done} are done; the same command tries again"
        )
    if done < total:
        elsewhere = f", other processes train {states['locked']}" if states["locked"] else ""
        raise Unfinished(
            f"{done} of {total} runs are done{elsewhere}; the same command resumes", status=3
        )
    return Path(sweep.output)


def _check_corpora(runs: list[Config], progress: bool) -> None:
    records, hashes = find_records(runs), dict[str, str]()
    for run, record in zip(runs, records) if None in records else ():
        documents = repr(run.data)
        hashes[documents] = (
            hashes.get(documents) or load_corpora(run.data, progress=progress).corpus_hash
        )
        if record is not None and record["corpus_hash"] != hashes[documents]:
            changed = f"data: the documents have changed since {run.name}, seed {run.seed}"
            raise ConfigError(
                f"{changed}; give another output, or remove its record and {run_folder(run)}"
            )
