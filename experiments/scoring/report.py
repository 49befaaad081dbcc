"""Tables and figures of scoring and generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packmamba.report import aggregate
from packmamba.report.aggregate import Record
from packmamba.report.figures import Figure, axes, finish
from packmamba.report.kinds import Kind
from packmamba.report.tables import Column, Table, gibibytes, number, word

METHODS = {"packed": "packed passes", "padded": "padded batches, same kernels", "hf": "lm-eval's class hf"}
COLOURS = {"packed": "#0072B2", "padded": "#E69F00", "hf": "#7A4B9A"}


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
        [
            Column("arm", ("arm",), False),
            Column("method", ("method",), False),
            Column("requests/s", ("requests_per_second",)),
            Column("seconds", ("seconds",)),
            Column("interquartile range", ("seconds_spread",)),
            Column("over packed", ("over_packed",)),
            Column("peak memory", ("peak_memory_bytes",)),
            Column("largest difference, nats a token", ("largest_difference",)),
            Column("greedy verdicts that differ", ("greedy_flips",)),
            Column("best choices that differ", ("choice_flips",)),
        ],
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


def scoring_figures(records: Sequence[Record]) -> list[Figure]:
    """Requests per second, a bar for each arm."""
    arms = _latest(records, "scoring")
    if not arms:
        return []
    config = next(iter(arms.values()))["config"]
    fig, (ax,) = axes(1, width=7.0, height=0.5 + 0.42 * len(arms))
    names = list(arms)[::-1]
    rates = [arms[name]["metrics"]["requests_per_second"] for name in names]
    bars = ax.barh(names, rates, color=[COLOURS[arms[name]["config"]["method"]] for name in names])
    ax.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3)
    ax.set(xlabel="requests per second", xlim=(0, 1.15 * max(rates)), title=f"Scoring, {config['workload']}")
    return [
        finish(
            fig,
            "scoring",
            f"Requests per second, {config['workload']}: packed passes, padded batches of the same kernels, lm-eval's class hf.",
        )
    ]


def generation_tables(records: Sequence[Record]) -> list[Table]:
    """Prefill and tokens per second; ``records`` are of one number of prompts."""
    table = Table(
        "generation",
        "Generation: prompts read packed, then one token a step for all",
        [
            Column("prompts", ("prompts",)),
            Column("prompt tokens", ("prompt_tokens",)),
            Column("prefill tokens/s", ("prefill_tokens_per_second",)),
            Column("prefill seconds", ("prefill_seconds",)),
            Column("interquartile range", ("prefill_spread",)),
            Column("tokens/s", ("tokens_per_second",)),
            Column("milliseconds a step", ("step_seconds",)),
            Column("spread, ms", ("step_spread",)),
            Column("peak memory", ("peak_memory_bytes",)),
        ],
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
        [
            Column("weights", ("dtype",), False),
            Column("model", ("model",), False),
            Column("device", ("device",), False),
            Column("requests", ("requests",)),
            Column("largest difference, nats", ("largest_difference",)),
            Column("a token", ("largest_difference_a_token",)),
            Column("relative", ("largest_relative",)),
            Column("greedy verdicts that differ", ("greedy_flips",)),
            Column("of so many that are greedy", ("greedy",)),
            Column("best choices that differ", ("choice_flips",)),
            Column("differ by a bit: shuffled", ("shuffled_differ",)),
            Column("asked in three parts", ("split_differ",)),
            Column("contexts not shared", ("unshared_differ",)),
        ],
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


def scoring_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each arm does."""
    made = {}
    for arm, record in _latest(records, "scoring").items():
        config = record["config"]
        made[arm] = {
            "packed": "all requests in passes of max_slots slots; a context is computed "
            + ("once, its state is where its continuations start" if config.get("share") else "for each continuation"),
            "padded": f"our kernels on batches of {config.get('batch')}, longest first, padded to the batch's longest",
            "hf": f"lm-evaluation-harness' class hf on transformers' Mamba with "
            f"{'no' if config.get('slow') else 'the fast'} kernels, batches of {config.get('batch')}",
        }[config["method"]]
    return made


SCORING = (
    "seconds", "seconds_spread", "requests", "requests_per_second", "peak_memory_bytes", "largest_difference",
    "mean_difference", "greedy_flips", "choice_flips",
)  # fmt: skip
GENERATION = (
    "prompt_tokens", "prefill_seconds", "prefill_tokens_per_second", "step_seconds", "tokens_per_second",
    "peak_memory_bytes",
)  # fmt: skip
EXACTNESS = (
    "largest_difference", "greedy", "greedy_flips", "choice_flips", "shuffled_differ", "split_differ", "unshared_differ",
)  # fmt: skip
KINDS = {
    "exactness": Kind(
        exactness_tables,
        label=lambda records: aggregate.of_kind(records, "exactness")[0]["config"]["device"],
        metrics=EXACTNESS,
    ),
    "scoring": Kind(
        scoring_tables,
        scoring_figures,
        label=lambda records: aggregate.of_kind(records, "scoring")[0]["config"]["workload"],
        metrics=SCORING,
        arms=scoring_legend,
    ),
    "generation": Kind(generation_tables, metrics=GENERATION),
}
