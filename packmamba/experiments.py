"""Experiments: the folders below ``experiments/``, found by their names. None is imported before it is asked for.

A folder holds a README, YAML files, ``bench.py`` (``BENCHES``: what it measures), ``report.py`` (``KINDS``: tables and figures
of its records), ``reproduce.py`` (``STEPS`` that make its records, ``HEADLINES`` that its README rests on), and the records,
tables and figures themselves.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from packmamba.config import ConfigError, import_plugins, parse_override, read_yaml, resolve, select_entries, suggest
from packmamba.records import check_writable

if TYPE_CHECKING:  # its libraries take a second
    from packmamba.report.kinds import Kind

CHECKOUT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
DONE = "done.json"
"""In a folder that ``reproduce`` fills: its steps so far."""

logger = logging.getLogger(__name__)


class Bench(NamedTuple):
    """A measurement of an experiment, ``experiments/<question>/<its name>.yaml`` configures it."""

    config: type
    """A dataclass: its keys and their defaults."""
    run: Callable[[Any, Path, bool], None]
    """run(config, records_path, progress) checks the configuration, measures and appends records."""


class Step(NamedTuple):
    """A bench or sweep that makes some of an experiment's records, and what it needs."""

    file: str
    """The folder's YAML file."""
    overrides: tuple[str, ...] = ()
    """``{output}`` in one is the folder that all steps write to."""
    small: tuple[str, ...] = ()
    """Further overrides under scale=small, about a minute on two cores or one GPU; a step without them is left out."""
    gpus: int = 0
    gpu_gib: int = 0
    """Memory of each GPU."""
    packages: tuple[str, ...] = ()
    """Without one of them a bench leaves arms out, and a sweep is left out."""
    small_on_cpu: bool = False
    """Under scale=small it needs no GPU."""

    def keys(self, output: Path) -> list[str]:
        """What the step's command is given, where all steps write to this folder."""
        return [*(override.replace("{output}", str(output)) for override in self.overrides), f"output={output}"]


class Headline(NamedTuple):
    """A number that an experiment's README rests on: a cell of its tables."""

    name: str
    table: str
    row: Mapping[str, Any]
    """The row's values in some of the table's CSV columns."""
    column: str
    over: Mapping[str, Any] | None = None
    """Another row's values: the number is the ratio to that row's."""
    paper: str = ""
    """What the paper has."""
    alone: str = ""
    """The table's name where the records are of one corpus, as in a small version."""
    small: Mapping[str, Any] = {}
    """What of the row's values a small version has others of; it may be in any of the tables whose names begin with ``alone``."""


class LoadedBench(NamedTuple):
    question: str
    name: str
    run: Callable[[Any, Path, bool], None]
    config: Any
    output: Path
    """The folder whose records/ it writes."""


def roots() -> list[Path]:
    """The folders that hold an ``experiments/``: the current one, then the checkout that this package lies in."""
    return [root for root in dict.fromkeys((Path.cwd(), CHECKOUT)) if (root / "experiments").is_dir()]


def names() -> list[str]:
    """All experiments."""
    files = (path for root in roots() for path in (root / "experiments").glob("*/*"))
    return sorted(
        {path.parent.name for path in files if path.name in ("bench.py", "report.py") or path.suffix == ".yaml"}
    )


def find(name: str) -> Path:
    """The folder of an experiment. Raises ConfigError for a name that is none."""
    if name in (known := names()):
        return next(folder for root in roots() if (folder := root / "experiments" / name).is_dir())
    if not known:
        raise ConfigError(f"unknown experiment '{name}': there is no folder experiments/ in {Path.cwd()}")
    raise ConfigError(f"unknown experiment '{name}'{suggest(name, known)}")


def folder_of(name: str | Path) -> Path:
    """A folder as it is named, else the experiment of that name."""
    return Path(name) if Path(name).is_dir() or Path(name).name != str(name) else find(str(name))


def module(folder: Path, part: str) -> ModuleType | None:
    """A folder's ``<part>.py``, imported; None if it has none. Below ``experiments/`` it is ``experiments.<question>.<part>``."""
    file = (folder / f"{part}.py").resolve()
    if not file.is_file():
        return None
    for root in map(str, roots()):
        if root not in sys.path:
            sys.path.append(root)
    name = f"experiments.{file.parent.name}.{part}"
    if file.parent.parent in [root.resolve() / "experiments" for root in roots()]:
        found = importlib.import_module(name)
        if found.__file__ and Path(found.__file__).resolve() == file:
            return found
    spec = importlib.util.spec_from_file_location(f"{name}_of_{abs(hash(file))}", file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    return loaded


def kinds_of(folder: Path, records: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """What is made of records: by the folder's own report.py, else by those of the experiments that the records name, or whose
    steps were taken here.

    Plugins of the runs are imported first, so that their tables and figures are made too; one that is gone is left out.
    """
    records = list(records)
    for plugin in dict.fromkeys(name for record in records for name in _plugins(record["config"])):
        try:
            import_plugins([plugin])
        except ConfigError as error:
            logger.warning("%s; what it adds to the report is left out", error)
    known = set(names())
    modules = [module(folder, "report")]
    if modules == [None]:
        asked = {r["experiment"] for r in records}
        try:
            asked |= {title.partition("/")[0] for title in done_steps(folder)}
        except ConfigError as error:  # it may be a file of the user's
            logger.warning("%s", error)
        modules = [module(find(name), "report") for name in sorted(asked & known)]
    return {kind: made for found in modules if found is not None for kind, made in found.KINDS.items()}


def done_steps(folder: Path) -> list[str]:
    """The steps that ``reproduce`` has taken in a folder of its own, each beginning ``<experiment>/``. Raises ConfigError."""
    marks = folder / DONE
    if not marks.is_file():
        return []
    try:
        steps = json.loads(marks.read_text())
    except ValueError:
        steps = None
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise ConfigError(f"{marks}: expected a list of the steps that reproduce has taken there; remove the file")
    return steps


def _plugins(config: Mapping[str, Any]) -> list[str]:
    plugins = config.get("plugins")
    return plugins if isinstance(plugins, list) else []


def load_bench(what: str | Path, overrides: list[str] | None = None) -> LoadedBench:
    """The bench ``<question>``, ``<question>/<name>`` or of a YAML file. Raises ConfigError that names a wrong key or name."""
    path = Path(what)
    if path.suffix not in (".yaml", ".yml"):
        question, _, name = str(what).partition("/")
        folder = find(question)
        path = folder / f"{name or question}.yaml"
        if not path.is_file() and not _benches(folder):
            raise ConfigError(f"experiment '{question}' has no bench, only sweeps; expected reproduce {question}")
        if not path.is_file():
            raise ConfigError(
                f"experiment '{question}' has no bench '{name or question}'{suggest(name, _benches(folder))}"
            )
    loaded = read_yaml(path, "bench")
    if "bench" not in loaded:
        raise ConfigError(f"{path}: bench: expected <experiment>/<bench>, got none")
    layers = [(loaded, str(path))]
    for override in overrides or []:
        layers.append((select_entries(loaded, parse_override(override)), f"'{override}'"))
    folder, name = _named(path, str(_taken(layers, "bench")))
    benches = _benches(folder)
    if name not in benches:
        raise ConfigError(f"{path}: bench: expected one of {', '.join(benches)}, got '{name}'")
    bench = benches[name]
    output = _taken(layers, "output") or RUNS / name
    if not isinstance(output, (str, Path)):
        raise ConfigError(f"output: expected a folder, got {output!r}")
    plugins = _taken(layers, "plugins") or []
    if not isinstance(plugins, (list, ListConfig)):
        raise ConfigError(f"plugins: expected a list, such as [a,b], got {plugins!r}")
    import_plugins(plugins)
    own = {"experiment": folder.name, "plugins": plugins}
    names = {key.name for key in dataclasses.fields(bench.config)}
    given = OmegaConf.create({key: value for key, value in own.items() if key in names})
    config: Any = resolve(bench.config, [(given, ""), *layers])
    return LoadedBench(folder.name, name, bench.run, config, Path(output))


def _taken(layers: list[tuple[DictConfig, str]], key: str) -> Any:
    """What the last layer that has the key says of it; the key is gone from all."""
    return ([layer.pop(key) for layer, _ in layers if key in layer] or [None])[-1]


def run_bench(what: str | Path, overrides: list[str] | None = None) -> Path:
    """Runs a bench and appends its records; returns the folder whose records/ holds them."""
    bench = load_bench(what, overrides)
    check_writable(bench.output / "records", "output")
    bench.run(bench.config, bench.output / "records" / f"{bench.name}.jsonl", True)
    return bench.output


def _named(path: Path, bench: str) -> tuple[Path, str]:
    """The folder and the name of a YAML file's ``bench``: ``<question>/<name>``, or a name, whose file lies in the folder."""
    question, slash, name = bench.partition("/")
    if slash:
        return find(question), name
    if (path.parent / "bench.py").is_file():
        return path.parent, bench
    beside = (find(name) for name in names())
    return next((folder for folder in beside if (folder / f"{bench}.yaml").is_file()), None) or find(bench), bench


def _benches(folder: Path) -> dict[str, Bench]:
    found = module(folder, "bench")
    return {} if found is None else found.BENCHES
