"""The fault campaign: python tests/faults/campaign.py [seconds=120] [seed=0] [kinds=disk,damage] [record=<file>].

Of the kinds with fewer than five trials, then of all, the one that has had the least time is next, until the time is over and
each had its turn. Every trial's count goes into the record as it ends; report.py makes one record of several. Exit status 1 if
any trial was lost, doubled or undetected.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

COUNTS = ("trials", "lost", "doubled", "undetected")
FEW = 5


class Skipped(Exception):
    """This machine cannot have that fault."""


def campaign(
    seconds: float, seed: int, record: Path | None, kinds: list[str], folder: Path, say: Any = print
) -> dict[str, Any]:
    """The record, as report.py reads it. Trials of a kind are numbered; a trial is a function of (seed, kind, number)."""
    from every import KINDS
    from kills import World, Wrong

    world = World(folder)
    begun = time.monotonic()
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    made: dict[str, Any] = {}
    spent = {kind: 0.0 for kind in KINDS if not kinds or any(word in kind for word in kinds)}
    numbers = dict.fromkeys(spent, 0)
    commit = _commit()
    while spent and (time.monotonic() - begun < seconds or not all(numbers[kind] for kind in spent)):
        kind = min(spent, key=lambda kind: (found.get(kind, {}).get("trials", 0) >= FEW, spent[kind]))
        numbers[kind] += 1
        trial = folder / f"trial-{sum(numbers.values())}"
        began = time.monotonic()
        counts = found.setdefault(kind, dict.fromkeys(COUNTS, 0))
        try:
            counts["trials"] += KINDS[kind](world, trial, random.Random(f"{seed} {kind} {numbers[kind]}"))
            shutil.rmtree(trial, ignore_errors=True)
        except Skipped as reason:
            skipped[kind] = str(reason)
            del found[kind], spent[kind]
            continue
        except Exception as error:
            counts["trials"] += 1
            counts[error.what if isinstance(error, Wrong) else "lost"] += 1
            say(f"{kind}, trial {numbers[kind]} of seed {seed}: {error}\n{traceback.format_exc()}", flush=True)
        spent[kind] += time.monotonic() - began
        commit = commit if commit == _commit() else f"{commit.removesuffix('-dirty')}-dirty"
        made = {"campaign": "faults", "commit": commit, "seconds": round(time.monotonic() - begun, 1), "seed": seed,
                "kinds": found, "skipped": skipped}  # fmt: skip
        if record is not None:
            record.write_text(json.dumps(made, indent=1) + "\n")
    return made


def _commit() -> str:
    words = ["git", "--no-optional-locks", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def main(words: list[str]) -> int:
    import kills  # what every fork shall have imported

    from processes import start_server

    assert kills.World
    logging.getLogger("packmamba.data.corpus").addFilter(lambda line: "will be prepared again" not in line.getMessage())
    start_server()
    given = dict(word.split("=", 1) for word in words)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    record = Path(given["record"]) if "record" in given else None
    kinds = [word for word in given.get("kinds", "").split(",") if word]
    made = campaign(float(given.get("seconds", 120)), int(given.get("seed", 0)), record, kinds, folder)
    total = {name: sum(counts[name] for counts in made["kinds"].values()) for name in COUNTS}
    for kind, counts in made["kinds"].items():
        print(f"{kind}: " + ", ".join(f"{name} {counts[name]}" for name in COUNTS))
    for kind, reason in made["skipped"].items():
        print(f"{kind}: skipped, {reason}")
    print(", ".join(f"{name} {count}" for name, count in total.items()) + f" in {made['seconds']:.0f} s")
    failed = any(total[name] for name in COUNTS[1:])
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
