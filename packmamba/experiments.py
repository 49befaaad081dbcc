"""Measurements: ``python run.py bench experiments/<question>/<bench>.yaml`` writes records that packmamba.report tabulates."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packmamba.config import ConfigError, check_command, parse_override, read_yaml, suggest, wrong_value
from packmamba.records import check_writable

BENCHES = {
    "packing": "experiments.packing.bench",
    "operators": "experiments.operators.cpu",
    "gpu_operators": "experiments.operators.gpu",
    "speedup": "experiments.speedup.whole_models",
    "multi_gpu": "experiments.speedup.multi_gpu",
}


def run_bench(path: str | Path, overrides: list[str] | None = None) -> Path:
    """Runs the bench that the file names and appends its records; returns the experiment's folder."""
    bench, module, config = load_bench(path, overrides)
    folder = Path("experiments") / config.experiment
    check_writable(folder / "records", "experiment")
    module.run(config, folder / "records" / f"{bench}.jsonl")
    return folder


def load_bench(path: str | Path, overrides: list[str] | None = None) -> tuple[str, ModuleType, Any]:
    """The bench that the file's key ``bench`` names: its name, module and configuration. ConfigError names a wrong key."""
    loaded = OmegaConf.merge(read_yaml(path), *map(parse_override, overrides or []))
    assert isinstance(loaded, DictConfig)
    if "bench" not in loaded:
        check_command("bench", path, loaded)
    bench = loaded.get("bench")
    if bench not in BENCHES:
        raise ConfigError(f"{path}: bench: expected one of {', '.join(BENCHES)}, got {bench!r}")
    module = importlib.import_module(BENCHES[bench])
    schema = OmegaConf.structured(module.Config)
    for key in map(str, loaded):
        if key not in schema:
            raise ConfigError(f"unknown key '{key}' in {path}{suggest(key, schema)}")
    try:
        return bench, module, OmegaConf.to_object(OmegaConf.merge(schema, loaded))
    except OmegaConfBaseException as error:
        raise wrong_value(error, path) from None
