"""What the fault campaign tries, and how each trial is judged: every kind of fault in the kinds that the record counts.

A trial of kills is one process that was killed: up to three in a row, each going on from the one before, then one that is
left alone. What it ends with must be what a run that was never disturbed ends with, to the bit.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from moments import Moment, await_moment, set_clock

from packmamba.config import Config, load_config
from packmamba.data.corpus import load_corpora
from packmamba.data.integrity import check
from packmamba.errors import UserError
from packmamba.ops import build
from packmamba.records import read_records
from packmamba.training.callbacks import checkpoints
from packmamba.training.checkpoint_file import check_whole, read_checkpoint
from packmamba.training.fit import fit
from packmamba.training.runs import record_path, run_folder
from packmamba.training.signals import Interrupted
from processes import fork, fork_ranks, kill, statuses
from runs import CARRY, losses_of, tiny_config, write_config

STEPS = ["trainer.max_steps=12", "trainer.validate_every=6", "trainer.checkpoint_every=2", "trainer.threads=1",
         "data.num_workers=0", "data.num_proc=1", "trainer.loggers=[csv]"]  # fmt: skip
SCHEMES = {
    "packed": ["data.strategy=greedy"],
    "carry": [*CARRY, "data.mode=stream", "data.tokens_per_step=144", "model.learned_initial_state=true"],
}
KILLS_IN_A_ROW = 3


class Wrong(Exception):
    """What a trial found: lost, doubled or undetected, and how."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what


def expect(true: Any, what: str, why: str) -> None:
    if not true:
        raise Wrong(what, why)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def same(a: Any, b: Any) -> bool:
    """To the bit."""
    return len(leaves(a)) == len(leaves(b)) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves(a), leaves(b))
    )


def outcome(config: Config) -> tuple[Any, Any]:
    """Losses and state of a run that has ended, once each."""
    records = read_records(run_folder(config))
    expect(len(records) == 1, "doubled", f"{len(records)} records")
    last = checkpoints(run_folder(config) / "checkpoints")[-1]
    state = read_checkpoint(last)
    weights = torch.load(run_folder(config) / "pytorch_model.bin", weights_only=True)
    return losses_of(records[0]), [state[part] for part in ("state_dict", "optimizer_states", "carry", "rng")] + [
        weights
    ]


def train(path: str, moment: Moment | None = None, clock: float = 0.0) -> int:
    """In a child: the command without its table, which takes a third of so small a run's time."""
    set_clock(clock)
    await_moment(moment)
    try:
        fit(load_config(path), progress=False)
    except UserError as error:
        print(f"refused: {error}")
        return error.status
    except Interrupted as interrupted:
        return interrupted.status
    return 0


def prepare(data: Any, moment: Moment | None, clock: float = 0.0) -> None:
    set_clock(clock)
    await_moment(moment)
    load_corpora(data, progress=False)


def build_kernels(sources: Path, moment: Moment | None) -> None:
    await_moment(moment)
    build.kernel_folder = lambda: sources
    build.build("cpu")


class World:
    """What all trials share: a corpus, and what undisturbed runs end with. ``folder`` is the campaign's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        statuses(fork(int, output=folder / "output.txt"))  # the first fork waits for what it is a fork of
        load_corpora(self.configs["packed"].data, progress=False)
        self.seconds: dict[str, float] = {}
        self._expected: dict[str, Any] = {}

    @cached_property
    def configs(self) -> dict[str, Config]:
        return {name: tiny_config(self.folder, *STEPS, *keys) for name, keys in SCHEMES.items()}

    def undisturbed(self, scheme: str, ranks: int = 1) -> Any:
        """What it ends with; measures how long it takes."""
        name = f"{scheme}-{ranks}"
        if name not in self._expected:
            folder = self.folder / "undisturbed" / name
            config, path = self.of(scheme, folder, ranks)
            begun = time.monotonic()
            expect(self.run(path, folder, ranks) == 0, "lost", f"an undisturbed run failed, see {folder}/output.txt")
            self.seconds[name] = time.monotonic() - begun
            self._expected[name] = outcome(config)
        return self._expected[name]

    def of(self, scheme: str, folder: Path, ranks: int = 1) -> tuple[Config, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(self.configs[scheme], runs_dir=str(folder / "runs"))
        config.trainer = replace(config.trainer, devices=ranks)
        return config, self.write(folder, config)

    @staticmethod
    def write(folder: Path, config: Config) -> Path:
        return write_config(folder / "run.yaml", config)

    def run(self, path: Path, folder: Path, ranks: int = 1, **given: Any) -> int:
        """A run that nobody kills: the worst exit status of its processes."""
        return max(map(abs, statuses(*self.begin(path, folder, ranks, **given), timeout=120)))

    def begin(self, path: Path, folder: Path, ranks: int, moment: Moment | None = None, clock: float = 0.0) -> Any:
        output = folder / "output.txt"
        if ranks == 1:
            return [fork(train, str(path), moment, clock, output=output)]
        return fork_ranks(ranks, train, str(path), output=output)


def whole_so_far(config: Config) -> None:
    """What lies in a run's folder at any moment: whole checkpoints, at most one record, and that whole."""
    for path in checkpoints(run_folder(config) / "checkpoints"):
        check_whole(path)
    path = record_path(config)
    if path.is_file():
        mine = [
            record
            for record in read_records(path.parents[1])
            if (record["arm"], record["seed"]) == (config.name, config.seed)
        ]
        expect(len(mine) == 1, "doubled", f"{len(mine)} records")


IN_A_RUN: dict[str, Callable[[random.Random], Moment | None]] = {
    "at a random time": lambda r: None,
    "in a step": lambda r: Moment("step", "", r.randint(1, 12), "after"),
    "in writing a checkpoint": lambda r: Moment(
        *r.choice([("fsync", ".ckpt"), ("replace", ".ckpt"), ("unlink", ".ckpt")]),
        r.randint(1, 6), r.choice(["before", "after"]),
    ) if r.random() < 0.5 else Moment("fsync", ".ckpt", r.randint(1, 6), "half", r.random()),
    "in writing a record": lambda r: Moment(
        r.choice(["fsync", "replace"]), ".jsonl", 1, r.choice(["before", "after"])
    ) if r.random() < 0.5 else Moment("fsync", ".jsonl", 1, "half", r.random()),
    "in writing the model": lambda r: Moment("replace", r.choice(["config.json", "pytorch_model", "tokenizer.json"]), 1,
                                             r.choice(["before", "after"])),
}  # fmt: skip


def killed_run(world: World, folder: Path, rng: random.Random, where: str, ranks: int = 1, clock: bool = False) -> int:
    """Kills of one run; how many there were."""
    scheme = rng.choice(list(SCHEMES)) if ranks == 1 else "packed"
    expected = world.undisturbed(scheme, ranks)
    config, path = world.of(scheme, folder, ranks)
    kills = 0
    for _ in range(KILLS_IN_A_ROW):
        moment = IN_A_RUN[where](rng)
        hours = rng.uniform(-48, 1) * 3600 if clock else 0.0
        processes = world.begin(path, folder, ranks, moment=moment, clock=hours)
        if moment is None:
            time.sleep(rng.uniform(0.05, 0.95) * world.seconds[f"{scheme}-{ranks}"])
            alive = [process for process in processes if process.is_alive()]
            if ranks > 1 and len(alive) == ranks and rng.random() < 0.5:
                kill(alive.pop(rng.randrange(ranks)))  # one first, as when its machine goes
                time.sleep(0.2)
            kill(*(process for process in alive if process.is_alive()))
        found = statuses(*processes, timeout=120)
        whole_so_far(config)
        if -signal.SIGKILL not in found:
            expect(set(found) == {0}, "lost", f"it ended with {found}, see {folder}/output.txt")
            break
        kills += 1
    hours = -24 * 3600.0 if clock else 0.0
    status = world.run(path, folder, ranks, clock=hours)
    expect(status == 0, "lost", f"the last run ended with {status}, see {folder}/output.txt")
    expect(same(outcome(config), expected), "lost", "it ended otherwise than the undisturbed run")
    left = [path.name for path in run_folder(config).rglob("*.tmp")] + [
        p.name for p in run_folder(config).glob("model-*")
    ]
    expect(not left, "undetected", f"left behind: {left}")
    return kills


def told_run(world: World, folder: Path, rng: random.Random) -> int:
    """SIGTERM to one run: it ends at its next step, and goes on; how often it was told."""
    scheme, told = rng.choice(list(SCHEMES)), 0
    expected = world.undisturbed(scheme)
    config, path = world.of(scheme, folder)
    for _ in range(KILLS_IN_A_ROW):
        (process,) = world.begin(path, folder, 1)
        time.sleep(rng.uniform(0.05, 0.95) * world.seconds[f"{scheme}-1"])
        if process.is_alive():
            process.terminate()
        (status,) = statuses(process, timeout=60)
        whole_so_far(config)
        expect(status in (0, -signal.SIGTERM, 128 + signal.SIGTERM), "lost", f"it ended with {status}, see {folder}")
        if status == 0:
            break
        told += 1
    expect(world.run(path, folder) == 0, "lost", f"the last run failed, see {folder}/output.txt")
    expect(same(outcome(config), expected), "lost", "it ended otherwise than the undisturbed run")
    return told


def was_killed(process: Any, after: float | None, what: str) -> bool:
    """Whether a process was killed, after so many seconds or at its own moment; else it must have ended well."""
    if after is not None:
        time.sleep(after)
        if process.is_alive():
            kill(process)
    (status,) = statuses(process, timeout=60)
    expect(status in (0, -signal.SIGKILL), "lost", f"it ended with {status}: {what}")
    return status == -signal.SIGKILL


def killed_store(world: World, folder: Path, rng: random.Random, clock: bool = False) -> int:
    """Kills of the preparation of a corpus."""
    data = replace(world.configs["packed"].data, cache_dir=str(folder / "cache"))
    expected = load_corpora(world.configs["packed"].data, progress=False)
    folder.mkdir(parents=True)
    kills = 0
    for _ in range(KILLS_IN_A_ROW):
        named = Moment(rng.choice(["fsync", "replace"]), "cache", rng.randint(1, 8), rng.choice(["before", "after"]))
        moment = named if rng.random() < 0.7 else None
        process = fork(prepare, data, moment, output=folder / "output.txt")
        if not was_killed(process, None if moment else rng.uniform(0, 0.4), f"preparing, see {folder}/output.txt"):
            break
        kills += 1
    found = load_corpora(data, progress=False)
    check(found.train.folder, whole=True)
    expect(found.corpus_hash == expected.corpus_hash, "lost", "another corpus")
    left = [path.name for path in (folder / "cache").iterdir() if path.name.startswith(".")]
    expect(not left, "undetected", f"left behind: {left}")
    return kills


def small_kernels(folder: Path) -> Path:
    for part in ("common", "cpu"):
        (folder / "kernels" / part).mkdir(parents=True)
    (folder / "kernels" / "common" / "answer.h").write_text("#define ANSWER 42\n")
    for name in "ab":
        (folder / "kernels" / "cpu" / f"{name}.cpp").write_text(
            f'#include "../common/answer.h"\nint {name}() {{ return ANSWER; }}\n'
        )
    return folder / "kernels"


def killed_build(world: World, folder: Path, rng: random.Random) -> int:
    """Kills of a build of kernels."""
    sources, cache = small_kernels(folder), folder / "cache"
    kills = 0
    for _ in range(KILLS_IN_A_ROW):
        half = Moment("fsync", ".so", 1, "half", rng.random())
        named = rng.choice([half, Moment("replace", ".so", 1, "before"), Moment("replace", ".so", 1, "after")])
        moment = named if rng.random() < 0.5 else None
        process = fork(build_kernels, sources, moment, output=folder / "output.txt", PACKMAMBA_CACHE=str(cache))
        if not was_killed(process, None if moment else rng.uniform(0, 0.6), f"a build, see {folder}/output.txt"):
            break
        kills += 1
    (status,) = statuses(fork(build_kernels, sources, None, output=folder / "output.txt", PACKMAMBA_CACHE=str(cache)))
    expect(status == 0, "lost", f"the last build ended with {status}")
    whole_library(cache)
    left = [path.name for path in cache.iterdir() if path.suffix not in (".so", ".lock")]
    expect(not left, "undetected", f"left behind: {left}")
    return kills


def whole_library(cache: Path) -> None:
    (library,) = cache.glob("*.so")
    content = library.read_bytes()
    expect(content[-32:] == build._digest(content[:-32]), "undetected", "a library that is not whole")
