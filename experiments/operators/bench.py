"""Time the operators on a CPU and on a GPU."""

from __future__ import annotations

from experiments.by_name import Bench
from experiments.operators import cpu, gpu

BENCHES = {"operators": Bench(cpu.Config, cpu.run), "gpu_operators": Bench(gpu.Config, gpu.run)}
