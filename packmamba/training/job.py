"""One run as a job of SLURM: it writes a checkpoint before the job ends, and has the job start again.

Exactly one party puts a job back into the queue. Told by SIGUSR2, which SLURM sends some time before the time limit and, where
the cluster is set up so, before it takes the machine away: the job itself, through submitit. Told by SIGTERM alone, which scancel
sends too: nobody here; the job waits for its end, after which SLURM requeues it or not, as the cluster's PreemptMode says.
Lightning never does (``packmamba.training.strategy.cluster``). Imports no PyTorch: a job can be told before that is there.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import submitit

from packmamba.config import Config
from packmamba.training.claims import LOST_SECONDS
from packmamba.training.note import Outcome, log_path, read_note, write_note
from packmamba.training.process import keep_freed_memory, limit_spinning
from packmamba.training.run_id import run_folder

Train = Callable[[Config, str, Callable[[], bool]], Outcome]

TRIES = 3
"""So many times in a row a job may be cut before it has a new checkpoint: with more time it would not go on for ever."""
WAIT_SECONDS = 600.0
"""After SIGTERM, how long to wait for the end."""


class Cut(BaseException):
    """The job ends soon, and no step has: what is since the last checkpoint is lost."""


class Job:
    """What submitit pickles, runs in the job, and pickles again when the job is requeued.

    Args:
        grace: seconds between SIGUSR2 and the job's end.
        train: trains the run; the last argument is asked after each step whether to stop there.
    """

    def __init__(self, config: Config, grace: float, train: Train | None = None) -> None:
        self.config = config
        self.grace = grace
        self.train = train or attempt_in_job
        self.reached = 0
        self.barren = 0

    def __call__(self) -> Outcome:
        where = f"{name_of_job()} on {socket.gethostname()}"
        told: set[int] = set()

        def tell(signum: int, frame: Any) -> None:
            if not told:
                signal.setitimer(signal.ITIMER_REAL, 0.8 * self.grace)
            told.add(signum)

        def cut(signum: int, frame: Any) -> None:
            raise Cut

        requeue: Any = signal.signal(signal.SIGUSR2, tell)
        signal.signal(signal.SIGTERM, tell)
        signal.signal(signal.SIGALRM, cut)
        outcome = Outcome("stopped", why="its job was over before a step was")
        try:
            until = time.monotonic() + LOST_SECONDS + 30
            outcome = self.train(self.config, where, lambda: bool(told))
            while outcome.state == "taken" and not told and time.monotonic() < until:
                time.sleep(5)  # a machine that is gone keeps its claim for a while
                outcome = self.train(self.config, where, lambda: bool(told))
        except Cut:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if outcome.state != "stopped":
            return outcome
        until = time.monotonic() + WAIT_SECONDS
        while signal.SIGUSR2 not in told and time.monotonic() < until:
            time.sleep(0.1)
        if signal.SIGUSR2 not in told:
            return outcome
        self.barren = 0 if outcome.step > self.reached else self.barren + 1
        self.reached = max(self.reached, outcome.step)
        if self.barren >= TRIES:
            why = f"its jobs were over {TRIES} times before a new checkpoint; give them more slurm.time or slurm.grace"
            say(self.config, state="failed", why=why)
            return Outcome("failed", why=why)
        say(self.config, state="submitted", job=name_of_job().partition(" ")[2])
        requeue(signal.SIGUSR2, None)  # submitit's: ends this process
        raise AssertionError("submitit has ended this process")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What submitit starts the job with when it comes again."""
        return submitit.helpers.DelayedSubmission(self)


def name_of_job() -> str:
    return f"job {submitit.JobEnvironment().job_id}"


def say(config: Config, **values: Any) -> None:
    """Adds to a run's note."""
    path = run_folder(config) / "status.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_note(path, read_note(config) | values)


def attempt_in_job(config: Config, where: str, stop: Callable[[], bool]) -> Outcome:
    """What it prints goes to the run's own file too."""
    limit_spinning()
    keep_freed_memory()
    from packmamba.training.places import several_devices
    from packmamba.training.ranks import attempt_in_ranks
    from packmamba.training.worker import printing_to

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    with printing_to(log_path(config)):
        if several_devices(config):
            return attempt_in_ranks(config, where, stop)
        from packmamba.training.attempt import attempt

        return attempt(config, where, False, stop)
