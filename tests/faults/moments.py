"""Named moments at which a process kills itself as SIGKILL would, and clocks that are wrong; for children of a campaign."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

from packmamba.training.module import MambaLitModule

CALLS = {"fsync": "fsync", "replace": "replace", "unlink": "unlink"}


class Moment(NamedTuple):
    call: str
    """One of CALLS, or "step": between a step's gradients and its optimizer."""
    path: str
    """A part of the name of the file that is meant."""
    number: int
    """The how-manieth such call, from 1."""
    when: str
    """before, after, or "half": the file that is put on the disk then ends somewhere in its middle."""
    share: float = 0.5
    """Where, of "half"."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def await_moment(moment: Moment | None) -> None:
    """Has this process die there; None: never."""
    if moment is None:
        return
    reached = 0

    def about(path: str) -> bool:
        nonlocal reached
        reached += moment.path in path
        return moment.path in path and reached == moment.number

    if moment.call == "step":
        accumulate = MambaLitModule.accumulate

        def accumulate_and_die(*arguments: Any) -> Any:
            loss = accumulate(*arguments)
            if about(moment.path):
                die()
            return loss

        MambaLitModule.accumulate = accumulate_and_die  # type: ignore[method-assign]
        return
    call = getattr(os, CALLS[moment.call])

    def call_and_die(*arguments: Any, **named: Any) -> Any:
        name = f"/proc/self/fd/{arguments[0]}" if moment.call == "fsync" else str(arguments[-1])
        path = os.readlink(name) if moment.call == "fsync" else name
        if not about(path):
            return call(*arguments, **named)
        if moment.when == "half":
            os.truncate(path, int(os.path.getsize(path) * moment.share))
        if moment.when == "after":
            call(*arguments, **named)
        die()

    setattr(os, moment.call, call_and_die)


def set_clock(seconds: float) -> None:
    """This process's clock, and the times of change that it reads nothing of, are so far ahead (or behind, below 0)."""
    real, nanoseconds = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: nanoseconds() + int(seconds * 1e9)
