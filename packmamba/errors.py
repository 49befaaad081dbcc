"""Errors whose message is meant for the person at the keyboard: one sentence, which a command prints without a traceback."""

from __future__ import annotations

from pathlib import Path

COMMAND = "python run.py" if (Path(__file__).resolve().parents[1] / "run.py").is_file() else "packmamba"
"""How a command line begins: in a checkout, or where the package is installed."""


class UserError(Exception):
    """Something that the user can mend."""

    status = 2
    """The command's exit status."""


class Unfinished(UserError):
    """Work that was begun did not come to its end.

    Args:
        status: the command's exit status: 1, something failed; 3, all that was reached is done and the rest waits.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class ConfigError(UserError, ValueError):
    """A configuration that cannot be run; the message names the key, what was expected and what came."""


class KernelError(UserError, RuntimeError):
    """Compiled kernels cannot be built or loaded; the message says why and what to do."""
