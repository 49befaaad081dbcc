"""The tables and the figure of Trainer's speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.common import hardware, named_by
from experiments.timing import median, spread
from packmamba.lab.report import aggregate
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.html import Kind
from packmamba.lab.report.statistics import interval
from packmamba.lab.report.tables import Cell, Table, make_table

BATCHES = {"padded": "padded", "grouped": "sorted by length, padded", "flattened": "flattened"}
KERNELS = {"mamba_ssm": "mamba-ssm's, by transformers", "torch": "none: transformers' slow path", None: "ours"}


def tables(records: Sequence[Record]) -> list[Table]:
    runs: dict[str, dict[str, Record]] = {}  # by commit: ratios are of one run
    for record in sorted(aggregate.of_kind(records, "integration"), key=lambda record: record["time"], reverse=True):
        runs.setdefault(record["commit"], {}).setdefault(record["arm"], record)
    newest = next(iter(runs.values()))
    first = newest.get("padded") or next(iter(newest.values()))
    config = first["config"]
    table = make_table(
        "integration",
        f"A Hugging Face Mamba of {config['model']} in Trainer, {config['precision']}",
        "!card | !arm | !batches | !kernels | non-padding tokens/s = real_tokens_per_second:,.0f | "
        "interquartile range = real_tokens_per_second_spread:,.0f | patched over it [95% CI] = patched_over[] | "
        "padding = padding_fraction:% | "
        "peak memory = peak_memory_bytes:GiB | loss, first step = first_loss:.4f | loss, last ten steps = last_loss:.4f | "
        "off from single documents = difference:.1e | turns = turns:d",
        [
            record["metrics"]
            | {"card": hardware(record).removeprefix("NVIDIA "), "arm": arm, "turns": record["config"]["rounds"]}
            | {"patched_over": _over(arms.get("patched"), record)}
            | {"batches": BATCHES[record["config"]["batches"]], "kernels": KERNELS[record["config"]["kernels"]]}
            for arms in runs.values()
            for arm, record in sorted(arms.items(), key=lambda item: _place(item[1]))
        ],
        f"Whole optimizer steps; medians of turns of {config['steps']} steps of {config['documents_per_step']} documents "
        f"({config['distribution']}: our choice; slow-path: a step of two), in which the arms of a run alternate; transformers "
        f"{' and '.join(dict.fromkeys(arms[arm]['config']['transformers'] for arms in runs.values() for arm in arms))}. "
        "-8: rows padded to a multiple of 8 tokens. Patched over it: the mean over turns of that run, 95 % intervals by "
        "Student's t. Off from single documents: logits in float32, relative, from transformers' path without kernels on each "
        "document alone. Losses are nats per byte.",
    )
    return [table]


def trainer_tables(records: Sequence[Record]) -> list[Table]:
    """A row for each model, and one for each of its arms."""
    models: dict[str, dict[str, Record]] = {}
    for record in sorted(aggregate.of_kind(records, "trainer"), key=lambda record: record["time"]):
        models.setdefault(record["config"]["model"], {})[record["arm"]] = _after_first_turn(record)
    first = next(iter(next(iter(models.values())).values()))
    config, rows, every = first["config"], [], []
    rounds = {record["config"]["rounds"] for arms in models.values() for record in arms.values()}
    turns = " or ".join(str(many - 1) for many in sorted(rounds) if many > 1)
    versions = " or ".join(sorted({r["config"]["transformers"] for arms in models.values() for r in arms.values()}))
    for model, arms in models.items():
        row: dict[str, Any] = {"model": model, "parameters": next(iter(arms.values()))["config"]["parameters"] / 1e6}
        for arm, record in arms.items():
            over = _over(arms.get("packed"), record, extremes=True)
            row |= {f"{arm}_{name}": value for name, value in record["metrics"].items()} | {f"over_{arm}": over}
            fields = {"model": model, "arm": arm, "batches": BATCHES[record["config"]["batches"]], "packed_over": over}
            fields |= {"kernels": KERNELS[record["config"]["kernels"]], "error": record["config"]["error"] or "-"}
            every.append(record["metrics"] | fields)
        rows.append(row)
    where = (
        f"{hardware(first)}; {config['precision']}; transformers {versions}; medians of {turns} interleaved turns of "
        f"{config['steps']} steps of {config['documents_per_step']} documents ({config['distribution']}: our choice), behind "
        "a first one in which kernels are compiled and tuned (of arms with one turn: it)"
    )
    speed, ours = "real_tokens_per_second", "packed_real_tokens_per_second"
    return [
        make_table(
            "trainer",
            "Small models with random weights in Trainer: packed beside padded",
            f"!model | million parameters = parameters:.0f | padded, non-padding tokens/s = padded_{speed}:,.0f | "
            f"sorted = grouped_{speed}:,.0f | packed = {ours}:,.0f | without kernels = slow-path_{speed}:,.0f | "
            "packed over padded [min, max] = over_padded[] | "
            "packed over sorted [min, max] = over_grouped[] | "
            "padded, peak memory = padded_peak_memory_bytes:GiB | packed, peak memory = packed_peak_memory_bytes:GiB | "
            "loss off in float32 = packed_loss_difference:.1e",
            rows,
            f"{where}. Padded and sorted run on mamba-ssm's and causal-conv1d's kernels, by transformers. Loss off: packed "
            "from padded on transformers' path without kernels, nats per target.",
        ),
        make_table(
            "trainer-arms",
            "All arms in Trainer",
            f"!model | !arm | !batches | !kernels | non-padding tokens/s = {speed}:,.0f | "
            f"interquartile range = {speed}_spread:,.0f | "
            "packed over it [min, max] = packed_over[] | padding = padding_fraction:% | "
            "peak memory = peak_memory_bytes:GiB | loss, first step = first_loss:.4f | loss, last steps = last_loss:.4f | "
            "off from single documents = difference:.1e | loss off in float32 = loss_difference:.1e | !error",
            every,
            f"{where}.",
        ),
    ]


def _after_first_turn(record: Record) -> Record:
    turns = record["curves"]["turns"]
    rates = [turn["real_tokens_per_second"] for turn in turns[1:] or turns]
    speeds = {"real_tokens_per_second": median(rates), "real_tokens_per_second_spread": spread(rates)} if rates else {}
    return {**record, "metrics": record["metrics"] | speeds, "curves": {"turns": turns[1:] or turns}}


def _over(patched: Record | None, record: Record, extremes: bool = False) -> Cell:
    """Patched's speed over the arm's, turn by turn: the mean with its 95 % interval, or the median
    and extremes.
    """
    if patched is None or not (_rates(patched) and _rates(record)):
        return Cell("-", (None,) * 3)
    ratios = pd.Series(_rates(patched)) / pd.Series(_rates(record))
    found = interval(ratios)
    assert found is not None
    if extremes:
        found = found._replace(mean=ratios.median(), low=ratios.min(), high=ratios.max())
    bounds = f" [{found.low:.2f}, {found.high:.2f}]" if found.seeds > 1 and found.low < found.high else ""
    return Cell(f"{found.mean:.2f}x{bounds}", found[:3])


def _rates(record: Record) -> list[float]:
    return [turn["real_tokens_per_second"] for turn in record["curves"]["turns"]]


def _place(record: Record) -> list[Any]:
    """Order a run's arms: the slow path last, as transformers makes them before patched ones, arms
    beside their -8.
    """
    c = record["config"]
    return [c["kernels"] == "torch", c["patched"], list(BATCHES).index(c["batches"]), c.get("multiple_of", 1)]


KINDS = {"integration": Kind(tables, label=named_by("integration", "model")), "trainer": Kind(trainer_tables)}
