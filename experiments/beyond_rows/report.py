"""Tabulate the library's tables without speeds of shared machines, and how each arm's loss rises
with position.
"""

from collections.abc import Sequence

from experiments.common import without_speeds
from packmamba.lab.report.aggregate import Record, training_arms
from packmamba.lab.report.html import KINDS as LIBRARY
from packmamba.lab.report.statistics import interval
from packmamba.lab.report.tables import Table, make_table

# Ends of octaves of positions: T to 2 T and 4 T to 8 T, which all documents have. T = 512.
NEAR, FAR = 1024, 4096


def failure(records: Sequence[Record]) -> list[Table]:
    """Tabulate how much higher an arm's loss is from 4 T to 8 T than from T to 2 T, over seeds."""
    rows = []
    for arm in training_arms(records):
        points = arm.points("loss_by_position")
        near, far = (points[points["end"] == end].set_index("seed")["loss"] for end in (NEAR, FAR))
        found = interval(far - near)
        if found is not None:
            rows.append({"arm": arm.label, "near": near.mean(), "far": far.mean(), "rise": found, "seeds": len(near)})
    columns = "!arm | T to 2 T = near:.4f | 4 T to 8 T = far:.4f | rise [95% CI] = rise[] | seeds = seeds:.0f"
    return [make_table("failure", "Loss of an arm by position, nats a target; T = 512", columns, rows)]


KINDS = {"training": without_speeds(LIBRARY["training"], failure)}
