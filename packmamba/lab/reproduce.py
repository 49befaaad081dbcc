"""Experiments by name: benches, reports, and steps that make their records from nothing."""

import csv
import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from packmamba.config import import_plugins, need, read_yaml, resolve, suggest
from packmamba.config.load import read_layers
from packmamba.errors import ConfigError
from packmamba.files import write_whole
from packmamba.lab.records import check_writable, read_records
from packmamba.lab.report.aggregate import with_items
from packmamba.lab.report.html import table_files, write_report
from packmamba.lab.report.tables import Table, make_columns, number, word, write_table

DONE = "done.json"  # the steps that ``reproduce`` has finished in a folder


class Bench(NamedTuple):
    """Measure with ``run(config, records_path, progress)``; ``config`` is a dataclass, then its instance."""

    config: Any
    run: Callable[[Any, Path, bool], None]
    name: str = ""
    output: Path = Path()


class Step(NamedTuple):
    """Run a bench or sweep; ``{output}`` in an override is the folder of all steps."""

    file: str
    overrides: tuple[str, ...] = ()
    small: tuple[str, ...] = ()  # with scale=small; steps without are left out
    gpus: int = 0
    gpu_gib: int = 0
    packages: tuple[str, ...] = ()
    small_on_cpu: bool = False


class Headline(NamedTuple):
    """Name a number of tables/``table``.csv; ``alone``: the table of records of one corpus."""

    name: str
    table: str
    row: Mapping[str, Any]
    column: str
    paper: str = ""
    alone: str = ""


def experiments() -> dict[str, Path]:
    """Return folders of experiments by name: the checkout's and the current folder's, or none."""
    roots = [root / "experiments" for root in (Path(__file__).resolve().parents[2], Path.cwd())]
    return {file.parent.name: file.parent for root in roots for file in sorted(root.glob("*/*.yaml"))}


def require_experiments() -> dict[str, Path]:
    """Return folders of experiments by name. Raises ConfigError outside a clone."""
    known = experiments()
    need(known, "experiments", "a clone as the current folder", f"{Path.cwd()}; clone PackMamba")
    return known


def find(name: str) -> Path:
    """Return an experiment's folder. Raises ConfigError for an unknown name."""
    known = require_experiments()
    if name not in known:
        raise ConfigError(f"expected an experiment, got '{name}'{suggest(name, known)}")
    return known[name]


def module(name: str, part: str) -> Any:
    """Import ``experiments.<name>.<part>``; None without such a file."""
    folder = find(name)
    sys.path += {str(folder.parents[1])}.difference(sys.path)
    return (
        importlib.import_module(f"experiments.{name}.{part}") if (folder / f"{part}.py").is_file() else None
    )


def kinds_of(folder: Path, records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables and figures that the experiments of records declare."""
    records, known = list(records), experiments()
    import_plugins({plugin for record in records for plugin in record["config"].get("plugins") or ()})
    made = {record["experiment"] for record in records} | {
        title.partition("/")[0] for title in finished(folder)
    }
    own = [name for name, path in known.items() if path.resolve() == folder.resolve()]
    reports = [module(name, "report") for name in own or sorted(made & known.keys())]
    return {kind: one for report in reports if report is not None for kind, one in report.KINDS.items()}


def load_bench(what: str | Path, overrides: Iterable[str] = ()) -> Bench:
    """Load the bench ``<question>``, ``<question>/<name>`` or of a YAML file."""
    path = Path(what)
    if path.suffix not in (".yaml", ".yml"):
        question, _, name = str(what).partition("/")
        path = find(question) / f"{name or question}.yaml"
    layers = read_layers(path, overrides, "bench")
    taken = {
        key: layer.pop(key) for layer, _ in layers for key in ("bench", "output", "plugins") if key in layer
    }
    import_plugins(taken.get("plugins", ()))
    question, _, name = str(taken["bench"]).rpartition("/")
    known = getattr(module(question or path.resolve().parent.name, "bench"), "BENCHES", {})
    if name not in known:
        raise ConfigError(f"bench: expected one of {', '.join(known)}, got '{name}' in {path}")
    output = Path(taken.get("output") or f"runs/{name}")
    return known[name]._replace(config=resolve(known[name].config, layers), name=name, output=output)


def run_bench(what: str | Path, overrides: Iterable[str] = ()) -> Path:
    bench = load_bench(what, overrides)
    check_writable(bench.output, "output")
    bench.run(bench.config, bench.output / "records" / f"{bench.name}.jsonl", True)
    return bench.output


def finished(folder: Path) -> list[str]:
    return json.loads((folder / DONE).read_text()) if (folder / DONE).is_file() else []


def missing(step: Step, is_bench: bool, small: bool) -> str:
    packages = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if packages and not is_bench:
        return f"the package {packages[0]}"
    gpus = [
        torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(torch.cuda.device_count())
    ]
    enough = sum(gib >= step.gpu_gib for gib in gpus) >= step.gpus or (small and step.small_on_cpu)
    return "" if enough else f"{step.gpus} GPU" + f" of {step.gpu_gib} GiB" * bool(step.gpu_gib)


def reproduce(what: str, overrides: Iterable[str] = ()) -> None:
    """Make the records of an experiment or step, and compare; without a name, list costs."""
    if not what:
        print("\n".join(costs()))
        return
    keys = [override for override in overrides if not override.startswith(("scale=", "output="))]
    own = dict(override.split("=", 1) for override in overrides if override not in keys)
    question, _, name = what.partition("/")
    folder, declared, small = (find(question), module(question, "reproduce"), own.get("scale") == "small")
    known = [Path(step.file).stem for step in getattr(declared, "STEPS", ())]
    if own.get("scale", "full") not in ("full", "small"):
        raise ConfigError(f"scale: expected full or small, got {own['scale']}")
    if declared is None or name not in ("", *known):
        raise ConfigError(f"expected a step of {question}, got '{name}'{suggest(name, known)}")
    steps = [
        step for step in declared.STEPS if name in ("", Path(step.file).stem) and (step.small or not small)
    ]
    output = Path(own.get("output", f"runs/reproduce/{question}{'-small' if small else ''}"))
    check_writable(output, "output")
    from packmamba.lab import sweep

    output.mkdir(parents=True, exist_ok=True)
    done = finished(output) or [f"{question}/"]
    for n, step in enumerate(steps, start=1):
        given, path = [*step.overrides, *(step.small if small else ()), *keys], folder / step.file
        title, is_bench = " ".join([f"{question}/{step.file}", *given]), "bench" in read_yaml(path)
        lacking = missing(step, is_bench, small)
        state = ": done before" if title in done else f": left out, as it needs {lacking}" if lacking else ""
        print(f"[{n}/{len(steps)}] {title}{state}", flush=True)
        if not state:
            given = [*(override.replace("{output}", str(output)) for override in given), f"output={output}"]
            run_bench(path, given) if is_bench else sweep.run_sweep(*sweep.load_sweep(path, given))
            done.append(title)
            write_whole(output / DONE, json.dumps(done, indent=1).encode())
    if len(done) == 1:
        raise ConfigError(f"{what}: expected a machine with what one of the steps above needs")
    records = with_items(output, read_records(output))
    kinds = kinds_of(folder, records)
    table = comparison(declared.HEADLINES, folder, table_files(records, kinds), small)
    page = write_report(output, kinds, records, opening=table)
    print(f"{write_table(table, 'txt')}\nReport: {page}")


def costs() -> Iterator[str]:
    for name in require_experiments():
        declared = module(name, "reproduce")
        steps = getattr(declared, "STEPS", ())
        gpu = max((step.gpu_gib for step in steps if step.gpus), default=None)
        needs = "CPU" if gpu is None else "GPU" + f" of {gpu} GiB" * bool(gpu)
        packages = dict.fromkeys(package for step in steps for package in step.packages)
        if steps:
            yield f"{name:<12} {needs:<15} {getattr(declared, 'TAKES', '-'):<28} {', '.join(packages)}".rstrip()


def comparison(headlines: Sequence[Headline], folder: Path, made: Mapping[str, str], small: bool) -> Table:
    """Tabulate headline numbers: the paper's, the committed and the new."""
    columns = (
        "!headline | !the paper | !committed | !now | now / committed = ratio | !committed interval = verdict"
    )
    table = Table("headlines", "Headline numbers, committed and now", make_columns(columns))
    committed = {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")}
    for headline in headlines:
        then, now = number_of(headline, committed), number_of(headline, made)
        comparable = then and now and not small
        ratio = now[0] / then[0] if comparable and then[0] else None
        verdict = (
            ("inside" if then[1] <= now[0] <= then[2] else "outside") if comparable and then[2:] else "-"
        )
        texts = (headline.name, headline.paper or "-", _shown(then), _shown(now))
        table.rows.append([*map(word, texts), number(ratio, ".2f"), word(verdict)])
    if small:
        table.notes = ["With scale=small no number is comparable."]
    return table


def number_of(headline: Headline, tables: Mapping[str, str]) -> list[float]:
    columns = [headline.column, f"{headline.column}_low", f"{headline.column}_high"]
    wanted = {key: str(value) for key, value in headline.row.items()}
    for name in (headline.table, headline.alone):
        for row in csv.DictReader(io.StringIO(tables.get(f"{name}.csv", ""))):
            if wanted.items() <= row.items():
                return [float(row[column]) for column in columns if row.get(column)]
    return []


def _shown(number: list[float]) -> str:
    return (
        "-"
        if not number
        else f"{number[0]:.4g}" + (f" [{number[1]:.2g}, {number[2]:.2g}]" if number[2:] else "")
    )
