"""What the library promises of long and large runs, measured."""

from __future__ import annotations

from experiments.reliability import determinism, soak
from packmamba.experiments import Bench

BENCHES = {"soak": Bench(soak.Config, soak.run), "determinism": Bench(determinism.Config, determinism.run)}
