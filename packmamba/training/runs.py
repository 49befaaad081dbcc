"""A run's name, its folder and record."""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any

from packmamba.config import Config, to_dict


def run_id(config: Config) -> str:
    """The run's name: its arm and a hash of everything that decides its result."""
    return recorded_id(config.name, decisive(config))


def recorded_id(name: str, values: dict[str, Any]) -> str:
    """Of the run whose record has this arm and configuration."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{digest[:10]}"


PLACES = ("runs_dir", "output", "data.cache_dir", "data.num_proc", "trainer.leakcheck_every", "trainer.loggers")
"""Keys that decide where files are kept, who makes them and what is looked at, not what is trained."""

LATER_KEYS: dict[str, Any] = {
    "data.task": None,
    "data.task_options": {},
    "data.unit": None,
    "data.cut_documents": None,
    "data.cut_at_steps": False,
    "data.stagger": False,
    "data.shuffle_steps": None,
    "data.subset": None,
    "data.split": "train",
    "data.streaming": False,
    "trainer.cuda_graphs": False,
    "trainer.deterministic": False,
    "trainer.init_from": None,
    "trainer.evaluate_every": None,
    "trainer.average_snapshots": 1,
    "trainer.average_share": 0.1,
    "model.mixer": "mamba1",
    "model.mixer_options": {},
    "optimizer.name": "adamw",
    "optimizer.options": {},
    "trainer.boundary_options": {},
    "plugins": [],
    "evaluations": [],
    "evaluation_options": {},
    "evaluation_examples": 200,
}
"""Keys that came after runs were named, and the value that stands for their absence: with it a run's name is what it was."""


def decisive(config: Config) -> dict[str, Any]:
    """The configuration without where files are kept: what a record holds and a run is named after."""
    values = to_dict(config)
    for name in PLACES:
        section, key = _place(values, name)
        del section[key]
    for name, absent in LATER_KEYS.items():
        section, key = _place(values, name)
        if section.get(key) == absent:
            del section[key]
    return values


def _place(values: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds the key, and its last name."""
    *sections, key = name.split(".")
    return reduce(dict.__getitem__, sections, values), key


def run_folder(config: Config) -> Path:
    return Path(config.runs_dir) / run_id(config)


def record_path(config: Config) -> Path:
    """Where the run's record goes: the output folder, or its own."""
    folder = run_folder(config) if config.output is None else Path(config.output)
    return folder / "records" / f"{run_id(config)}.jsonl"


def name_of(output: str) -> str:
    """Of the experiment whose records a folder holds: the folder's, also where it is called ``.``."""
    return os.path.basename(os.path.abspath(output)) or "root"
