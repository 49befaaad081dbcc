"""One attempt at one run of a sweep: what became of it, and a note beside the run of how far it is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.config import Config
from packmamba.errors import UserError
from packmamba.training.callbacks import Stopped
from packmamba.training.claims import Taken, alone, taken
from packmamba.training.fit import fit
from packmamba.training.runs import record_path, run_folder

NOTE = "status.json"
NOTE_SECONDS = 2.0
"""A running run's note is at most about as old."""


class Outcome(NamedTuple):
    state: str
    """done, diverged (that is its result), stopped (it goes on from its checkpoint), failed, or taken (by another process)."""
    seconds: float = 0.0
    loss: float | None = None
    why: str = ""


class Note:
    """What a run's folder says of the last attempt at it."""

    def __init__(self, config: Config, where: str) -> None:
        self.path = run_folder(config) / NOTE
        self.begun = time.time()
        self.values: dict[str, Any] = {
            "where": where, "host": socket.gethostname(), "pid": os.getpid(), "begun": self.begun, "step": 0,
            "steps": config.trainer.max_steps,
        }  # fmt: skip
        self.say(state="running")

    def say(self, **values: Any) -> None:
        self.values |= values | {"seconds": time.time() - self.begun}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.values))
        os.replace(temporary, self.path)

    def step(self, step: int) -> None:
        if time.time() - self.begun - self.values["seconds"] > NOTE_SECONDS:
            self.say(step=step)


def read_note(config: Config) -> dict[str, Any]:
    """Of the last attempt at a run; empty if there was none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run_folder(config) / NOTE).read_text())
    return {}


def log_path(config: Config) -> Path:
    """What a run in a process of its own prints, tracebacks among it."""
    return run_folder(config) / "output.txt"


def attempt(config: Config, where: str, progress: bool, stop: Callable[[], bool] | None = None) -> Outcome:
    """Trains the run unless another process does. Whatever goes wrong in it is its outcome, with the traceback on stderr.

    Args:
        where: the device, for the note.
        stop: asked after each step whether to stop there.
    """
    try:
        with alone(run_folder(config)):
            if record_path(config).is_file():
                return Outcome("done")
            note = Note(config, where)

            def after(step: int) -> bool:
                note.step(step)
                return stop is not None and stop()

            loss, why = None, ""
            try:
                metrics = fit(config, progress, after)["metrics"]
                loss, state = metrics["val_loss"], "done"
                if "diverged_at_step" in metrics:
                    state, why = "diverged", said_of_divergence(metrics)
            except Stopped as stopped:
                state = "stopped"
                note.say(step=stopped.step)
            except UserError as error:
                state, why = "failed", str(error)
            except Exception as error:
                state, why = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
                traceback.print_exc(file=sys.stderr)
            note.say(state=state, why=why)
            return Outcome(state, note.values["seconds"], loss, why)
    except Taken:
        return Outcome("taken")


def said_of_divergence(metrics: Mapping[str, Any]) -> str:
    return f"its loss was not finite at step {metrics['diverged_at_step']:.0f}"


def state_of(config: Config) -> dict[str, Any]:
    """The note of a run's last attempt, its ``state`` as it is now: done, running, stopped, failed, interrupted, waiting."""
    note = read_note(config)
    if record_path(config).is_file():
        state = "diverged" if note.get("state") == "diverged" else "done"
    elif taken(run_folder(config)):
        state = "running"
    else:
        # A record that was removed makes a done run wait again.
        state = {"running": "interrupted", "done": "waiting"}.get(said := note.get("state", "done"), said)
    return {**note, "state": state, "step": note.get("step")}
