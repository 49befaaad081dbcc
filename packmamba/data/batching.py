"""Rows of document pieces become what a step consumes. Shapes: B rows, L slots, S documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba.data.packing import PackingPlan
from packmamba.data.token_store import Corpus
from packmamba.layout import SequenceLayout


@dataclass
class PackedBatch:
    """One forward pass.

    Attributes:
        tokens: (B, L) int64; 0 at padding.
        targets: (B, L) int64, the next token of the same document, or what a task wants said; 0 where there is none.
        loss_mask: (B, L) bool, where there is a target: at every token but a document's last, unless the document goes on
            elsewhere (in a later batch, or as another piece); in a task's documents where an answer counts.
        layout: where documents lie.
        turn: where streams take turns, which of this process's batches of a round this is; rows go on where its last did.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    layout: SequenceLayout
    turn: int = 0

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
        batches: this rank's forward passes, in order; their gradients add up.
        num_targets: real targets of the whole step, over the batches of all ranks: the loss's denominator.
        num_tokens, num_slots: real tokens and slots of the whole step.
        num_behind: of all ranks' documents, or pieces of them, those that lie behind another one in their row.
        tokens_behind: theirs.
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


@dataclass
class Arrangement:
    """A plan over some documents of a corpus.

    Attributes:
        corpus: where the tokens are.
        documents: (n,) the corpus's number of each planned document.
        ends: (n,) where each planned document ends for us: its length, or less if only a part of it is planned.
        plan: rows of pieces of these documents.
        begins: (n,) where each planned document begins for us, which its pieces count from; None: at its first token.
    """

    corpus: Corpus
    documents: np.ndarray
    ends: np.ndarray
    plan: PackingPlan
    begins: np.ndarray | None = None

    def count(self, groups: list[np.ndarray]) -> tuple[int, int, int]:
        """(real targets, real tokens, slots) of these batches; each token has a target but the last of each document, unless
        the corpus has targets of its own."""
        rows = np.concatenate(groups)
        before = self._counts_before
        targets, tokens = (before[:, rows + 1] - before[:, rows]).sum(axis=1).tolist()
        return targets, tokens, sum(len(group) * int(self.plan.slots[group].max()) for group in groups)

    def count_behind(self, groups: list[np.ndarray]) -> tuple[int, int]:
        """Pieces in these batches that lie behind another in their row, and their tokens."""
        rows = np.concatenate(groups)
        firsts, ends = self.plan.row_offsets[rows], self.plan.row_offsets[rows + 1]
        tokens = self._counts_before[1, rows + 1] - self._counts_before[1, rows]
        alone = self.plan.length[firsts[firsts < ends]].sum()
        return int((ends - firsts - 1).clip(0).sum()), int(tokens.sum() - alone)

    @cached_property
    def _counts_before(self) -> np.ndarray:
        """(2, rows + 1) int64: targets and tokens of all rows before each."""
        plan = self.plan
        before = np.zeros((2, plan.length.size + 1), np.int64)
        np.cumsum([self._targets_of_pieces(), plan.length], axis=1, out=before[:, 1:])
        return before[:, plan.row_offsets]

    def _targets_of_pieces(self) -> np.ndarray:
        plan = self.plan
        start = plan.start if self.begins is None else plan.start + self.begins[plan.document]
        own = getattr(self.corpus, "targets", None)
        if own is None:
            return plan.length - (start + plan.length == self.ends[plan.document])
        begins = self.corpus.offsets[self.documents[plan.document]] + start
        own = own.view(np.ndarray)  # slicing a memmap object costs several times as much
        pieces = zip(begins.tolist(), plan.length.tolist())
        return np.array([np.count_nonzero(own[begin : begin + length] >= 0) for begin, length in pieces])

    def group_rows(self, rows: np.ndarray, slots_per_batch: int, rows_per_batch: int | None = None) -> list[np.ndarray]:
        """Splits consecutive ``rows`` (numbers of the plan's) into batches of at most ``slots_per_batch`` slots, but at least
        one row, or of ``rows_per_batch`` rows. Every row of a batch is as long as its longest."""
        if rows_per_batch is not None:
            return np.split(rows, range(rows_per_batch, len(rows), rows_per_batch))
        edges, first, longest = [], 0, 0
        for i, width in enumerate(self.plan.slots[rows].tolist()):
            longest = max(longest, width)
            if i > first and longest * (i - first + 1) > slots_per_batch:
                edges.append(i)
                first, longest = i, width
        return np.split(rows, edges)

    def batch(self, rows: np.ndarray) -> PackedBatch:
        """The tokens, targets and layout of these rows, numbers of the plan's."""
        plan = self.plan
        row_length = int(plan.slots[rows].max())
        tokens = np.zeros((len(rows), row_length), np.int64)
        targets = np.zeros_like(tokens)
        loss_mask = np.zeros(tokens.shape, bool)
        lengths: list[list[int]] = []
        offsets: list[list[int]] = []
        own_targets = getattr(self.corpus, "targets", None) is not None
        for b, row in enumerate(rows):
            pieces = range(plan.row_offsets[row], plan.row_offsets[row + 1])
            lengths.append(plan.length[pieces.start : pieces.stop].tolist())
            offsets.append(plan.start[pieces.start : pieces.stop].tolist())
            slot = 0
            for piece, length, start in zip(pieces, lengths[-1], offsets[-1]):
                planned = plan.document[piece]
                start += 0 if self.begins is None else int(self.begins[planned])
                # One token more than the piece holds, if the document goes on: the target of its last.
                source = self.corpus.document(int(self.documents[planned]))
                source = source[start : min(start + length + 1, int(self.ends[planned]))]
                tokens[b, slot : slot + length] = source[:length]
                answers = self.corpus.answers(int(self.documents[planned])) if own_targets else None
                if answers is None:
                    targets[b, slot : slot + source.size - 1] = source[1:]
                    loss_mask[b, slot : slot + source.size - 1] = True
                else:
                    here = answers[start : start + length]
                    targets[b, slot : slot + length] = np.maximum(here, 0)
                    loss_mask[b, slot : slot + length] = here >= 0
                slot += length
        layout = SequenceLayout.from_lengths(lengths, row_length=row_length, offsets=offsets)
        return PackedBatch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(loss_mask), layout)


def empty_batch() -> PackedBatch:
    """One slot of padding: what a rank computes when the others have a batch more."""
    layout = SequenceLayout.from_lengths([[]], row_length=1)
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return PackedBatch(nothing, nothing, nothing.bool(), layout)
