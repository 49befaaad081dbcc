"""Trials of what lies beside weights and records: models, evaluations, what else is in a run's folder, what a sweep says."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from damage import resume, spoil, stopped
from kills import KILLS_IN_A_ROW, World, expect, outcome, same, was_killed
from moments import Moment, await_moment

import run
from packmamba.evaluation.kept import Kept
from packmamba.evaluation.subject import load_subject
from packmamba.records import read_records, write_sweep
from packmamba.report.items import with_items
from packmamba.training.runs import run_folder
from processes import fork, statuses

EVALUATION = ["tasks=[perplexity,contradiction]", "examples=60", "max_slots=128", "device=cpu", "data.row_length=256",
              "data.slots_per_batch=2560"]  # fmt: skip


def model_of(world: World) -> Path:
    """The folder of a run that has ended."""
    world.undisturbed("packed")
    config, _ = world.of("packed", world.folder / "undisturbed" / "packed-1")
    return run_folder(config)


def spoilt(path: Path, rng: random.Random, count: int, read: Callable[[], Any], known: Any) -> int:
    """So many times: damaged, it must be refused by name, or read as what it was; at the end it is as it was."""
    content = path.read_bytes()
    for _ in range(count):
        how = spoil(path, rng)
        try:
            found = read()
        except ValueError as error:
            expect(path.name in str(error), "undetected", f"{path.name}, {how}: the file is not named in {error}")
        else:
            expect(same(found, known), "undetected", f"{path.name}, {how}")
        path.write_bytes(content)
    return count


def a_model(world: World, folder: Path, rng: random.Random) -> int:
    """Weights, sizes and configuration of a run that has ended, as ``eval`` and ``generate`` read them."""
    shutil.copytree(model_of(world), folder / "m")

    def read() -> Any:
        subject = load_subject(folder / "m", "cpu")
        return [subject.model.state_dict(), vars(subject.config.data), vars(subject.config.trainer)]

    known, names = read(), ["pytorch_model.bin", "config.json", "configuration.yaml"]
    exported = folder / "hf"
    expect(run.main(["export", str(folder / "m"), str(exported)]) == 0, "lost", "no model in Hugging Face's format")
    found = sum(spoilt(folder / "m" / name, rng, 5, read, known) for name in names)
    weights = load_subject(exported, "cpu").model.state_dict()
    return found + spoilt(
        exported / "model.safetensors", rng, 5, lambda: load_subject(exported, "cpu").model.state_dict(), weights
    )


def evaluate(model: Path, output: Path, moment: Moment | None = None) -> int:
    torch.set_num_threads(1)
    await_moment(moment)
    return run.main(["eval", str(model), *EVALUATION, f"output={output}"])


def answers(output: Path) -> Any:
    records = [(record["arm"], record["metrics"], record["curves"]) for record in read_records(output)]
    return records, {path.name: path.read_bytes() for path in sorted((output / "items").iterdir())}


def undisturbed(world: World) -> Path:
    """The output of an evaluation that was left alone."""
    output = world.folder / "undisturbed" / "evaluation"
    if "evaluation" not in world._expected:
        process = fork(evaluate, model_of(world), output, output=world.folder / "evaluation.txt")
        expect(statuses(process) == [0], "lost", f"an evaluation failed, see {world.folder}/evaluation.txt")
        world._expected["evaluation"] = answers(output)
    return output


def killed_evaluation(world: World, folder: Path, rng: random.Random) -> int:
    """Kills of an evaluation, which goes on with the items that it lacks; how many there were."""
    undisturbed(world)
    folder.mkdir(parents=True)
    kills, said = 0, folder / "output.txt"
    for _ in range(KILLS_IN_A_ROW):
        named = Moment(rng.choice(["fsync", "replace"]), ".jsonl", rng.randint(1, 4), rng.choice(["before", "after"]))
        moment = named if rng.random() < 0.5 else None
        process = fork(evaluate, model_of(world), folder / "e", moment, output=said)
        if not was_killed(process, None if moment else rng.uniform(0, 2), f"an evaluation, see {said}"):
            break
        kills += 1
    process = fork(evaluate, model_of(world), folder / "e", output=said)
    expect(statuses(process) == [0], "lost", f"the last evaluation failed, see {said}")
    found = answers(folder / "e")
    expect(len(found[0]) == 2, "doubled", f"{len(found[0])} records")
    expect(found == world._expected["evaluation"], "lost", "other answers")
    return kills


def items(world: World, folder: Path, rng: random.Random) -> int:
    """What a report reads of an evaluation, and what a killed evaluation goes on from."""
    shutil.copytree(undisturbed(world), folder)
    records = read_records(folder)

    def read() -> Any:
        return [Path(record["items"]).read_bytes() for record in with_items(folder, records)]

    found = sum(spoilt(path, rng, 5, read, read()) for path in sorted((folder / "items").iterdir()))
    model, part = load_subject(model_of(world), "cpu").model, folder / "it.part"
    documents = [list(range(n)) for n in range(1, 9)]

    def ask() -> Any:
        return Kept(part, model).answers("it", documents, 4, lambda which: [{"n": n / 7} for n in which])

    known = ask()
    return found + spoilt(part, rng, 10, ask, known)


def what_a_sweep_says(world: World, folder: Path, rng: random.Random) -> int:
    (record,) = read_records(model_of(world))
    (folder / "records").mkdir(parents=True)
    (path,) = (model_of(world) / "records").glob("*.jsonl")
    shutil.copy(path, folder / "records" / path.name)
    write_sweep(folder, "it", {record["arm"]: [0, 1], "other": [0]}, record["arm"], steps={record["arm"]: 12})
    return spoilt(folder / "sweep.json", rng, 20, lambda: read_records(folder), read_records(folder))


def the_rest_of_a_run(world: World, folder: Path, rng: random.Random) -> int:
    """Configuration, claim, lock, curves: the run goes on to the same end, or says in one sentence which file is damaged."""
    config, output = replace(stopped(world), runs_dir=str(folder / "runs")), folder / "output.txt"
    here = Path(shutil.copytree(run_folder(stopped(world)), run_folder(config)))
    others = [path for path in sorted(here.rglob("*")) if path.is_file() and path.suffix != ".ckpt"]
    path = rng.choice(others)
    time = path.stat().st_mtime_ns
    how = "no byte to spoil" if not path.stat().st_size else spoil(path, rng)
    os.utime(path, ns=(time, time))
    (status,) = statuses(fork(resume, config, output=output), timeout=120)
    said = output.read_text()
    expect(status == 0 or (status == 2 and path.name in said), "undetected", f"{path.name}, {how}: {status}: {said}")
    if status == 0:
        expect(same(outcome(config), world.undisturbed("packed")), "lost", f"{path.name}, {how}: another end")
    return 1
