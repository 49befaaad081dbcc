"""Tables and figures of the experiment, by kind of record."""

from __future__ import annotations

from experiments.operators.cpu_tables import operators_figures, operators_tables
from experiments.operators.gpu_figures import gpu_operators_figures
from experiments.operators.gpu_shapes import METRICS as GPU_METRICS
from experiments.operators.gpu_tables import gpu_operators_tables
from packmamba.report.kinds import Kind

# config: operator, implementation and sizes. One implementation of one operator, forward and backward; arms of one operator were
# timed in turns. bound_seconds is what the machine's rates, measured in the same run, allow. Spreads are interquartile ranges.
_METRICS = ("seconds_median", "seconds_spread", "bound_seconds", "rounds")
KINDS = {
    "operators": Kind(operators_tables, operators_figures, metrics=_METRICS),
    "gpu_operators": Kind(gpu_operators_tables, gpu_operators_figures, metrics=GPU_METRICS),
}
