"""Measure speed and gradients beside the sweeps."""

from experiments.parity import gradients
from packmamba.lab.reproduce import Bench

BENCHES = {"gradients": Bench(gradients.Config, gradients.run)}
