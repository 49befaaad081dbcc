"""Trials of damage: changed, zeroed and missing bytes in what a run, a corpus and a cache keep."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

from kills import World, build_kernels, expect, outcome, same, small_kernels, whole_library

from packmamba.config import Config
from packmamba.data.corpus import Corpora, load_corpora
from packmamba.data.integrity import check
from packmamba.errors import UserError
from packmamba.records import read_records
from packmamba.training.callbacks import Stopped, checkpoints
from packmamba.training.checkpoint_file import Damaged, read_checkpoint
from packmamba.training.fit import fit
from packmamba.training.runs import run_folder
from processes import fork, statuses


def spoil(path: Path, rng: random.Random) -> str:
    """Changes a file; says how. Never leaves it as it was."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["bits", "bytes", "zeros", "cut", "empty", "longer"])
    if how == "bits":
        for place in rng.sample(range(len(content)), min(rng.choice([1, 1, 3]), len(content))):
            content[place] ^= 1 << rng.randrange(8)
    elif how == "bytes":
        for place in rng.sample(range(len(content)), min(rng.choice([40, 200]), len(content))):
            content[place] ^= rng.randrange(1, 256)
    elif how == "zeros":
        start = rng.randrange(len(content))
        end = min(len(content), start + rng.choice([8, 512, 4096]))
        content[start:end] = bytes(
            255 - content[start] if not any(content[start:end]) else 0 for _ in range(end - start)
        )
    elif how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "empty":
        content.clear()
    else:
        content += os.urandom(rng.choice([1, 100]))
    path.write_bytes(content)
    return how


def stopped(world: World) -> Config:
    """A run that stopped after step 8 of 12."""
    config = replace(world.configs["packed"], runs_dir=str(world.folder / "stopped"))
    if not checkpoints(run_folder(config) / "checkpoints"):
        (status,) = statuses(fork(stop_at, config, 8, output=world.folder / "stopped.txt"))
        expect(status == 0, "lost", "no run to damage")
    return config


def stop_at(config: Config, step: int) -> None:
    try:
        fit(config, progress=False, stop=lambda history: history.totals["steps"] == step)
    except Stopped:
        return


def resume(config: Config) -> int:
    """In a child: 2 where the run was refused."""
    try:
        fit(config, progress=False)
    except UserError as error:
        print(f"refused: {error}")
        return 2
    return 0


def a_checkpoint(world: World, folder: Path, rng: random.Random) -> int:
    """Twenty copies of it are spoiled and must be refused."""
    (*_, newest) = checkpoints(run_folder(stopped(world)) / "checkpoints")
    folder.mkdir()
    for _ in range(20):
        copy = Path(shutil.copy(newest, folder / newest.name))
        how = spoil(copy, rng)
        try:
            read_checkpoint(copy)
        except Damaged as error:
            expect(newest.name in str(error), "undetected", f"{how}: the file is not named")
        else:
            expect(False, "undetected", how)
    return 20


def a_run_s_checkpoint(world: World, folder: Path, rng: random.Random) -> int:
    """The newest is spoiled, and the run ends as if it had not been; or both are, and the run refuses and names them."""
    config = replace(stopped(world), runs_dir=str(folder / "runs"))
    shutil.copytree(run_folder(stopped(world)), run_folder(config))
    both = rng.random() < 0.3
    spoilt = checkpoints(run_folder(config) / "checkpoints")[0 if both else 1 :]
    hows = [spoil(path, rng) for path in spoilt]
    output = folder / "output.txt"
    (status,) = statuses(fork(resume, config, output=output), timeout=120)
    said = output.read_text()
    expect(all(str(path) in said for path in spoilt), "undetected", f"{hows}: not named in {said}")
    expect(status == 2 * both, "lost", f"{hows}: status {status}: {said}")
    if not both:
        expect(same(outcome(config), world.undisturbed("packed")), "lost", f"{hows}: another end")
    return 1


def the_token_store(world: World, folder: Path, rng: random.Random) -> int:
    """Each file in turn: the corpus is made again, and is what it was."""
    folder.mkdir()
    data = replace(world.configs["packed"].data, cache_dir=str(folder / "cache"))
    before = contents(load_corpora(data, progress=False))
    for name in sorted(before):
        path = next((folder / "cache").glob(f"*/{name}"))
        how = spoil(path, rng)
        found = load_corpora(data, progress=False)
        check(found.train.folder, whole=True)
        expect(contents(found) == before, "undetected", f"{name}: {how}")
    return len(before)


def contents(corpora: Corpora) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpora.train.folder.iterdir() if path.stat().st_size}


def a_library(world: World, folder: Path, rng: random.Random) -> int:
    """Of compiled kernels: it is built again."""
    sources, cache = small_kernels(folder), folder / "cache"
    given = {"output": folder / "output.txt", "PACKMAMBA_CACHE": str(cache)}
    for _ in range(3):
        (status,) = statuses(fork(build_kernels, sources, None, **given))
        expect(status == 0, "lost", "a build failed")
        whole_library(cache)
        (library,) = cache.glob("*.so")
        spoil(library, rng)
    (status,) = statuses(fork(build_kernels, sources, None, **given))
    whole_library(cache)
    return 3


def a_record(world: World, folder: Path, rng: random.Random) -> int:
    """Twenty copies of it: each is named, or says the same as before."""
    world.undisturbed("packed")
    config, _ = world.of("packed", world.folder / "undisturbed" / "packed-1")
    (path,) = (run_folder(config) / "records").glob("*.jsonl")
    (record,) = read_records(run_folder(config))
    (folder / "records").mkdir(parents=True)
    copy = folder / "records" / path.name
    for _ in range(20):
        shutil.copy(path, copy)
        how = spoil(copy, rng)
        try:
            found = read_records(folder)
        except ValueError as error:
            expect(str(folder) in str(error), "undetected", f"{how}: the file is not named")
        else:
            expect(found == [record], "undetected", how)
    return 20
