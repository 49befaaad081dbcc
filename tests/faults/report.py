"""docs/reliability.md from the campaigns' records and the defects that they found: python tests/faults/report.py [part.json ...].

With parts, which are records of one campaign at one clean commit, such as two processes make side by side, their sum becomes
that campaign's record first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
COUNTS = ("trials", "lost", "doubled", "undetected")

FRONT = """# What survives a weekend alone
This page is made by `python tests/faults/report.py` from the campaigns' records in `tests/faults/records/`. `make
test-faults` runs two minutes of each campaign; `make test` runs a few seconds.

- **A kill costs steps, not results.** A run that was killed, at any moment, goes on from its last checkpoint when its
  command is repeated, and ends on a CPU with the same bits.
- **Files are whole or not there.** Checkpoints, records, corpora and compiled kernels are written beside their place,
  put on the disk and renamed. A full disk leaves what was there.
- **A signal costs nothing.** Ctrl-C and SIGTERM end a run after the step that it is in, with a checkpoint.
- **Damage is found.** Checkpoints, trained models, records, items of evaluations, corpora and kernels carry checksums.
  A damaged checkpoint is named and the one before it is taken; a corpus, kernels and the items that a killed evaluation
  kept are made again; the rest is refused by name. What was written before there were checksums, or by others, has
  none and is read. Corpora above a gigabyte have their lengths checked when they are opened;
  `python run.py doctor <folder>` reads every byte.
- **Nothing in a checkpoint runs.** Checkpoints hold tensors and plain values. One from an older version, or from
  somebody else, is refused until `python run.py convert <file>` has said what reading it would run and you have
  agreed. `plugins` in a configuration name Python modules, which do run: they are yours to trust.
- **A wrong input is one sentence**, exit status 2, before any work.

A trial of SIGKILL is one killed process, a trial of SIGTERM one that was told to end. Up to three follow each other,
then one is left alone, and what it ends with (weights, optimizer, losses, records) is compared with an undisturbed run.
*Lost*: it did not end, or ended otherwise.
*Doubled*: a run has two records. *Undetected*: something half written or damaged was read or left, or a wrong input
was not refused.
"""

SANITIZERS = """## Under sanitizers
Constructors and operators get right shapes drawn at random, then calls with one wrong argument, which must be refused by
its name. `make test-asan` does it on a CPU, `make sanitize-gpu` on a GPU.
"""


def table(record: dict[str, Any]) -> list[str]:
    lines = ["| fault | " + " | ".join(COUNTS) + " |", "|---|" + "---:|" * len(COUNTS)]
    for kind, counts in record["kinds"].items():
        lines.append(f"| {kind} | " + " | ".join(str(counts[name]) for name in COUNTS) + " |")
    return lines


def page() -> str:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((HERE / "records").glob("*.json"))]
    every = [counts for record in records for counts in record["kinds"].values()]
    total = ", ".join(f"{name} {sum(counts[name] for counts in every)}" for name in COUNTS)
    kills = sum(
        counts["trials"] for record in records for kind, counts in record["kinds"].items() if kind.startswith("SIGKILL")
    )
    parts = [FRONT, f"**{total}**\n", f"Of them {kills} were kills.\n"]
    for record in records:
        name = record["campaign"]
        parts.append(f"## The campaign of {name}\n{record['seconds']:.0f} seconds at commit {record['commit']}.\n")
        parts.append("\n".join(table(record)) + "\n")
        parts += [f"Skipped: {kind} ({reason}).\n" for kind, reason in record.get("skipped", {}).items()]
        defects = HERE / "defects" / f"{name}.md"
        if defects.is_file():
            parts.append(f"What it found, and what was mended:\n\n{defects.read_text(encoding='utf-8').strip()}\n")
    parts.append(f"{SANITIZERS}\n```\n{(HERE / 'records' / 'sanitizers.log').read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of several. Raises ValueError for parts that do not belong together, or of a tree that was not committed."""
    for name in ("campaign", "commit"):
        if len(found := {part[name] for part in parts}) != 1:
            raise ValueError(f"parts differ in {name}: {', '.join(sorted(found))}")
    if parts[0]["commit"].endswith("-dirty"):
        raise ValueError(f"made with changes that were not committed: {parts[0]['commit']}")
    if len({part["seed"] for part in parts}) != len(parts):
        raise ValueError("two parts have one seed: they hold the same trials")
    kinds: dict[str, dict[str, int]] = {}
    skipped: dict[str, str] = {}
    for part in parts:
        skipped |= part.get("skipped", {})
        for kind, counts in part["kinds"].items():
            sums = kinds.setdefault(kind, dict.fromkeys(COUNTS, 0))
            for name in COUNTS:
                sums[name] += counts[name]
    seeds = [part["seed"] for part in parts]
    return {
        **parts[0],
        "seconds": sum(part["seconds"] for part in parts),
        "seed": seeds,
        "kinds": kinds,
        "skipped": skipped,
    }


if __name__ == "__main__":
    if parts := [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]:
        try:
            made = merged(parts)
        except ValueError as error:
            sys.exit(str(error))
        (HERE / "records" / f"{made['campaign']}.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
