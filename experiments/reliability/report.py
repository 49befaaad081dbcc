"""Tables of what is promised of long and large runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from packmamba.report import summary
from packmamba.report.figures import Figure, axes, finish, legend_below, style_of
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
    "step_over_yardstick": ("a step over the same step in a program beside it", 1, ".4f"),
}
"""What is watched: its name, the unit, the digits."""

FLAT: dict[str, float | str] = {
    "anonymous_bytes": 10e6,
    "open_files": 10,
    "disk_bytes": 10e6,
    "seconds_per_step": "5 %",
    "cpu_seconds_per_step": "2 %",
    "step_over_yardstick": "5 %",
}
"""The trend an hour, or its share of the beginning, up to which each is flat. Pages of mapped files are the system's to keep."""


EVER = [name for name in SOAK if name != "step_over_yardstick"]
"""What records of all ages have."""
DRAWN = ("anonymous_bytes", "open_files", "seconds_per_step", "cpu_seconds_per_step")
ENDS = ("begin", "end", "slope", "slope_low", "slope_high")


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
                Column("flat is within", ("limit",)),
                Column("flat", ("flat",), False),
            ],
            notes=[
                f"Beginning and end are means over {1 / c['blocks']:.1%} of the time, after the first {c['warm_up']:.0%}. The "
                f"trend is a line through {c['blocks']} such means, with its 95 % interval. "
                f"{record['hardware']['cores']} cores, on which "
                f"other programs kept {m['cores_of_others']:.1f} busy: compare processor time, not time.",
                "Flat: yes, if the whole interval is within what stands before it; no, if all of it is outside; else not "
                "shown.",
            ],
        )
        for name, (said, unit, digits) in SOAK.items():
            if f"{name}_slope" not in m:  # of a record that is older than what it would be held against
                continue
            begin, end, *slope = (_over(m[f"{name}_{what}"], unit) for what in ENDS)
            text = "-" if None in slope else "{:+{d}} [{:+{d}}, {:+{d}}]".format(*slope, d=digits)
            limit = flat_within(m, name)
            least = "-" if limit is None else f"±{limit / unit:{digits}}"
            table.rows.append([
                word(said), number(begin, digits), number(end, digits), Cell(text, tuple(slope)), Cell(least, (limit,)),
                word(flat(m, name)),
            ])  # fmt: skip
        tables.append(table)
    return tables


def flat_within(metrics: Mapping[str, Any], name: str) -> float | None:
    """Of what is watched, the most of a trend that is flat; None: it is not judged."""
    limit = FLAT.get(name)
    return float(limit[:-2]) / 100 * metrics[f"{name}_begin"] if isinstance(limit, str) else limit


def flat(metrics: Mapping[str, Any], name: str) -> str:
    """Whether a trend is within its limit, by its 95 % interval."""
    limit, low, high = flat_within(metrics, name), metrics[f"{name}_slope_low"], metrics[f"{name}_slope_high"]
    if limit is None or low is None or high is None:
        return "-"
    return "yes" if -limit <= low <= high <= limit else "no" if low > limit or high < -limit else "not shown"


def soak_figures(records: Sequence[Record]) -> list[Figure]:
    """What a long run holds, look by look, and its trend."""
    figures = []
    for place, record in enumerate(summary.of_kind(records, "soak")):
        m, samples = record["metrics"], record["curves"]["samples"]
        minutes = [sample["seconds"] / 60 for sample in samples]
        first = minutes[int(len(minutes) * record["config"]["warm_up"])]
        fig, panels = axes(len(DRAWN), width=13)
        for ax, name in zip(panels, DRAWN):
            said, unit, _ = SOAK[name]
            values = [sample[name] / unit for sample in samples]
            ax.plot(minutes, values, ".", markersize=2.5, color=style_of("single")["color"], label="a look")
            middle = (first + minutes[-1]) / 2
            mean = float(np.mean([value for minute, value in zip(minutes, values) if minute >= first]))
            ends = (first, minutes[-1])
            trend = [mean + m[f"{name}_slope"] / unit * (minute - middle) / 60 for minute in ends]
            ax.plot(ends, trend, label="its trend", **(style_of("packed-reset") | {"linewidth": 2}))
            ax.set(title=said, xlabel="minutes", ylim=(0, 1.3 * np.percentile(values, 99)))
        legend_below(fig)
        caption = f"One run of {m['minutes']:.0f} minutes. The trend leaves the first looks out."
        figures.append(finish(fig, "soak" if place == 0 else f"soak-{place + 1}", caption))
    return figures


def scale_tables(records: Sequence[Record]) -> list[Table]:
    """The memory that large corpora take."""
    found = summary.of_kind(records, "scale")
    if not found:
        return []
    table = Table(
        "scale",
        "Memory of one process that plans or streams a corpus",
        [
            Column("what", ("arm",), False),
            Column("documents", ("documents",)),
            Column("mapped file, GB", ("bytes",)),
            Column("steps", ("steps",)),
            Column("before it begins, MB", ("start_resident_bytes",)),
            Column("most, MB", ("peak_resident_bytes",)),
            Column("of it its own, MB", ("peak_anonymous_bytes",)),
            Column("processor seconds", ("cpu_seconds",)),
        ],
        notes=[
            "Most: resident memory, with the pages of mapped files that the process has read and not given back. Its own: "
            "without them. Before it begins: Python, PyTorch and this library. Looked at every 50 ms."
        ],
    )
    names = {"lengths": "lengths planned, every step of an epoch", "tokens": "tokens streamed, from all over the store"}
    for record in found:
        m = record["metrics"]
        table.rows.append([
            word(names[record["arm"]]), number(m["documents"], ",.0f"), _in(m["bytes"], 1e9, ".2f"), number(m["steps"], ",.0f"),
            *(_in(m[name], 1e6) for name in ("start_resident_bytes", "peak_resident_bytes", "peak_anonymous_bytes")),
            number(m["cpu_seconds"], ",.0f"),
        ])  # fmt: skip
    return [table]


def _device(records: Sequence[Record]) -> str:
    return "gpu" if records[0]["hardware"]["gpus"] else "cpu"


def determinism_tables(records: Sequence[Record]) -> list[Table]:
    """Which runs have the first one's bits, and how far the others are from it."""
    found = list(
        {record["arm"]: record for record in summary.of_kind(records, "determinism")}.values()
    )  # the newest of each
    if not found:
        return []
    metrics = found[0]["metrics"]
    table = Table(
        "determinism",
        f"The same run of {metrics['steps']} steps and {metrics['parameters']:,} parameters, against the first",
        [
            Column("run", ("arm",), False),
            Column("tensors of weights that differ", ("weights_that_differ",)),
            Column("weights: relative difference", ("weights_relative_difference",)),
            Column("last loss: relative difference", ("loss_relative_difference",)),
            Column("first step whose loss differs", ("first_step_that_differs",)),
        ],
        notes=[f"The norm of the difference of all weights over their norm; 0 is to the bit. {_machine(found[0])}."],
    )
    for record in found:
        m = record["metrics"]
        table.rows.append([
            word(record["arm"]), number(m["weights_that_differ"], "d"), _apart(m["weights_relative_difference"]),
            _apart(m["loss_relative_difference"]), number(m["first_step_that_differs"], ".0f"),
        ])  # fmt: skip
    return [table]


def checkpoint_tables(records: Sequence[Record]) -> list[Table]:
    """How long a checkpoint stops training, and how long it takes."""
    found = summary.of_kind(records, "checkpoint")
    if not found:
        return []
    table = Table(
        "checkpoint",
        "A checkpoint that is written while training goes on",
        [
            Column("parameters", ("parameters",)),
            Column("GB", ("checkpoint_bytes",)),
            Column("a step, s", ("seconds_per_step",)),
            Column("training waits for the first, s", ("copy_seconds_first",)),
            Column("for a later one, s", ("copy_seconds",)),
            Column("written in, s", ("write_seconds",)),
            Column("a step meanwhile, s", ("seconds_per_step_beside",)),
            Column("the longest, s", ("seconds_per_step_beside_most",)),
            Column("a plain copy of as much, s", ("plain_copy_seconds",)),
            Column("other programs, cores", ("cores_of_others",)),
            Column("machine", ("machine",), False),
        ],
        notes=[
            "Training waits while the state is copied to the host's memory, which the first has to take from the system. Steps "
            "are medians. A plain copy: of 1 GiB, into memory that is there. Copies into such memory are medians of three."
        ],
    )
    for record in found:
        m = record["metrics"]
        table.rows.append([
            number(m["parameters"], ",d"), _in(m["checkpoint_bytes"], 1e9, ".1f"), number(m["seconds_per_step"], ".3f"),
            *(number(m[name], ".2f") for name in ("copy_seconds_first", "copy_seconds", "write_seconds")),
            number(m["seconds_per_step_beside"], ".3f"), number(m["seconds_per_step_beside_most"], ".3f"),
            _plain(m["checkpoint_bytes"], m["host_bytes_per_second"]), number(m.get("cores_of_others"), ".1f"),
            word(_machine(record)),
        ])  # fmt: skip
    return [table]


def _plain(size: float, rate: float | None) -> Cell:
    return number(None if rate is None else size / rate, ".2f")


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _machine(record: Record) -> str:
    return ", ".join(record["hardware"]["gpus"]) or f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores"


def _in(value: float, unit: float, digits: str = ",.0f") -> Cell:
    return Cell(f"{value / unit:{digits}}", (value,))


def _apart(value: float) -> Cell:
    return Cell("0" if value == 0 else f"{value:.1e}", (value,))


MEMORY = (
    "documents",
    "bytes",
    "steps",
    "start_resident_bytes",
    "peak_resident_bytes",
    "peak_anonymous_bytes",
    "cpu_seconds",
)
APART = ("steps", "parameters", "weights_that_differ", "weights_relative_difference", "loss_relative_difference")

CHECKPOINT = (
    "parameters",
    "checkpoint_bytes",
    "seconds_per_step",
    "copy_seconds_first",
    "copy_seconds",
    "write_seconds",
)

KINDS = {
    "soak": Kind(
        soak_tables,
        soak_figures,
        metrics=("steps", "minutes", *(f"{name}_{what}" for name in EVER for what in ("begin", "end", "slope"))),
    ),
    "scale": Kind(scale_tables, metrics=MEMORY),
    "checkpoint": Kind(checkpoint_tables, metrics=CHECKPOINT),
    "determinism": Kind(determinism_tables, metrics=(*APART, "first_step_that_differs"), label=_device),
}
