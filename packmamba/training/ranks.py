"""A run on several devices of this machine, in processes of its own: ``python -m`` starts the first rank, Lightning the others.

Whoever starts it needs no PyTorch. All ranks ignore the signals that a cluster sends to every process of a job: a pipe tells the
first one to stop, which tells the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from packmamba.config import Config
from packmamba.records import check_writable
from packmamba.training.note import Outcome
from packmamba.training.process import die_with_parent, imports, keep_freed_memory
from packmamba.training.run_id import run_folder
from packmamba.training.worker import ROOT

POLL_SECONDS = 0.2
IGNORED = (signal.SIGTERM, signal.SIGUSR2)


def attempt_in_ranks(
    config: Config, where: str, stop: Callable[[], bool], progress: bool = False, at_once: bool = False
) -> Outcome:
    """What became of the run, as ``attempt`` says it; what its processes print goes where this one's does.

    Args:
        stop: asked several times a second; once told, the ranks end at their next logged step, with a checkpoint.
        at_once: they are told as by Ctrl-C: outside of training they end at once.
    """
    check_writable(run_folder(config), "runs_dir")
    said = pickle.dumps(config).hex()  # no file: others may try the run meanwhile, and a killed launcher would leave it
    pipe, other = Pipe()
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, said, str(other.fileno()), where, str(progress), str(os.getpid())],
            env=_environment(), stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True, preexec_fn=_ignore,
        )  # fmt: skip
    told = False
    try:
        while not pipe.poll(POLL_SECONDS):
            if not told and stop():
                told = True
                process.send_signal(signal.SIGINT) if at_once else pipe.send_bytes(b"stop")
            if process.poll() is not None and not pipe.poll():
                raise EOFError  # though a process that it has forked may hold the pipe's other end
        return Outcome(*json.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        status = process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return Outcome("failed", why=f"one of its processes ended with {how}")
    finally:
        pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
        process.wait()


def _environment() -> dict[str, str]:
    """This process's, without what says that it is a task of a cluster: the ranks are not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SUBMITIT_"))}
    # Not the current folder's modules; and what is printed comes at once, since ranks are killed at their end.
    kept |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _ignore() -> None:
    """Before Python starts, and for all that it starts."""
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)


def main(said: str, pipe: str, where: str, progress: str, launcher: str) -> None:
    """One rank. The first has the claim, the note and the pipe."""
    die_with_parent()
    _ignore()
    first = not int(os.environ.get("LOCAL_RANK", 0))
    if first and os.getppid() != int(launcher):
        return  # it has ended before its end could be heard of
    told = Connection(int(pipe)) if first else None
    keep_freed_memory()
    try:
        with imports():
            from packmamba.training.attempt import attempt
            from packmamba.training.callbacks import Stopped
            from packmamba.training.fit import fit

        config, shown = pickle.loads(bytes.fromhex(said)), progress == "True"
        if told is not None:
            outcome = attempt(config, where, shown, told.poll)
        else:
            with contextlib.suppress(Stopped):
                fit(config, shown, lambda history: False)
    except KeyboardInterrupt as interrupted:
        outcome = Outcome("stopped", why=str(interrupted))
    if told is not None:
        told.send_bytes(json.dumps(outcome).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
