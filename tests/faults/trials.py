"""A trial of the bad-input campaign: one command with one fault, in this process, and what is wrong with its refusal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packmamba import cli

"".encode("utf-16be")  # its codec is loaded by who may read it
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0
"""How long a refusal may compute, imports not counted; waiting, twelve times as long."""
GIGABYTES = 1
"""How much memory it may take."""


@dataclass(frozen=True)
class Trial:
    kind: str
    """Of the fault: the row of the campaign's table."""
    argv: tuple[str, ...]
    names: str = ""
    """A pattern that the sentence must hold: the key, file or argument."""
    prepare: Callable[[Path], object] = field(default=lambda folder: None, compare=False)
    """Makes the fault's files in the trial's folder, which is the current one."""
    user: bool = False
    """Runs without root's right to read and write everything."""

    def __str__(self) -> str:
        return " ".join(word if len(word) < 80 else f"{word[:60]}..." for word in self.argv)


class Hangs(BaseException):
    """No ``except Exception`` takes it for an error of its own."""


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """With not much more memory than is taken now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 * GIGABYTES << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def _inside(folder: Path, user: bool) -> Iterator[None]:
    """In the folder, with bounded memory, and as a user who may not do everything."""
    back, was = os.getcwd(), os.geteuid()
    os.chdir(folder)
    try:
        if user and was == 0:
            os.seteuid(65534)
        with bounded():
            yield
    finally:
        os.seteuid(was)
        os.chdir(back)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Name, size and time of every file below."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in paths}


def try_out(trial: Trial, folder: Path) -> str | None:
    """None, or what is wrong: expected are one line, status 2, nothing written, a few seconds."""
    trial.prepare(folder)
    if trial.user:
        folder.chmod(folder.stat().st_mode | 0o055)
    before = files_of(folder)
    out, err = io.StringIO(), io.StringIO()
    begun, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _inside(folder, trial.user), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with _watched(12 * SECONDS):  # within: a second ring would keep this process from leaving the folder
                status = cli.main(list(trial.argv))
    except SystemExit as exit:
        status = exit.code  # type: ignore[assignment]
    except Hangs:
        return "hangs"
    except BaseException as error:
        return f"traceback: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    seconds = time.process_time() - begun
    if wrong := _judged(trial, status, out.getvalue(), err.getvalue(), before, folder):
        return wrong
    lines = err.getvalue().strip().splitlines()
    if seconds > SECONDS:
        return f"takes {seconds:.0f} s: {lines[0]}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) / 2**20
    if grown > GIGABYTES:
        return f"takes {grown:.1f} GiB: {lines[0]}"
    return None


def try_process(trial: Trial, folder: Path) -> str | None:
    """The same of a process of its own, whose home, cache and temporary files lie in the folder too."""
    trial.prepare(folder)
    outside = {"HOME": "home", "XDG_CACHE_HOME": "home", "PACKMAMBA_CACHE": "home", "TMPDIR": "tmp"}
    for name in outside.values():
        (folder / name).mkdir(exist_ok=True)
    environment = {**os.environ, **{name: str(folder / place) for name, place in outside.items()}, "MPLCONFIGDIR": "/tmp",
                   "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    before = files_of(folder)
    words = [sys.executable, str(ROOT / "run.py"), *trial.argv]
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=12 * SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    return _judged(trial, done.returncode, done.stdout, done.stderr, before, folder)


def _judged(
    trial: Trial, status: object, out: str, err: str, before: dict[str, tuple[int, int]], folder: Path
) -> str | None:
    lines = [line for line in err.splitlines() if line.strip()]
    if status != 2:
        return f"status {status}: {' '.join([*lines, *out.splitlines()][-3:])[:300]}"
    if len(lines) != 1 or not lines[0].startswith(("packmamba: error: ", "run.py: error: ")):
        return f"{len(lines)} lines: {' | '.join(lines)[-500:]}"
    if new := sorted(set(files_of(folder).items()) - set(before.items())):
        return f"wrote {', '.join(name for name, _ in new[:4])}: {lines[0]}"
    if not re.search(trial.names, lines[0]):
        return f"does not name {trial.names}: {lines[0]}"
    if len(lines[0]) > 1000:
        return f"{len(lines[0])} characters: {lines[0][:300]}"
    if any(ord(sign) < 32 for sign in lines[0]):
        return f"unprintable: {lines[0]!r}"
    return None
