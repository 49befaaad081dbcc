"""Helpers that reports of experiments share."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from packmamba.lab.report.aggregate import Record, of_kind
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import Estimate, Ruling
from packmamba.lab.report.tables import Cell, Table, gibibytes, interval_text, mean_sd, number, p_cell, percent, word
from packmamba.lab.report.tables import make_columns as make_columns


class PeakMemory:
    """Measure peak GPU memory since construction; ``held``: bytes in use then."""

    def __init__(self, device: torch.device | str) -> None:
        self.gpu, self.held = torch.device(device).type == "cuda", 0
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()

    def bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.gpu else None


def steps_of(count: int) -> tuple[str, ...]:
    """Return the keys of runs of so many steps."""
    return tuple(f"trainer.{key}={count}" for key in ("max_steps", "validate_every", "checkpoint_every"))


def suffixed(suffix: str, *arms: str) -> str:
    return ",".join(f"{arm}-{suffix}" for arm in arms)


def make_table(name: str, title: str, columns: str, rows: Iterable[Mapping[str, Any]], *notes: str) -> Table:
    """Make a table of rows by column name, ``columns`` as in make_columns, each with a format: ``title = name:,.1f x``.

    The format's unit is ``%`` (a share), ``GiB``, ``p`` or a suffix; ``name±:.4g ± .2g`` are name and name_spread in a cell,
    ``name[]`` name, name_low and name_high of an Estimate, with so many digits. ``~`` is a space in a name. Words have no
    format. A Cell is taken as it is, of a Series mean and standard deviation.
    """
    columns = re.sub(r"(\w+)±(?=[ :]|$)", r"\1 \1_spread", re.sub(r"(\S+)\[\]", r"\1 \1_low \1_high", columns))
    parts = [
        part.rpartition(":") if ":" in part.rpartition(" = ")[2] else (part, "", "") for part in columns.split(" | ")
    ]
    made = make_columns(" | ".join(part for part, _, _ in parts))
    made = [c._replace(names=tuple(name.replace("~", " ") for name in c.names)) for c in made]
    forms = [form for _, _, form in parts]
    cells = [[_cell([row.get(n) for n in c.names], form) for c, form in zip(made, forms)] for row in rows]
    return Table(name, title, made, cells, list(notes))


def _cell(values: list[Any], form: str) -> Cell:
    value, (plain, _, unit) = values[0], form.partition(" ")
    if isinstance(value, Cell):
        return value
    if isinstance(value, pd.Series):
        return mean_sd(value)
    if isinstance(value, Estimate):
        return _interval_cell(value, int(plain or 4), len(values))
    if len(values) > 2 or (len(values) > 1 and not form):
        return Cell("-", tuple(values))
    if unit.startswith("±"):
        shown = "-" if value is None else " ± ".join(f"{v:{f}}" for v, f in zip(values, form.split(" ± ")))
        return Cell(shown, tuple(values))
    of_unit = {"%": percent, "GiB": gibibytes, "p": p_cell}
    return of_unit[form](value) if form in of_unit else number(value, plain, unit) if form else word(str(value))


def _interval_cell(found: Estimate, digits: int, count: int) -> Cell:
    """Format an estimate with its interval, if it has one, in so many columns."""
    if math.isnan(found.mean):
        return Cell("-", (None,) * count)
    text = interval_text(found[:3], f"+.{digits}f") + " (no claim)" * math.isnan(found.low)
    return Cell(text, tuple(found[:count]))


def ruled(ruling: Ruling) -> dict[str, Any]:
    """Return a row's cells for a contrast that was ruled on: ``difference[]``, two p, and two verdicts."""
    row = {"difference": ruling.estimate, "verdict": ruling.verdict, "registered": ruling.by_interval}
    return row | {"p_difference": ruling.p_difference, "p_equivalence": ruling.p_equivalence}


def ruled_columns(margin: float, alone: str = "as registered") -> str:
    """Return make_table's columns for the cells of ``ruled`` but the difference; ``alone``: the verdict without Holm."""
    p = "p of difference, Holm = p_difference:p | p of equivalence, Holm = p_equivalence:p"
    return f"!verdict, margin ± {margin} = verdict | !{alone} = registered | {p}"


def hardware(record: Record) -> str:
    """Name a record's GPU, else its CPU."""
    return next(iter(record["hardware"]["gpus"]), record["hardware"]["cpu"])


def latest(records: Iterable[Record], kind: str) -> dict[str, Record]:
    """Select records of a kind by arm, of equal ones the latest."""
    return {record["arm"]: record for record in sorted(of_kind(records, kind), key=lambda record: record["time"])}


def named_by(kind: str, key: str) -> Callable[[Sequence[Record]], str]:
    """Name records of a kind by a key of their configuration."""
    return lambda records: of_kind(records, kind)[0]["config"][key]


def records_of(records: Iterable[Record], kind: str) -> list[Record]:
    """Select records of a kind; those made when an arm was only a name get its fields from old_arms.csv."""
    found = []
    for record in of_kind(records, kind):
        config = record["config"]
        fields = _fields().get((record["experiment"], kind, record["arm"], config.get("operator", "")), {})
        found.append(record if fields.keys() <= config.keys() else {**record, "config": {**config, **fields}})
    return found


@functools.cache
def _fields() -> dict[tuple[str, ...], dict[str, object]]:
    """Read the fields that each old arm stood for from old_arms.csv."""
    found = {}
    with (Path(__file__).parent / "old_arms.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row.pop(name) for name in ("experiment", "kind", "arm", "old_operator"))
            plain = {name: text in ("true", "false", "null") or text.isdecimal() for name, text in row.items()}
            found[key] = {name: json.loads(text) if plain[name] else text for name, text in row.items() if text}
    return found


def without_speeds(kind: Kind, *more: Callable[..., list[Table]]) -> Kind:
    """Leave out the speed of training runs that shared a machine, which timings of arms in turns have; add tables."""

    def tables(records: Sequence[Record], **others: Any) -> list[Table]:
        made = kind.tables(records)
        for table in made:
            kept = [i for i, c in enumerate(table.columns) if c.names[0] not in ("real_tokens_per_second", "speedup")]
            if table.name == "training":
                table.columns = [table.columns[i] for i in kept]
                table.rows = [[row[i] for i in kept] for row in table.rows]
                table.notes = [note for note in table.notes if not note.startswith("Not timed")]
        return made + [table for make in more for table in make(records, **others)]

    return replace(kind, tables=tables)
