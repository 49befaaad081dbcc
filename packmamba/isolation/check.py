"""Check documents for isolation: change other documents, compare bits, gradients, and documents alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packmamba.isolation import probes
from packmamba.isolation.adapters import CheckedModel, DocumentInput, adapt
from packmamba.isolation.probes import logits_of, moved
from packmamba.isolation.result import LeakCheckResult, ModeResult

ROWS = ((19, 1, 23, 2, 38), (64, 63, 1, 65))
"""Lengths of documents: awkward ones, and some that end where kernels cut their chunks. The sums are primes, which no other
axis of a model is as long as."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum ||packed - alone|| / ||alone|| of a document: sums in another order."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Changes, relative to the largest logit, that count as rounding where tokens are routed and no gradient connects documents."""


def leakcheck(
    model_or_callable: Any,
    boundaries: str = "position_ids",
    vocab_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> LeakCheckResult:
    """Check whether anything crosses a document boundary: change documents of a packed row, compare the others bit by bit.

    Forward: a document's last token is changed, another's first token, and for each document everything but it. Backward: a
    document's loss is differentiated by what all tokens are embedded to. Then each document is computed alone. Random states,
    modes, buffers, gradients and weights are left as they were; each call draws the same random numbers.

    Args:
        model_or_callable: a causal language model that takes ``input_ids`` and the boundary argument (called with
            ``use_cache=False``); or a MambaLM (by its layout); or a callable (tokens (1, L) int64, lengths) -> logits (1, L, V).
        boundaries: how the model is told where documents start: position_ids, seq_idx, cu_seq_lens_q (with the arguments that
            go with it), several joined by +; or attention_mask: documents in rows of their own, padded on either side. A
            MambaLM and a callable take none.
        vocab_size: ids are below it; None: the model's, of a callable 32.
        lengths: of the documents, at least two; None: awkward ones.

    Raises:
        TypeError, ValueError: what is checked is no such model, its logits are not finite, or no token moves them.
        Exception: the model's own, where it fails without boundaries too.
    """
    model = adapt(model_or_callable, boundaries, vocab_size)
    if lengths is not None and (len(lengths) < 2 or not all(isinstance(n, int) and n > 0 for n in lengths)):
        raise ValueError(f"lengths: expected at least two integers above 0, such as [3, 5], got {lengths!r}")
    rows = [tuple(lengths)] if lengths is not None else [row for row in ROWS if sum(row) <= model.longest]
    if not rows:
        raise ValueError(f"lengths: the model takes {model.longest} positions; name documents that fit")
    result = LeakCheckResult(model.boundaries, {})

    def checked(name: str, rows: Sequence[Sequence[int]], alone: bool) -> ModeResult:
        mode = ModeResult(name)
        for row in rows:
            for way in model.inputs:
                check(model, way, row, mode, alone)
        return mode

    with probes.undisturbed(model.modules):
        for module in model.modules:
            module.eval()
        if not model.vocab_size:
            two = torch.zeros(2, dtype=torch.int64, device=model.device)
            with torch.no_grad():
                model = replace(model, vocab_size=logits_of(model.alone, two, [2]).shape[-1])
        name = "evaluation" if model.modules else "as it is"
        first = result.modes[name] = checked(name, rows, True)
        if first.raises is None and model.modules:
            result.padding = {way.name: padding_is_harmless(model, way, rows[0]) for way in model.padded}
            for module in model.modules:
                module.train()
            result.modes["training"] = checked("training", rows[:1], False)
    return result


class Documents:
    """Random tokens of packed documents, and other tokens in their place."""

    def __init__(self, model: CheckedModel, lengths: Sequence[int]) -> None:
        ids = torch.arange(model.vocab_size)
        ids = ids[~torch.isin(ids, torch.tensor(sorted(model.avoid), dtype=torch.int64))]
        if len(ids) < 2:
            raise ValueError(f"vocab_size: expected two ids without a meaning of their own, got {len(ids)}")
        self.lengths = list(lengths)
        self.spans = [(end - n, end) for end, n in zip(itertools.accumulate(lengths), lengths)]
        self._ids = ids.to(model.device)
        drawn = torch.randint(len(ids), (sum(lengths),), generator=torch.Generator().manual_seed(1))
        self._drawn = drawn.to(model.device)
        self.tokens = self._ids[self._drawn]

    def changed(self, slot: int) -> Tensor:
        """Return the tokens with another one in this slot."""
        drawn = self._drawn.clone()
        drawn[slot] = (drawn[slot] + max(1, len(self._ids) // 2)) % len(self._ids)
        return self._ids[drawn]

    def inside(self, number: int) -> Tensor:
        """Mark a document's slots, (L,)."""
        slots = torch.arange(len(self.tokens), device=self.tokens.device)
        return (slots >= self.spans[number][0]) & (slots < self.spans[number][1])

    def probes(self, documents: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """List changed tokens, and the slots that must not change: a last token, a first, then all around each document.

        The latter become the document's own first token, which competes with it most.
        """
        last, first, around = self.spans[0][1] - 1, self.spans[-1][0], [self.inside(number) for number in documents]
        return [
            (self.changed(last), ~self.inside(0)),
            (self.changed(first), ~self.inside(len(self.lengths) - 1)),
            *((torch.where(own, self.tokens, self.tokens[own][0]), own) for own in around),
        ]


def check(model: CheckedModel, way: DocumentInput, lengths: Sequence[int], mode: ModeResult, alone: bool) -> None:
    """Check one row of documents and add the findings to ``mode``."""
    documents = Documents(model, lengths)
    with torch.no_grad():
        single = _alone(model, documents) if alone else None
        try:
            base = logits_of(way.call, documents.tokens, documents.lengths)
        except Exception as error:
            if model.unmarked is None and way.name == "packed":
                raise
            if single is None:
                _alone(model, documents)  # where this fails too, it is no refusal
            mode.raises = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return
        if not base.isfinite().any(-1).all():
            raise ValueError("logits: expected finite numbers, got a token without any")
        scale = float(base[base.isfinite()].abs().max())
        dtype = _computed_in(base, model)
        failed = _forward(way, documents, base, mode, ROUNDING[dtype] * scale)
        if single is not None:
            difference = max(_relative(base[a:b], single[a:b]) for a, b in documents.spans)
            mode.difference = max(difference, mode.difference or 0.0)
            mode.same_as_alone = mode.same_as_alone is not False and difference <= TOLERANCES[dtype]
            if model.unmarked is not None and mode.ignored is not False:
                unmarked = logits_of(model.unmarked, documents.tokens, documents.lengths)
                mode.ignored = not moved(base, unmarked).any()
    looked_at = [documents.inside(number) for number in sorted({(len(lengths) - 1) // 2, len(lengths) - 1})]
    crossed = probes.crossing_gradients(way, documents.tokens, documents.lengths, looked_at)
    if crossed is not None:
        mode.isolated_backward = mode.isolated_backward is not False and not crossed
    elif "The logits have no gradient." not in mode.notes:
        mode.notes.append("The logits have no gradient.")
    if failed is None:
        mode.isolated_forward = mode.isolated_forward is not False
        return
    tokens, watched, largest = failed
    mode.largest = max(mode.largest, largest)
    small = crossed is False and largest <= ROUNDING[dtype] * scale
    if small and probes.routes(way, documents.tokens, documents.lengths):
        mode.rounding, mode.after, mode.endless = True, 0, False
        mode.isolated_forward = mode.isolated_forward is not False
        return
    mode.isolated_forward = False
    if mode.module is None and watched is not None:
        pair = (documents.tokens, tokens)
        mode.module = probes.first_module(way, model.modules, pair, documents.lengths, watched)


def _forward(
    way: DocumentInput, documents: Documents, base: Tensor, mode: ModeResult, rounding: float
) -> tuple[Tensor, Tensor | None, float] | None:
    """Return the first probe that changes another document, and the largest change of all; None if none does."""
    last = documents.spans[0][1] - 1
    failed: list[tuple[Tensor, Tensor | None]] = []
    largest = noise = 0.0
    for number, (tokens, watched) in enumerate(documents.probes(range(len(documents.lengths)))):
        logits = logits_of(way.call, tokens, documents.lengths)
        sizes = _moves(logits, base)
        slots = sizes > 4 * noise
        if number == 0:
            if not slots[last]:
                raise ValueError("logits: a changed token does not change its own logits, so no leak would show either")
            noise = float(_moves(logits_of(way.call, documents.tokens, documents.lengths), base).max())
            if noise:
                differ = f"Two calls with the same tokens differ by {noise:.1g}"
                if noise > rounding:
                    mode.notes.append(f"{differ}: something is carried from one call to the next.")
                    return tokens, None, noise
                mode.notes.append(f"{differ}; smaller changes than 4 times that are not seen.")
                slots &= sizes > 4 * noise
        slots &= watched
        if not slots.any():
            continue
        failed.append((tokens, watched))
        largest = max(largest, float(sizes[slots].max()))
        places = slots.nonzero()
        if number == 0 and (after := int(places.max()) - last) > mode.after:
            mode.after, mode.endless = after, int(places.max()) == len(tokens) - 1
    return (*failed[0], largest) if failed else None


def padding_is_harmless(model: CheckedModel, way: DocumentInput, lengths: Sequence[int]) -> bool | None:
    """Return whether padded documents equal themselves alone up to rounding, whatever the padding holds; None: refused."""
    documents = Documents(model, lengths)
    with torch.no_grad():
        alone = _alone(model, documents)
        try:
            base = logits_of(way.call, documents.tokens, documents.lengths)
        except Exception:  # of whatever kind a model refuses by
            return None
        dtype = _computed_in(base, model)
        if max(_relative(base[a:b], alone[a:b]) for a, b in documents.spans) > TOLERANCES[dtype]:
            return False
        rounding = ROUNDING[dtype] * float(base[base.isfinite()].abs().max())
        for tokens, watched in documents.probes([len(lengths) // 2]):
            if _moves(logits_of(way.call, tokens, documents.lengths), base)[watched].max() > rounding:
                return False
    return True


def _alone(model: CheckedModel, documents: Documents) -> Tensor:
    return torch.cat([logits_of(model.alone, documents.tokens[a:b], [b - a]) for a, b in documents.spans])


def _computed_in(logits: Tensor, model: CheckedModel) -> torch.dtype:
    """Return the coarsest dtype of logits and parameters: many models widen their logits at the end."""
    parameters = {parameter.dtype for module in model.modules for parameter in module.parameters()}
    return max((parameters & TOLERANCES.keys()) | {logits.dtype}, key=TOLERANCES.__getitem__)


def _moves(logits: Tensor, base: Tensor) -> Tensor:
    """Return each token's largest change of a logit, (L,); 0 if bitwise equal, infinite to or from NaN."""
    by = torch.where(moved(logits, base), (logits - base).abs().nan_to_num(nan=torch.inf), 0.0)
    return by.amax(-1).double()


def _relative(packed: Tensor, alone: Tensor) -> float:
    """Return ||packed - alone|| / ||alone|| over finite entries; infinite if other entries differ."""
    finite = packed.isfinite() & alone.isfinite()
    if not torch.equal(packed[~finite], alone[~finite]):
        return torch.inf
    packed, alone = packed[finite].double(), alone[finite].double()
    return float((packed - alone).norm() / alone.norm())
