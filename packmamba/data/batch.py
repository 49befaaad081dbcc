"""Rows of document pieces, and the batches that a training step consumes. Shapes: B rows, L slots, S documents, P pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packmamba.data.packing import PackingPlan
from packmamba.data.token_store import Corpus
from packmamba.layout import SequenceLayout

Integers = NDArray[np.int64]


@dataclass
class PackedBatch:
    """One forward pass.

    Attributes:
        tokens: (B, L) int64; 0 at padding.
        targets: (B, L) int64, the next token of the same document, or a task's answer; 0 where there is none.
        loss_mask: (B, L) bool, where there is a target: at every token but a document's last, also where its next token is in
            another piece; in a task's documents where an answer counts.
        layout: where documents lie.
        turn: where streams take turns, which batch of a round this is; its rows continue the last batch of the same turn.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    layout: SequenceLayout
    turn: int = 0

    @classmethod
    def empty(cls) -> PackedBatch:
        """Return one slot of padding, for a rank that has a batch less than others."""
        layout, nothing = SequenceLayout.from_lengths([[]], row_length=1), torch.zeros(1, 1, dtype=torch.int64)
        return cls(nothing, nothing, nothing.bool(), layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self._moved(lambda part: part.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> PackedBatch:
        parts = ("tokens", "targets", "loss_mask", "layout")
        return replace(self, **{part: move(getattr(self, part)) for part in parts})


@dataclass
class StepBatch:
    """What one optimizer step consumes.

    Attributes:
        batches: this rank's micro-batches, in order; their gradients add up.
        num_targets: real targets of the whole step, over the batches of all ranks: the loss's denominator.
        num_tokens, num_slots: real tokens and slots of the whole step.
        num_behind: documents of all ranks, or pieces of them, that follow another one in their row.
        tokens_behind: their tokens.
    """

    batches: list[PackedBatch]
    num_targets: int
    num_tokens: int
    num_slots: int
    num_behind: int = 0
    tokens_behind: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        return replace(self, batches=[batch.to(device, non_blocking=non_blocking) for batch in self.batches])

    def pin_memory(self) -> StepBatch:
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass(eq=False)
class Rows:
    """Rows of pieces of a corpus's documents: row i holds pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``.

    Attributes:
        corpus: the tokens.
        document: (P,) number of each piece's document in the corpus.
        start: (P,) place of the piece's first token in the document.
        length: (P,) tokens of the piece.
        offset: (P,) tokens of the document in earlier rows, whose state the piece may continue from; 0: it starts from zero.
        end: (P,) where the document ends in these rows: the token there, if the document goes on, is no target.
        row_offsets: (R + 1,).
        slots: (R,) slots of each row.
    """

    corpus: Corpus
    document: Integers
    start: Integers
    length: Integers
    offset: Integers
    end: Integers
    row_offsets: Integers
    slots: Integers

    @classmethod
    def of(cls, corpus: Corpus, document: Integers, start: Integers, end: Integers, plan: PackingPlan) -> Rows:
        """Resolve a plan of parts of documents: tokens ``start`` of a ``document`` on, whose last target is before ``end``."""
        part = plan.document
        return cls(
            corpus, document[part], start[part] + plan.start, plan.length, plan.start, end[part], plan.row_offsets, plan.slots
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.slots)

    def count(self, groups: list[Integers]) -> tuple[int, int, int, int, int]:
        """Return StepBatch's numbers of these batches of row numbers: targets, tokens, slots, and pieces and tokens behind."""
        rows = np.concatenate(groups)
        first, last = self.row_offsets[rows], self.row_offsets[rows + 1]
        before = self._counts_before
        targets, tokens = (before[:, last] - before[:, first]).sum(axis=1).tolist()
        slots = sum(len(group) * int(self.slots[group].max()) for group in groups)
        alone = int(self.length[first[first < last]].sum())
        return targets, tokens, slots, int((last - first - 1).clip(0).sum()), tokens - alone

    @cached_property
    def _counts_before(self) -> Integers:
        """(2, P + 1): targets and tokens of all pieces before each."""
        before = np.zeros((2, self.length.size + 1), np.int64)
        np.cumsum([self._targets(), self.length], axis=1, out=before[:, 1:])
        return before

    def _targets(self) -> Integers:
        """Count the targets of each piece (P,)."""
        own = getattr(self.corpus, "targets", None)
        if own is None:
            return self.length - (self.start + self.length == self.end)
        begins = self.corpus.offsets[self.document] + self.start
        own = own.view(np.ndarray)  # slicing a memmap object costs several times as much
        pieces = zip(begins.tolist(), self.length.tolist())
        return np.array([np.count_nonzero(own[begin : begin + length] >= 0) for begin, length in pieces])

    def batch(self, rows: Integers, turn: int = 0) -> PackedBatch:
        """Return the tokens, targets and layout of these rows, given by number."""
        row_length = int(self.slots[rows].max())
        tokens = np.zeros((len(rows), row_length), np.int64)
        targets = np.zeros_like(tokens)
        loss_mask = np.zeros(tokens.shape, bool)
        lengths, offsets = [], []
        own_targets = getattr(self.corpus, "targets", None) is not None
        for b, row in enumerate(rows):
            pieces = slice(self.row_offsets[row], self.row_offsets[row + 1])
            lengths.append(self.length[pieces].tolist())
            offsets.append(self.offset[pieces].tolist())
            slot = 0
            each = zip(
                self.document[pieces].tolist(), self.start[pieces].tolist(), lengths[-1], self.end[pieces].tolist()
            )
            for document, start, length, end in each:
                # One token more than the piece holds, if the document goes on: the target of its last.
                source = self.corpus.document(document)[start : min(start + length + 1, end)]
                tokens[b, slot : slot + length] = source[:length]
                answers = self.corpus.answers(document) if own_targets else None
                if answers is None:
                    targets[b, slot : slot + source.size - 1] = source[1:]
                    loss_mask[b, slot : slot + source.size - 1] = True
                else:
                    here = answers[start : start + length]
                    targets[b, slot : slot + length] = np.maximum(here, 0)
                    loss_mask[b, slot : slot + length] = here >= 0
                slot += length
        layout = SequenceLayout.from_lengths(lengths, row_length=row_length, offsets=offsets)
        return PackedBatch(
            torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(loss_mask), layout, turn
        )
