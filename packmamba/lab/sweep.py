"""Train every run of a grid of arms, keys and seeds.

    file -> check -> corpora -> timing in turns -> runs -> records

A sweep is a file: what all runs share, the arms that are compared, a grid of further values. It is
checked whole before the first run. A run is identified by its configuration, so that the same
command skips what has a record and resumes the rest; nothing else remembers where a sweep stands.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Optional

from omegaconf import DictConfig, OmegaConf

from packmamba.config import Config, key, need, resolve
from packmamba.config.load import ON_GPU, load, parse_override, read_yaml
from packmamba.config.schema import AUTO
from packmamba.data.token_store import load_corpora
from packmamba.errors import ConfigError, Unfinished
from packmamba.lab import launch
from packmamba.lab.benchmark import measure_throughput
from packmamba.lab.fit import check_accelerator, check_run
from packmamba.lab.records import METRICS, append_record, check_writable, records_of, write_sweep
from packmamba.lab.run_id import find_records, flatten, id_of, run_folder, run_id


@dataclass
class TableConfig:
    """Say what the report's table shows."""

    metrics: list[str] = key([], "Metrics, such as [val_loss, mqar.accuracy]; []: val_loss.")
    columns: Optional[list[str]] = key(None, "Further metrics and keys, such as optimizer.lr; null: the usual ones.")


@dataclass
class SweepConfig:
    """Declare the keys of a sweep's file."""

    output: str = key("runs/sweep", "Folder of records, tables and report.")
    name: Optional[str] = key(None, "Name in sweep.json; null for the file's.")
    base: Optional[str] = key(None, "Configuration that runs start from, relative to this file.")
    common: dict[str, Any] = key({}, "Keys of every run, such as data.row_length: 512.")
    arms: dict[str, dict[str, Any]] = key({}, "Keys of each arm that is compared.", check=("at least one arm", bool))
    grid: dict[str, list[Any]] = key({}, "Values of keys, combined with every arm, such as seed: [0, 1].")
    evaluations: list[str] = key([], "Run on every model, such as [next_line, mqar].")
    evaluation_options: dict[str, Any] = key({}, "Parameters of each evaluation.")
    plugins: list[str] = key([], "Python modules to import first.")
    throughput_rounds: int = key(0, "Time this many interleaved steps of all arms first.", low=0)
    train: bool = key(True, "Train the runs; false: only time them.")
    baseline: Optional[str] = key(None, "Arm to compare with; null: the first of padded, single, packed.")
    margin: Optional[float] = key(None, "Differences within ± this are equivalent.", above=0)
    primary: list[str] = key([], "Contrasts that Holm adjusts: an arm, minus the baseline, or 'arm - other'.")
    table: TableConfig = field(default_factory=TableConfig)
    jobs: Any = key(1, "Runs at a time; auto: one on each GPU, or on each four cores.", check=AUTO)

    def check(self, arms: Mapping[str, Any]) -> None:
        """Check rules between a sweep's own keys. Raises ConfigError.

        arms: all of the file, also those that an override leaves out.
        """
        need(self.train or self.throughput_rounds, "train", "true without throughput_rounds", "false")
        for name, values in self.grid.items():
            distinct = values and len(values) == len(set(map(str, values)))
            need(distinct, f"grid.{name}", "at least one value and none twice", values)
        sections = {"common": self.common, "grid": self.grid} | {f"arms.{arm}": arms[arm] for arm in arms}
        for place, keys in sections.items():
            of_sweep = ", ".join(sorted({"name", "output", "runs_dir"} & {*keys}))
            need(not of_sweep, place, "no key that the sweep itself sets", of_sweep)
            need(not re.search(" [^ =]+=", place), place, "a name without ' key='", "one, as a grid adds it")
        names = ", ".join(arms)
        need(self.baseline in (None, *arms), "baseline", f"one of {names} or null", f"'{self.baseline}'")
        for contrast in self.primary:
            sides = str(contrast).split(" - ", 1)
            are_arms = all(side in arms for side in sides)
            are_different = len(set(sides)) == len(sides) and sides != [self.baseline]
            expected = f"arms ({names}), not the baseline, or '<arm> - <arm>'"
            need(are_arms and are_different, "primary", expected, f"'{contrast}'")

    def check_metrics(self, evaluations: Iterable[str]) -> None:
        """Check names of metrics; an evaluation's are ``<name>.<metric>``. Raises ConfigError."""
        prefixes = tuple(f"{name}." for name in evaluations)
        choices = f"one of {', '.join((*METRICS, *prefixes))}"
        for name in self.table.metrics:
            need(name in METRICS or name.startswith(prefixes), "table.metrics", choices, f"'{name}'")


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[SweepConfig, list[Config]]:
    """Load a sweep and its runs; overrides are of its own keys, or of every run's.

    Raises ConfigError.
    """
    run_keys = Config.__dataclass_fields__.keys() - SweepConfig.__dataclass_fields__.keys()
    of_runs = [override for override in overrides if re.split(r"[.=]", override)[0] in run_keys]
    # grid.optimizer.lr=[1], whose key has dots, is grid={optimizer.lr: [1]}.
    as_mapping = partial(re.sub, r"grid\.([\w.-]+)=(.*)", r"grid={\1: \2}", flags=re.DOTALL)
    of_sweep = [as_mapping(override) for override in overrides if override not in of_runs]
    sweep = load(SweepConfig, path, of_sweep, "sweep")
    # An arm that an override leaves out is still a baseline, or a side of a contrast, by its name.
    sweep.check(read_yaml(path).arms | sweep.arms)
    sweep.name = sweep.name or Path(path).stem

    # Layers of each run, each with its name in errors: the base, the run's own keys, overrides.
    base = [] if sweep.base is None else [(read_yaml(Path(path).parent / sweep.base, "train"), sweep.base)]
    last = [(parse_override(override), f"'{override}'") for override in of_runs]
    _check_places(sweep, {origin: flatten(OmegaConf.to_container(layer)) for layer, origin in last})
    configs = [resolve(Config, [*base, *_layers(parts, str(path)), *last]) for parts in _runs(sweep)]
    # A check takes a moment, and a seed decides none: check one run of those that differ by seed.
    without_seed = {repr(replace(config, seed=0)): config for config in configs}
    for config in without_seed.values():
        check_run(config)
        devices = config.trainer.devices * config.trainer.num_nodes
        need(devices == 1, "trainer.devices", "1 in a sweep", devices)
    sweep.check_metrics(configs[0].evaluations)
    return sweep, configs


def _check_places(sweep: SweepConfig, overrides: dict[str, dict[str, Any]]) -> None:
    """Refuse a grid's key that is set elsewhere too, and overrides of keys in which arms differ."""
    arms = {f"arms.{arm}": flatten(keys) for arm, keys in sweep.arms.items()}
    for name in sweep.grid:
        for origin, keys in (arms | overrides).items():
            expected = f"a key that {origin} does not set"
            need(not _overlapping(name, keys), f"grid.{name}", expected, f"one; give grid.{name}=[...]")
    for origin, keys in overrides.items():
        for name in keys:
            # Of each arm what it sets there; where some arm sets nothing, an override may.
            by_arm = [[arm[place] for place in _overlapping(name, arm)] for arm in arms.values()]
            differ = all(by_arm) and any(values != by_arm[0] for values in by_arm)
            need(not differ, origin, "a key in which arms do not differ", f"one; set arms.<name>.{name}")


def _overlapping(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that are ``name``, inside of it or around it."""
    return [key for key in keys if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")]


def _runs(sweep: SweepConfig) -> Iterator[tuple[dict[str, Any], ...]]:
    """Yield the keys of each run, each arm at each point of the grid; later parts override."""
    # Keys of a sweep that are a run's too.
    passed_on = {name: getattr(sweep, name) for name in ("plugins", "evaluations", "evaluation_options")}
    passed_on = {name: value for name, value in passed_on.items() if value}
    for values in itertools.product(*sweep.grid.values()):
        point = dict(zip(sweep.grid, values))
        # A point's name, as in `` lr=0.1 d_state=4``, is without its seed.
        shown = {name.rpartition(".")[2]: value for name, value in point.items() if name != "seed"}
        suffix = "".join(f" {name}={value}" for name, value in shown.items())
        for arm, keys in sweep.arms.items():
            identity = {"name": arm + suffix, "output": sweep.output, "runs_dir": f"{sweep.output}/runs"}
            yield passed_on, flatten(sweep.common), flatten(keys), {**point, **identity}


def _layers(parts: Iterable[dict[str, Any]], origin: str) -> Iterator[tuple[DictConfig, str]]:
    """Yield layers of a configuration, each with its name in errors.

    A named size, as in ``model: 130m``, goes before the keys of the model beside it.
    """
    for keys in parts:
        yield _layer({name: value for name, value in keys.items() if name == "model"}), origin
        yield _layer({name: value for name, value in keys.items() if name != "model"}), origin


def _layer(keys: dict[str, Any]) -> DictConfig:
    """Return a layer of a configuration from keys with dots."""
    layer = OmegaConf.create()
    for name, value in keys.items():
        OmegaConf.update(layer, name, value)
    return layer


def run_sweep(sweep: SweepConfig, configs: list[Config], progress: bool = True) -> Path:
    """Time a sweep's arms and train its runs; return the folder of records.

    The same call goes on where the last one stopped: runs with a record are skipped. Raises
    ConfigError; Unfinished where runs failed or are left.
    """
    runs = configs if sweep.train else []
    check_writable(sweep.output, "output")
    untimed = _untimed_arms(sweep, configs[: len(sweep.arms)])
    found = find_records(runs)
    left = [run for run, record in zip(runs, found) if record is None]
    start = _launcher(sweep, [*left, *untimed], progress)
    _check_corpora(runs, found, progress)
    progress_of_runs = _Progress(progress)

    if untimed:
        for record in measure_throughput(untimed, sweep.throughput_rounds, sweep.output, progress):
            append_record(Path(sweep.output) / "records.jsonl", record)
    seeds: dict[str, list[int]] = {}
    for config in runs:
        seeds.setdefault(config.name, []).append(config.seed)
    if seeds:  # what the report needs to know of the sweep
        table = vars(sweep.table) if sweep.table != TableConfig() else None
        rules = {"margin": sweep.margin, "primary": sweep.primary, "table": table}
        write_sweep(sweep.output, str(sweep.name), seeds, sweep.baseline, **rules)
    _train(runs, found, start, progress_of_runs)
    progress_of_runs.check_finished(total=len(runs))
    return Path(sweep.output)


def _launcher(sweep: SweepConfig, runs: list[Config], progress: bool) -> Callable[..., None]:
    """Return a function (configs, report=...) that trains runs here, or in slots.

    ``runs``: those that are left.
    """
    for config in runs:
        check_accelerator(config)
    if sweep.jobs == 1:
        return partial(launch.run_here, progress=progress)
    on_gpu = any(config.trainer.accelerator in ON_GPU for config in runs)
    return partial(launch.run_in_slots, slots=launch.device_slots(sweep.jobs, on_gpu))


class _Progress:
    """Report and count what becomes of runs."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.states: Counter[str] = Counter()

    def __call__(self, config: Config, status: launch.Status, place: str = "") -> None:
        self.states[status.state] += 1
        if self.shown:
            where = f" on {place}" if place else ""
            why = f": {status.why}" if status.why else ""
            print(f"{config.name}, seed {config.seed}: {status.state}{where}{why}", flush=True)

    def check_finished(self, total: int) -> None:
        """Raise Unfinished unless all runs are done."""
        done = self.states["done"]
        if failed := self.states["failed"]:
            raise Unfinished(f"{failed} of {total} runs failed, {done} are done; the same command tries again")
        if done < total:
            locked = self.states["locked"]
            elsewhere = f", other processes train {locked}" if locked else ""
            raise Unfinished(f"{done} of {total} runs are done{elsewhere}; the same command resumes", status=3)


def _train(wanted: list[Config], done: Sequence[Any], start: Callable, report: _Progress) -> None:
    """Train runs without a record, last those that start from others' weights.

    Raises ConfigError for a finished run whose source is among those that are left.
    """
    # What a run starts from is in an earlier wave: runs of a wave may start in any order.
    left = {(Path(str(run.output)).resolve(), run.name, run.seed) for run, record in zip(wanted, done) if not record}
    waves: tuple[list[Config], list[Config]] = ([], [])
    for run, record in zip(wanted, done):
        folder, _, arm = str(run.trainer.init_from).rpartition(":")
        starts_from_left = (Path(folder).resolve(), arm, run.seed) in left
        if record is None:
            waves[starts_from_left].append(run)
            continue
        got = f"one that is trained anew; remove its record and {run_folder(run)}"
        need(not starts_from_left, "trainer.init_from", f"the run that {run.name}, seed {run.seed}, began with", got)
        report(run, launch.Status("done", "before"))
    for wave in filter(None, waves):
        start(wave, report=report)


def _untimed_arms(sweep: SweepConfig, arms: list[Config]) -> list[Config]:
    """Return the arms, whose steps are to be timed in turns; none if their records are there."""
    # Arms by the process that timed them, since speeds of others do not compare.
    timings: dict[str, set[str]] = {}
    for record in records_of(sweep.output, "throughput"):
        if record["metrics"]["rounds"] >= sweep.throughput_rounds:
            timings.setdefault(record["config"]["run"], set()).add(id_of(record["arm"], record["config"]))
    are_timed = any(timed.issuperset(map(run_id, arms)) for timed in timings.values())
    return [] if are_timed or not sweep.throughput_rounds else arms


def _check_corpora(runs: list[Config], records: Sequence[Any], progress: bool) -> None:
    """Tokenize the corpora, and refuse to go on beside records of other documents."""
    if None not in records:
        return  # a finished sweep is reported without its documents
    hashes: dict[str, str] = {}
    for run, record in zip(runs, records):
        documents = repr(run.data)
        if documents not in hashes:
            hashes[documents] = load_corpora(run.data, progress=progress).corpus_hash
        if record is not None and record["corpus_hash"] != hashes[documents]:
            changed = f"data: the documents have changed since {run.name}, seed {run.seed}"
            remedy = f"give another output, or remove its record and {run_folder(run)}"
            raise ConfigError(f"{changed}; {remedy}")
