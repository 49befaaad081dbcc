"""Tokenising in processes of their own, one a core, which end with the process that started them."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from packmamba.data.shards import Card, tokenise
from packmamba.data.sources import Part
from packmamba.data.tokenization import Tokenizer
from packmamba.errors import UserError


class Task(NamedTuple):
    number: int
    """Of the part."""
    part: Part
    done: frozenset[int]
    """Its chunks that are on disk."""


class Failed(NamedTuple):
    """A part that cannot be read."""

    number: int
    error: UserError


Message = Failed | Card
Advance = Callable[[int], object]


def run(
    tasks: Sequence[Task], processes: int, tokenizer: Tokenizer, folder: Path, advance: Advance
) -> Generator[Message, None, None]:
    """Tokenises parts into the folder: a card for each chunk once it is there, those of a part in order.

    Raises UserError if a process is killed from outside.
    """
    count = min(processes, len(tasks))
    if count <= 1:
        return _here(tasks, tokenizer, folder, advance)
    return _elsewhere(tasks, count, max(1, processes // count), tokenizer, folder, advance)


def _here(
    tasks: Sequence[Task], tokenizer: Tokenizer, folder: Path, advance: Advance
) -> Generator[Message, None, None]:
    for task in tasks:
        try:
            yield from tokenise(task.number, task.part, tokenizer, folder, task.done, advance)
        except UserError as error:
            yield Failed(task.number, error)


def _elsewhere(
    tasks: Sequence[Task], count: int, threads: int, tokenizer: Tokenizer, folder: Path, advance: Advance
) -> Generator[Message, None, None]:
    waiting = iter(tasks)
    workers = [_Worker(tokenizer, folder, threads) for _ in range(count)]
    try:
        busy = {worker.connection: worker for worker in workers if worker.start(next(waiting, None))}
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                message = worker.receive()
                if isinstance(message, int):
                    advance(message)
                elif isinstance(message, (OSError, UserError)):
                    raise message
                elif isinstance(message, str):
                    raise RuntimeError(f"a process that tokenises failed:\n{message}")
                elif message is not None:
                    yield message
                elif not worker.start(next(waiting, None)):
                    del busy[worker.connection]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            worker.connection.close()


class _Worker:
    """A process that runs ``serve``: it imports what is needed and no more, and ends when the connection to it closes."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, threads: int) -> None:
        self.connection, theirs = Pipe()
        paths = os.pathsep.join(filter(None, sys.path))
        limits = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1)}
        code = f"from packmamba.data.workers import serve; serve({theirs.fileno()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONPATH": paths} | limits,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        _send(self.connection, (tokenizer, folder))

    def start(self, task: Task | None) -> bool:
        if task is not None:
            try:
                _send(self.connection, task)
            except OSError:
                raise self._ended() from None
        return task is not None

    def receive(self) -> Any:
        """How far it came (int), a message, what writing failed of, a traceback (str), or None: the task is done."""
        try:
            return _receive(self.connection)
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> UserError:
        status = self.process.wait()
        why = f"ended with status {status}"
        if status == -signal.SIGKILL:
            why = "was killed, perhaps because memory ran out (data.num_proc=1 needs the least)"
        return UserError(f"a process that tokenises {why}; the same command goes on from what is done")


def _send(connection: Connection, message: Any) -> None:
    """By plain pickle: PyTorch teaches ``send`` to share tensors' memory, which ends with who sent it."""
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def serve(descriptor: int) -> None:
    """What a worker runs: a tokenizer and a folder come first, then tasks; None is said after each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one is told too, and ends it
    connection: Any = Connection(descriptor)
    try:
        tokenizer, folder = _receive(connection)
        while True:
            content = connection.recv_bytes()
            try:
                task = pickle.loads(content)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                _send(
                    connection,
                    UserError(
                        f"another process cannot make what it is to read ({why}); data.num_proc=1 reads it in this one"
                    ),
                )
                return
            _serve(connection, task, tokenizer, folder)
            _send(connection, None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(connection: Connection, task: Task, tokenizer: Tokenizer, folder: Path) -> None:
    pending, told = 0, time.monotonic()

    def advance(amount: int) -> None:
        nonlocal pending, told
        pending += amount
        if pending >= 1 << 20 or time.monotonic() - told > 1:
            _send(connection, pending)
            pending, told = 0, time.monotonic()

    try:
        for card in tokenise(task.number, task.part, tokenizer, folder, task.done, advance):
            _send(connection, pending)
            pending = 0
            _send(connection, card)
    except UserError as error:
        _send(connection, Failed(task.number, error))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        _send(connection, error)
    except Exception:
        _send(connection, traceback.format_exc())
