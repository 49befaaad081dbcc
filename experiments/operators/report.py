"""Tables and figures of the operators: on a CPU, and with gpu_report.py on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common import records_of
from experiments.operators.arms import CPU_ARMS, CpuArm
from experiments.operators.gpu_report import gpu_operators_figures, gpu_operators_tables
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.figures import MUTED, Figure, axes, finish, legend_below, style_of
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Table, make_table

_OPERATORS = {"scan": "ssm_pack", "conv": "conv1d_pack"}


def operators_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each operator: of equal arms the latest record counts."""
    tables = []
    for operator, arms in _by_operator(records).items():
        slowest = arms.get(CPU_ARMS["transformers"])
        config = next(iter(arms.values()))["config"]
        rows = []
        for arm, record in arms.items():
            m = record["metrics"]
            row = {f"ms_{key}": 1e3 * m[f"seconds_{key}"] for key in ("median", "spread", "fastest")}
            row |= {"implementation": arm, "limit_ms": (limit := 1e3 * m["bound_seconds"])}
            row |= {"times_limit": row["ms_median"] / limit, "times_limit_fastest": row["ms_fastest"] / limit}
            rows.append(row | {"speedup": slowest and slowest["metrics"]["seconds_median"] / m["seconds_median"]})
        table = make_table(
            f"operators-{operator.replace('_', '-')}",
            f"{operator}, forward and backward ({_shape(operator, config)}, {config['threads']} threads)",
            "!implementation | ms (median, spread) = ms_median ms_spread:.3g ± .2g | limit (ms) = limit_ms:.3g | "
            "times the limit = times_limit:.3g | fastest turn (ms) = ms_fastest:.3g | "
            "times the limit = times_limit_fastest:.3g | against transformers = speedup:.3g",
            rows,
            _limit(operator, next(iter(arms.values()))["metrics"]),
            "In one process, in turns; spread is the interquartile range. Limits are of the rates' best turns.",
        )
        tables.append(table)
    return tables


def operators_figures(records: Sequence[Record]) -> list[Figure]:
    """Time of each implementation, and its limit, one panel for each operator."""
    operators = _by_operator(records)
    fig, panels = axes(len(operators), height=3.2)
    for ax, (operator, arms) in zip(panels, operators.items()):
        for rank, (arm, record) in enumerate(arms.items()):
            metrics = record["metrics"]
            ax.barh(rank, 1e3 * metrics["seconds_median"], color=style_of(str(arm), rank)["color"], height=0.6)
            limit = 1e3 * metrics["bound_seconds"]
            what = "what the machine's rates allow" if rank == 0 else None
            ax.plot([limit, limit], [rank - 0.4, rank + 0.4], color=MUTED, linewidth=1.6, label=what)
        ax.set_yticks(range(len(arms)), [str(arm) for arm in arms])
        ax.invert_yaxis()
        ax.set(xscale="log", xlim=(1, None), xlabel="milliseconds, forward and backward", title=operator)
    legend_below(fig)
    caption = "Median time of the packed operators, forward and backward; strokes are what the machine's rates allow."
    return [finish(fig, "operators", caption)]


def _by_operator(records: Sequence[Record]) -> dict[str, dict[CpuArm, Record]]:
    """By operator, then by arm."""
    found: dict[str, dict[CpuArm, Record]] = {}
    for record in records_of(records, "operators"):
        found.setdefault(_OPERATORS[record["config"]["operator"]], {})[CpuArm.of(record)] = record
    return found


def _shape(operator: str, config: dict) -> str:
    if operator == "ssm_pack":
        return f"{config['tokens']} tokens, {config['channels']} channels, {config['states']} states, {config['dtype']}"
    return f"{config['conv_tokens']} tokens, {config['conv_channels']} channels, {config['dtype']}"


def _limit(operator: str, rates: dict[str, float]) -> str:
    if operator == "ssm_pack":
        return (
            "The limit is what the scan's multiply-adds and exponentials take at the rates measured in the same run: "
            f"{rates['multiply_adds_per_second'] / 1e9:.0f} and {rates['exponentials_per_second'] / 1e9:.1f} billion "
            "float32 a second."
        )
    return (
        "The limit is what the bytes that must move take at the rate of copying in the same run: "
        f"{rates['copy_bytes_per_second'] / 1e9:.1f} GB/s (read and written) into memory at hand, "
        f"{rates['copy_to_new_bytes_per_second'] / 1e9:.1f} GB/s into new memory, which all but the second row write."
    )


# config: operator, implementation and sizes. One implementation of one operator, forward and
# backward; arms of one operator were timed in turns. bound_seconds is what the machine's rates,
# measured in the same run, allow. Spreads are interquartile ranges.
KINDS = {
    "operators": Kind(operators_tables, operators_figures),
    "gpu_operators": Kind(gpu_operators_tables, gpu_operators_figures),
    "host_time": Kind(),  # of a bench that is no more: its table lies in logs/
}
