"""Errors for the user, which commands print in one line: ``key: expected X, got Y; do Z``."""

import difflib
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

COMMAND = "python run.py" if (Path(__file__).resolve().parents[1] / "run.py").is_file() else "packmamba"


def expect(holds: object, name: str, expected: str, got: object, kind: type[Exception] = ValueError) -> None:
    """Raise ``name: expected ..., got ...`` unless it holds."""
    if not holds:
        raise kind(f"{name}: expected {expected}, got {got}")


def missing_package(name: str | None) -> ModuleNotFoundError:
    """Make the error that says how to install a package of the extra ``train``."""
    return ModuleNotFoundError(f"the package '{name}' is missing; pip install 'packmamba[train]'", name=name)


def require(*packages: str) -> None:
    """Raise ModuleNotFoundError for a missing package of the extra ``train``, importing none."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise missing_package(name)


class UserError(Exception):
    """An error that the user can correct; ``status``: the command's exit status."""

    status = 2


class Unfinished(UserError):
    """A command did not finish: status 1: something failed; 3: the same command continues."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class ConfigError(UserError, ValueError):
    """An invalid configuration, in one line."""

    def __str__(self) -> str:
        # Of a DataLoader's worker: PyTorch puts its traceback before the message.
        return " ".join(super().__str__().split()).rpartition("packmamba.errors.ConfigError: ")[2]


need = functools.partial(expect, kind=ConfigError)


@contextmanager
def refusing(*kinds: type[Exception], prefix: str = "", suffix: str = "") -> Iterator[None]:
    """Raise ConfigError for errors of these kinds.

    Their message stands between ``prefix`` and ``suffix``.

    An error of an operator's ``backend`` is one of the key ``ops.backend``, whatever the prefix.
    """
    try:
        yield
    except kinds as error:
        section = "ops." if str(error).startswith("backend: ") else prefix
        raise ConfigError(f"{section}{error}{suffix}") from None


def extra(package: str, key: str = "data.source") -> ModuleType:
    """Import a package of the extra ``integrations``, which a key needs.

    Raises ConfigError without it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ConfigError(f"{key}: needs {name}; pip install 'packmamba[integrations]'") from None


def suggest(name: str, names: Iterable[Any], cutoff: float = 0.6) -> str:
    """Return ``; did you mean 'nearest'?``, or ``; known: ...`` if no name is near."""
    texts = [str(text) for text in names]
    close = difflib.get_close_matches(str(name), texts, 1, cutoff)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(texts) or 'none'}"


class KernelError(UserError, RuntimeError):
    """Compiled kernels can be neither built nor loaded."""
