"""What a process and its children hold, read from outside: memory, open files, processor time, and what a folder takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from experiments.tokenization.watched import family

TICKS = os.sysconf("SC_CLK_TCK")


class Held(NamedTuple):
    """Of all processes together; pages that they share count in each."""

    resident_bytes: int
    """With the pages of mapped files that were read lately, which the system may take back at any time."""
    anonymous_bytes: int
    """Without them: what only this program can give back."""
    open_files: int
    cpu_seconds: float


def held(root: int) -> Held:
    """By a process and its children; what has ended meanwhile counts nothing."""
    resident = anonymous = files = 0
    cpu = 0.0
    for number in family(root):
        try:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines() if ":" in line
            )
            times = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            count = len(os.listdir(f"/proc/{number}/fd"))
        except OSError:
            continue
        resident += _bytes(status.get("VmRSS", "0 kB"))
        anonymous += _bytes(status.get("RssAnon", "0 kB"))
        files += count
        cpu += sum(map(int, times[11:13])) / TICKS
    return Held(resident, anonymous, files, cpu)


def folder_bytes(folder: Path) -> int:
    """What a folder's files take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def _bytes(text: str) -> int:
    return int(text.split()[0]) * 1024
