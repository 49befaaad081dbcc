"""A process that trains one run after another on one device, for a sweep that has several: ``python -m`` with its pipe."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packmamba.training.process import die_with_parent, imports, keep_freed_memory

if TYPE_CHECKING:
    from packmamba.config import Config
    from packmamba.training.note import Outcome

ROOT = Path(__file__).resolve().parents[2]


class Place(NamedTuple):
    """Where a worker runs: what people call it, and what its environment says."""

    name: str
    environment: dict[str, str]


class Worker:
    """The other side of such a process. It starts at once, is its own process group, and dies with this process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.warnings: list[str] = []
        """What this package warned of in the last run whose outcome came."""
        self.pipe, other = Pipe()
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                env={**os.environ, **place.environment, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def begin(self, config: Config, deadline: float) -> None:
        """Has it train; ``deadline`` is of ``time.monotonic``."""
        self.pipe.send_bytes(pickle.dumps((config, self.place.name, deadline)))

    def outcome(self) -> Outcome | None:
        """What became of the run; waits for it. None if the process is gone."""
        with contextlib.suppress(EOFError, OSError):
            outcome, self.warnings = pickle.loads(self.pipe.recv_bytes())
            return outcome
        return None

    def stop(self) -> None:
        """Has it end at its run's next step, with a checkpoint; without a run, now."""
        self.pipe.close()

    def end(self, seconds: float = 0.0) -> str:
        """Waits, kills what is left of the process and of those it started, and says how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        status = self.process.wait()
        self.pipe.close()
        return f"signal {-status}" if status < 0 else f"exit status {status}"


def main(pipe: Connection) -> None:
    """Trains what comes through the pipe until it is closed, or until a run fails: the next one gets a fresh process."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which all processes of a job are sent: the parent has this one stop
    keep_freed_memory()
    with imports():  # takes seconds: before the first run is there
        import torch

        from packmamba.training.attempt import attempt
        from packmamba.training.note import log_path

    state = "done"
    while state != "failed":
        try:
            config, where, deadline = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # What poll finds is the pipe's end: nothing comes while a run is trained.
        stop = functools.partial(lambda deadline: time.monotonic() > deadline or pipe.poll(), deadline)
        with printing_to(log_path(config)), heard() as said:
            outcome = attempt(config, where, False, stop)
        state = outcome.state
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps((outcome, said)))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What this package warns of meanwhile, in words; it is printed, too."""
    handler, logger, show = _Heard(logging.WARNING), logging.getLogger("packmamba"), warnings.showwarning

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if Path(filename).is_relative_to(ROOT / "packmamba"):
            handler.said.append(str(message))
        show(message, category, filename, lineno, file, line)

    logger.addHandler(handler)
    warnings.showwarning = note
    try:
        yield handler.said
    finally:
        warnings.showwarning = show
        logger.removeHandler(handler)


class _Heard(logging.Handler):
    """Prints what comes, and keeps it."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        print(self.said[-1], file=sys.stderr)


@contextlib.contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """All that this process prints goes to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(1), os.dup(2)]
    try:
        with open(path, "a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, old in zip((1, 2), kept):
            os.dup2(old, stream)
            os.close(old)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
