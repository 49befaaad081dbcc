"""Tables and figures of the experiment, by kind of record. Spreads are interquartile ranges."""

from __future__ import annotations

from experiments.speedup.report_breakdown import FAMILIES, breakdown_figures, breakdown_tables
from experiments.speedup.report_growth import (
    PARALLEL,
    growth_figures,
    growth_tables,
    multi_gpu_figures,
    multi_gpu_tables,
)
from experiments.speedup.report_models import speedup_figures, speedup_legend, speedup_tables
from packmamba.report.kinds import Kind

KINDS = {
    # A whole model. config: model, part (forward_backward: the bare loop; steps: whole optimizer steps through Lightning) and its
    # sizes. A batch stands for the mean of all the arm's batches of the same documents. peak_memory_bytes is null off a GPU,
    # position_bytes (of one batch) and the gate's errors are null in steps.
    "speedup": Kind(
        speedup_tables,
        speedup_figures,
        metrics=(
            "seconds_per_batch", "seconds_spread", "real_tokens_per_batch", "real_tokens_per_second", "slots_per_second",
            "padding_fraction", "model_flops_utilisation", "peak_memory_bytes", "position_bytes", "loss_error", "leak_error",
        ),
        arms=speedup_legend,
    ),
    # Seconds of one call by family of kernels; their sum is seconds.
    "breakdown": Kind(breakdown_tables, breakdown_figures, metrics=(*FAMILIES, "seconds")),
    # config: axis (row_length or mean_length) and its value.
    "growth": Kind(
        growth_tables,
        growth_figures,
        metrics=(
            "seconds_per_batch", "seconds_spread", "num_documents", "real_tokens_per_second", "model_flops_utilisation",
        ),
    ),
    # Whole optimizer steps; losses of the first steps, which all arms take on the same documents, are in curves["loss"].
    "multi_gpu": Kind(
        multi_gpu_tables,
        multi_gpu_figures,
        metrics=(
            "seconds_per_step", "seconds_spread", "real_tokens_per_second", "slots_per_second", "peak_memory_bytes",
            "loss_error",
        ),
        arms=lambda records: PARALLEL,
    ),
}  # fmt: skip
