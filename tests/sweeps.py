"""A small sweep that tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from packmamba.lab import cli, launch
from runs import tiny_config, write_config


def write_sweep(folder: Path, **changes: Any) -> Path:
    """Two arms, two seeds, two steps, on a tiny corpus."""
    sweep = {
        "output": str(folder / "sweep"),
        "base": str(write_config(folder / "base.yaml", tiny_config(folder, "trainer.max_steps=2"))),
        "common": {"data.row_length": 30},
        "arms": {"padded": {"data.strategy": "padded"}, "packed": {"data.strategy": "greedy"}},
        "grid": {"seed": [0, 1]},
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep | changes, sort_keys=False))
    return path


def sweep_in_forks(*arguments: Any) -> int:
    """``run.py sweep`` whose workers are forks, as importing all takes them seconds."""
    launch.START_METHOD = "fork"
    return cli.main(["sweep", *map(str, arguments)])
