"""What is made of the records of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from packmamba.records import METRICS
from packmamba.report.evaluation import arms_evaluation_tables, evaluation_label, evaluation_tables
from packmamba.report.evaluation_curves import (
    arms_curve_figures,
    arms_curve_tables,
    models_curve_figures,
    models_curve_tables,
)
from packmamba.report.figures import Figure
from packmamba.report.summary import Record
from packmamba.report.tables import Table
from packmamba.report.training import throughput_legend, throughput_tables, training_legend, training_tables
from packmamba.report.training_figures import throughput_figures, training_figures

MakeTables = Callable[[Sequence[Record]], list[Table]]
MakeFigures = Callable[[Sequence[Record]], list[Figure]]


def _nothing(records: Sequence[Record]) -> list:
    return []


def _no_arms(records: Sequence[Record]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Kind:
    """The tables and figures of one kind of record. Every function is given all records of one corpus."""

    tables: MakeTables = _nothing
    figures: MakeFigures = _nothing
    label: Callable[[Sequence[Record]], str] = lambda records: records[0]["corpus_hash"][:12]
    """Tells corpora apart in the names of files."""
    metrics: tuple[str, ...] = ()
    """What the metrics of a record of this kind must hold, a number or null each."""

    arms: Callable[[Sequence[Record]], dict[str, str]] = _no_arms
    """What each arm of the tables does, by its name there: the page's legend."""

    def extended(self, tables: MakeTables = _nothing, figures: MakeFigures = _nothing) -> Kind:
        """This kind with further tables and figures after its own."""
        return replace(
            self,
            tables=lambda records: [*self.tables(records), *tables(records)],
            figures=lambda records: [*self.figures(records), *figures(records)],
        )


KINDS: dict[str, Kind] = {
    "training": Kind(training_tables, training_figures, metrics=METRICS["training"], arms=training_legend)
    .extended(arms_evaluation_tables)
    .extended(arms_curve_tables, arms_curve_figures),
    "throughput": Kind(throughput_tables, throughput_figures, metrics=METRICS["throughput"], arms=throughput_legend),
    "evaluation": Kind(evaluation_tables, label=evaluation_label).extended(models_curve_tables, models_curve_figures),
}
"""What the library knows. An experiment's own kinds are in its report.py."""
