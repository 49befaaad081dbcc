"""Tokens on disk: a corpus is prepared once under a hash of all that decides its tokens, and memory-mapped after.

A corpus's folder holds ``meta.json`` and for each split, little-endian and without headers: ``<split>.tokens`` (uint16
or uint32), ``<split>.offsets`` (int64) and ``<split>.lengths`` (int32); where documents have their own targets or groups also
``<split>.targets`` and ``<split>.groups`` (int32). It appears by one rename, so it is whole or not
there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from packmamba.config import ConfigError, DataConfig
from packmamba.data.sources import Document, Member, Source, open_source
from packmamba.data.tokenization import TokenIds, Tokenizer, load_tokenizer, token_dtype

FORMAT = 1  # part of every key: raise it when the same keys and files shall give other tokens or another folder
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
ABANDONED_SECONDS = 24 * 3600

logger = logging.getLogger(__name__)


class Corpus:
    """One split of a prepared corpus, memory-mapped and read-only; n documents of T tokens in all.

    Pickles as its folder's path and maps the files again where it is unpickled. Raises ValueError naming the file if
    the folder is damaged.
    """

    tokens: np.ndarray
    """(T,) uint16 or uint32, all documents one after another, begin and end tokens included."""
    offsets: np.ndarray
    """(n + 1,) int64: document i is tokens[offsets[i]:offsets[i + 1]]."""
    lengths: np.ndarray
    """(n,) int32, tokens of each document; at least one."""
    targets: np.ndarray | None
    """(T,) int32, what is to be said after each token, -1 for nothing; None: the token that follows, but at documents' ends."""
    groups: np.ndarray | None
    """(n,) int32, what each document belongs to, by its place in ``group_names``; None: documents have no groups."""
    group_names: list[str]
    corpus_hash: str
    """Of the tokens and lengths of both splits."""

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder).resolve()
        self.split = split
        meta = _read_meta(self.folder)
        self.num_documents: int = meta["splits"][split]["documents"]
        self.num_tokens: int = meta["splits"][split]["tokens"]
        self.vocab_size: int = meta["vocab_size"]
        self.begin_id: int | None = meta["begin_id"]
        self.end_id: int | None = meta["end_id"]
        self.corpus_hash = meta["corpus_hash"]
        self.tokens = self._map("tokens", token_dtype(self.vocab_size), self.num_tokens)
        self.offsets = self._map("offsets", np.dtype("<i8"), self.num_documents + 1)
        self.lengths = self._map("lengths", np.dtype("<i4"), self.num_documents)
        answers = meta["splits"][split].get("answers")
        self.targets = None if answers is None else self._map("targets", np.dtype("<i4"), self.num_tokens)
        self.group_names = meta["splits"][split].get("groups", [])
        self.groups = self._map("groups", np.dtype("<i4"), self.num_documents) if self.group_names else None
        self._plain_tokens = self.tokens.view(np.ndarray)  # slicing a memmap object costs several times as much

    def _map(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        path = self.folder / f"{self.split}.{name}"
        found = path.stat().st_size
        if found != size * dtype.itemsize:
            raise ValueError(f"{path} has {found} bytes where meta.json says {size * dtype.itemsize}")
        return np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)

    def document(self, index: int) -> np.ndarray:
        """Tokens of a document, (lengths[index],), a read-only view of the mapped file; IndexError if there is none."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self._plain_tokens[self.offsets[index] : self.offsets[index + 1]]

    def answers(self, index: int) -> np.ndarray | None:
        """Targets of a document where the corpus has targets of its own, (lengths[index],); else None."""
        return None if self.targets is None else self.targets[self.offsets[index] : self.offsets[index + 1]]

    def group(self, index: int) -> str | None:
        """What a document belongs to."""
        return None if self.groups is None else self.group_names[self.groups[index]]

    def __len__(self) -> int:
        return self.num_documents

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.folder, self.split)

    def __repr__(self) -> str:
        return f"Corpus({self.split}: {self.num_documents} documents, {self.num_tokens} tokens, {self.folder})"


@dataclass(frozen=True)
class Corpora:
    """Both splits of one corpus."""

    train: Corpus
    validation: Corpus
    corpus_hash: str
    """Of the tokens and lengths of both splits; equal on every machine that has the same documents."""
    skipped: dict[str, int]
    """What was left out: empty_documents (no token of their own), bad_lines, unparsable_files."""


def load_corpora(data: DataConfig, progress: bool = True) -> Corpora:
    """The corpus that ``data`` describes, from ``data.cache_dir`` or prepared into it first.

    Any number of processes may do this at once: each that finds no corpus prepares one, and the first to finish is
    kept. A damaged folder is prepared again. Empty documents are left out and counted; what was left out is logged as
    a warning each time. `progress` shows a bar on a terminal while preparing.

    Raises ConfigError naming the key, before any work except for what only reading can show.
    """
    source = open_source(data)
    tokenizer = load_tokenizer(data) if source.vocab_size is None else TokenIds(source.vocab_size)
    identity = {
        "format": FORMAT,
        "source": [data.source, *source.fingerprint],
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": float(data.validation_fraction),
        "corpus_seed": data.corpus_seed,
    }
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()
    folder = Path(data.cache_dir).resolve() / f"{data.source}-{key}"
    corpora = _open(folder)
    if corpora is None:
        _prepare(folder, data, source, tokenizer, identity, progress)
        corpora = _open(folder)
        if corpora is None:
            raise RuntimeError(f"the corpus {folder} disappeared while it was opened")
    if corpora.skipped:
        counts = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in corpora.skipped.items())
        logger.warning("the corpus of data.source=%s leaves out %s", data.source, counts)
    return corpora


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "meta.json").read_text())
    except ValueError as error:
        raise ValueError(f"{folder / 'meta.json'} is not JSON ({error})") from None


def _open(folder: Path) -> Corpora | None:
    """None if there is no such corpus or it is damaged, which is logged."""
    if not folder.exists():
        return None
    try:
        train, validation = Corpus(folder, "train"), Corpus(folder, "validation")
        return Corpora(train, validation, train.corpus_hash, _read_meta(folder)["skipped"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the prepared corpus %s is damaged and will be prepared again (%s)", folder, error)
        return None


def _prepare(
    folder: Path, data: DataConfig, source: Source, tokenizer: Tokenizer, identity: dict[str, Any], progress: bool
) -> None:
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"data.cache_dir '{data.cache_dir}' cannot be written ({error.strerror})") from None
    try:
        _remove_abandoned(folder)
        bar = tqdm(
            total=source.total,
            unit=source.unit,
            unit_scale=True,
            desc=f"Preparing {data.source} corpus",
            disable=None if progress else True,
        )
        skipped: Counter[str] = Counter()
        with (
            bar,
            _Writer(temporary, "train", tokenizer) as train,
            _Writer(temporary, "validation", tokenizer) as validation,
        ):
            for batch in _batches(source.read(bar.update, skipped)):
                encoded = tokenizer.encode_batch([document.content for document in batch])
                skipped["empty_documents"] += sum(not len(tokens) for tokens in encoded)
                found = [(document, ids) for document, ids in zip(batch, encoded, strict=True) if len(ids)]
                for writer, held_out in ((train, False), (validation, True)):
                    some = [(ids, document) for document, ids in found if document.held_out == held_out]
                    writer.write([(ids, document.targets) for ids, document in some])
                    writer.write_groups([document.group for _, document in some if isinstance(document, Member)])
        _check_split(train.num_documents, validation.num_documents, data)
        header = [tokenizer.vocab_size, tokenizer.begin_id, tokenizer.end_id, *train.digests(), *validation.digests()]
        meta = {
            "identity": identity,
            "corpus_hash": hashlib.blake2b(json.dumps(header).encode(), digest_size=16).hexdigest(),
            "vocab_size": tokenizer.vocab_size,
            "begin_id": tokenizer.begin_id,
            "end_id": tokenizer.end_id,
            "splits": {w.split: w.counts() for w in (train, validation)},
            "skipped": dict(+skipped),
        }
        with open(temporary / "meta.json", "w") as file:
            json.dump(meta, file, indent=1)
            _sync(file)
        _sync_folder(temporary)
        _install(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_split(train: int, validation: int, data: DataConfig) -> None:
    if train + validation == 0:
        raise ConfigError(f"data.path '{data.path}' has no document with a token in it")
    if train == 0 or (validation == 0 and data.validation_fraction):
        raise ConfigError(
            f"data.validation_fraction={data.validation_fraction} makes {train} training and {validation} validation "
            "documents; change it, 0 holds out none"
        )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Streams one split to disk, hashing as it goes; on a clean exit the files are on the disk."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        self.split = split
        self.num_documents = 0
        self.num_tokens = 0
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._begin, self._end = (
            np.array([] if token is None else [token], self._dtype) for token in (tokenizer.begin_id, tokenizer.end_id)
        )
        self._hashes = [hashlib.blake2b(digest_size=16) for _ in range(2)]
        self._files = [open(folder / f"{split}.{name}", "wb") for name in ("tokens", "lengths", "offsets")]
        self._files[2].write(np.zeros(1, "<i8").tobytes())
        self._targets: Any = None  # a file, if documents have targets of their own
        self._targets_path = folder / f"{split}.targets"
        self.num_answers = 0
        self._groups: dict[str, int] = {}
        self._groups_path = folder / f"{split}.groups"
        self._groups_file: Any = None

    def write(self, pairs: list[tuple[np.ndarray, Any]]) -> None:
        """Tokens of each document, and its own targets or None."""
        if not pairs:
            return
        documents = [tokens for tokens, _ in pairs]
        self._write_targets([targets for _, targets in pairs if targets is not None])
        lengths = np.array([len(document) for document in documents], "<i8") + len(self._begin) + len(self._end)
        if lengths.max() >= 2**31:
            raise ConfigError(f"a document has {lengths.max()} tokens, more than 2**31 - 1; cut it in data.path")
        pieces = [piece for document in documents for piece in (self._begin, document, self._end)]
        arrays = [np.concatenate(pieces, dtype=self._dtype), lengths.astype("<i4"), self.num_tokens + lengths.cumsum()]
        for file, array in zip(self._files, arrays, strict=False):
            file.write(array.data)
        for digest, array in zip(self._hashes, arrays, strict=False):
            digest.update(array.data)
        self.num_documents += len(documents)
        self.num_tokens += int(lengths.sum())

    def _write_targets(self, targets: list[np.ndarray]) -> None:
        if not targets:
            return
        if self._targets is None:
            self._targets = open(self._targets_path, "wb")
            self._files.append(self._targets)
            self._hashes.append(hashlib.blake2b(digest_size=16))
        array = np.concatenate(targets).astype("<i4")
        self._targets.write(array.data)
        self._hashes[-1].update(array.data)
        self.num_answers += int((array >= 0).sum())

    def write_groups(self, groups: list[str]) -> None:
        """What each of the documents that were just written belongs to."""
        if not groups:
            return
        if self._groups_file is None:
            self._groups_file = open(self._groups_path, "wb")
            self._files.append(self._groups_file)
        numbers = [self._groups.setdefault(group, len(self._groups)) for group in groups]
        self._groups_file.write(np.array(numbers, "<i4").data)

    def counts(self) -> dict[str, Any]:
        """What meta.json says of the split."""
        found: dict[str, Any] = {"documents": self.num_documents, "tokens": self.num_tokens}
        if self._groups:
            found["groups"] = list(self._groups)
        return found if self._targets is None else found | {"answers": self.num_answers}

    def digests(self) -> list[str]:
        return [digest.hexdigest() for digest in self._hashes]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files:
            if kind is None:
                _sync(file)
            file.close()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _install(temporary: Path, folder: Path) -> None:
    """Rename into place; where another process came first its corpus stays, unless it is damaged."""
    while True:
        try:
            os.rename(temporary, folder)
        except OSError as error:  # not whether it is there now: another process may just have moved it away
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            _sync_folder(folder.parent)
            return
        if _open(folder) is not None:
            return
        aside = temporary.with_name(f"{temporary.name}-damaged")
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Delete what killed writers of this corpus left, once nothing in it has changed for a day."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in [left, *left.iterdir()])
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
