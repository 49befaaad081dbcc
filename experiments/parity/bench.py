"""What the experiment measures beside its sweeps."""

from experiments.parity import gradients
from packmamba.reproduce import Bench

BENCHES = {"gradients": Bench(gradients.Config, gradients.run)}
