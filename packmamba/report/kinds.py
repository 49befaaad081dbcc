"""Tables and figures of each kind of record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from packmamba.records import METRICS
from packmamba.report.aggregate import Record
from packmamba.report.arm_figures import curve_figures, throughput_figures, training_figures
from packmamba.report.arm_tables import (
    arms_evaluation_tables,
    arms_legend,
    curve_tables,
    evaluation_label,
    evaluation_tables,
    throughput_tables,
    training_tables,
)
from packmamba.report.figures import Figure
from packmamba.report.tables import Table

MakeTables = Callable[[Sequence[Record]], list[Table]]
MakeFigures = Callable[[Sequence[Record]], list[Figure]]


def _nothing(records: Sequence[Record]) -> list:
    return []


@dataclass(frozen=True)
class Kind:
    """Functions of all records of one corpus.

    Attributes:
        tables, figures: make those of one kind of record.
        label: tells corpora apart in names of files.
        metrics: that a record of this kind must hold, a number or null each.
        arms: returns what each arm does, by its name in tables.
    """

    tables: MakeTables = _nothing
    figures: MakeFigures = _nothing
    label: Callable[[Sequence[Record]], str] = lambda records: records[0]["corpus_hash"][:12]
    metrics: tuple[str, ...] = ()
    arms: Callable[[Sequence[Record]], dict[str, str]] = lambda records: {}

    def extended(self, tables: MakeTables = _nothing, figures: MakeFigures = _nothing) -> Kind:
        """Return this kind with further tables and figures after its own."""
        return replace(
            self,
            tables=lambda records: [*self.tables(records), *tables(records)],
            figures=lambda records: [*self.figures(records), *figures(records)],
        )


def _curves(kind: str) -> tuple[MakeTables, MakeFigures]:
    return functools.partial(curve_tables, kind=kind), functools.partial(curve_figures, kind=kind)


KINDS: dict[str, Kind] = {
    "training": Kind(training_tables, training_figures, metrics=METRICS["training"], arms=arms_legend)
    .extended(arms_evaluation_tables)
    .extended(*_curves("training")),
    "throughput": Kind(throughput_tables, throughput_figures, metrics=METRICS["throughput"], arms=arms_legend),
    "evaluation": Kind(evaluation_tables, label=evaluation_label).extended(*_curves("evaluation")),
}
"""The library's kinds. An experiment's own are in its report.py."""
