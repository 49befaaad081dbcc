"""A note in a run's folder of the last attempt at it: where, how far, how fast, why it failed. Imports no PyTorch."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import Config
from packmamba.training.claims import taken
from packmamba.training.run_id import find_record, run_folder

NOTE = "status.json"
NOTE_SECONDS = 2.0
"""A running run's note is at most about as old."""


class Outcome(NamedTuple):
    state: str
    """done, diverged (that is its result), stopped (it goes on from its checkpoint), failed, or taken (by another process)."""
    seconds: float = 0.0
    loss: float | None = None
    why: str = ""
    step: int = 0
    """Of the checkpoint with which it stopped."""

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed because its GPU had no memory left: what PyTorch, CUDA, Triton or cuBLAS say then."""
        said = self.why.lower()
        return self.state == "failed" and (
            any(word in said for word in ("outofmemory", "out of memory", "alloc_failed"))
            or ("not_initialized" in said and "create" in said)
        )


class Note:
    """What a run's folder says of the last attempt at it."""

    def __init__(self, config: Config, where: str) -> None:
        self.path = run_folder(config) / NOTE
        self.begun = time.time()
        self.first: tuple[int, float, float] | None = None
        """Step, tokens and time from which on speed is counted: this attempt's first step warms up."""
        self.values: dict[str, Any] = {
            "where": where, "host": socket.gethostname(), "pid": os.getpid(), "begun": self.begun, "step": 0,
            "steps": config.trainer.max_steps,
        }  # fmt: skip
        self.say(state="running")

    def say(self, **values: Any) -> None:
        self.values |= values | {"seconds": time.time() - self.begun}
        write_note(self.path, self.values)

    def step(self, step: int, tokens: float) -> None:
        """``tokens``: real ones, of all steps so far."""
        now = time.time()
        if self.first is None:
            self.first = (step, tokens, now)
        elif now - self.begun - self.values["seconds"] > NOTE_SECONDS:
            steps, tokens, seconds = step - self.first[0], tokens - self.first[1], max(now - self.first[2], 1e-9)
            left = (self.values["steps"] - step) * seconds / steps
            self.say(step=step, tokens_per_second=tokens / seconds, seconds_left=left)


def write_note(path: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all, with a checksum."""
    values = {**values, "checksum": _checksum(values)}
    temporary = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, path)


def read_note(config: Config) -> dict[str, Any]:
    """Of the last attempt at a run; empty if there was none, or if the note is not what was written."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        values = json.loads((run_folder(config) / NOTE).read_text())
        if values.pop("checksum", None) in (None, _checksum(values)) and "state" in values:
            return values
    return {}


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def log_path(config: Config) -> Path:
    """What a run in a process of its own prints, tracebacks among it."""
    return run_folder(config) / "output.txt"


def state_of(config: Config) -> dict[str, Any]:
    """The note of a run's last attempt, its ``state`` as it is now: done, diverged, running, submitted, stopped, failed,
    interrupted or waiting."""
    note = read_note(config)
    if find_record(config) is not None:
        state = "diverged" if note.get("state") == "diverged" else "done"
    elif taken(run_folder(config)):
        state = "running"
    else:
        # A record that was removed makes a done run wait again.
        state = {"running": "interrupted", "done": "waiting"}.get(said := note.get("state", "done"), said)
    return {**note, "state": state, "step": note.get("step")}
