"""Arms of records made when an arm was only a name: old_arms.csv has the fields that each name stood for."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable
from pathlib import Path

from packmamba.report.aggregate import Record, of_kind


def records_of(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of a kind, each with its arm's fields in its configuration."""
    return [with_fields(record) for record in of_kind(records, kind)]


def with_fields(record: Record) -> Record:
    """The record itself if its configuration holds its arm's fields or the table does not name its arm."""
    config = record["config"]
    fields = _fields().get(
        tuple(map(str, (record["experiment"], record["kind"], record["arm"], config.get("operator", ""))))
    )
    if fields is None or fields.keys() <= config.keys():
        return record
    return {**record, "config": {**config, **fields}}


@functools.cache
def _fields() -> dict[tuple[str, ...], dict[str, object]]:
    found: dict[tuple[str, ...], dict[str, object]] = {}
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row.pop(name) for name in ("experiment", "kind", "arm", "old_operator"))
            found[key] = {name: _value(text) for name, text in row.items() if text}
    return found


def _value(text: str) -> object:
    return json.loads(text) if text in ("true", "false", "null") or text.isdecimal() else text
