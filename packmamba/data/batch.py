"""From planned rows to tensors: the batches of a training step.

A plan (``RowPlan``) says where pieces of documents lie; here their tokens are read from the corpus,
next to the targets and the layout that tells every operator where documents begin.

Shapes: B rows, L slots (the widest row of the batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba.data.corpus import Documents
from packmamba.data.packing import Integers, Pieces, RowPlan
from packmamba.layout import SequenceLayout, move_parts


@dataclass
class PackedBatch:
    """Hold one forward pass.

    Attributes:
        tokens: (B, L) int64, 0 at padding.
        targets: (B, L) int64, each token's next token, or a task's answer; 0 where ``loss_mask``
            is False.
        loss_mask: (B, L) bool, whether the slot has a target: False at padding and at a document's
            last token, True where a document was cut: there the next token is known.
        layout: where documents lie.
        turn: of streams that take turns, the group of streams: the batch continues the last batch
            of the same turn, row by row.
        source: (S,) int32, where documents are from, an index into ``source_names``; None: not of a
            mixture, or no document.
    """

    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    layout: SequenceLayout
    turn: int = 0
    source: Tensor | None = None
    source_names: tuple[str, ...] = ()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """Return a copy on a device."""
        return move_parts(self, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """Return a copy in page-locked memory."""
        return move_parts(self, lambda part: part.pin_memory())

    def shard(self, context: Any) -> PackedBatch:
        """Return this rank's columns of rows that ranks share; context: a ContextParallel."""
        layout = context.shard(self.layout)
        columns: Any = {name: context.columns(getattr(self, name)) for name in ("tokens", "targets", "loss_mask")}
        # Of each document here its number in the whole batch, which its first slot has there.
        kept = context.columns(self.layout.documents).flatten()[layout.starts]
        source = None if self.source is None else self.source[kept]
        return replace(self, **columns, layout=layout, source=source)


@dataclass
class StepBatch:
    """Hold a rank's micro-batches of an optimizer step, and counts over all of its ranks'.

    Attributes:
        num_targets: tokens with a target, the loss's denominator.
        num_tokens: slots that hold a token.
        num_slots: slots, padding included.
        num_behind: pieces that follow another piece in their row: where a leak would enter.
        tokens_behind: tokens of these pieces.
        batches: the rank's micro-batches.
    """

    num_targets: int
    num_tokens: int
    num_slots: int
    num_behind: int = 0
    tokens_behind: int = 0
    batches: list[PackedBatch] = field(default_factory=list)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """Return a copy on a device."""
        return replace(self, batches=[batch.to(device, non_blocking) for batch in self.batches])

    def shard(self, context: Any) -> StepBatch:
        """Return this rank's columns of all micro-batches; the counts stay the step's."""
        return replace(self, batches=[batch.shard(context) for batch in self.batches])

    def pin_memory(self) -> StepBatch:
        """Return a copy in page-locked memory."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


def count_step(corpus: Documents, plan: RowPlan, micro_batches: Sequence[Integers]) -> StepBatch:
    """Count a step's targets, tokens and slots; return them without batches.

    Args:
        micro_batches: row numbers of each; one without rows costs a slot of padding.
    """
    rows = np.concatenate([np.asarray(numbers, np.int64) for numbers in micro_batches])
    # Indices of the rows' pieces, row by row. The first piece of a row is in ``row_offsets``.
    index = plan.pieces_of(rows)
    pieces = plan.take(index)
    is_behind = ~np.isin(index, plan.row_offsets)
    # Slots of a micro-batch: its rows times its widest one; a single slot without rows.
    widths = [int(plan.slots[numbers].max(initial=1)) for numbers in micro_batches]
    return StepBatch(
        num_targets=_count_targets(corpus, pieces),
        num_tokens=pieces.num_tokens,
        num_slots=sum(max(len(rows), 1) * width for rows, width in zip(micro_batches, widths)),
        num_behind=int(is_behind.sum()),
        tokens_behind=int(pieces.length[is_behind].sum()),
    )


def _count_targets(corpus: Documents, pieces: Pieces) -> int:
    """Count tokens that predict their next one, or that have an answer."""
    if not corpus.has_answers:
        return pieces.num_tokens - int(pieces.ends_document.sum())
    # Answers are sparse and known only to the corpus: read the targets.
    return sum(int((corpus.read(*place)[1] >= 0).sum()) for place in pieces.places())


def make_batch(corpus: Documents, plan: RowPlan, rows: Integers, turn: int = 0) -> PackedBatch:
    """Read the tokens and targets of some rows.

    Args:
        rows: (B,) row numbers; without any the batch is one slot of padding, since every rank
            takes part in every micro-batch.
    """
    shape = max(len(rows), 1), int(plan.slots[rows].max(initial=1))
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    lengths = []
    offsets = []
    for b, row in enumerate(rows):
        span = plan.row(row)
        pieces = plan.take(span)
        lengths.append(pieces.length.tolist())
        offsets.append(plan.offset[span].tolist())
        slot = 0
        for document, start, length, ends in pieces.places():
            of_piece = slice(slot, slot + length)
            # A target of -1 is none: store a valid id there, and let the mask exclude it.
            tokens.numpy()[b, of_piece], of_tokens = corpus.read(document, start, length, ends)
            targets.numpy()[b, of_piece] = np.maximum(of_tokens, 0)
            loss_mask.numpy()[b, of_piece] = of_tokens >= 0
            slot += length
    source = None
    if len(rows) and corpus.source_names:
        source = torch.from_numpy(corpus.groups[plan.document[plan.pieces_of(rows)]])
    # Without rows ``[[]]`` is one row that is all padding.
    layout = SequenceLayout.from_lengths(lengths or [[]], shape[1], offsets or [[]])
    return PackedBatch(tokens, targets, loss_mask, layout, turn, source, tuple(corpus.source_names))
