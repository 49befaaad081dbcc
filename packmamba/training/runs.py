"""A run's name, its folder and record."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from packmamba.config import CONFIGURATION, Config, to_dict
from packmamba.errors import ConfigError
from packmamba.records import LATER_KEYS, has_records, read_records

PLACES = (
    *("runs_dir", "output", "data.cache_dir", "data.num_proc"),
    *("trainer.leakcheck_every", "trainer.loggers", "trainer.checkpoint_async"),
)
"""Keys that decide where files are kept, who makes them and what is looked at, not what is trained."""

NEUTRAL: dict[str, Any] = {
    "data.num_workers": 0,
    "trainer.log_every": 10,
    "trainer.checkpoint_every": 50,
    "trainer.threads": None,
}
"""Keys that decide how a run goes and not what comes out, and the value that a name holds whatever theirs is. Threads round
sums in another way, as another machine does; under ``trainer.deterministic``, which promises bits, they are part of the name."""

CONSTANT_STEPS = 200
"""What a name holds for the schedule's length where the learning rate stays."""


def decisive(config: Config) -> dict[str, Any]:
    """The configuration without where files are kept: what a record holds."""
    return _decisive(to_dict(config))


def _decisive(values: dict[str, Any]) -> dict[str, Any]:
    for name in PLACES:
        section, key = _place(values, name)
        section.pop(key, None)
    for name, absent in LATER_KEYS.items():
        section, key = _place(values, name)
        if section.get(key) == absent:
            section.pop(key, None)
    return values


def _place(values: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds the key, and its last name."""
    *sections, key = name.split(".")
    return reduce(dict.__getitem__, sections, values), key


class Name(NamedTuple):
    run: str
    """Of the run's folder."""
    record: str
    """Of its record's file: the run's, and where it took more or fewer steps than its schedule has, how many."""


def names(arm: str, values: dict[str, Any]) -> list[Name]:
    """The run's name, then the one that it had when NEUTRAL keys were part of it, if that is another.

    A name is the arm and a hash of what decides the result. Steps beyond it decide nothing about those before: a run is named as
    one that ends with its schedule.

    Args:
        values: ``decisive``'s, or a record's.
    """
    steps = values["trainer"]["max_steps"]
    before = copy.deepcopy(values)
    optimizer, trainer = before["optimizer"], before["trainer"]
    if trainer.get("average_snapshots", 1) == 1:  # else the last step decides which weights are kept
        trainer["max_steps"] = optimizer.pop("schedule_steps", None) or steps
    now = copy.deepcopy(before)
    if optimizer.get("final_lr_fraction") == 1 and trainer.get("average_snapshots", 1) == 1:
        now["trainer"]["max_steps"] = CONSTANT_STEPS
    for name, value in NEUTRAL.items():
        section, key = _place(now, name)
        if name != "trainer.threads" or not trainer.get("deterministic"):
            section[key] = value
    found = []
    for named in (now, before) if now != before else (now,):
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
        run = f"{_slug(arm)}-{digest[:10]}"
        found.append(Name(run, run if named["trainer"]["max_steps"] == steps else f"{run}-{steps}"))
    return found


def _slug(arm: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", arm)


def run_id(config: Config) -> str:
    """The run's name: its arm and a hash of what decides its result."""
    return names(config.name, decisive(config))[0].run


def run_folder(config: Config) -> Path:
    return Path(config.runs_dir) / _found(config).run


def record_path(config: Config) -> Path:
    """Where the run's record goes: the output folder, or its own."""
    return _record_path(config, _found(config))


def _record_path(config: Config, name: Name) -> Path:
    folder = Path(config.runs_dir) / name.run if config.output is None else Path(config.output)
    return folder / "records" / f"{name.record}.jsonl"


def _found(config: Config) -> Name:
    """The name under which there is a record of the run, or else its folder; if there is neither, its name now."""
    known = names(config.name, decisive(config))
    recorded = [name for name in known if _record_path(config, name).is_file()]
    begun = [name for name in known if (Path(config.runs_dir) / name.run).is_dir()]
    return [*recorded, *begun, known[0]][0]


def folder_of_record(runs: Path, record: dict[str, Any]) -> Path:
    """Of the run that a record is of, below the folder of all runs."""
    folders = [runs / name.run for name in names(record["arm"], record["config"])]
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def records_of(config: Config) -> dict[int, dict[str, Any]]:
    """The run's records, by the steps after which they were made. ValueError names a file that cannot be read."""
    folder, mine = record_path(config).parents[1], run_id(config)
    if not has_records(folder):
        return {}
    return {
        record["config"]["trainer"]["max_steps"]: record
        for record in read_records(folder)
        if record["kind"] == "training" and record["arm"] == config.name
        and names(config.name, record["config"])[0].run == mine
    }  # fmt: skip


def training_records(folder: Path) -> list[dict[str, Any]]:
    """All of a folder. Raises ConfigError naming a file that cannot be read."""
    try:
        return [record for record in read_records(folder) if record["kind"] == "training"]
    except ValueError as error:
        raise ConfigError(str(error)) from None


def of_other_length(config: Config) -> tuple[Path, int] | None:
    """The folder of a run like this one but for its schedule, and the schedule's length."""
    mine, length = run_id(config), schedule_steps(config)
    for file in sorted(Path(config.runs_dir).glob(f"{_slug(config.name)}-*/{CONFIGURATION}")):
        with contextlib.suppress(Exception):  # files of any age; all that depends on them is a warning
            values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
            theirs = values["optimizer"].pop("schedule_steps", None) or values["trainer"]["max_steps"]
            values["trainer"]["max_steps"] = length
            if theirs != length and names(config.name, _decisive(values))[0].run == mine:
                return file.parent, theirs
    return None


def may_be_raised(config: Config) -> bool:
    """Whether ``trainer.max_steps`` is not what the learning rate's course ends with."""
    return config.optimizer.schedule_steps is not None or config.optimizer.final_lr_fraction == 1


def schedule_steps(config: Config) -> int:
    """Over how many steps the learning rate rises and falls."""
    return config.optimizer.schedule_steps or config.trainer.max_steps


def name_of(output: str) -> str:
    """Of the experiment whose records a folder holds: the folder's, also where it is called ``.``."""
    return os.path.basename(os.path.abspath(output)) or "root"
