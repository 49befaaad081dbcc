"""SIGINT and SIGTERM: a run ends the step that it is in, writes a checkpoint, and says where it stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 1.0
"""A second SIGINT is a person's if it comes so long after the first: some senders tell a process and then its group."""


class Interrupted(KeyboardInterrupt):
    """This process was told to end by a signal; its text, if any, says where it stopped."""

    def __init__(self, signum: int, where: str = "") -> None:
        super().__init__(where)
        self.status = 128 + signum


def interrupt(signum: int, frame: Any) -> None:
    raise Interrupted(signum)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Told:
    """Which signal, 0 for none, told this process to end while somebody looked for that at each step (``looks``). At other times,
    and for a person who presses Ctrl-C again, a signal raises Interrupted at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.looks = False
        self._first = 0.0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, signals are handled here, but for those that somebody else handles."""
        usual = (signal.SIG_DFL, signal.default_int_handler, interrupt)
        main = threading.current_thread() is threading.main_thread()
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM) if main}
        before = {signum: handler for signum, handler in before.items() if handler in usual}
        for signum in before:
            signal.signal(signum, self._tell)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _tell(self, signum: int, frame: Any) -> None:
        again = self.signal == signum == signal.SIGINT and time.monotonic() - self._first >= AGAIN_SECONDS
        if again or not self.looks:
            raise Interrupted(signum)
        if not self.signal:
            self.signal, self._first = signum, time.monotonic()
