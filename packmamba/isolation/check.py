"""One mode's check: changes, what they move, gradients, documents alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from packmamba.isolation.probes import crossing_gradients, first_module, logits_of, moved, routes, spans
from packmamba.isolation.verdict import Mode
from packmamba.isolation.ways import Subject, Way

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a document packed against itself alone, ||packed - alone|| / ||alone||: sums in another order."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Moves, relative to the largest logit, that are rounding where tokens are routed and no gradient connects documents."""


class Documents:
    """Random tokens of packed documents, and other tokens in their place."""

    def __init__(self, subject: Subject, lengths: Sequence[int]) -> None:
        ids = torch.arange(subject.vocab_size)
        ids = ids[~torch.isin(ids, torch.tensor(sorted(subject.avoid), dtype=torch.int64))]
        if len(ids) < 2:
            raise ValueError(f"vocab_size: expected two ids without a meaning of their own, got {len(ids)}")
        self.lengths = list(lengths)
        self.spans = spans(lengths)
        self._ids = ids.to(subject.device)
        drawn = torch.randint(len(ids), (sum(lengths),), generator=torch.Generator().manual_seed(1))
        self._drawn = drawn.to(subject.device)
        self.tokens = self._ids[self._drawn]

    def changed(self, slot: int) -> Tensor:
        """The tokens with another one in this slot."""
        drawn = self._drawn.clone()
        drawn[slot] = (drawn[slot] + max(1, len(self._ids) // 2)) % len(self._ids)
        return self._ids[drawn]

    def flooded(self, number: int) -> Tensor:
        """All but one document replaced by that one's first token, which is what competes with it most."""
        begin, end = self.spans[number]
        tokens = self.tokens[begin].repeat(len(self.tokens))
        tokens[begin:end] = self.tokens[begin:end]
        return tokens

    def all_but(self, number: int) -> Tensor:
        """Marks (L,) of the other documents' slots."""
        marks = torch.ones(len(self.tokens), dtype=torch.bool, device=self.tokens.device)
        marks[slice(*self.spans[number])] = False
        return marks

    def probes(self, documents: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Tokens, and marks of the slots that must not move: a last token, a first token, then all around each document."""
        last, first = self.spans[0][1] - 1, self.spans[-1][0]
        count = len(self.lengths)
        return [
            (self.changed(last), self.all_but(0)),
            (self.changed(first), self.all_but(count - 1)),
            *((self.flooded(number), ~self.all_but(number)) for number in documents),
        ]


def check(subject: Subject, way: Way, lengths: Sequence[int], mode: Mode, alone: bool) -> None:
    """Adds what is found in one row of documents to a mode's findings."""
    documents = Documents(subject, lengths)
    with torch.no_grad():
        single = _alone(subject, documents) if alone else None
        try:
            base = logits_of(way.call, documents.tokens, documents.lengths)
        except Exception as error:
            if subject.unmarked is None and way.name == "packed":
                raise
            if single is None:
                _alone(subject, documents)  # where this fails too, it is no refusal
            mode.raises = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return
        if not base.isfinite().any(-1).all():
            raise ValueError("logits: expected finite numbers, got a token without any")
        scale = float(base[base.isfinite()].abs().max())
        dtype = _computed_in(base, subject)
        failed = _forward(way, documents, base, mode, ROUNDING[dtype] * scale)
        if single is not None:
            tolerance = TOLERANCES[dtype]
            difference = max(_relative(base[a:b], single[a:b]) for a, b in documents.spans)
            mode.difference, mode.tolerance = max(difference, mode.difference or 0.0), tolerance
            mode.same_as_alone = mode.same_as_alone is not False and difference <= tolerance
            if subject.unmarked is not None and mode.ignored is not False:
                unmarked = logits_of(subject.unmarked, documents.tokens, documents.lengths)
                mode.ignored = not moved(base, unmarked).any()
    looked_at = [documents.spans[number] for number in sorted({(len(lengths) - 1) // 2, len(lengths) - 1})]
    crossed, why = crossing_gradients(way, documents.tokens, documents.lengths, looked_at)
    if crossed is not None:
        mode.isolated_backward = mode.isolated_backward is not False and not crossed
    elif why not in mode.notes:
        mode.notes.append(why)
    if failed is None:
        mode.isolated_forward = mode.isolated_forward is not False
        return
    tokens, watched, largest = failed
    mode.largest = max(mode.largest, largest)
    small = crossed is False and largest <= ROUNDING[dtype] * scale
    if small and routes(way, documents.tokens, documents.lengths):
        mode.rounding, mode.after, mode.before, mode.endless = True, 0, 0, False
        mode.isolated_forward = mode.isolated_forward is not False
        return
    mode.isolated_forward = False
    if mode.module is None and watched is not None:
        found = first_module(way, subject.modules, documents.tokens, tokens, documents.lengths, watched)
        if found is not None:
            mode.module, last = found
            if last is not None and mode.after:
                mode.module_reach = last - documents.spans[0][1] + 1
                mode.module_endless = last == len(tokens) - 1


def _forward(
    way: Way, documents: Documents, base: Tensor, mode: Mode, rounding: float
) -> tuple[Tensor, Tensor | None, float] | None:
    """The first probe that moves what it must not, with the largest move of all; None if none does."""
    last, first = documents.spans[0][1] - 1, documents.spans[-1][0]
    failed: list[tuple[Tensor, Tensor | None]] = []
    largest = noise = 0.0
    for number, (tokens, watched) in enumerate(documents.probes(range(len(documents.lengths)))):
        logits = logits_of(way.call, tokens, documents.lengths)
        sizes = _moves(logits, base)
        slots = sizes > 4 * noise
        if number == 0:
            if not slots[last]:
                raise ValueError(
                    "logits: a changed token does not move its own logits, so no leak would be seen either"
                )
            noise = float(_moves(logits_of(way.call, documents.tokens, documents.lengths), base).max())
            if noise:
                if noise > rounding:
                    mode.notes.append(
                        f"Two calls with the same tokens differ by {noise:.2g}: something is carried from one call to the next."
                    )
                    return tokens, None, noise
                mode.notes.append(
                    f"Two calls with the same tokens differ by {noise:.1g}; smaller moves than 4 times that are not seen."
                )
                slots &= sizes > 4 * noise
        if number == 1:
            inside = (slots & ~watched).nonzero()
            mode.inside = max(mode.inside, int(inside.max()) - first) if len(inside) else mode.inside
        slots &= watched
        if not slots.any():
            continue
        failed.append((tokens, watched))
        largest = max(largest, float(sizes[slots].max()))
        places = slots.nonzero()
        if number == 0 and (after := int(places.max()) - last) > mode.after:
            mode.after, mode.endless = after, int(places.max()) == len(tokens) - 1
        if number == 1:
            mode.before = max(mode.before, first - int(places.min()))
    return (*failed[0], largest) if failed else None


def padding_is_harmless(subject: Subject, way: Way, lengths: Sequence[int]) -> bool | None:
    """Whether padded documents are what they are alone, whatever the padding holds, up to rounding; None: refused."""
    documents = Documents(subject, lengths)
    with torch.no_grad():
        alone = _alone(subject, documents)
        try:
            base = logits_of(way.call, documents.tokens, documents.lengths)
        except Exception:  # of whatever kind a model refuses by
            return None
        dtype = _computed_in(base, subject)
        if max(_relative(base[a:b], alone[a:b]) for a, b in documents.spans) > TOLERANCES[dtype]:
            return False
        rounding = ROUNDING[dtype] * float(base[base.isfinite()].abs().max())
        for tokens, watched in documents.probes([len(lengths) // 2]):
            if _moves(logits_of(way.call, tokens, documents.lengths), base)[watched].max() > rounding:
                return False
    return True


def _alone(subject: Subject, documents: Documents) -> Tensor:
    return torch.cat([logits_of(subject.alone, documents.tokens[a:b], [b - a]) for a, b in documents.spans])


def _computed_in(logits: Tensor, subject: Subject) -> torch.dtype:
    """The coarsest dtype of logits and parameters: many models widen their logits at the end."""
    parameters = {parameter.dtype for module in subject.modules for parameter in module.parameters()}
    return max((parameters & TOLERANCES.keys()) | {logits.dtype}, key=TOLERANCES.__getitem__)


def _moves(logits: Tensor, base: Tensor) -> Tensor:
    """(L,) by how much each token's logits moved at most; 0 if by no bit, infinite to or from what is no number."""
    by = torch.where(moved(logits, base), (logits - base).abs().nan_to_num(nan=torch.inf), 0.0)
    return by.amax(-1).double()


def _relative(packed: Tensor, alone: Tensor) -> float:
    """||packed - alone|| / ||alone||, of finite entries; infinite where others differ."""
    finite = packed.isfinite() & alone.isfinite()
    if not torch.equal(packed[~finite], alone[~finite]):
        return torch.inf
    packed, alone = packed[finite].double(), alone[finite].double()
    return float((packed - alone).norm() / alone.norm())
