"""Tables of tokenisation: speed and memory of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packmamba.report import summary
from packmamba.report.kinds import Kind
from packmamba.report.summary import Record
from packmamba.report.tables import Cell, Column, Table, number, word

METRICS = (
    *("seconds", "cpu_seconds", "documents", "tokens", "text_bytes", "documents_per_second", "tokens_per_second"),
    *("text_bytes_per_second", "tokens_per_cpu_second", "peak_memory_bytes", "processes"),
)


def tables(records: Sequence[Record]) -> list[Table]:
    """Medians over rounds, and from the least to the most."""
    by_arm: dict[str, list[Record]] = {}
    for record in summary.of_kind(records, "tokenization"):
        by_arm.setdefault(record["arm"], []).append(record)
    if not by_arm:
        return []
    first = next(iter(by_arm.values()))[0]
    hardware, config = first["hardware"], first["config"]
    table = Table(
        "tokenization",
        f"Documents become tokens on disk ({first['corpus_hash']})",
        [
            Column("arm", ("arm",), False),
            Column("text, GB", ("gigabytes",)),
            Column("rounds", ("rounds",)),
            Column("processes", ("processes",)),
            Column("seconds", ("seconds", "seconds_least", "seconds_most")),
            Column("tokens/s", ("tokens_per_second",)),
            Column("documents/s", ("documents_per_second",)),
            Column("processor seconds", ("cpu_seconds", "cpu_seconds_least", "cpu_seconds_most")),
            Column("tokens a processor second", ("tokens_per_cpu_second",)),
            Column("peak memory, MB", ("peak_memory_megabytes",)),
            Column("seconds until killed", ("seconds_before",)),
            Column("cores of other programs", ("cores_of_others",)),
        ],
        notes=[
            f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB. Medians over rounds, in "
            "brackets the least and the most. Seconds are from a process's start to its end, the check of every byte included; "
            "other programs ran meanwhile: compare processor seconds. Memory is the largest sum over all processes, the "
            f"most of any round. bpe: a tokenizer of {config['vocabulary']:,} tokens, trained on the same text."
        ],
    )  # fmt: skip
    for arm, some in by_arm.items():
        table.rows.append([
            word(arm), number(some[0]["config"]["gigabytes"], "g"), number(len(some), "d"),
            number(max(_all(some, "processes")), ".0f"), _spread(some, "seconds"), _median(some, "tokens_per_second"),
            _median(some, "documents_per_second"), _spread(some, "cpu_seconds"), _median(some, "tokens_per_cpu_second"),
            number(max(_all(some, "peak_memory_bytes")) / 1e6, ",.0f"), _median(some, "seconds_before", ".1f"),
            _median(some, "cores_of_others", ".1f"),
        ])  # fmt: skip
    return [table]


def _all(records: Sequence[Record], metric: str) -> list[Any]:
    return [value for record in records if (value := record["metrics"].get(metric)) is not None]


def _median(records: Sequence[Record], metric: str, form: str = ",.0f") -> Cell:
    values = _all(records, metric)
    return number(float(np.median(values)) if values else None, form)


def _spread(records: Sequence[Record], metric: str) -> Cell:
    values = _all(records, metric)
    middle, least, most = float(np.median(values)), min(values), max(values)
    text = f"{middle:,.1f}" if len(values) == 1 else f"{middle:,.1f} [{least:,.1f}, {most:,.1f}]"
    return Cell(text, (middle, least, most))


def legend(records: Sequence[Record]) -> dict[str, str]:
    """What each arm reads, and by what it becomes tokens."""
    found = {}
    for record in summary.of_kind(records, "tokenization"):
        c = record["config"]
        text = "text made as it is read" if c["format"] == "generated" else f"{c['format']} files"
        found[record["arm"]] = (
            f"{c['gigabytes']:g} GB of {text}, {'bytes' if c['tokenizer'] == 'bytes' else 'a trained tokenizer'}"
            + ("" if c["processes"] is None else f", {c['processes']} process")
            + ("" if c["killed_at"] is None else f", killed at {c['killed_at']:.0%} of the tokens and run again")
        )
    return found


def label(records: Sequence[Record]) -> str:
    return records[0]["config"]["distribution"]


KINDS = {"tokenization": Kind(tables, label=label, metrics=METRICS, arms=legend)}
