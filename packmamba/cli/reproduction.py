"""Runs an experiment from nothing and compares its headline numbers with the committed ones."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import read_yaml
from packmamba.errors import ConfigError
from packmamba.experiments import DONE, Headline, Step, done_steps, find, kinds_of, module, names, run_bench
from packmamba.records import check_writable, has_records, read_records, write_whole
from packmamba.report.folder import build_sections, write_report
from packmamba.report.tables import Cell, Column, Table, number, word, write_table

SCALES = ("full", "small")
OUTPUT = Path("runs") / "reproduce"


class Plan(NamedTuple):
    """What of an experiment is run, and where to."""

    experiment: str
    steps: list[Step]
    left_out: list[str]
    """One sentence for each step that this machine cannot do."""
    headlines: Sequence[Headline]
    overrides: list[str]
    output: Path
    small: bool = False


def reproduce(what: str, arguments: list[str]) -> None:
    """``what`` is an experiment, one of its steps (``speedup/multi_gpu``) or ``all``; ``arguments`` are scale, output and keys.

    Raises ConfigError in one sentence if the machine can do none of it.
    """
    plans = load_plans(what, arguments)
    for sentence in dict.fromkeys(sentence for plan in plans for sentence in plan.left_out):
        print(f"Left out: {sentence}.", flush=True)
    for plan in plans:
        run(plan)
        print(f"\n{comparison(plan).text()}\nReport, with figures: {plan.output / 'report.html'}")


def load_plans(what: str, arguments: list[str]) -> list[Plan]:
    """The plan of each experiment of which this machine can do a step."""
    own = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in ("scale", "output")}
    overrides = [argument for argument in arguments if argument.partition("=")[0] not in own]
    if (scale := own.get("scale", "full")) not in SCALES:
        raise ConfigError(f"scale: expected one of {', '.join(SCALES)}, got '{scale}'")
    plans, refused = [], []
    chosen = reproducible() if what == "all" else [what]
    if not chosen:
        raise ConfigError(f"there is no experiment with a reproduce.py below {Path.cwd() / 'experiments'}")
    for name in chosen:
        question, _, step = name.partition("/")
        declared = module(find(question), "reproduce")
        if declared is None:
            raise ConfigError(
                f"experiment '{question}' has no reproduce.py; those that have: {', '.join(reproducible())}"
            )
        steps = [s for s in declared.STEPS if not step or Path(s.file).stem == step]
        if not steps:
            known = dict.fromkeys(f"{question}/{Path(s.file).stem}" for s in declared.STEPS)
            raise ConfigError(f"experiment '{question}' has no step '{step}'; known: {', '.join(known)}")
        if overrides and len(steps) > 1:
            known = dict.fromkeys(f"{question}/{Path(s.file).stem}" for s in steps)
            raise ConfigError(f"'{overrides[0]}' is a key of one step; name it, one of {', '.join(known)}")
        small = scale == "small"
        needs = {s: s._replace(gpus=0) if small and s.small_on_cpu else s for s in steps}
        lacking = {s: problem for s in steps if (problem := lacks(needs[s], question))}
        able = [s for s in steps if s not in lacking and (s.small or not small)]
        if not able:
            refused += list(lacking.values())
            continue
        extra = [(s, [*s.overrides, *(s.small if small else ()), *overrides]) for s in able]
        folder = question if scale == "full" else f"{question}-{scale}"
        output = Path(own["output"]) if "output" in own else OUTPUT / folder
        output = output / question if "output" in own and len(chosen) > 1 else output
        able = [s._replace(overrides=tuple(keys)) for s, keys in extra]
        plans.append(Plan(question, able, list(lacking.values()), declared.HEADLINES, overrides, output, small))
    if not plans:
        raise ConfigError("; ".join(dict.fromkeys(refused)))
    if refused:
        plans[0].left_out.extend(refused)
    return plans


def reproducible() -> list[str]:
    """The experiments that declare how to reproduce them."""
    return [name for name in names() if (find(name) / "reproduce.py").is_file()]


def lacks(step: Step, question: str) -> str | None:
    """Why this machine cannot do the step."""
    what = f"{question}/{Path(step.file).stem}"
    missing = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if missing and "bench" not in read_yaml(find(question) / step.file):  # a bench leaves arms out
        return f"{what} needs {missing[0]}, which is not installed"
    if not step.gpus:
        return None
    import torch

    found = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(torch.cuda.device_count())]
    if len(found) < step.gpus:
        gpus = "a GPU" if step.gpus == 1 else f"{step.gpus} GPUs"
        return f"{what} needs {gpus} that PyTorch can use, this machine has {len(found) or 'none'}"
    if min(found) < step.gpu_gib:
        keys = " ".join(["", *step.overrides])
        return f"{what}{keys} needs {step.gpu_gib} GiB of GPU memory, this machine has {min(found):.0f}"
    return None


def run(plan: Plan) -> None:
    """Runs the steps that this folder has no results of yet and writes its tables and figures."""
    check_writable(plan.output, "output")
    done = done_steps(plan.output) or [f"{plan.experiment}/"]
    titles = [" ".join([f"{plan.experiment}/{step.file}", *step.overrides]) for step in plan.steps]
    files = {title.partition(" ")[0] for title in titles}
    if others := [title for title in done if title not in titles and title.partition(" ")[0] in files]:
        raise ConfigError(f"output: {plan.output} holds results of '{others[0]}'; remove it or name another")
    plan.output.mkdir(parents=True, exist_ok=True)
    write_whole(plan.output / DONE, json.dumps(done, indent=1).encode())  # whose it is, also if it is interrupted
    for count, (step, title) in enumerate(zip(plan.steps, titles), start=1):
        print(f"[{count}/{len(plan.steps)}] {title}{': done before' if title in done else ''}", flush=True)
        if title in done:
            continue
        for package in (name for name in step.packages if importlib.util.find_spec(name) is None):
            print(f"Without {package}, which is not installed: its arms are left out.", flush=True)
        path = find(plan.experiment) / step.file
        keys = step.keys(plan.output)
        if "bench" in read_yaml(path):
            run_bench(path, keys)
        else:
            from packmamba.training.sweep import load_sweep, run_sweep

            run_sweep(*load_sweep(path, keys))
        done.append(title)
        write_whole(plan.output / DONE, json.dumps(done, indent=1).encode())
    write_report(plan.output, kinds_of(find(plan.experiment), read_records(plan.output)))


def comparison(plan: Plan) -> Table:
    """Each headline number, committed and now; also written beside the report."""
    table = Table(
        "headlines",
        f"{plan.experiment}: committed and now",
        [
            Column("headline", ("headline",), False),
            Column("the paper", ("paper",)),
            Column("committed", ("committed",)),
            Column("now", ("now",)),
            Column("now over committed", ("comparison",)),
        ],
    )
    experiment = find(plan.experiment)
    then, now = cells(plan.headlines, experiment), cells(plan.headlines, plan.output, experiment, plan.small)
    for headline in plan.headlines:
        a, b = then[headline.name], now[headline.name]
        compared = word("-") if plan.small else _compared(a, b)
        table.rows.append([word(headline.name), word(headline.paper or "-"), a, b, compared])
    table.notes = [
        f"Now: {', '.join(step.file for step in plan.steps)}, with the keys that done.json has. Numbers of steps that were left "
        "out, or whose keys differ from the committed run's, are missing or differ; tables/ has all that was computed."
    ]
    if plan.small:
        table.notes.insert(
            0,
            "scale=small: nothing here is comparable; it shows what is computed. A dash: a small version has no such number.",
        )
    (plan.output / "headlines.md").write_text(write_table(table, "md"), encoding="utf-8")
    return table


def cells(
    headlines: Sequence[Headline], folder: Path, experiment: Path | None = None, small: bool = False
) -> dict[str, Cell]:
    """The number behind each headline, from a folder's records; a dash where they have none. ``experiment``: whose tables, if not
    the folder's own. ``small``: they are of a small version."""
    records = read_records(folder) if has_records(folder) else []
    sections = build_sections(records, figures=False, kinds=kinds_of(experiment or folder, records))
    tables = {table.name: table for section in sections for table in section.tables}
    return {headline.name: _cell(headline, tables, small) for headline in headlines}


def _cell(headline: Headline, tables: Mapping[str, Table], small: bool) -> Cell:
    found = [table for name, table in tables.items() if name in (headline.table, headline.alone)]
    if small and headline.small:
        found += [table for name, table in tables.items() if name.startswith(f"{headline.alone}-")]
    for table in found:
        for row in _rows(table, {**headline.row, **(headline.small if small else {})}):
            if headline.over is None:
                return row[headline.column]
            together = {"run": row["run"].values[0]} if "run" in row else {}  # times of two runs are not compared
            for over in _rows(table, {**headline.over, **together}):
                return _ratio(row[headline.column], over[headline.column])
    return number(None, "")


def _ratio(cell: Cell, other: Cell) -> Cell:
    if cell.values[0] is None or not other.values[0]:
        return number(None, "")
    return number(cell.values[0] / other.values[0], ".2f", "x")


def _compared(committed: Cell, now: Cell) -> Cell:
    """The ratio; of differences, which may be zero, whether their intervals meet."""
    if committed.values[0] is None or now.values[0] is None:
        return number(None, "")
    if len(committed.values) < 3:
        return number(now.values[0] / committed.values[0], ".2f") if committed.values[0] else number(None, "")
    (low, high), (other_low, other_high) = committed.values[1:3], now.values[1:3]
    if None in (low, high, other_low, other_high):
        return word("one seed")
    return word("intervals meet" if low <= other_high and other_low <= high else "intervals apart")


def _rows(table: Table, wanted: Mapping[str, Any]) -> Iterator[dict[str, Cell]]:
    """All rows with these values: the cell behind each of its names."""
    for cells in table.rows:
        row = {
            name: (cell, value) for c, cell in zip(table.columns, cells) for name, value in zip(c.names, cell.values)
        }
        if all(name in row and row[name][1] == value for name, value in wanted.items()):
            yield {name: cell for name, (cell, _) in row.items()}
