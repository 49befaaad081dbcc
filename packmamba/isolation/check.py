"""Check that documents in a row are isolated.

Others' tokens are changed, and a document's logits compared bit by bit; gradients must not cross
boundaries; and each document is compared with itself alone.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.isolation import probes
from packmamba.isolation.adapters import CheckedCallable, adapt
from packmamba.isolation.probes import Documents, moved

# Lengths of documents, awkward or at kernels' chunks; two rows that fit are checked.
#
# The sums are primes: no other axis of a module's tensors is as long.
ROWS = ((19, 1, 23, 2, 38), (64, 63, 1, 65), (63, 1, 1, 62))
# Maximum ||packed - alone|| / ||alone|| of a document.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# Maximum rounding, relative to the largest logit, where tokens are routed.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class LeakCheckResult:
    """Hold results of ``leakcheck``, in sentences by ``str``. None: not seen.

    Attributes:
        boundaries: the argument that marked documents; layout of a MambaLM, lengths of a callable.
        isolated_forward: other documents' tokens change no bit of a document's logits.
        isolated_backward: a document's loss has no gradient at other documents' tokens.
        same_as_alone: packed logits are those of documents alone, within the tolerance.
        mixes: a changed token changes the logits of tokens behind it; else no leak could show.
        largest: largest change of another document's logits.
        reach: tokens that a document's last token reaches behind it; ``endless``: all of the row.
        module: the first whose output another document changes.
        difference: largest relative difference between packed and alone.
        ignored: the boundary argument changes no bit.
        raises: the model's error at the boundary argument.
        padding: by side, whether padded documents are what they are alone (None: refused).
    """

    boundaries: str
    isolated_forward: bool | None = None
    isolated_backward: bool | None = None
    same_as_alone: bool | None = None
    mixes: bool | None = None
    largest: float = 0.0
    reach: int = 0
    endless: bool = False
    module: str | None = None
    difference: float | None = None
    ignored: bool | None = None
    raises: str | None = None
    padding: dict[str, bool | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        """Return if anything crosses a boundary, forward or backward."""
        return self.isolated_forward is False or self.isolated_backward is False

    @property
    def ok(self) -> bool:
        """Return if nothing leaks or is refused, and documents are what they are alone."""
        return not self.leaks and self.raises is None and self.same_as_alone is not False

    def add(self, name: str, holds: bool) -> None:
        """Record whether a property holds in one more row."""
        setattr(self, name, getattr(self, name) is not False and holds)

    def __str__(self) -> str:
        return "\n".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if self.raises is not None:
            yield f"Nothing was checked: the model refuses {self.boundaries}: {self.raises}"
            return
        title = "Documents leak" if self.leaks else "Nothing crosses a document boundary"
        yield f"{title} (boundaries: {self.boundaries})."
        changed = "no bit of a document's logits"
        if not self.isolated_forward:
            reach = f", {self.reach} tokens behind it" if self.reach else ""
            changed = f"a document's logits, by up to {self.largest:.2g}{reach}"
        elif self.largest:
            changed = f"a document's logits by rounding alone ({self.largest:.1g}), without a gradient"
        yield f"  Changing other documents changes {changed}."
        if self.isolated_backward is not None:
            article = "no" if self.isolated_backward else "a"
            yield f"  A document's loss has {article} gradient at another document's tokens."
        if self.module is not None:
            yield f"  The first module that leaks is {self.module}."
        verb = "equal" if self.same_as_alone else "differ from"
        yield (f"  Packed logits {verb} those of each document alone: relative difference {self.difference:.1g}.")
        if self.ignored:
            yield (f"  The model ignores {self.boundaries} silently: without it, every bit is the same.")
        if self.mixes is False:
            yield "  A changed token changes no other token's logits: no leak could show."
        for note in dict.fromkeys(self.notes):
            yield f"  {note}"
        verbs = {None: "are refused", True: "equal themselves alone", False: "differ from themselves alone"}
        for side, harmless in self.padding.items():
            yield f"  Padding on the {side}: documents {verbs[harmless]}."


def leakcheck(
    model_or_callable: Any,
    boundaries: str = "position_ids",
    vocab_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> LeakCheckResult:
    """Check whether anything crosses a document boundary.

    Change documents of a packed row, and compare the others bit by bit; differentiate documents'
    losses by all tokens' embeddings; compute each document alone; in evaluation mode, then in
    training mode. PyTorch's random states, modes, buffers, gradients and weights stay.

    Args:
        model_or_callable: a causal language model that takes ``input_ids`` and the boundary
            argument; a MambaLM; or a callable (tokens (1, L) int64, lengths) -> logits (1, L, V).
        boundaries: the argument that marks documents: position_ids, seq_idx, cu_seq_lens_q,
            several joined by +; or attention_mask: documents in rows of their own, padded on
            either side. A MambaLM and a callable take none.
        vocab_size: ids are below it; None: the model's, of a callable 32.
        lengths: of the documents, at least two; None: awkward ones.

    Raises:
        TypeError, ValueError: no such model, logits that are not finite, or that no token moves.
        Exception: the model's own, where it fails without boundaries too.
    """
    model = adapt(model_or_callable, boundaries, vocab_size)
    rows = _rows_to_check(lengths, model.longest)
    result = LeakCheckResult(model.boundaries)
    with probes.undisturbed(model.modules):
        # Evaluation mode first: with dropout a document alone differs from itself packed.
        for module in model.modules:
            module.eval()
        # A callable tells its vocabulary by the width of its logits.
        if not model.vocab_size:
            with torch.no_grad():
                two = torch.zeros(2, dtype=torch.int64, device=model.device)
                model.vocab_size = probes.logits_of(model.alone, two).shape[-1]
        for row, way in itertools.product(rows, model.inputs):
            check_documents(probes.draw(model, way, row), result)
        if result.raises is None:
            result.padding = {side: _check_padding(model, side, rows[0]) for side in model.padding}
        # Only without a leak so far: training mode may take other kernels.
        if result.raises is None and not result.leaks and model.modules:
            for module in model.modules:
                module.train()
            for way, row in itertools.product(model.inputs, rows):
                check_documents(probes.draw(model, way, row), result, alone=False)
            if result.leaks:
                result.notes.append("In training mode alone.")
    return result


def _rows_to_check(lengths: Sequence[int] | None, longest: int) -> Sequence[tuple[int, ...]]:
    """Return rows of documents' lengths: those that are given, or two of ROWS that fit."""
    if lengths is None:
        rows = [row for row in ROWS if sum(row) <= longest][:2]
        expect(rows, "lengths", f"documents that fit in {longest} positions", "none")
        return rows
    are_lengths = isinstance(lengths, Sequence) and all(type(length) is int and length > 0 for length in lengths)
    expect(are_lengths and len(lengths) > 1, "lengths", "two or more integers above 0", repr(lengths))
    return [tuple(lengths)]


def _check_padding(model: CheckedCallable, side: str, lengths: Sequence[int]) -> bool | None:
    """Tell whether padded documents are what they are alone; None: the model refuses padding.

    Reported by itself: a model may refuse padding, or read it, and still pack correctly.
    """
    padded = LeakCheckResult(side)
    try:
        check_documents(probes.draw(model, side, lengths), padded)
    except ValueError:
        padded.same_as_alone = False
    return None if padded.raises else padded.ok


def check_documents(documents: Documents, result: LeakCheckResult, alone: bool = True) -> None:
    """Check documents; add to ``result``. ``alone``: compare with documents alone, too.

    Raises ValueError for logits that are not finite, or that no token moves; the model's errors.
    """
    with torch.no_grad():
        base = _packed_logits(documents, result)
        if base is None:
            return
        expect(base.isfinite().any(-1).all(), "logits", "finite numbers", "none at a token")
        # (probes, L): changed tokens, slots whose logits must stay, each token's largest change.
        tokens, watched = map(torch.stack, zip(*documents.probes()))
        moves = torch.stack([_moves(documents.logits(changed), base) for changed in tokens])
        # Two equal calls: what differs is noise of the model, and no change below it can be seen.
        noise = float(_moves(documents.logits(), base).max())
        dtype, routed = _products(documents, base)
        rounding = ROUNDING[dtype] * float(base[base.isfinite()].abs().max())
        carried = noise > rounding
        if noise:
            carries = "something is carried from one call to the next"
            what = carries if carried else "smaller changes are not seen"
            result.notes.append(f"Two calls with the same tokens differ by {noise:.1g}: {what}.")
        # The first probe changes the last token of document 0, whose own logits must then move.
        moves_itself = carried or moves[0, documents.lengths[0] - 1] > 4 * noise
        expect(moves_itself, "logits", "a changed token to change its own", "the same")
        # A leak is a change at a watched slot above the
        # noise; if states are carried, any change is.
        slots = watched & (moves > (-1 if carried else 4 * noise))
        # Tokens that stay, in documents that change: if
        # none moves, the model mixes no tokens at all.
        unchanged = (tokens == documents.tokens) & ~watched  # beside changed tokens
        if unchanged.any():
            result.mixes = bool(result.mixes or (moves[unchanged] > 4 * noise).any())
        if alone:
            _compare_with_alone(documents, base, TOLERANCES[dtype], result)
    crossed = probes.crossing_gradients(documents)
    if crossed is not None:
        result.add("isolated_backward", not crossed)
    else:
        result.notes.append("No gradient can be taken.")
    largest = float(moves[slots].max()) if slots.any() else 0.0
    result.largest = max(result.largest, largest)
    # Rounding is no leak where routed tokens change the
    # shapes of others' products, unless a gradient crosses.
    isolated = not largest or (crossed is False and largest <= rounding and routed)
    result.add("isolated_forward", isolated)
    if not isolated:
        _locate(documents, result, tokens, watched, slots)


def _packed_logits(documents: Documents, result: LeakCheckResult) -> Tensor | None:
    """Compute packed documents' logits; None, with the reason in ``result``, if the model refuses."""
    try:
        return documents.logits()
    except Exception as error:
        if not documents.model.optional:
            raise
        documents.alone()  # fails too where it is no refusal of boundaries
        result.raises = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None


def _products(documents: Documents, base: Tensor) -> tuple[torch.dtype, bool]:
    """Return the coarsest dtype of products, and whether tokens are routed."""
    with probes.eager(), probes.Watch() as ran:
        documents.logits()
    return max((ran.dtypes & TOLERANCES.keys()) | {base.dtype}, key=TOLERANCES.__getitem__), ran.routed


def _compare_with_alone(documents: Documents, base: Tensor, tolerance: float, result: LeakCheckResult) -> None:
    """Add to ``result`` whether logits ``base`` are those of documents alone.

    Add, too, whether boundaries are ignored.
    """
    difference = _from_alone(documents, base)
    result.difference = max(difference, result.difference or 0.0)
    result.add("same_as_alone", difference <= tolerance)
    # Without the boundary argument every bit the same: the model ignores it.
    model = documents.model
    if model.optional and documents.way == "packed" and result.ignored is not False:
        result.ignored = not moved(base, probes.logits_of(model.alone, documents.tokens)).any()


def _locate(documents: Documents, result: LeakCheckResult, tokens: Tensor, watched: Tensor, slots: Tensor) -> None:
    """Add to ``result`` how far a leak reaches, and its first module; arguments (probes, L)."""
    last = documents.lengths[0] - 1
    if slots[0].any():
        reach = int(slots[0].nonzero().max()) - last
        if reach > result.reach:
            result.reach = reach
            # Up to the row's last token, the leak has no end that this row could show.
            result.endless = last + reach == slots.shape[1] - 1
    first = int(slots.any(1).nonzero()[0])
    with suppress(torch.OutOfMemoryError):
        result.module = result.module or probes.first_module(documents, tokens[first], watched[first])


def _moves(logits: Tensor, base: Tensor) -> Tensor:
    """Return each token's largest change of a logit, (L,); infinite to or from NaN."""
    changes = []
    # In parts: differences of all logits (L, V) at once could exceed the memory.
    for after, before in zip(logits.split(1024), base.split(1024)):
        change = (after - before).abs().nan_to_num(nan=torch.inf)
        changes.append(torch.where(moved(after, before), change, 0.0).amax(-1).double())
    return torch.cat(changes)


def _from_alone(documents: Documents, base: Tensor) -> float:
    """Return the largest ||packed - alone|| / ||alone|| over finite entries of a document.

    Infinite if entries that are not finite differ.
    """
    largest = 0.0
    for packed, alone in zip(base.split(documents.lengths), documents.alone()):
        finite = packed.isfinite() & alone.isfinite()
        if not torch.equal(packed[~finite], alone[~finite]):
            return torch.inf
        packed, alone = packed[finite].double(), alone[finite].double()
        largest = max(largest, float((packed - alone).norm() / alone.norm()))
    return largest
