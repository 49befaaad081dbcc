"""What the experiment measures: whole models on one device (``speedup``) and steps on several (``multi_gpu``)."""

from __future__ import annotations

from experiments.speedup import multi_gpu, whole_models
from packmamba.experiments import Bench

BENCHES = {
    "speedup": Bench(whole_models.Config, whole_models.run),
    "multi_gpu": Bench(multi_gpu.Config, multi_gpu.run),
}
