"""Tables and figures of the experiment, by kind of record."""

from __future__ import annotations

from experiments.speedup.report_growth import growth_figures, growth_tables, multi_gpu_figures, multi_gpu_tables
from experiments.speedup.report_models import breakdown_figures, breakdown_tables, speedup_figures, speedup_tables
from packmamba.report.kinds import Kind

KINDS = {
    "speedup": Kind(speedup_tables, speedup_figures),
    "breakdown": Kind(breakdown_tables, breakdown_figures),
    "growth": Kind(growth_tables, growth_figures),
    "multi_gpu": Kind(multi_gpu_tables, multi_gpu_figures),
}
