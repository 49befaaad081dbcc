"""Parts of a source as tokens on disk, chunk by chunk: what a killed process leaves behind is not done again.

A chunk is about ``CHUNK`` characters or ids of one part. For each split it has the files that a corpus has, ``tokens``,
``lengths`` and, where documents have targets of their own or groups, ``targets`` and ``groups``; its card appears last, and then
it is whole.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from packmamba.config import ConfigError
from packmamba.data.integrity import SPLITS
from packmamba.data.sources import Document, Member, Part, unreadable
from packmamba.data.tokenization import Tokenizer, token_dtype

CHUNK = 1 << 25
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096

Card = dict[str, Any]
"""A chunk's: part, chunk, last (of its part), advanced (as the source counts), skipped, and for each split documents, tokens,
answers; groups, their names for each split. It and its files are called ``<part>-<chunk>``."""


def tokenise(
    number: int,
    part: Part,
    tokenizer: Tokenizer,
    folder: Path,
    done: Container[int] = (),
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Card]:
    """Writes the chunks of a part that are not ``done`` into the folder, and yields the card of each. What is done is read
    again, but not tokenised.

    Raises ConfigError for a source that cannot be read.
    """
    skipped: Counter[str] = Counter()
    advanced = 0

    def count(amount: int) -> None:
        nonlocal advanced
        advanced += amount
        if chunk not in done:
            advance(amount)

    chunk = 0
    documents = _readable(part(count, skipped))
    first = next(documents, None)
    for chunk in itertools.count():
        some = _some(documents if first is None else itertools.chain([first], documents))
        if chunk in done:
            for _ in some:
                pass
        else:
            with Shard(folder, number, chunk, tokenizer) as shard:
                for batch in _batches(some):
                    encoded = tokenizer.encode_batch([document.content for document in batch])
                    skipped["empty_documents"] += sum(not len(tokens) for tokens in encoded)
                    shard.write([(document, ids) for document, ids in zip(batch, encoded, strict=True) if len(ids)])
        first = next(documents, None)
        if chunk not in done:
            yield shard.close(first is None, advanced, dict(+skipped))
        skipped.clear()
        advanced = 0
        if first is None:
            return


def _readable(documents: Iterator[Document]) -> Iterator[Document]:
    try:
        yield from documents
    except OSError as error:
        raise unreadable(error) from None


def _some(documents: Iterator[Document]) -> Iterator[Document]:
    """The documents of one chunk."""
    size = 0
    for document in documents:
        yield document
        size += len(document.content)
        if size >= CHUNK:
            return


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


class Shard:
    """Writes the files of one chunk."""

    def __init__(self, folder: Path, part: int, chunk: int, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.card: Card = {"part": part, "chunk": chunk}
        self._counts = {split: Counter({"documents": 0, "tokens": 0}) for split in SPLITS}
        self._groups: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._begin, self._end = (
            np.array([] if token is None else [token], self._dtype) for token in (tokenizer.begin_id, tokenizer.end_id)
        )
        self._files: dict[str, BinaryIO] = {}

    def write(self, documents: list[tuple[Document, np.ndarray]]) -> None:
        """Documents and their tokens."""
        for split in SPLITS:
            found = [pair for pair in documents if pair[0].held_out == (split == "validation")]
            if found:
                self._write(split, [ids for _, ids in found])
                self._write_own(split, [one for one, _ in found])

    def _write(self, split: str, documents: list[np.ndarray]) -> None:
        lengths = np.array([len(document) for document in documents], "<i8") + len(self._begin) + len(self._end)
        if lengths.max() >= 2**31:
            raise ConfigError(f"a document has {lengths.max()} tokens, more than 2**31 - 1; cut it in data.path")
        pieces = [piece for document in documents for piece in (self._begin, document, self._end)]
        self._append(f"{split}.tokens", np.concatenate(pieces, dtype=self._dtype))
        self._append(f"{split}.lengths", lengths.astype("<i4"))
        self._counts[split].update(documents=len(documents), tokens=int(lengths.sum()))

    def _write_own(self, split: str, documents: list[Document]) -> None:
        """Targets and groups of documents that have them."""
        if own := [one.targets for one in documents if one.targets is not None]:
            answers = np.concatenate(own).astype("<i4")
            self._append(f"{split}.targets", answers)
            self._counts[split]["answers"] += int((answers >= 0).sum())
        names = self._groups[split]
        if groups := [names.setdefault(one.group, len(names)) for one in documents if isinstance(one, Member)]:
            self._append(f"{split}.groups", np.array(groups, "<i4"))

    def _append(self, name: str, array: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = open(self.folder / f"{stem(self.card)}.{name}", "wb")
        self._files[name].write(array.data)

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def close(self, last: bool, advanced: int, skipped: dict[str, int]) -> Card:
        """Writes the card."""
        self.card |= {"last": last, "advanced": advanced, "skipped": skipped, "files": sorted(self._files)}
        self.card |= {split: dict(counts) for split, counts in self._counts.items()}
        self.card["groups"] = {split: list(names) for split, names in self._groups.items()}
        path = self.folder / f"{stem(self.card)}.json"
        path.with_suffix(".part").write_text(json.dumps(self.card))
        os.replace(path.with_suffix(".part"), path)
        return self.card


def stem(card: Card) -> str:
    return f"{card['part']}-{card['chunk']}"


def keep(folder: Path, which: Callable[[tuple[int, int]], bool]) -> dict[tuple[int, int], Card]:
    """The cards of a folder's whole chunks, of these parts and numbers; all other files are deleted."""
    cards = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    kept = {(card["part"], card["chunk"]): card for card in cards if which((card["part"], card["chunk"]))}
    names = {f"{stem(card)}.{name}" for card in kept.values() for name in ("json", *card["files"])}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
    return kept
