"""Trials of places that cannot be written, and of many processes that want one thing."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from campaign import Skipped
from kills import World, build_kernels, expect, outcome, prepare, same, small_kernels, whole_library, whole_so_far

from packmamba.data.corpus import load_corpora
from packmamba.data.integrity import check
from processes import fork, statuses


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise Skipped("mounting a small file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def one_sentence(status: int, output: Path, what: str) -> None:
    """A refusal: exit status 2, and no traceback."""
    said = output.read_text()
    expect(status == 2 and "Traceback" not in said, "undetected", f"{what}: status {status}: {said[-3000:]}")


def full_disk_under_a_run(world: World, folder: Path, rng: random.Random) -> int:
    """It ends in one sentence; with more room it goes on to the same end."""
    disk, output = folder / "disk", folder / "output.txt"
    expected = world.undisturbed("packed")
    with small_disk(disk, rng.randrange(20, 180) * 1024):
        config, path = world.of("packed", folder)
        config.runs_dir = str(disk / "runs")
        path = world.write(folder, config)
        status = world.run(path, folder)
        if status:
            one_sentence(status, output, "a full disk under a run")
        whole_so_far(config)
        remount(disk, "size=64m")
        expect(world.run(path, folder) == 0, "lost", f"with more room it failed: {output.read_text()[-3000:]}")
        expect(same(outcome(config), expected), "lost", "another end")
    return int(status != 0)


def full_disk_under_a_corpus(world: World, folder: Path, rng: random.Random) -> int:
    disk, output = folder / "disk", folder / "output.txt"
    whole = load_corpora(world.configs["packed"].data, progress=False)
    with small_disk(disk, rng.randrange(2, 12) * 4096):
        config, path = world.of("packed", folder)
        config.data = replace(config.data, cache_dir=str(disk / "cache"))
        path = world.write(folder, config)
        status = world.run(path, folder)
        if status:
            one_sentence(status, output, "a full disk under a corpus")
        remount(disk, "size=64m")
        found = load_corpora(config.data, progress=False)
        check(found.train.folder, whole=True)
        expect(found.corpus_hash == whole.corpus_hash, "lost", "another corpus")
    return int(status != 0)


def full_disk_under_kernels(world: World, folder: Path, rng: random.Random) -> int:
    disk, sources = folder / "disk", small_kernels(folder)
    with small_disk(disk, rng.randrange(1, 8) * 4096):
        given = {"output": folder / "output.txt", "PACKMAMBA_CACHE": str(disk / "cache")}
        (status,) = statuses(fork(build_kernels, sources, None, **given))
        if status:
            said = (folder / "output.txt").read_text()
            expect("KernelError" in said, "undetected", f"a full disk under kernels: {said[-2000:]}")
        remount(disk, "size=64m")
        (again,) = statuses(fork(build_kernels, sources, None, **given))
        expect(again == 0, "lost", "with more room the build failed")
        whole_library(disk / "cache")
    return int(status != 0)


def read_only_folder(world: World, folder: Path, rng: random.Random) -> int:
    """Under a run, before it begins or after it was stopped; nothing is written, and later it goes on."""
    disk, output = folder / "disk", folder / "output.txt"
    with small_disk(disk, 64 << 20):
        config, path = world.of("packed", folder)
        where = rng.choice(["runs_dir", "data.cache_dir"])
        if where == "runs_dir":
            config.runs_dir = str(disk / "runs")
        else:
            config.data = replace(config.data, cache_dir=str(disk / "cache"))
        path = world.write(folder, config)
        remount(disk, "ro")
        one_sentence(world.run(path, folder), output, "a read-only folder")
        expect(where in output.read_text(), "undetected", f"{where} is not named: {output.read_text()}")
        remount(disk, "rw")
        expect(world.run(path, folder) == 0, "lost", f"writable again, it failed: {output.read_text()[-3000:]}")
        expect(same(outcome(config), world.undisturbed("packed")), "lost", "another end")
    return 1


def two_commands(world: World, folder: Path, rng: random.Random) -> int:
    """Of one run at once: one trains it, the other refuses or takes its record."""
    expected = world.undisturbed("packed")
    config, path = world.of("packed", folder)
    begun = [process for _ in range(2) for process in world.begin(path, folder, 1)]
    found = sorted(statuses(*begun, timeout=120))
    expect(found in ([0, 0], [0, 2]), "lost", f"they ended with {found}: {(folder / 'output.txt').read_text()[-3000:]}")
    expect(same(outcome(config), expected), "lost", "another end")
    return 1


def eight_builds(world: World, folder: Path, rng: random.Random) -> int:
    """At once: one compiles, all have it."""
    sources, cache = small_kernels(folder), folder / "cache"
    given = {"output": folder / "output.txt", "PACKMAMBA_CACHE": str(cache)}
    found = statuses(*(fork(build_kernels, sources, None, **given) for _ in range(8)))
    expect(found == [0] * 8, "lost", f"builds ended with {found}")
    compiled = (folder / "output.txt").read_text().count("Compiling")
    expect(compiled == 1, "doubled", f"{compiled} processes compiled")
    whole_library(cache)
    return 1


def four_preparations(world: World, folder: Path, rng: random.Random) -> int:
    """Of one corpus at once."""
    folder.mkdir()
    data = replace(world.configs["packed"].data, cache_dir=str(folder / "cache"))
    found = statuses(*(fork(prepare, data, None, output=folder / "output.txt") for _ in range(4)))
    expect(found == [0] * 4, "lost", f"they ended with {found}")
    corpora = load_corpora(data, progress=False)
    check(corpora.train.folder, whole=True)
    whole = load_corpora(world.configs["packed"].data, progress=False)
    expect(corpora.corpus_hash == whole.corpus_hash, "lost", "another corpus")
    return 1
