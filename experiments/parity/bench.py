"""Measure speed and gradients beside the sweeps."""

from experiments.parity import gradients
from packmamba.reproduce import Bench

BENCHES = {"gradients": Bench(gradients.Config, gradients.run)}
