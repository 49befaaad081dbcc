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

# Boundary arguments (R, W), and their step inside a document; attention_mask may number documents.
POSITION_STEPS = {"position_ids": 1, "seq_idx": 0, "attention_mask": 0}
# Arguments with which models compute losses, TRL's without logits.
LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head")


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

    texts = {"boundaries": ", ".join(names), "remedy": "patch the model, or put one document in a row"}
    return _check(logits, model, batch["input_ids"], number_documents(marks), **texts) is not None


def check_packed(model: nn.Module, boundary: Any, batch: Any, max_slots: int = 2**31) -> bool:
    """Check a PackedBatch under a boundary scheme, by what the model's head reads.

    Of a larger batch ``cut_rows`` takes ``max_slots``. Returns and raises as ``check_batch``.
    """
    expect(not boundary.stateful, "boundary", "a scheme that carries no states", boundary.name)
    part = cut_rows(batch, max_slots)
    # Where ranks share rows, each checks what it holds by itself.
    part = replace(part, layout=replace(part.layout, crossing=None))

    def hidden(rows: Tensor) -> Any:
        return boundary.hidden(model, replace(part, tokens=rows))

    texts = {"boundaries": f"layout, boundary={boundary.name}"}
    texts["remedy"] = "mend the mixer, or put one document in a row"
    result = _check(hidden, model, part.tokens, part.layout.documents, **texts)
    if result is not None:
        expect(result.isolated_backward is not None, "outputs", "a gradient at the embeddings", "none")
    return result is not None


def cut_rows(batch: Any, max_slots: int) -> Any:
    """Cut a PackedBatch to whole rows of ``max_slots`` slots in all, first those with neighbours.

    A single row that is longer is cut to ``max_slots`` slots around its first inner boundary. A
    batch without neighbours, of which nothing is checked, stays whole.
    """
    layout = batch.layout.origin or batch.layout  # on the host
    num_rows, row_length = layout.shape
    if num_rows * row_length <= max_slots or not layout.packed:
        return batch
    width = min(row_length, max_slots)
    # (R,): documents of each row, and the number of its second one.
    counts = torch.bincount(layout.rows, minlength=num_rows)
    second = (counts.cumsum(0) - counts + 1).clamp(max=layout.num_documents - 1)
    # False sorts before True: rows with two documents or more come first.
    rows = (counts < 2).sort(stable=True).indices[: max_slots // width]
    # Centre the window on the second document's start, as far as the row allows.
    boundary = torch.where(counts > 1, layout.starts[second] % row_length, 0)[rows]
    firsts = rows * row_length + (boundary - width // 2).clamp(0, row_length - width)
    slots = firsts[:, None] + torch.arange(width, device=layout.device)
    # Documents that lie outside of the window are dropped.
    part = SequenceLayout.from_seq_idx(layout.documents.flatten()[slots])
    slots = slots.to(batch.tokens.device)
    cut: Any = {name: getattr(batch, name).flatten()[slots] for name in ("tokens", "targets", "loss_mask")}
    return replace(batch, layout=part.to(slots.device), **cut)


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
    """Hold the documents of a batch, whose probes change every other document."""

    def probes(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield changed tokens (T,), and the slots whose outputs must not change.

        Documents' second tokens stay, but of pairs: what they read of the first must move them.
        """
        counts = torch.tensor(self.lengths, device=self.tokens.device)
        first = counts.cumsum(0) - counts
        position = torch.arange(len(self.tokens), device=counts.device) - first[self.number]
        stays = (position == 1) & (counts[self.number] > 2)
        for changed in (self.number % 2 == 0, self.number % 2 == 1):
            yield torch.where(changed & ~stays, self.others, self.tokens), ~changed


def _check(
    call: Callable[[Tensor], Any], model: nn.Module, rows: Tensor, number: Tensor, boundaries: str, remedy: str
) -> LeakCheckResult | None:
    """Check ``call``, rows (R, W) -> outputs (R, W, V), with the slots' document numbers (R, W).

    Return what was found; None where no row holds two documents. Raises as check_batch.
    """
    in_document = number >= 0
    tokens = rows[in_document]
    _, numbers, counts = number[in_document].unique_consecutive(return_inverse=True, return_counts=True)
    # As many documents as rows that hold any: no row has two.
    if len(counts) <= int(in_document.any(1).sum()):
        return None
    # Place of each slot's token among the T tokens; padding repeats an earlier token.
    slots = (in_document.flatten().cumsum(0) - 1).clamp(min=0).view(rows.shape)
    # Replacements are ids of the batch (and 0 and 1): others might be special, or too large.
    ids = torch.cat([tokens, tokens.new_tensor([0, 1])]).unique()
    others = ids[(torch.searchsorted(ids, tokens) + len(ids) // 2) % len(ids)]
    checked = CheckedCallable(call, [model], boundaries, vocab_size=0, longest=0)
    documents = BatchDocuments(checked, "as trained", counts.tolist(), tokens, others, numbers, slots, in_document)
    result = LeakCheckResult(boundaries)
    with undisturbed([model]), eager():
        check_documents(documents, result, alone=False)
    if result.leaks:
        where = f" from {result.module} on" if result.module else ""
        what = f"outputs that move by {result.largest:.2g}{where}"
        what = what if result.largest else "gradients across boundaries"
        raise LeakError(f"batch: expected isolated documents (by {boundaries}), got a leak: {what}; {remedy}")
    moved = "a changed token to move those behind it"
    expect(result.mixes is not False, "outputs", moved, "none that moves: no leak could show")
    return result
