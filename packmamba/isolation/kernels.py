"""Models that take kernels for GPUs where these are installed, whatever device their tensors are on."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn


@contextmanager
def own_code(modules: Sequence[nn.Module], run: Callable[[], Any]) -> Iterator[bool]:
    """Takes transformers' functions in PyTorch if the model does not run with what wraps them; yields whether it runs by that.

    A wrapper calls a kernel where one is installed, also with tensors of a CPU.

    Args:
        modules: roots of the modules that compute.
        run: calls the model.
    """
    wrapped = [] if _runs(run) else list(_wrapped(modules))
    try:
        for module, name, function in wrapped:
            setattr(module, name, inspect.unwrap(function))
        if not (helps := bool(wrapped) and _runs(run)):
            _put_back(wrapped)  # what it fails by is its own
        yield helps
    finally:
        _put_back(wrapped)


Wrapped = tuple[ModuleType, str, Callable[..., Any]]
"""Where a function lies, its name there, and what it is there."""


def _wrapped(modules: Sequence[nn.Module]) -> Iterator[Wrapped]:
    names = {type(part).__module__ for root in modules for part in root.modules()}
    for module in [sys.modules[name] for name in sorted(names) if name.startswith("transformers.")]:
        for name, function in list(vars(module).items()):
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            if own and hasattr(function, "__wrapped__"):
                yield module, name, function


def _put_back(wrapped: Sequence[Wrapped]) -> None:
    for module, name, function in wrapped:
        setattr(module, name, function)


def _runs(run: Callable[[], Any]) -> bool:
    try:
        run()
    except Exception:  # of whatever kind a model refuses by; it says so again when it is checked
        return False
    return True
