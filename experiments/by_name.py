"""Experiments by name: their benches, their reports, and the steps that make their records.

An experiment is a folder ``experiments/<question>/`` of this clone, or of the current folder. The
package knows no experiment: its commands find them here by name, with what they declare: a bench in
bench.py, tables and figures in report.py, steps in reproduce.py.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import import_plugins, need, resolve, suggest
from packmamba.config.load import read_layers
from packmamba.errors import ConfigError
from packmamba.lab.records import check_writable

DONE = "done.json"  # the steps that ``reproduce`` has finished in a folder


class Bench(NamedTuple):
    """Measure with ``run(config, records_path, progress)``; ``config`` is a dataclass, then its
    instance.
    """

    config: Any
    run: Callable[[Any, Path, bool], None]
    name: str = ""
    output: Path = Path()


def experiments() -> dict[str, Path]:
    """Return folders of experiments by name: this clone's and the current folder's."""
    roots = (Path(__file__).resolve().parent, Path.cwd() / "experiments")
    return {file.parent.name: file.parent for root in roots for file in sorted(root.glob("*/*.yaml"))}


def find(name: str) -> Path:
    """Return an experiment's folder. Raises ConfigError for an unknown name."""
    known = experiments()
    if name not in known:
        raise ConfigError(f"expected an experiment, got '{name}'{suggest(name, known)}")
    return known[name]


def module(name: str, part: str) -> Any:
    """Import ``experiments.<name>.<part>``; None without such a file."""
    folder = find(name)
    sys.path += {str(folder.parents[1])}.difference(sys.path)
    has_part = (folder / f"{part}.py").is_file()
    return importlib.import_module(f"experiments.{name}.{part}") if has_part else None


def kinds_of(folder: Path, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables and figures that the experiments of records declare.

    In and below an experiment's own folder its report alone counts, which may show others' records.
    """
    records = list(records)
    known = experiments()
    names = [name for name, path in known.items() if folder.resolve().is_relative_to(path.resolve())]
    if not names:
        made = {record["experiment"] for record in records}
        made |= {title.partition("/")[0] for title in finished(folder)}
        names = sorted(made & known.keys())
    kinds: dict[str, Any] = {}
    for report in (module(name, "report") for name in names):
        kinds |= report.KINDS if report is not None else {}
    return kinds


def load_bench(what: str | Path, overrides: Iterable[str] = ()) -> Bench:
    """Load the bench ``<question>``, ``<question>/<name>`` or of a YAML file.

    Raises ConfigError.
    """
    path = Path(what)
    if path.suffix not in (".yaml", ".yml"):
        question, _, name = str(what).partition("/")
        path = find(question) / f"{name or question}.yaml"
    layers = read_layers(path, overrides, "bench")
    taken: dict[str, Any] = {}  # keys that are not the bench's
    for layer, _ in layers:
        taken |= {key: layer.pop(key) for key in ("bench", "output", "plugins") if key in layer}
    import_plugins(taken.get("plugins", ()))
    question, _, name = str(taken["bench"]).rpartition("/")
    known = getattr(module(question or path.resolve().parent.name, "bench"), "BENCHES", {})
    need(name in known, "bench", f"one of {', '.join(known)}", f"'{name}' in {path}")
    output = Path(taken.get("output") or f"runs/{name}")
    return known[name]._replace(config=resolve(known[name].config, layers), name=name, output=output)


def run_bench(what: str | Path, overrides: Iterable[str] = ()) -> Path:
    """Measure, and return the folder of the records."""
    bench = load_bench(what, overrides)
    check_writable(bench.output, "output")
    bench.run(bench.config, bench.output / "records" / f"{bench.name}.jsonl", True)
    return bench.output


def finished(folder: Path) -> list[str]:
    """Return the titles of steps that ``reproduce`` has finished in a folder."""
    return json.loads((folder / DONE).read_text()) if (folder / DONE).is_file() else []
