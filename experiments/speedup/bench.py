"""What the experiment measures: whole models on one device (``speedup``) and steps on several (``multi_gpu``)."""

from __future__ import annotations

from pathlib import Path

from experiments.speedup import multi_gpu
from experiments.speedup.config import Config
from packmamba.experiments import Bench


def speedup(config: Config, records_path: Path, progress: bool = True) -> None:
    from experiments.speedup import whole_models  # imports Lightning: a wrong key is refused before

    whole_models.run(config, records_path, progress)


BENCHES = {
    "speedup": Bench(Config, speedup),
    "multi_gpu": Bench(multi_gpu.Config, multi_gpu.run),
}
