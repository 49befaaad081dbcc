"""Train while documents are tokenized.

A process of its own writes the corpus in shards, ahead of training.

    source      document, document, ...       read once, in its order
    writer      shard 0 | shard 1 | ...       each whole or absent, of growing size
    training    window 0 = shard 0, shuffled; window 1 = shard 1; ...

The first shard is small, so that training begins after seconds; later ones double, so that
documents are shuffled over more of them. A shard ends with the first chunk of documents at which it
has its tokens: it is a function of source and tokenizer, and a step, which waits for its shard, a
function of its number. After the last shard all come again, in another order each epoch. What is
held out of the first shard is the validation split; what is held out of later ones is left out.

The writer goes on after the shards that are there. Each process that trains starts one, a lock lets
one of them write, and it ends with the process that started it, so another one takes over.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from packmamba.config import ConfigError, DataConfig, import_plugins, need, refusing
from packmamba.config.load import IMPORTED_PLUGINS
from packmamba.data.corpus import META, Corpus, Joined
from packmamba.data.encoding import Opened, SplitWriter, encode, open_documents, write_meta
from packmamba.data.tokenizer import Tokenizer
from packmamba.errors import UserError
from packmamba.files import space_for, work_folder, write_whole

# Tokens of the first shard, and how often the next ones double them.
FIRST_TOKENS = 1 << 20
DOUBLINGS = 6
# Names in a streamed corpus's folder, beside its shards.
COMPLETE = "complete"
ERROR = "error"
LOCK = ".writer.lock"
# Seconds between two looks for a shard, after which a wait is said, and for which a writer may be
# starting.
INTERVAL = 0.2
UNSAID = 5.0
STARTING = 60.0

_writers: dict[Path, subprocess.Popen] = {}


def open_stream(data: DataConfig) -> tuple[StreamedCorpus, Corpus, str]:
    """Start a writer unless the corpus is complete; wait for the first shard.

    Returns training documents, validation documents, and a hash of the first shard and of what
    decides the others. Raises ConfigError.
    """
    opened = open_documents(data, shards=[FIRST_TOKENS, DOUBLINGS])
    need(opened.source.read_test is None, "data.streaming", "false with a test split", "true")
    folder = opened.folder(data)
    with refusing(OSError, prefix=f"data.cache_dir: cannot write '{data.cache_dir}' (", suffix=")"):
        folder.mkdir(parents=True, exist_ok=True)
        is_missing = folder not in _writers or _writers[folder].poll() is not None
        if is_missing and not (folder / COMPLETE).exists():
            (folder / ERROR).unlink(missing_ok=True)
            _writers[folder] = _start_writer(data, folder)
        train = StreamedCorpus(folder)
    corpus_hash = f"{train.parts[0].corpus_hash}-{folder.name.rpartition('-')[2]}"
    return train, Corpus(train.parts[0].folder, "validation"), corpus_hash


class StreamedCorpus(Joined):
    """Hold the training documents of the shards so far, and wait for others that are asked for.

    Attributes, as of ``Corpus``, of the shards that were opened: ``lengths`` (n,), ``num_tokens``.
    """

    is_streamed = True

    def __init__(self, folder: Path) -> None:
        super().__init__(tokens=None, lengths=np.zeros(0, "<i4"))
        self.folder = folder
        self.parts = []
        self.firsts = [0]
        self._open(0)
        self.vocab_size = self.parts[0].vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedCorpus, (self.folder,)

    def wait(self) -> None:
        """Wait until all documents are tokenized, and open all shards."""
        while self._open(len(self.parts)):
            pass

    def window(self, seed: int, number: int, size: int) -> np.ndarray:
        """Return the numbers of a shard's documents.

        In the first epoch it is shard ``number``, later shards come in another order.
        """
        if not self._open(number):
            epoch, place = divmod(number, len(self.parts))
            number = int(np.random.default_rng([seed, epoch]).permutation(len(self.parts))[place])
        return np.arange(self.firsts[number], self.firsts[number + 1])

    def _open(self, number: int) -> bool:
        """Open the shards up to a number, waiting for them; return whether there are so many."""
        last_written = time.monotonic()
        said_at = last_written + UNSAID
        while len(self.parts) <= number:
            shard = _shard(self.folder, len(self.parts))
            if shard.exists():
                part = Corpus(shard, "train")
                self.parts.append(part)
                self.firsts.append(self.firsts[-1] + len(part))
                self.lengths = np.concatenate([self.lengths, part.lengths])
            elif (self.folder / COMPLETE).exists() and not shard.exists():
                written = int((self.folder / COMPLETE).read_text())
                need(len(self.parts) == written, "data.cache_dir", f"{shard}", "none; delete its folder")
                return False
            else:
                if _is_written(self.folder):
                    last_written = time.monotonic()
                now = time.monotonic()
                gone = "none; start the command again"
                need(now - last_written < STARTING, "data.streaming", "a process that tokenizes", gone)
                if now > said_at:
                    print(f"Waiting until {shard} is tokenized ...", file=sys.stderr, flush=True)
                    said_at = float("inf")
                time.sleep(INTERVAL)
        return True


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}"


def _is_written(folder: Path) -> bool:
    """Return whether a process writes shards. Raises ConfigError with the reason if it failed."""
    if (folder / ERROR).exists():
        raise ConfigError((folder / ERROR).read_text())
    status = folder in _writers and _writers[folder].poll()
    need(not status, "data.streaming", "a process that tokenizes", f"its exit status {status}; see its message above")
    with suppress(Timeout), FileLock(folder / LOCK, timeout=0):
        return False
    return True


def _start_writer(data: DataConfig, folder: Path) -> subprocess.Popen:
    """Start ``main`` in a process of its own, which ends when its input does: with this process."""
    # The same modules as here, whatever else lies in the current folder.
    code = f"import sys; sys.path[:] = {sys.path}; from packmamba.data.streaming import main; main()"
    writer: Any = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    writer.stdin.write(json.dumps([str(folder), IMPORTED_PLUGINS, dataclasses.asdict(data)]).encode() + b"\n")
    writer.stdin.flush()
    return writer


def main() -> None:
    """Write shards, as the input's first line says, until the input ends.

    The line is JSON: the folder, plugins, and the section ``data``.
    """
    folder, plugins, keys = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_input, daemon=True).start()
    # Locked before documents are listed, which may take longer than others wait for a writer.
    with FileLock(Path(folder, LOCK)):
        try:
            import_plugins(plugins)
            data = DataConfig(**keys)
            with space_for(folder):
                # Another process may have written meanwhile.
                if not Path(folder, COMPLETE).exists():
                    write_shards(Path(folder), data, open_documents(data, shards=[FIRST_TOKENS, DOUBLINGS]))
        except Exception as error:
            reason = error if isinstance(error, UserError) else f"data.streaming: {type(error).__name__}: {error}"
            write_whole(Path(folder, ERROR), str(reason).encode())


def _exit_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def write_shards(folder: Path, data: DataConfig, opened: Opened) -> None:
    """Write the shards that are missing, then ``COMPLETE``. Raises ConfigError."""
    tokenizer = opened.load_tokenizer()
    number = 0
    documents_read = 0
    while (shard := _shard(folder, number)).exists():
        documents_read += json.loads((shard / META).read_text())["documents_read"]
        number += 1
    chunks = encode(itertools.islice(opened.source.read(), documents_read, None), tokenizer, data)
    while _write_shard(folder, number, opened, tokenizer, chunks):
        number += 1
    expected = "documents in training and validation"
    remedy = "none of one of them; add others with text, or change validation_fraction"
    need(number, "data.path", expected, f"'{data.path}' with {remedy}")
    write_whole(folder / COMPLETE, str(number).encode())


def _write_shard(folder: Path, number: int, opened: Opened, tokenizer: Tokenizer, chunks: Iterator[list]) -> bool:
    """Write a shard under a temporary name, then rename it.

    Returns False if the source has ended.
    """
    shard = _shard(folder, number)
    documents_read = 0
    is_filled = False
    with work_folder(shard) as work:
        writers = {"train": SplitWriter(work / "train", tokenizer)}
        if number == 0:
            writers["validation"] = SplitWriter(work / "validation", tokenizer)
        for chunk in chunks:
            documents_read += len(chunk)
            for split, writer in writers.items():
                writer.add([pair for pair in chunk if pair[0].held_out == (split == "validation")])
            is_filled = all(writer.counts["documents"] for writer in writers.values())
            if is_filled and writers["train"].counts["tokens"] >= FIRST_TOKENS << min(number, DOUBLINGS):
                break
        if is_filled:
            write_meta(work, opened, tokenizer, writers, documents_read=documents_read)
            os.rename(work, shard)
    return is_filled
