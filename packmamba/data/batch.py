"""Rows of document pieces, and a training step's batches. B rows, L slots, P pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba.data.packing import Integers
from packmamba.data.token_store import Corpus
from packmamba.layout import SequenceLayout


@dataclass
class PackedBatch:
    """Hold one forward pass; tokens, targets and loss_mask are (B, L)."""

    tokens: Tensor
    targets: Tensor  # next tokens, or a task's answers; 0 where loss_mask is False
    loss_mask: Tensor
    layout: SequenceLayout
    turn: int = 0  # of streams: the batch continues the last of this number

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Return a copy on a device."""
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self._map(lambda part: part.pin_memory())

    def _map(self, move: Callable[[Any], Any]) -> PackedBatch:
        return PackedBatch(
            move(self.tokens),
            move(self.targets),
            move(self.loss_mask),
            move(self.layout),
            self.turn,
        )


@dataclass
class StepBatch:
    """Hold a rank's micro-batches of an optimizer step, and numbers over all ranks."""

    batches: list[PackedBatch]
    num_targets: int  # the loss's denominator
    num_tokens: int
    num_slots: int
    num_behind: int = 0  # pieces that follow another in their row
    tokens_behind: int = 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """Return a copy on a device."""
        return replace(self, batches=[batch.to(device, non_blocking) for batch in self.batches])

    def pin_memory(self) -> StepBatch:
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass(eq=False)
class Rows:
    """Hold rows of pieces of documents, as PackingPlan does."""

    corpus: Corpus
    document: Integers
    start: Integers
    length: Integers
    offset: Integers  # the document's tokens in earlier rows
    end: Integers  # of the document in these rows; a token there is no target
    row_offsets: Integers
    slots: Integers

    def __len__(self) -> int:
        return len(self.slots)

    def count(self, groups: list[Integers]) -> tuple[int, int, int, int, int]:
        """Return StepBatch's five numbers, of batches given by row numbers."""
        pieces = np.concatenate(
            [np.arange(*self.row_offsets[row : row + 2]) for rows in groups for row in rows]
        )
        length, tokens = self.length[pieces], int(self.length[pieces].sum())
        targets = tokens - int(np.count_nonzero(self.start[pieces] + length == self.end[pieces]))
        if self.corpus.targets is not None:
            spans = zip(
                (self.corpus.offsets[self.document[pieces]] + self.start[pieces]).tolist(),
                length.tolist(),
            )
            targets = sum(
                int((self.corpus.targets[first : first + n] >= 0).sum()) for first, n in spans
            )
        slots = sum(max(len(rows), 1) * int(self.slots[rows].max(initial=1)) for rows in groups)
        behind = length[self.row_offsets[np.searchsorted(self.row_offsets, pieces)] != pieces]
        return targets, tokens, slots, len(behind), int(behind.sum())

    def batch(self, rows: Integers, turn: int = 0) -> PackedBatch:
        """Return the batch of these rows; of none, a slot of padding."""
        if not len(rows):
            nothing = torch.zeros(1, 1, dtype=torch.int64)
            return PackedBatch(
                nothing, nothing, nothing.bool(), SequenceLayout.from_lengths([[]], row_length=1)
            )
        corpus, tokens = self.corpus, np.zeros((len(rows), int(self.slots[rows].max())), np.int64)
        targets, loss_mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        lengths, offsets = [], []
        for b, row in enumerate(rows):
            of = slice(*self.row_offsets[row : row + 2])
            firsts = (corpus.offsets[self.document[of]] + self.start[of]).tolist()
            goes_on = (self.start[of] + self.length[of] < self.end[of]).tolist()
            lengths.append(self.length[of].tolist())
            offsets.append(self.offset[of].tolist())
            slot = 0
            for first, length, more in zip(firsts, lengths[-1], goes_on):
                here, known = slice(slot, slot + length), slice(slot, slot + length - 1 + more)
                tokens[b, here] = corpus.tokens[first : first + length]
                if corpus.targets is None:
                    targets[b, known], loss_mask[b, known] = (
                        corpus.tokens[first + 1 : first + length + more],
                        True,
                    )
                else:
                    answers = corpus.targets[first : first + length]
                    targets[b, here], loss_mask[b, here] = np.maximum(answers, 0), answers >= 0
                slot += length
        layout = SequenceLayout.from_lengths(lengths, row_length=tokens.shape[1], offsets=offsets)
        of_numpy = torch.from_numpy
        return PackedBatch(of_numpy(tokens), of_numpy(targets), of_numpy(loss_mask), layout, turn)
