"""One process at a time in a folder, also where several machines share it.

Two things keep a folder. A lock of the system ends with its process, so that on one machine another takes over at once. On a
shared folder locks may reach no further than one machine, or be absent (NFS with ``nolock``, Lustre with ``localflock``):
so the process also has the newest of the files ``claim-1``, ``claim-2``, ..., and renews its time of change. Whoever finds that
old takes the next number, which only one process can create; numbers never come twice. Ages are told by the file server's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from packmamba.errors import ConfigError
from packmamba.records import check_writable

BEAT_SECONDS = 15.0
LOST_SECONDS = 120.0
"""A claim of another machine that was not renewed for so long is lost: that machine is off, or has lost the folder."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_NAME = re.compile(r"claim-(\d+)")


class Taken(ConfigError):
    """Another process has the folder."""


@contextmanager
def alone(folder: Path, key: str = "runs_dir", does: str = "trains this run") -> Iterator[None]:
    """Keeps a folder, of a run unless ``key`` and what another process ``does`` there are said, to this process while it lives.

    Inside, this process may ask for the same folder again.

    Raises:
        Taken: another process has it.
        ConfigError: it cannot be written.
    """
    if _own(folder) is not None:
        yield
        return
    check_writable(folder, key)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        # A lock of this process, not of loaders' workers that outlive it. Whoever only looks holds it for a moment.
        tries = 5
        while (locked := _lock(file, fcntl.LOCK_EX)) is False:
            if not (tries := tries - 1):
                break
            time.sleep(0.02)
        before = _claims(folder)
        claim = None if locked is False or _lives(folder, before, locked) else Claim.take(folder, before)
        if claim is None:
            raise Taken(f"another process {does}, in {folder}; wait for it, or stop it")
        _held[folder.resolve()] = claim
        try:
            yield
        finally:
            del _held[folder.resolve()]
            claim.leave()


def taken(folder: Path) -> bool:
    """Whether a process trains in the run's folder now."""
    if _own(folder) is not None:
        return True
    try:
        with open(folder / "lock") as file:
            locked = _lock(file, fcntl.LOCK_SH)
            return locked is False or _lives(folder, _claims(folder), locked)
    except FileNotFoundError:
        return False


def check_claim(folder: Path) -> None:
    """Raises Taken if this process had the folder and has lost it: it hung for minutes, and another has taken over."""
    if (claim := _own(folder)) is not None and not claim.holds():
        raise Taken(f"{folder} was taken over by another process, since this one gave no sign of life for a while")


class Claim:
    """A claim file of this process, which a thread renews."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pid = os.getpid()
        self.seen = time.monotonic()
        self.ended = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    @classmethod
    def take(cls, folder: Path, before: Mapping[int, Path]) -> Claim | None:
        """The claim that follows those before, which are lost; None if another process was faster."""
        path = folder / f"claim-{max(before, default=0) + 1}"
        said = json.dumps({"kernel": _kernel(), "host": socket.gethostname(), "pid": os.getpid()})
        try:
            if not _appear(path, said):
                return None
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error.strerror})") from None
        for old in before.values():
            old.unlink(missing_ok=True)
        if _newest(_claims(folder)) != path:  # others came and went since the look at those before
            path.unlink(missing_ok=True)
            return None
        return cls(path)

    def holds(self) -> bool:
        """Whether it is still the newest, as of the last seconds."""
        if not self.ended.is_set() and time.monotonic() - self.seen > BEAT_SECONDS:
            self._beat()
        return not self.ended.is_set()

    def leave(self) -> None:
        """Gives it up. The file stays, old as can be, so that its number never comes again."""
        self.ended.set()
        with contextlib.suppress(OSError):
            os.utime(self.path, (0, 0))

    def _renew(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        try:
            os.utime(self.path)
            if _newest(_claims(self.path.parent)) not in (None, self.path):
                self.ended.set()
        except FileNotFoundError:
            self.ended.set()
        except OSError:
            return  # the folder cannot be reached: nor can others say then whether this process lives
        self.seen = time.monotonic()


_held: dict[Path, Claim] = {}
"""What this process has."""


def _own(folder: Path) -> Claim | None:
    claim = _held.get(folder.resolve())
    return claim if claim is not None and claim.pid == os.getpid() else None


def _lives(folder: Path, claims: Mapping[int, Path], locked: bool | None) -> bool:
    """Whether the newest of the claims is that of a process that lives, as far as can be told; ``locked``: see ``_lock``."""
    if (newest := _newest(claims)) is None:
        return False
    try:
        with open(newest, "rb") as file:
            said, changed = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:  # another process has just taken over
        return True
    if changed == 0 or (locked and f'"{_kernel()}"'.encode() in said):
        return False
    return abs(_now(folder) - changed) < LOST_SECONDS


def _appear(path: Path, said: str) -> bool:
    """Makes a file with this content; False if there is one. Whole from the first: an empty claim of a process that was
    killed as it wrote would keep others out until it is old."""
    whole = path.with_name(f".claim-{uuid.uuid4().hex}")
    try:
        whole.write_text(said)
        try:
            os.link(whole, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(path, "x") as file:
                file.write(said)
    except FileExistsError:
        return False
    finally:
        whole.unlink(missing_ok=True)
    return True


def _claims(folder: Path) -> dict[int, Path]:
    return {int(match[1]): folder / name for name in os.listdir(folder) if (match := _NAME.fullmatch(name))}


def _newest(claims: Mapping[int, Path]) -> Path | None:
    return claims[max(claims)] if claims else None


def _lock(file: IO[str], kind: int) -> bool | None:
    """Whether this process has the lock now; None: the file system has no locks."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _kernel() -> str:
    """Names the running system on which locks hold for sure."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _now(folder: Path) -> float:
    """The time that a file has which changes in this folder now."""
    probe = folder / f".now-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
