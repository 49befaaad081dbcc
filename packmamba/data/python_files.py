"""Python source files: the functions in them, and reading many at once on all cores."""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import tokenize
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from packmamba.errors import UserError

Job = TypeVar("Job")
Made = TypeVar("Made")

ALONE = 500
"""So few jobs are not worth starting processes for."""


def functions_of(code: bytes) -> list[str] | None:
    """Every function and method that is not nested in another function, as it stands in its file, decorators included.

    None for a file that does not parse.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = code.splitlines(keepends=True)  # of bytes: splits where the parser counts lines, not at \f
    found = []
    for function in _functions(tree):
        start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        found.append(b"".join(lines[start - 1 : function.end_lineno]).decode(encoding))
    return found


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            else:
                yield from _functions(child)


def in_parallel(function: Callable[[Job], Made], jobs: Iterable[Job]) -> Iterator[Made]:
    """``function`` of each, in order, on as many processes as there are cores for us."""
    jobs = list(jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1 or len(jobs) < ALONE:
        yield from map(function, jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # forking would copy PyTorch's threads' locks
    # Ctrl-C is for this process, which ends the others.
    with ProcessPoolExecutor(cores, spawn, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        with _no_script():
            made = pool.map(function, jobs, chunksize=16)
        try:
            yield from made
        except BrokenProcessPool:
            raise UserError(
                "a process that reads packages was killed, perhaps because memory ran out; the same command goes on"
            ) from None


@contextlib.contextmanager
def _no_script() -> Iterator[None]:
    """Processes that start here do not run the user's script again, which without a guard would come to this place and wait."""
    script, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
