"""Identify runs by a hash of configuration keys; find records; lock folders.

Two runs are the same run if every key that decides a result is the same: then the second finds the
first's record, or goes on from its checkpoint. Keys at their defaults are not hashed, so a new key
leaves the ids of earlier runs as they are.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

from packmamba.config import Config, to_dict
from packmamba.errors import ConfigError
from packmamba.files import space_for
from packmamba.lab.records import LATER_KEYS, records_of

SCHEMA_VERSION = 2  # raise it when a key's default changes
SECTIONS = ("data", "model", "optimizer", "trainer", "ops")
# Keys that records leave out, and others that decide no result.
UNRECORDED = """runs_dir output data.cache_dir data.num_proc trainer.leakcheck_every trainer.loggers
    trainer.log_axis trainer.samples""".split()
EXCLUDED = [*UNRECORDED, *"data.num_workers trainer.log_every trainer.checkpoint_every trainer.threads".split()]
WITHOUT_END = ("constant", "inverse_sqrt")  # schedules that do not know the last step
LEASE_SECONDS = 60.0  # after which a lock that is not renewed is lost


def flatten(values: Any) -> dict[str, Any]:
    """Map ``{"data": {"path": x}, "seed": 0}`` to ``{"data.path": x, "seed": 0}``.

    Options stay mappings.
    """
    sections = {name: values[name] for name in SECTIONS if isinstance(values.get(name), dict)}
    flat = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in values.items() if name not in sections} | flat


def recorded_config(config: Config) -> dict[str, Any]:
    """Return a record's configuration.

    It lacks ``UNRECORDED``, and later keys at their first values.
    """
    values = to_dict(config)
    for name in [*UNRECORDED, *LATER]:
        section, _, key = name.rpartition(".")
        keys = values[section] if section else values
        # In records a key at its first value is absent, as in records older than the key.
        if name in UNRECORDED or keys.get(key) == LATER[name]:
            keys.pop(key, None)
    return values


# Of earlier versions, with their defaults. A record in which one was not at its default is of no run
# of today, so it is part of the id.
REMOVED = {"trainer.average_snapshots": 1, "trainer.average_share": 0.1, "model.learned_initial_state": False}
DEFAULTS = flatten(to_dict(Config())) | REMOVED
# The values of later keys in records without them.
LATER = {name: DEFAULTS[name] for name in LATER_KEYS} | {"data.cut_at_steps": False}


def id_of(arm: str, values: dict[str, Any]) -> str:
    """Return a run's id from its record's configuration.

    Two runs that differ only in how far they follow one schedule share an id, which has the
    schedule's end in place of ``trainer.max_steps``.
    """
    keys = DEFAULTS | LATER | flatten(values)
    # A run with more steps of the same schedule goes on where the shorter one ended: its id is the
    # same.
    steps = keys["optimizer.schedule_steps"] or keys["trainer.max_steps"]
    constant = keys["optimizer.final_lr_fraction"] == 1 or keys["optimizer.schedule"] in WITHOUT_END
    keys |= {"optimizer.schedule_steps": None, "trainer.max_steps": 0 if constant else steps}
    # Where bits matter the number of threads decides them.
    excluded = EXCLUDED[:-1] if keys["trainer.deterministic"] else EXCLUDED
    # A key at its default is not hashed: keys that are added later leave ids as they are.
    hashed = {k: v for k, v in keys.items() if k in DEFAULTS and k not in excluded and v != DEFAULTS[k]}
    digest = hashlib.sha256(json.dumps([SCHEMA_VERSION, hashed], sort_keys=True).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', arm)}-seed{keys['seed']}-{digest[:10]}"


def run_id(config: Config) -> str:
    """Return a run's id: its arm, seed and hash."""
    return id_of(config.name, recorded_config(config))


def run_folder(config: Config) -> Path:
    """Return the folder of a run's checkpoints, weights and logs."""
    return Path(config.runs_dir) / run_id(config)


def record_path(config: Config) -> Path:
    """Return the file of a run's record: its own, or that of its sweep."""
    if config.output is None:
        return run_folder(config) / "record.json"
    return Path(config.output) / "records.jsonl"


def find_records(configs: Sequence[Config]) -> list[dict[str, Any] | None]:
    """Read each run's record, None if it is not finished."""
    wanted = [(record_path(config).parent, run_id(config), config.trainer.max_steps) for config in configs]
    # A record is the run's if id and steps agree: the id alone leaves the number of steps open.
    records = {}
    for folder in {folder for folder, *_ in wanted}:
        for record in records_of(folder):
            values = record["config"]
            records[folder, id_of(record["arm"], values), values["trainer"]["max_steps"]] = record
    return [records.get(identity) for identity in wanted]


def name_of(output: str) -> str:
    """Name a sweep or bench by its folder, as its records' experiment."""
    return os.path.basename(os.path.abspath(output)) or "root"


class Locked(ConfigError):
    """Another process has the folder."""


class RunLock:
    """Lock a folder to one process, reentrantly, also among machines that share a file system.

    Where a process was killed on another machine, its lock is free once a process has waited for it
    for ``LEASE_SECONDS``; a lock without its holder's name, of one killed while it wrote that, never.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # One lease for all locks of a folder in this process: reentrant, also across threads.
        shared: Any = {"thread_local": False, "is_singleton": True}
        self._lease = SoftFileLease(folder / ".lock", lease_duration=LEASE_SECONDS, **shared)

    def __enter__(self) -> None:
        try:
            with space_for(self.folder / ".lock"):
                # Twice or more: some versions of filelock
                # only remove a dead holder's lock at first.
                self._lease.acquire(timeout=0.1, poll_interval=0.02)
        except Timeout:
            raise Locked(
                f"{self.folder} is in use by another process; wait for it, stop it or, if none is left, remove its .lock"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._lease.release()
