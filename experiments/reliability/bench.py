"""What the library promises of long and large runs, and of machines of other shapes, measured."""

from __future__ import annotations

from experiments.reliability import checkpoint_times, determinism, scale, soak
from packmamba.experiments import Bench

BENCHES = {
    "soak": Bench(soak.Config, soak.run),
    "scale": Bench(scale.Config, scale.run),
    "checkpoint": Bench(checkpoint_times.Config, checkpoint_times.run),
    "determinism": Bench(determinism.Config, determinism.run),
}
