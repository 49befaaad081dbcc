"""Helpers that reports of experiments share."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

from packmamba.lab.report.aggregate import Record, of_kind
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import P_COLUMNS, Cell, Table


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


def hardware(record: Record) -> str:
    """Name a record's GPU, else its CPU."""
    return next(iter(record["hardware"]["gpus"]), record["hardware"]["cpu"])


def unit(records: Sequence[Record]) -> str:
    """Name the unit of a document, for training records of one corpus."""
    data = records[0]["config"]["data"]
    return data.get("unit") or data["source"]


def latest(records: Iterable[Record], kind: str) -> dict[str, Record]:
    """Select records of a kind by arm, of equal ones the latest."""
    return {record["arm"]: record for record in sorted(of_kind(records, kind), key=lambda record: record["time"])}


def named_by(kind: str, key: str) -> Callable[[Sequence[Record]], str]:
    """Name records of a kind by a key of their configuration."""
    return lambda records: of_kind(records, kind)[0]["config"][key]


def records_of(records: Iterable[Record], kind: str) -> list[Record]:
    """Select records of a kind; those made when an arm was only a name get its fields from
    old_arms.csv.
    """
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


def row_of(table: str, where: Mapping[str, Any]) -> dict[str, str]:
    """Return the first row of a CSV file's text with these values; empty without one."""
    wanted = {key: str(value) for key, value in where.items()}
    return next((row for row in csv.DictReader(io.StringIO(table)) if wanted.items() <= row.items()), {})


def with_interval(row: Mapping[str, str], column: str) -> list[float]:
    """Return a number of a table's row, with its interval if it has one; [] without a number."""
    return [float(row[name]) for name in (column, f"{column}_low", f"{column}_high") if row.get(name)]


def without_speeds(kind: Kind, *more: Callable[..., list[Table]]) -> Kind:
    """Leave out the speed of training runs that shared a machine, which timings of arms in turns
    have; add tables.
    """

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


def name_bars(ax: Axes, labels: Sequence[str], shown: bool = True) -> None:
    """Name rows from the top down, the first at y = 0."""
    ax.set_yticks(range(len(labels)), labels if shown else [""] * len(labels))
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def of_planned(seeds: int, planned: int, diverged: int = 0) -> Cell:
    """Say how many seeds have a value, if fewer than planned, and how many diverged; values: seeds
    and planned.
    """
    text = f"{seeds} of {planned}" if seeds < planned else str(seeds)
    return Cell(text + f", {diverged} diverged" * bool(diverged), (seeds, planned))


def ruled_columns(margin: float, alone: str = "as registered") -> str:
    """Describe the columns of ``ruled`` but the difference; ``alone``: the verdict without Holm."""
    return f"!verdict, margin ± {margin} = verdict | !{alone} = registered | {P_COLUMNS}"
