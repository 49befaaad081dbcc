"""Make an experiment's records from nothing, and compare them: ``packmamba reproduce QUESTION``.

An experiment's reproduce.py declares STEPS, which are benches and sweeps, HEADLINES, which are
numbers of its tables, and what all of it TAKES. A step that was finished is not repeated, and one
whose machine is not there is left out, so that a laptop reproduces what it can.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.by_name import DONE, experiments, find, finished, kinds_of, load_bench, module, run_bench
from experiments.common import row_of, with_interval
from packmamba.config import ConfigError, need, suggest
from packmamba.config.load import read_yaml
from packmamba.files import write_whole
from packmamba.lab.records import check_writable, read_records
from packmamba.lab.report.aggregate import with_items
from packmamba.lab.report.html import build_sections, files_of_tables, tables_of, write_sections
from packmamba.lab.report.tables import Table, interval_text, make_table, write_table
from packmamba.lab.sweep import load_sweep, run_sweep


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


def reproduce(what: str, overrides: Sequence[str] = ()) -> None:
    """Make the records of an experiment or step, and compare; without a name, list costs."""
    if not what:
        need(not overrides, "reproduce", "an experiment, or nothing to list costs", " ".join(overrides))
        print("\n".join(costs()))
        return
    keys = [override for override in overrides if not override.startswith(("scale=", "output="))]
    options = dict(override.split("=", 1) for override in overrides if override not in keys)
    question, _, name = what.partition("/")
    folder = find(question)
    declared = module(question, "reproduce")
    known = [Path(step.file).stem for step in getattr(declared, "STEPS", ())]
    need(options.get("scale", "full") in ("full", "small"), "scale", "full or small", options.get("scale"))
    if declared is None or name not in ("", *known):
        raise ConfigError(f"expected a step of {question}, got '{name}'{suggest(name, known)}")
    small = options.get("scale") == "small"
    steps = [step for step in declared.STEPS if name in ("", Path(step.file).stem) and (step.small or not small)]
    output = Path(options.get("output") or f"runs/reproduce/{question}{'-small' if small else ''}")
    check_writable(output, "output")
    done = finished(output) or [f"{question}/"]
    # All are loaded first: a wrong key of the last is refused before the first runs for hours.
    to_run: dict[str, Callable[[], Any]] = {}
    for number, step in enumerate(steps, start=1):
        added = [*step.overrides, *(step.small if small else ()), *keys]
        title = " ".join([f"{question}/{step.file}", *added])
        lacking = missing(step, "bench" in read_yaml(folder / step.file), small)
        state = ": done before" if title in done else f": left out, as it needs {lacking}" if lacking else ""
        print(f"[{number}/{len(steps)}] {title}{state}", flush=True)
        if not state:
            to_run[title] = load_step(folder / step.file, added, output)
    for title, run in to_run.items():
        print(f"Running {title}", flush=True)
        run()
        done.append(title)
        write_whole(output / DONE, json.dumps(done, indent=1).encode())
    need(len(done) > 1, what, "a machine with what one of the steps above needs", "this one")
    records = with_items(output, read_records(output))
    sections = build_sections(records, kinds=kinds_of(folder, records))
    table = comparison(declared.HEADLINES, folder, files_of_tables(tables_of(sections)), small)
    page = write_sections(output, sections, opening=table)
    print(f"{write_table(table, 'txt')}\nReport: {page}")


def load_step(path: Path, overrides: Sequence[str], output: Path) -> Callable[[], Any]:
    """Check a bench or sweep, whose records go to ``output``; return what runs it.

    Raises ConfigError.
    """
    keys = [override.replace("{output}", str(output)) for override in overrides] + [f"output={output}"]
    if "bench" in read_yaml(path):
        load_bench(path, keys)
        return partial(run_bench, path, keys)
    return partial(run_sweep, *load_sweep(path, keys))


def missing(step: Step, is_bench: bool, small: bool) -> str:
    """Say what a step needs that is not here: a package, of a sweep, or GPUs; empty if nothing."""
    packages = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if packages and not is_bench:  # a bench leaves arms out
        return f"the package {packages[0]}"
    cards = [torch.cuda.get_device_properties(card) for card in range(torch.cuda.device_count())]
    large_enough = [card for card in cards if card.total_memory / 2**30 >= step.gpu_gib]
    if len(large_enough) >= step.gpus or (small and step.small_on_cpu):
        return ""
    return f"{step.gpus} GPU" + f" of {step.gpu_gib} GiB" * bool(step.gpu_gib)


def costs() -> Iterator[str]:
    """Yield a line for each experiment that has steps: what it needs, and how long it takes."""
    for name in experiments():
        declared = module(name, "reproduce")
        steps = getattr(declared, "STEPS", ())
        gpu = max((step.gpu_gib for step in steps if step.gpus), default=None)
        needs = "CPU" if gpu is None else "GPU" + f" of {gpu} GiB" * bool(gpu)
        packages = dict.fromkeys(package for step in steps for package in step.packages)
        if steps:
            yield f"{name:<12} {needs:<15} {getattr(declared, 'TAKES', '-'):<28} {', '.join(packages)}".rstrip()


def comparison(headlines: Sequence[Headline], folder: Path, made: Mapping[str, str], small: bool) -> Table:
    """Tabulate headline numbers: the paper's, the committed and the new."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in (folder / "tables").glob("*.csv")}
    rows = []
    for headline in headlines:
        then, now = number_of(headline, committed), number_of(headline, made)
        row: dict[str, Any] = {"headline": headline.name, "the paper": headline.paper or "-", "verdict": "-"}
        row |= {"committed": _shown(then), "now": _shown(now)}
        if then and now and not small:
            row["ratio"] = now[0] / then[0] if then[0] else None
            if then[2:]:
                row["verdict"] = "inside" if then[1] <= now[0] <= then[2] else "outside"
        rows.append(row)
    return make_table(
        "headlines",
        "Headline numbers, committed and now",
        "!headline | !the paper | !committed | !now | now / committed = ratio:.2f | !committed interval = verdict",
        rows,
        *["With scale=small no number is comparable."] * small,
    )


def number_of(headline: Headline, tables: Mapping[str, str]) -> list[float]:
    """Return a headline's number, with its interval if it has one, of CSV files by name; [] without
    it.
    """
    rows = (row_of(tables.get(f"{name}.csv", ""), headline.row) for name in (headline.table, headline.alone))
    return with_interval(next(filter(None, rows), {}), headline.column)


def _shown(number: list[float]) -> str:
    return interval_text(number, ".4g") if number else "-"
