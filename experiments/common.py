"""Helpers that reports of experiments share."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from packmamba.report.aggregate import Record, of_kind
from packmamba.report.html import Kind
from packmamba.report.tables import Column, Table


def make_columns(text: str) -> list[Column]:
    """Make columns of ``title = name name | !title = name | name``: ``!`` for words, a title alone is its own name."""
    made = []
    for part in text.split(" | "):
        title, _, names = part.removeprefix("!").partition(" = ")
        made.append(Column(title, tuple((names or title).split()) if names else (title,), not part.startswith("!")))
    return made


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


def without_speeds(kind: Kind) -> Kind:
    """Leave out the speed of training runs that shared a machine; timings of arms in turns have tables of their own."""

    def tables(records: Sequence[Record]) -> list[Table]:
        made = kind.tables(records)
        for table in made:
            kept = [i for i, c in enumerate(table.columns) if c.names[0] not in ("real_tokens_per_second", "speedup")]
            if table.name == "training":
                table.columns = [table.columns[i] for i in kept]
                table.rows = [[row[i] for i in kept] for row in table.rows]
                table.notes = [note for note in table.notes if not note.startswith("Speed")]
        return made

    return replace(kind, tables=tables)
