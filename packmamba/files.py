"""Write files whole or not at all; a disk without space is one sentence that names the path."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packmamba.errors import UserError


class DiskFull(UserError, OSError):
    """A file could not be written for want of space; the same command continues."""

    status = 1

    def __str__(self) -> str:
        remedy = "make space, and the same command continues"
        return f"{self.filename}: expected space to write, got '{self.strerror}'; {remedy}"


def full_disk(error: BaseException, path: str | Path) -> DiskFull | None:
    """Return what an error says of a full disk; None of another error.

    Its path is the error's, or else ``path``.

    torch raises a RuntimeError while it handles the OSError, safetensors an error with its number.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = re.search(r"os error (\d+)", str(cause))
        code = cause.errno if isinstance(cause, OSError) else int(number[1]) if number else None
        # No space, or above a quota or a limit.
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return DiskFull(code, os.strerror(code), getattr(cause, "filename", None) or str(path))
        cause = cause.__context__
    return None


@contextmanager
def space_for(path: str | Path) -> Iterator[None]:
    """Raise DiskFull with the path for an error of what writes there."""
    try:
        yield
    except Exception as error:
        if (full := full_disk(error, path)) is None:
            raise
        raise full from None


@contextmanager
def replacing(path: str | Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yield a temporary path, to write; rename it at the end, and remove it if that is not reached.

    Its folder is made if need be.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + suffix)
    try:
        with space_for(path):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, to fill and rename to ``folder``.

    It is removed at the end if it is still there.
    """
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # what a killed process left behind
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file, and make its folder; processes may do so at once. Raises DiskFull."""
    with replacing(path, f".{os.getpid()}.tmp") as temporary:
        temporary.write_bytes(content)
