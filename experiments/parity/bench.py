"""Measure speed and gradients beside the sweeps."""

from experiments.by_name import Bench
from experiments.parity import gradients

BENCHES = {"gradients": Bench(gradients.Config, gradients.run)}
