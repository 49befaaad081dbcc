"""What the experiment measures: the operators on a CPU (``operators``) and on a GPU (``gpu_operators``)."""

from __future__ import annotations

from experiments.operators import cpu, gpu
from packmamba.experiments import Bench

BENCHES = {"operators": Bench(cpu.Config, cpu.run), "gpu_operators": Bench(gpu.Config, gpu.run)}
