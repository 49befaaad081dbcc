"""Time the operators on a CPU and on a GPU."""

from __future__ import annotations

from experiments.operators import cpu, gpu
from packmamba.lab.reproduce import Bench

BENCHES = {"operators": Bench(cpu.Config, cpu.run), "gpu_operators": Bench(gpu.Config, gpu.run)}
