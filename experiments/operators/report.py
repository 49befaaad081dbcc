"""Tables and figures of the experiment, by kind of record."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.operators.arms import CPU_ARMS, GPU_ARMS
from experiments.operators.cpu_tables import operators_figures, operators_tables
from experiments.operators.gpu_figures import gpu_operators_figures
from experiments.operators.gpu_shapes import METRICS as GPU_METRICS
from experiments.operators.gpu_shapes import by_shape
from experiments.operators.gpu_tables import gpu_operators_tables
from experiments.operators.host_tables import METRICS as HOST_METRICS
from experiments.operators.host_tables import host_tables
from packmamba.report.aggregate import Record
from packmamba.report.kinds import Kind


def cpu_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each arm on a CPU does."""
    return {arm.label: arm.does for arm in CPU_ARMS.values()}


def gpu_legend(records: Sequence[Record]) -> dict[str, str]:
    """What each arm on a GPU does."""
    present = {arm for arms in by_shape(records).values() for arm in arms}
    return {arm.label: arm.does for arm in GPU_ARMS.values() if arm in present}


def host_legend(records: Sequence[Record]) -> dict[str, str]:
    """Whose function each row calls."""
    return {
        "packmamba": "our public operator, with all its checks",
        "mamba-ssm": "mamba-ssm's selective_scan_fn, without documents",
        "causal-conv1d": "causal-conv1d's causal_conv1d_fn, without documents",
    }


# config: operator, implementation and sizes. One implementation of one operator, forward and backward; arms of one operator were
# timed in turns. bound_seconds is what the machine's rates, measured in the same run, allow. Spreads are interquartile ranges.
_METRICS = ("seconds_median", "seconds_spread", "bound_seconds", "rounds")
KINDS = {
    "operators": Kind(operators_tables, operators_figures, metrics=_METRICS, arms=cpu_legend),
    "gpu_operators": Kind(gpu_operators_tables, gpu_operators_figures, metrics=GPU_METRICS, arms=gpu_legend),
    "host_time": Kind(host_tables, metrics=HOST_METRICS, arms=host_legend),
}
