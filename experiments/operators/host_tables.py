"""Table of the host's time for an eager call of each operator."""

from __future__ import annotations

from collections.abc import Sequence

from packmamba.report.aggregate import Record, of_kind
from packmamba.report.tables import Cell, Column, Table, word

PHASES = {
    "forward": "without gradients",
    "recorded": "gradients recorded",
    "backward": "backward",
    "floor": "backward's floor",
    "one_by_one": "backward, one by one",
}
METRICS = tuple(f"{phase}_{what}" for phase in PHASES for what in ("seconds", "spread"))
_NAMES = {"scan": "ssm_pack", "conv": "conv1d_pack"}


def host_tables(records: Sequence[Record]) -> list[Table]:
    """One table: of equal arms the latest record counts."""
    arms = {record["arm"]: record for record in of_kind(records, "host_time")}
    table = Table(
        "host-time",
        "The host's time for one eager call (us)",
        [
            Column("operator", ("operator",), False),
            Column("arguments", ("arguments",), False),
            Column("implementation", ("implementation",), False),
            *(Column(title, (f"{phase}_us", f"{phase}_spread_us")) for phase, title in PHASES.items()),
        ],
    )
    for record in arms.values():
        config, metrics = record["config"], record["metrics"]
        times = [(1e6 * metrics[f"{phase}_seconds"], 1e6 * metrics[f"{phase}_spread"]) for phase in PHASES]
        cells = [Cell(f"{median:.1f} ± {spread:.1f}", (median, spread)) for median, spread in times]
        table.rows.append(
            [
                word(_NAMES[config["operator"]]),
                word(config["arguments"]),
                word(config.get("implementation", "packmamba")),
                *cells,
            ]
        )
    calls = next(iter(arms.values()))["config"]["calls"]
    table.notes = [
        f"Wall time of {calls} calls in a row on a row of 64 tokens and 64 channels; median and interquartile range.",
        "Arguments: all that a Mamba block gives the operator, or as few as it takes.",
        "Backward: one pass through all recorded calls; its floor: of an empty autograd function with as many inputs; one by "
        "one: PyTorch's engine starts for every call.",
    ]
    return [table]
