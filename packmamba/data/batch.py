"""Rows of document pieces, and the batches that a training step consumes. Shapes: B rows, L slots, S documents, P pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packmamba.data.packing import PackingPlan
from packmamba.data.token_store import Corpus
from packmamba.layout import SequenceLayout

Integers = NDArray[np.int64]
MOVED = ("tokens", "targets", "loss_mask", "layout")


@dataclass
class PackedBatch:
    """One forward pass.

    Attributes:
        tokens: (B, L) int64; 0 at padding.
        targets: (B, L) int64, the next token of the same document, or a task's answer; 0 where there is none.
        loss_mask: (B, L) bool, where there is a target: at every token but a document's last, or where a task's answer counts.
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
        return replace(self, **{part: getattr(self, part).to(device, non_blocking=non_blocking) for part in MOVED})

    def pin_memory(self) -> PackedBatch:
        return replace(self, **{part: getattr(self, part).pin_memory() for part in MOVED})


@dataclass
class StepBatch:
    """Hold the micro-batches of one optimizer step on this rank, in order; their gradients add up.

    Attributes:
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
    """Rows of pieces of a corpus's documents, as in PackingPlan: row i holds pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``.

    Attributes:
        offset: (P,) tokens of the document in earlier rows, whose state the piece may continue from; 0: it starts from zero.
        end: (P,) where the document ends in these rows: the token there, if the document goes on, is no target.
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
        start = start[part] + plan.start
        return cls(corpus, document[part], start, plan.length, plan.start, end[part], plan.row_offsets, plan.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def count(self, groups: list[Integers]) -> tuple[int, int, int, int, int]:
        """Return StepBatch's numbers of these batches of row numbers: targets, tokens, slots, and pieces and tokens behind."""
        of_rows = [np.arange(*self.row_offsets[row : row + 2]) for rows in groups for row in rows]
        pieces, behind = np.concatenate(of_rows), np.concatenate([row[1:] for row in of_rows])
        slots = sum(len(rows) * int(self.slots[rows].max()) for rows in groups)
        tokens, tokens_behind = int(self.length[pieces].sum()), int(self.length[behind].sum())
        return self._targets(pieces), tokens, slots, len(behind), tokens_behind

    def _targets(self, pieces: Integers) -> int:
        """Count the targets of these pieces, given by number."""
        document, start, length = self.document[pieces], self.start[pieces], self.length[pieces]
        if not self._has_answers:
            return int(length.sum() - np.count_nonzero(start + length == self.end[pieces]))
        each = zip(document.tolist(), start.tolist(), length.tolist())
        return sum(int((self.corpus.answers(d)[begin : begin + n] >= 0).sum()) for d, begin, n in each)

    @property
    def _has_answers(self) -> bool:
        return getattr(self.corpus, "targets", None) is not None

    def batch(self, rows: Integers, turn: int = 0) -> PackedBatch:
        """Return the tokens, targets and layout of these rows, given by number."""
        tokens = np.zeros((len(rows), int(self.slots[rows].max())), np.int64)
        targets, loss_mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        lengths, offsets = [], []
        for b, row in enumerate(rows):
            pieces = slice(*self.row_offsets[row : row + 2])
            lengths.append(self.length[pieces].tolist())
            offsets.append(self.offset[pieces].tolist())
            places = zip(self.document[pieces].tolist(), self.start[pieces].tolist(), self.end[pieces].tolist())
            slot = 0
            for (document, start, end), length in zip(places, lengths[-1]):
                here = slice(slot, slot + length)
                # One token more than the piece holds, if the document goes on: the target of its last.
                source = self.corpus.document(document)[start : min(start + length + 1, end)]
                tokens[b, here] = source[:length]
                if self._has_answers:
                    answers = self.corpus.answers(document)[start : start + length]
                    targets[b, here], loss_mask[b, here] = np.maximum(answers, 0), answers >= 0
                else:
                    targets[b, slot : slot + source.size - 1] = source[1:]
                    loss_mask[b, slot : slot + source.size - 1] = True
                slot += length
        layout = SequenceLayout.from_lengths(lengths, row_length=tokens.shape[1], offsets=offsets)
        tensors = [torch.from_numpy(array) for array in (tokens, targets, loss_mask)]
        return PackedBatch(tensors[0], tensors[1], tensors[2], layout, turn)
