"""Check a training batch as it is: its own tokens and rows, in the model's present mode.

Shapes: R rows, W slots of a row, T tokens in documents, V the outputs' width.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import UserError, expect
from packmamba.isolation.adapters import CheckedCallable, logits_in
from packmamba.isolation.check import LeakCheckResult, check_documents
from packmamba.isolation.probes import Documents, eager, undisturbed
from packmamba.layout import SequenceLayout

POSITION_STEPS = {"position_ids": 1, "seq_idx": 0, "attention_mask": 0}
"""Boundary arguments (R, W), and their step inside a document; attention_mask may number documents."""
LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")
"""Arguments with which models compute losses, TRL's without logits."""


class LeakError(UserError, RuntimeError):
    """Documents leak into each other."""

    status = 1


def check_batch(model: nn.Module, batch: Mapping[str, Any], marks: Mapping[str, Any] | None = None) -> bool:
    """Check a batch's documents in a model that takes ``input_ids``, in its present mode.

    Change every other document, then those between: no bit of the others' logits may change, and
    a loss has no gradient outside its document. Weights, gradients and random states stay.

    Args:
        batch: the model's arguments by name; ``input_ids`` and boundary arguments are (R, W).
        marks: boundary arguments that the model is not called with.

    Returns whether any row holds two documents; else nothing is checked. Raises LeakError;
    ValueError where a leak could not be seen, as while no token moves those behind it.
    """
    # No labels: logits are compared, and losses are this module's own.
    arguments = {name: value for name, value in batch.items() if name not in LOSS_ARGUMENTS}
    marks = {**(marks or {}), **arguments}
    names = [name for name in (*POSITION_STEPS, "cu_seq_lens_q") if marks.get(name) is not None]

    def logits(rows: Tensor) -> Any:
        return logits_in(model(**{**arguments, "input_ids": rows}))

    documents = BatchDocuments(
        logits, model, batch["input_ids"], number_documents(marks), boundaries=", ".join(names)
    )
    return documents.check(remedy="patch the model, or put one document in a row") is not None


def check_packed(model: nn.Module, boundary: Any, batch: Any, max_slots: int = 2**31) -> bool:
    """Check a PackedBatch under a boundary scheme, by what the model's head reads.

    Of a larger batch ``cut_rows`` takes ``max_slots``. Returns and raises as ``check_batch``.
    """
    expect(not boundary.stateful, "boundary", "a scheme that carries no states", boundary.name)
    part = cut_rows(batch, max_slots)

    def hidden(rows: Tensor) -> Any:
        return boundary.hidden(model, replace(part, tokens=rows))

    documents = BatchDocuments(
        hidden, model, part.tokens, part.layout.documents, boundaries=f"layout, boundary={boundary.name}"
    )
    result = documents.check(remedy="mend the mixer, or put one document in a row")
    if result is not None:
        differentiable = result.isolated_backward is not None
        expect(differentiable, "outputs", "a gradient at the embeddings", "none")
    return result is not None


def cut_rows(batch: Any, max_slots: int) -> Any:
    """Cut a PackedBatch to whole rows of ``max_slots`` slots in all, first those with neighbours.

    A single row that is longer is cut to ``max_slots`` slots around its first inner boundary.
    """
    layout = batch.layout.origin or batch.layout  # on the host
    num_rows, row_length = layout.shape
    if num_rows * row_length <= max_slots:
        return batch
    # (first, end) of each document by row, counted from the row's start.
    spans: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for row, start, end in zip(*(t.tolist() for t in (layout.rows, layout.starts, layout.ends))):
        spans[row].append((start - row * row_length, end - row * row_length))
    width = min(row_length, max_slots)
    # False sorts before True: rows with two documents or more come first.
    rows = sorted(range(num_rows), key=lambda row: len(spans[row]) < 2)[: max_slots // width]
    firsts, lengths = [], []
    for row in rows:
        # Centre the window on the second document's start, as far as the row allows.
        boundary = spans[row][1][0] if len(spans[row]) > 1 else 0
        first = min(max(boundary - width // 2, 0), row_length - width)
        # Documents clipped to the window; those outside become empty and are dropped.
        inside = [(max(start, first), min(end, first + width)) for start, end in spans[row]]
        firsts.append(row * row_length + first)
        lengths.append([end - start for start, end in inside if start < end])
    device = batch.tokens.device
    slots = torch.tensor(firsts, device=device)[:, None] + torch.arange(width, device=device)
    names = ("tokens", "targets", "loss_mask")
    return replace(
        batch,
        layout=SequenceLayout.from_lengths(lengths, row_length=width).to(device),
        **{name: getattr(batch, name).flatten()[slots] for name in names},
    )


def number_documents(arguments: Mapping[str, Any]) -> Tensor:
    """Number a batch's documents (R, W) by all its boundary arguments; -1 at padding."""
    tokens = arguments["input_ids"]
    starts = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    starts[:, 0] = True
    in_document = torch.ones_like(starts)
    for name, step in POSITION_STEPS.items():
        marks = arguments.get(name)
        # Arguments of another shape (4D masks, one row of positions for all) mark no documents.
        if isinstance(marks, Tensor) and marks.dim() == 2 and marks.shape[1] == tokens.shape[1]:
            # Inside a document positions rise by 1, ids stay: another difference is a start.
            starts[:, 1:] |= marks.long().diff() != step
            in_document &= marks > 0 if name == "attention_mask" else marks >= 0
    # cu_seq_lens_q: a document starts where the one before ends; the last end starts none.
    if isinstance(ends := arguments.get("cu_seq_lens_q"), Tensor):
        starts.view(-1)[ends[ends < starts.numel()].long()] = True
    return torch.where(in_document, starts.view(-1).cumsum(0).view(tokens.shape), -1)


class BatchDocuments(Documents):
    """Hold the documents of a batch, whose probes change every other document.

    ``tokens`` and ``number`` are (T,); rows (R, W) hold them where ``in_document`` is true.
    """

    def __init__(
        self, call: Callable[[Tensor], Any], model: nn.Module, rows: Tensor, number: Tensor, boundaries: str
    ) -> None:
        """Take ``call``, rows (R, W) -> outputs (R, W, V), and the slots' document numbers (R, W)."""
        self.model = CheckedCallable(call, [model], boundaries, vocab_size=0, longest=0)
        self.way = "as trained"
        self.in_document = number >= 0
        # Place of each slot's token among the T tokens; padding repeats an earlier token.
        self.slots = (self.in_document.flatten().cumsum(0) - 1).clamp(min=0).view(rows.shape)
        self.tokens = rows[self.in_document]
        _, self.number, counts = number[self.in_document].unique_consecutive(return_inverse=True, return_counts=True)
        self.lengths = counts.tolist()
        self.position = torch.arange(len(self.tokens), device=rows.device)
        self.position -= (counts.cumsum(0) - counts)[self.number]
        # Replacements are ids of the batch (and 0 and 1): others might be special, or too large.
        ids = torch.cat([self.tokens, self.tokens.new_tensor([0, 1])]).unique()
        place = torch.searchsorted(ids, self.tokens)
        self.others = ids[(place + len(ids) // 2) % len(ids)]

    def probes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield changed tokens (T,), and the slots whose outputs must not change.

        Documents' second tokens stay, but of pairs: what they read of the first must move them.
        """
        lengths = torch.tensor(self.lengths, device=self.tokens.device)[self.number]
        stays = (self.position == 1) & (lengths > 2)
        for changed in (self.number % 2 == 0, self.number % 2 == 1):
            yield torch.where(changed & ~stays, self.others, self.tokens), ~changed

    def call(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the batch with other tokens."""
        return self.model.call(tokens[0][self.slots])[self.in_document][None]

    def alone(self) -> list[Tensor]:
        """Compute each document's logits in a row of its own."""
        # Never compared: ``check`` says alone=False. An error of the model is raised as it is.
        return []

    def check(self, remedy: str) -> LeakCheckResult | None:
        """Return what was found; None where no row holds two documents. Raises as check_batch."""
        # As many documents as rows that hold any: no row has two.
        if len(self.lengths) <= int(self.in_document.any(1).sum()):
            return None
        result = LeakCheckResult(self.model.boundaries)
        with undisturbed(self.model.modules), eager():
            check_documents(self, result, alone=False)
        if result.leaks:
            where = f" from {result.module} on" if result.module else ""
            what = f"outputs that move by {result.largest:.2g}{where}"
            what = what if result.largest else "gradients across boundaries"
            raise LeakError(
                f"batch: expected isolated documents (by {result.boundaries}), got a leak: {what}; {remedy}"
            )
        moved = "a changed token to move those behind it"
        expect(result.mixes is not False, "outputs", moved, "none that moves: no leak could show")
        return result
