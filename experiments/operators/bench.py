"""What the experiment measures: the operators on a CPU and on a GPU, and the host's time for an eager call."""

from __future__ import annotations

from experiments.operators import cpu, gpu, host_time
from packmamba.experiments import Bench

BENCHES = {
    "operators": Bench(cpu.Config, cpu.run),
    "gpu_operators": Bench(gpu.Config, gpu.run),
    "host_time": Bench(host_time.Config, host_time.run),
}
