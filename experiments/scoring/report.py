"""Tables and figures of scoring and generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common import make_columns
from packmamba.report import aggregate
from packmamba.report.aggregate import Record
from packmamba.report.html import Kind
from packmamba.report.tables import Table, gibibytes, number, word

METHODS = {"packed": "packed passes", "padded": "padded batches, same kernels", "hf": "lm-eval's class hf"}


def _latest(records: Sequence[Record], kind: str) -> dict[str, Record]:
    """By arm, of equal ones the latest."""
    return {r["arm"]: r for r in sorted(aggregate.of_kind(records, kind), key=lambda r: r["time"])}


def scoring_tables(records: Sequence[Record]) -> list[Table]:
    """Requests per second of every arm; ``records`` are of one workload."""
    arms = _latest(records, "scoring")
    if not arms:
        return []
    first = next(iter(arms.values()))
    config = first["config"]
    hardware = ", ".join(first["hardware"]["gpus"]) or first["hardware"]["cpu"]
    table = Table(
        "scoring",
        f"Scoring, {config['workload']}: {config['contexts']} contexts of {config['context']} tokens (median), "
        f"{config['continuations']} continuation(s) of {config['continuation']}",
        make_columns(
            "!arm | !method | requests/s = requests_per_second | seconds | "
            "interquartile range = seconds_spread | over packed = over_packed | "
            "peak memory = peak_memory_bytes | largest difference, nats a token = largest_difference | "
            "greedy verdicts that differ = greedy_flips | best choices that differ = choice_flips"
        ),
        notes=[
            f"{config['model']}, {config['dtype']}, random weights; {hardware}; medians of {config['rounds']} rounds in "
            f"turns, {first['metrics']['requests']} requests. Differences are from packed scores with shared contexts; "
            "over packed: packed's requests per second over the arm's."
        ],
    )
    ours = arms.get("packed")
    for arm, record in arms.items():
        m = record["metrics"]
        over = ours["metrics"]["requests_per_second"] / m["requests_per_second"] if ours else None
        table.rows.append([
            word(arm), word(METHODS[record["config"]["method"]]), number(m["requests_per_second"], ",.1f"),
            number(m["seconds"], ".3f"), number(m["seconds_spread"], ".3f"), number(over, ".2f", "x"),
            gibibytes(m["peak_memory_bytes"]), number(m["largest_difference"], ".2g"), number(m["greedy_flips"], "d"),
            number(m["choice_flips"], "d"),
        ])  # fmt: skip
    return [table]


def generation_tables(records: Sequence[Record]) -> list[Table]:
    """Prefill and tokens per second; ``records`` are of one number of prompts."""
    table = Table(
        "generation",
        "Generation: prompts read packed, then one token a step for all",
        make_columns(
            "prompts | prompt tokens = prompt_tokens | prefill tokens/s = prefill_tokens_per_second | "
            "prefill seconds = prefill_seconds | interquartile range = prefill_spread | "
            "tokens/s = tokens_per_second | milliseconds a step = step_seconds | "
            "spread, ms = step_spread | peak memory = peak_memory_bytes"
        ),
    )
    for record in sorted(_latest(records, "generation").values(), key=lambda r: r["config"]["prompts"]):
        m: Mapping[str, Any] = record["metrics"]
        table.rows.append([
            number(record["config"]["prompts"], "d"), number(m["prompt_tokens"], ",d"),
            number(m["prefill_tokens_per_second"], ",.0f"), number(m["prefill_seconds"], ".4f"),
            number(m["prefill_spread"], ".4f"), number(m["tokens_per_second"], ",.0f"),
            number(1e3 * m["step_seconds"], ".2f"), number(1e3 * m["step_spread"], ".2f"), gibibytes(m["peak_memory_bytes"]),
        ])  # fmt: skip
    return [table] if table.rows else []


DTYPES = ("float64", "float32", "bfloat16")


def exactness_tables(records: Sequence[Record]) -> list[Table]:
    """Packed scores beside those of one request at a time, a row for each dtype."""
    table = Table(
        "exactness",
        "Packed scores, one request at a time, and in another order",
        make_columns(
            "!weights = dtype | !model | !device | requests | "
            "largest difference, nats = largest_difference | a token = largest_difference_a_token | "
            "relative = largest_relative | greedy verdicts that differ = greedy_flips | "
            "of so many that are greedy = greedy | best choices that differ = choice_flips | "
            "differ by a bit: shuffled = shuffled_differ | asked in three parts = split_differ | "
            "contexts not shared = unshared_differ"
        ),
        notes=[
            "Random weights. The largest difference is of a request's whole log-likelihood. A context's first continuation is "
            "what greedy decoding says, about 16 tokens: one of them that turns is a verdict that differs."
        ],
    )
    found = sorted(aggregate.of_kind(records, "exactness"), key=lambda r: r["time"])
    latest = {(r["arm"], r["config"]["model"], r["config"]["device"]): r for r in found}
    for (dtype, *_), record in sorted(latest.items(), key=lambda item: (DTYPES.index(item[0][0]), item[0])):
        m, config = record["metrics"], record["config"]
        hardware = record["hardware"]["cpu"] if config["device"] == "cpu" else record["hardware"]["gpus"][0]
        table.rows.append([
            word(dtype), word(config["model"]), word(hardware), number(m["requests"], "d"),
            number(m["largest_difference"], ".2g"), number(m["largest_difference_a_token"], ".2g"),
            number(m.get("largest_relative"), ".2g"),
            *(number(m[name], "d") for name in
              ("greedy_flips", "greedy", "choice_flips", "shuffled_differ", "split_differ", "unshared_differ")),
        ])  # fmt: skip
    return [table] if table.rows else []


KINDS = {
    "exactness": Kind(
        exactness_tables,
        label=lambda records: aggregate.of_kind(records, "exactness")[0]["config"]["device"],
    ),
    "scoring": Kind(
        scoring_tables,
        label=lambda records: aggregate.of_kind(records, "scoring")[0]["config"]["workload"],
    ),
    "generation": Kind(generation_tables),
}
