"""Makes a corpus's folder: chunks of tokens are joined in the source's order, whichever process made them.

Beside the corpus's folder lies, while it is made, ``.<name>.work``: ``shards-*/`` (chunks that wait for those before them),
``corpus/`` (all before, joined) and ``journal.jsonl`` (a line for each chunk that was joined: how long the files were then,
and the hashes of what was in them). A process that takes up another's work cuts the files back to the journal's last line.
The corpus appears by one rename, so it is whole or not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig
from packmamba.data import integrity, shards, workers
from packmamba.data.integrity import BLOCK, SPLITS, hash_of
from packmamba.data.shards import Card
from packmamba.data.sources import PART_BYTES, PART_EXAMPLES, Part, Source, unreadable
from packmamba.data.tokenization import Tokenizer
from packmamba.errors import UserError

_THREADS = threading.Lock()

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def alone(folder: Path, data: DataConfig) -> Iterator[None]:
    """Keeps the making of a corpus to this process; waits as long as another has it."""
    path = _beside(folder, "lock")
    with _THREADS, contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            while True:
                file = stack.enter_context(open(path, "w"))
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    logger.warning("another process prepares the corpus %s; waiting for it", folder)
                    fcntl.lockf(file, fcntl.LOCK_EX)
                if _is_there(path, file):
                    break
        except OSError as error:
            raise ConfigError(f"data.cache_dir '{data.cache_dir}' cannot be written ({error.strerror})") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def clear_away(folder: Path) -> None:
    """Removes what a process has left that was killed when the corpus was in its place."""
    left = [_beside(folder, what) for what in ("work", "damaged", "lock")]
    if not any(path.exists() for path in left) or not _THREADS.acquire(blocking=False):
        return
    try:
        with contextlib.suppress(OSError), open(left[-1], "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(left[-1], file):
                for path in left[:-1]:
                    shutil.rmtree(path, ignore_errors=True)
                left[-1].unlink()
    finally:
        _THREADS.release()


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _is_there(path: Path, file: IO[str]) -> bool:
    """Whether the path still is this file: the process that had it before removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def prepare(
    folder: Path, data: DataConfig, source: Source, tokenizer: Tokenizer, identity: dict[str, Any], progress: bool
) -> None:
    """Makes the corpus, or goes on from what a process that was killed has left.

    Raises ConfigError where the source or a key must change, UserError where the same command may go on.
    """
    work = _beside(folder, "work")
    try:
        _prepare(folder, work, data, source, tokenizer, identity, progress)
    except ConfigError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:
        raise UserError(
            f"data.cache_dir '{data.cache_dir}' cannot be written ({error.strerror or error}); what is done is kept, and the "
            "same command goes on from it"
        ) from None


def _prepare(
    folder: Path,
    work: Path,
    data: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    progress: bool,
) -> None:
    try:
        parts: Sequence[Part] = source.parts() if source.parts else [source.read]
    except OSError as error:
        raise unreadable(error) from None
    joined, ready, waiting = _take_up(work, len(parts))
    done = [*joined.cards, *ready.values()]
    tasks = _tasks(parts, done)
    bar = tqdm(
        total=source.total,
        initial=sum(card["advanced"] for card in done),
        unit=source.unit,
        unit_scale=True,
        desc=f"Preparing {data.source} corpus",
        disable=None if progress else True,
    )
    failed: dict[int, UserError] = {}
    with bar, joined, contextlib.ExitStack() as stack:
        messages = workers.run(tasks, data.num_proc or _cores(), tokenizer, waiting, bar.update)
        stack.callback(messages.close)
        joined.add(ready, waiting)
        for message in messages:
            if isinstance(message, workers.Failed):
                failed[message.number] = message.error
            else:
                ready[message["part"], message["chunk"]] = message
            joined.add(ready, waiting)
            if joined.next[0] in failed:  # the first, whichever process met it first
                raise failed[joined.next[0]]
    train, validation = (joined.counts(split)["documents"] for split in SPLITS)
    _check_split(train, validation, sum(card["skipped"].get("bad_lines", 0) for card in joined.cards), data)
    try:
        joined.finish(identity, tokenizer)
    except ValueError as error:
        raise ConfigError(f"data.cache_dir '{data.cache_dir}' does not keep what is written: {error}") from None
    _install(work / "corpus", folder)
    shutil.rmtree(work, ignore_errors=True)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _tasks(parts: Sequence[Part], done: list[Card]) -> list[workers.Task]:
    whole = {card["part"] for card in done if card["last"]}
    chunks: dict[int, set[int]] = {}
    for card in done:
        chunks.setdefault(card["part"], set()).add(card["chunk"])
    return [
        workers.Task(number, part, frozenset(chunks.get(number, ())))
        for number, part in enumerate(parts)
        if number not in whole
    ]


def _check_split(train: int, validation: int, bad_lines: int, data: DataConfig) -> None:
    if train + validation == 0 and bad_lines:
        raise ConfigError(
            f"data.path '{data.path}' has no document: data.bad_lines=skip leaves out all of its {bad_lines} lines; "
            "data.bad_lines=error says what is wrong with the first"
        )
    if train + validation == 0:
        raise ConfigError(f"data.path '{data.path}' has no document with a token in it")
    if train == 0 or (validation == 0 and data.validation_fraction):
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction} makes {train} training and {validation} validation "
            "documents; change it, 0 holds out none"
        )


def _take_up(work: Path, num_parts: int) -> tuple[Joined, dict[tuple[int, int], Card], Path]:
    """What is joined, the chunks that wait, and their folder; nothing where there is none, or where it cannot be used.

    The folder is a new one: a process that was started by one that is gone may for a moment still write into the old one.
    """
    plan = [num_parts, PART_BYTES, PART_EXAMPLES, shards.CHUNK]
    waiting = work / f"shards-{uuid.uuid4().hex}"
    if (work / "plan.json").exists():
        try:
            left = json.loads((work / "plan.json").read_text())
            if left["plan"] != plan:
                raise ValueError("another version cut it otherwise")
            joined = Joined(work)
            (old,) = work.glob("shards-*")
            os.rename(old, waiting)
            same_boot = left["boot"] == _boot()  # else files may lack what was not yet on the disk
            ready = shards.keep(waiting, lambda place: same_boot and place >= joined.next)
            _write_plan(work, plan)
            if done := len(joined.cards) + len(ready):
                logger.warning("going on with the corpus in %s: %d chunks are done", work, done)
            return joined, ready, waiting
        except (OSError, ValueError, KeyError, IndexError) as error:
            logger.warning(
                "what is left of the corpus in %s cannot be used (%s); it is made from the start", work, error
            )
    shutil.rmtree(work, ignore_errors=True)
    (work / "corpus").mkdir(parents=True)
    waiting.mkdir()
    _write_plan(work, plan)
    return Joined(work), {}, waiting


def _write_plan(work: Path, plan: list[int]) -> None:
    (work / "plan.json").write_text(json.dumps({"plan": plan, "boot": _boot()}))


def _boot() -> str:
    """Changes when the machine starts again."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.urandom(8).hex()


def _install(made: Path, folder: Path) -> None:
    """Renames into place; what is there is damaged, and those who have it open keep it."""
    aside = _beside(folder, "damaged")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    os.rename(made, folder)
    integrity.sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


class Joined:
    """The chunks so far as one corpus: files that grow, their hashes, the journal."""

    def __init__(self, work: Path) -> None:
        """Raises ValueError where the files are not as the journal says."""
        self.folder = work / "corpus"
        self._journal = open(work / "journal.jsonl", "a+")
        self._journal.seek(0)
        lines = [line for line in self._journal.read().splitlines(keepends=True) if line.endswith("\n")]
        self._journal.truncate(sum(map(len, lines)))  # a line that was cut short counts for nothing; it is ASCII
        entries = list(map(json.loads, lines))
        self.cards: list[Card] = []
        self.next = (0, 0)
        """Part and chunk that come next."""
        self._groups: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        for entry in entries:
            self._step(entry["card"])
        self._files: dict[str, BinaryIO] = {}
        self._hashes: dict[str, Any] = {}
        known = entries[-1]["files"] if entries else {}
        for path in self.folder.iterdir():
            if path.name not in known:
                path.unlink()
        for name in {*known, *(f"{split}.{name}" for split in SPLITS for name in ("tokens", "lengths"))}:
            self._open(name)
        for name, (size, digest) in known.items():
            self._hashes[name] = hash_of(self._files[name], size)
            if self._hashes[name].hexdigest() != digest:
                raise ValueError(f"{self.folder / name} is not what was written")
        for file in self._files.values():
            file.truncate()

    def _open(self, name: str) -> None:
        if name not in self._files:
            (self.folder / name).touch()
            self._files[name] = open(self.folder / name, "r+b")
            self._hashes[name] = hashlib.blake2b(digest_size=16)

    def _step(self, card: Card) -> None:
        self.cards.append(card)
        self.next = (card["part"] + 1, 0) if card["last"] else (card["part"], card["chunk"] + 1)
        self._number_groups(card)

    def _number_groups(self, card: Card) -> None:
        for split, names in self._groups.items():
            for name in card["groups"][split]:
                names.setdefault(name, len(names))

    def add(self, ready: dict[tuple[int, int], Card], folder: Path) -> None:
        """Takes what comes next as long as it is there."""
        while card := ready.pop(self.next, None):
            self._number_groups(card)
            for name in card["files"]:
                self._append(name, folder / f"{shards.stem(card)}.{name}", card)
            for file in self._files.values():
                file.flush()
            files = {name: (file.tell(), self._hashes[name].hexdigest()) for name, file in self._files.items()}
            self._journal.write(json.dumps({"card": card, "files": files}) + "\n")
            self._journal.flush()
            for name in ("json", *card["files"]):
                (folder / f"{shards.stem(card)}.{name}").unlink()
            self._step(card)

    def _append(self, name: str, path: Path, card: Card) -> None:
        self._open(name)
        split, _, kind = name.partition(".")
        numbers = np.array([self._groups[split][group] for group in card["groups"][split]], "<i4")
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                if kind == "groups":  # a chunk counts its own
                    block = numbers[np.frombuffer(block, "<i4")].tobytes()
                self._files[name].write(block)
                self._hashes[name].update(block)

    def counts(self, split: str) -> dict[str, Any]:
        """What meta.json says of a split: documents, tokens; answers and groups where documents have targets and groups."""
        counts = Counter({"documents": 0, "tokens": 0})
        for card in self.cards:
            counts.update(card[split])
        return dict(counts) | ({"groups": list(self._groups[split])} if self._groups[split] else {})

    def finish(self, identity: dict[str, Any], tokenizer: Tokenizer) -> None:
        """Writes what follows from the rest, and reads all of it again from the disk."""
        skipped: Counter[str] = Counter()
        for card in self.cards:
            skipped.update(card["skipped"])
        checksums = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        ids = (tokenizer.vocab_size, tokenizer.begin_id, tokenizer.end_id)
        meta = {
            "identity": identity,
            "corpus_hash": integrity.corpus_hash(*ids, checksums),
            **dict(zip(("vocab_size", "begin_id", "end_id"), ids)),
            "splits": {split: self.counts(split) for split in SPLITS},
            "skipped": dict(skipped),
            "checksums": checksums,
        }
        for split in SPLITS:
            integrity.write_offsets(self.folder, split)
        integrity.write_meta(self.folder, meta)
        for path in (*self.folder.iterdir(), self.folder):
            integrity.sync(path)
        integrity.check(self.folder, whole=True)

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        for file in self._files.values():
            file.close()
