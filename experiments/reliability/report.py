"""Tables of what is promised of long and large runs."""

from __future__ import annotations

from collections.abc import Sequence

from packmamba.report import summary
from packmamba.report.kinds import Kind
from packmamba.report.summary import Record
from packmamba.report.tables import Cell, Column, Table, number, word

SOAK = {
    "anonymous_bytes": ("memory of its own, MB", 1e6, ",.1f"),
    "resident_bytes": ("memory with pages of mapped files, MB", 1e6, ",.1f"),
    "open_files": ("open files", 1, ".2f"),
    "disk_bytes": ("the run's folder, MB", 1e6, ".2f"),
    "seconds_per_step": ("a step, ms", 1e-3, ".1f"),
    "cpu_seconds_per_step": ("a step, processor ms", 1e-3, ".2f"),
}
"""What is watched: its name, the unit, the digits."""


def soak_tables(records: Sequence[Record]) -> list[Table]:
    """What a long run holds when it begins and when it ends, and its trend."""
    tables = []
    for place, record in enumerate(summary.of_kind(records, "soak")):
        m, c = record["metrics"], record["config"]
        table = Table(
            "soak" if place == 0 else f"soak-{place + 1}",
            f"One run of {m['minutes']:.0f} minutes: {m['steps']:,} steps, {m['evaluations']} evaluations, "
            f"{m['checkpoints']} checkpoints",
            [
                Column("watched", ("watched",), False),
                Column("at its beginning", ("begin",)),
                Column("at its end", ("end",)),
                Column("trend, per hour", ("slope", "slope_low", "slope_high")),
            ],
            notes=[
                f"Beginning and end are means over {1 / c['blocks']:.1%} of the time, after the first {c['warm_up']:.0%}. The "
                f"trend is a line through {c['blocks']} such means, with its 95 % interval. "
                f"{record['hardware']['cores']} cores, on which "
                f"other programs kept {m['cores_of_others']:.1f} busy: compare processor time, not time."
            ],
        )
        for name, (said, unit, digits) in SOAK.items():
            begin, end, *slope = (
                m[f"{name}_{what}"] / unit for what in ("begin", "end", "slope", "slope_low", "slope_high")
            )
            text = "{:+{d}} [{:+{d}}, {:+{d}}]".format(*slope, d=digits)
            table.rows.append([word(said), number(begin, digits), number(end, digits), Cell(text, tuple(slope))])
        tables.append(table)
    return tables


KINDS = {
    "soak": Kind(
        soak_tables,
        metrics=("steps", "minutes", *(f"{name}_{what}" for name in SOAK for what in ("begin", "end", "slope"))),
    )
}
