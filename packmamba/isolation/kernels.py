"""Models that take kernels for GPUs where these are installed, whatever device their tensors are on."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def own_code(modules: Sequence[nn.Module], run: Callable[[], Any]) -> Iterator[bool]:
    """Takes functions without what wraps them if the model does not run with it; yields whether it runs by that.

    transformers wraps its functions in PyTorch: a wrapper calls an installed kernel, also with tensors of a CPU.

    Args:
        modules: roots of the modules that compute.
        run: calls the model.
    """
    wrapped = [] if _runs(run) else list(_wrapped(modules))
    for module, name, function in wrapped:
        setattr(module, name, inspect.unwrap(function))
    try:
        yield bool(wrapped) and _runs(run)
    finally:
        for module, name, function in wrapped:
            setattr(module, name, function)


def _wrapped(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Functions of the models' modules that something wraps: where each lies, and its name there."""
    for module in {sys.modules[type(part).__module__] for root in modules for part in root.modules()}:
        for name, function in list(vars(module).items()):
            if (
                inspect.isfunction(function)
                and function.__module__ == module.__name__
                and hasattr(function, "__wrapped__")
            ):
                yield module, name, function


def _runs(run: Callable[[], Any]) -> bool:
    try:
        run()
    except Exception:  # of whatever kind a model refuses by; it says so again when it is checked
        return False
    return True
