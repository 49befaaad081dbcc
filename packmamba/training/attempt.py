"""One attempt at one run of a sweep: what became of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from packmamba.config import Config
from packmamba.errors import UserError
from packmamba.training.callbacks import RunMetrics, Stopped, newest_step
from packmamba.training.claims import Taken, alone
from packmamba.training.fit import fit
from packmamba.training.note import Note, Outcome
from packmamba.training.run_id import find_record, run_folder


def attempt(config: Config, where: str, progress: bool, stop: Callable[[], bool] | None = None) -> Outcome:
    """Trains the run unless another process does. Whatever goes wrong in it is its outcome, with the traceback on stderr.

    Args:
        where: the device, for the note.
        stop: asked after each step whether to stop there.
    """
    try:
        with alone(run_folder(config)):
            if find_record(config) is not None:
                return Outcome("done")
            note = Note(config, where)

            def after(metrics: RunMetrics) -> bool:
                note.step(int(metrics.totals["steps"]), metrics.totals["real_tokens"])
                return stop is not None and stop()

            loss, why, step = None, "", 0
            try:
                metrics = fit(config, progress, after)["metrics"]
                loss, state = metrics["val_loss"], "done"
                if "diverged_at_step" in metrics:
                    state, why = "diverged", said_of_divergence(metrics)
            except Stopped as stopped:
                state, step = "stopped", stopped.step
                note.say(step=step)
            except KeyboardInterrupt:
                if reached := newest_step(run_folder(config) / "checkpoints"):
                    note.say(step=reached)  # else the note is of some seconds ago
                raise
            except UserError as error:
                state, why = "failed", str(error)
            except Exception as error:
                state, why = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:300]
                traceback.print_exc(file=sys.stderr)
            note.say(state=state, why=why)
            return Outcome(state, note.values["seconds"], loss, why, step)
    except Taken:
        return Outcome("taken")


def said_of_divergence(metrics: Mapping[str, Any]) -> str:
    return f"its loss was not finite at step {metrics['diverged_at_step']:.0f}"
