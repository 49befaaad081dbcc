"""Tables and figures of scoring and generation."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common import latest, named_by
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Table, make_table

METHODS = {"packed": "packed passes", "padded": "padded batches, same kernels", "hf": "lm-eval's class hf"}


def scoring_tables(records: Sequence[Record]) -> list[Table]:
    """Requests per second of every arm; ``records`` are of one workload."""
    arms = latest(records, "scoring")
    first = next(iter(arms.values()))
    config, ours = first["config"], arms.get("packed")
    devices = ", ".join(first["hardware"]["gpus"]) or first["hardware"]["cpu"]
    rates = {arm: record["metrics"]["requests_per_second"] for arm, record in arms.items()}
    table = make_table(
        "scoring",
        f"Scoring, {config['workload']}: {config['contexts']} contexts of {config['context']} tokens (median), "
        f"{config['continuations']} continuation(s) of {config['continuation']}",
        "!arm | !method | requests/s = requests_per_second:,.1f | seconds:.3f | interquartile range = seconds_spread:.3f | "
        "over packed = over_packed:.2f x | peak memory = peak_memory_bytes:GiB | "
        "largest difference, nats a token = largest_difference:.2g | "
        "greedy verdicts that differ = greedy_flips:d | best choices that differ = choice_flips:d",
        [
            record["metrics"]
            | {"arm": arm, "method": METHODS[record["config"]["method"]]}
            | {"over_packed": rates["packed"] / rates[arm] if ours else None}
            for arm, record in arms.items()
        ],
        f"{config['model']}, {config['dtype']}, random weights; {devices}; medians of {config['rounds']} rounds in "
        f"turns, {first['metrics']['requests']} requests. Differences are from packed scores with shared contexts; "
        "over packed: packed's requests per second over the arm's.",
    )
    return [table]


def generation_tables(records: Sequence[Record]) -> list[Table]:
    """Prefill and tokens per second; ``records`` are of one number of prompts."""
    table = make_table(
        "generation",
        "Generation: prompts read packed, then one token a step for all",
        "prompts:d | prompt tokens = prompt_tokens:,d | prefill tokens/s = prefill_tokens_per_second:,.0f | "
        "prefill seconds = prefill_seconds:.4f | interquartile range = prefill_spread:.4f | "
        "tokens/s = tokens_per_second:,.0f | milliseconds a step = step_seconds:.2f | spread, ms = step_spread:.2f | "
        "peak memory = peak_memory_bytes:GiB",
        [
            r["metrics"]
            | {"prompts": r["config"]["prompts"]}
            | {name: 1e3 * r["metrics"][name] for name in ("step_seconds", "step_spread")}
            for r in sorted(latest(records, "generation").values(), key=lambda r: r["config"]["prompts"])
        ],
    )
    return [table]


KINDS = {
    "exactness": Kind(),  # of a bench that is no more: its tables lie in logs/
    "scoring": Kind(scoring_tables, label=named_by("scoring", "workload")),
    "generation": Kind(generation_tables),
}
