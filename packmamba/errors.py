"""Errors whose message is meant for the person at the keyboard: one sentence, which a command prints without a traceback."""

from __future__ import annotations

import re
from pathlib import Path

COMMAND = "python run.py" if (Path(__file__).resolve().parents[1] / "run.py").is_file() else "packmamba"
"""How a command line begins: in a checkout, or where the package is installed."""


LONGEST = 1000


def sentence(message: object) -> str:
    """One line that a terminal shows as it is, whatever the user's own words in it hold."""
    line = " ".join(str(message).split())
    line = re.sub("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]", lambda sign: repr(sign[0])[1:-1], line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 4 :]}"


def of_machine(error: BaseException) -> str | None:
    """What the machine has refused (a file, its disk, its memory), as a sentence; None for an error of another kind."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, OSError) and error.errno is not None:
        what = f"{error.filename}: " if error.filename is not None else ""
        return f"{what}{(error.strerror or text).lower()}"
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return f"out of memory ({text or type(error).__name__}); a smaller data.slots_per_batch or model needs less"
    if text.startswith("Symlink loop"):
        return text
    if "file write failed" in text or "PytorchStreamWriter failed" in text:
        return f"a file could not be written ({text}); is the disk full?"
    return None


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
