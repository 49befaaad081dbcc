"""The campaign of wrong inputs: python tests/faults/inputs.py [seconds=120] [seed=0] [blocks=8] [record=<file>] [only=<word>].

One of each kind is tried first, then all in an order drawn by the seed until the time is over; without `seconds`, all of them.
Each is one command with one fault in this process or in one of its own, one call of a public function with one wrong argument, or
a block of faults that hypothesis draws (`drawn.py`; `blocks` of each kind). Exit status 1 if any was not refused as it should be:
by one sentence that names it, with status 2, before anything is written, within seconds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import campaign as faults  # which also says where the rest lies
import constructors
import drawn
import files
import keys
import torch
import words
from trials import Trial as Trial
from trials import try_out, try_process

import packmamba.report.folder
import packmamba.training.fit  # noqa: F401
from made_records import training
from packmamba import MambaLM

WHOLE = ("key", "key of a bench", "file", "folder")
"""Kinds whose faults have rows of their own."""
PROCESSES = 60
"""How many of the commands are also tried as processes of their own."""
Try = Callable[[Path], "tuple[int, str | None]"]


def trials(model: Path, seed: int = 0, blocks: int = 8, examples: int = 25) -> Iterator[tuple[str, str, Try]]:
    """(row of the table, what is tried, how) of all; ``model`` is the folder of a good one. A try gives how many it was and None,
    or what is wrong."""
    record = json.dumps(training("single", corpus="c")) + "\n"
    commands = [
        *keys.every(), *files.sources(), *files.configurations(), *files.models(model), *files.records(record), *files.outputs(),
        *words.commands(), *words.assignments(),
    ]  # fmt: skip
    for trial in commands:
        first = trial.kind.partition(":")[0]
        row = trial.kind if first in WHOLE else first
        yield f"{row}, a command", str(trial), lambda folder, trial=trial: (1, try_out(trial, folder))
    plain = [trial for trial in commands if not trial.user and "\0" not in "".join(trial.argv)]
    for trial in random.Random(seed).sample(plain, PROCESSES):
        yield "a command in a process", str(trial), lambda folder, trial=trial: (1, try_process(trial, folder))
    for name, target in constructors.targets(("reference", "cpu")).items():
        for argument, value in constructors.every(target):
            said = f"{name}({argument}={value!r:.40})"
            wrong = {argument: value}
            how = lambda _, target=target, wrong=wrong: (1, constructors.problem(target, wrong))  # noqa: E731
            yield f"argument of {name.partition(' ')[0]}", said, how
    every = list(drawn.blocks(model, record))
    for number in range(blocks):
        for row, how in every:
            yield (
                row,
                f"block {number}",
                lambda folder, how=how, number=number: how(folder, 1000 * seed + number, examples),
            )


def in_order(every: list[Any], seed: int) -> list[Any]:
    """One of each row first, then the others; both as the seed draws them."""
    random.Random(seed).shuffle(every)
    firsts = {row: trial for trial in reversed(every) for row in trial[:1]}
    of_rows = {id(trial) for trial in firsts.values()}
    return sorted(every, key=lambda trial: id(trial) not in of_rows)


def campaign(
    folder: Path,
    seconds: float = float("inf"),
    seed: int = 0,
    only: str = "",
    blocks: int = 8,
    examples: int = 25,
    say: Any = print,
) -> dict[str, Any]:
    """The record, as report.py reads it."""
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    MambaLM(300, 8, 1).save_pretrained(folder / "model")
    every = [trial for trial in trials(folder / "model", seed, blocks, examples) if only in f"{trial[0]} {trial[1]}"]
    begun, found = time.monotonic(), {}
    for number, (kind, what, how) in enumerate(in_order(every, seed)):
        if time.monotonic() - begun > seconds:
            break
        place = folder / str(number)
        place.mkdir()
        tried, wrong = how(place)
        shutil.rmtree(place, ignore_errors=True)
        counts = found.setdefault(kind, dict.fromkeys(faults.COUNTS, 0))
        counts["trials"] += tried
        if wrong is not None:
            counts["undetected"] += 1
            say(f"[{kind}] {what}: {wrong}", flush=True)
    return {"campaign": "inputs", "commit": faults._commit(), "seconds": round(time.monotonic() - begun, 1), "seed": seed,
            "kinds": dict(sorted(found.items()))}  # fmt: skip


def main(given: dict[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="inputs-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        made = campaign(
            Path(folder),
            float(given.get("seconds", "inf")),
            int(given.get("seed", 0)),
            given.get("only", ""),
            int(given.get("blocks", 8)),
        )
    if "record" in given:
        Path(given["record"]).write_text(json.dumps(made, indent=1) + "\n")
    total = {name: sum(counts[name] for counts in made["kinds"].values()) for name in faults.COUNTS}
    print(", ".join(f"{name} {count}" for name, count in total.items()) + f" in {made['seconds']:.0f} s")
    return int(any(total[name] for name in faults.COUNTS[1:]))


if __name__ == "__main__":
    sys.exit(main(dict(word.split("=", 1) for word in sys.argv[1:])))
