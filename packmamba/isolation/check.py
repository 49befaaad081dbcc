"""Check documents for isolation: change other documents, compare bits, gradients, and documents alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packmamba.isolation import probes
from packmamba.isolation.adapters import CheckedCallable, adapt
from packmamba.isolation.probes import Documents, moved

ROWS = ((19, 1, 23, 2, 38), (64, 63, 1, 65))
"""Lengths of documents: awkward ones, and some that end at kernels' chunks. The sums are primes: no other axis is as long."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum ||packed - alone|| / ||alone|| of a document."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Maximum rounding, relative to the largest logit, where tokens are routed and no gradient connects documents."""


def leakcheck(
    model_or_callable: Any,
    boundaries: str = "position_ids",
    vocab_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> LeakCheckResult:
    """Check whether anything crosses a document boundary: change documents of a packed row, compare the others bit by bit.

    Also differentiate documents' losses by the embeddings of all tokens, and compute each document alone. Torch's random
    states, modes, buffers, gradients and weights are left as they were; each call draws the same random numbers.

    Args:
        model_or_callable: a causal language model that takes ``input_ids`` and the boundary argument; a MambaLM (by its
            layout); or a callable (tokens (1, L) int64, lengths) -> logits (1, L, V).
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

    def check_mode(name: str, rows: Sequence[Sequence[int]], alone: bool) -> ModeResult:
        mode = result.modes[name] = ModeResult()
        for module in model.modules:
            module.train(name == "training")
        for row in rows:
            for way in model.inputs:
                _check(Documents(model, way, row), mode, alone)
        return mode

    with probes.undisturbed(model.modules):
        if not model.vocab_size:
            two = torch.zeros(2, dtype=torch.int64, device=model.device)
            with torch.no_grad():
                model.vocab_size = probes.logits_of(model.alone, two).shape[-1]
        mode = check_mode("evaluation" if model.modules else "as it is", rows, True)
        if mode.raises is None and model.modules:
            result.padding = {side: _padding_is_harmless(Documents(model, side, rows[0])) for side in model.padding}
            check_mode("training", rows[:1], False)
    return result


def _check(documents: Documents, mode: ModeResult, alone: bool) -> None:
    """Check one row of documents; add to ``mode``."""
    model = documents.model
    with torch.no_grad():
        try:
            base = documents.logits()
        except Exception as error:
            documents.alone()  # where this fails too, it is no refusal
            if not model.optional:
                raise
            mode.raises = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return
        if not base.isfinite().any(-1).all():
            raise ValueError("logits: expected finite numbers, got a token without any")
        tolerance, rounding = _limits(base, documents.model)
        tokens, watched = map(torch.stack, zip(*documents.probes(range(len(documents.lengths)))))
        moves = torch.stack([_moves(documents.logits(other), base) for other in tokens])
        slots = watched & (moves > _noise(documents, base, moves, mode, rounding))
        if alone:
            difference = _from_alone(documents, base)
            mode.difference = max(difference, mode.difference or 0.0)
            mode.add("same_as_alone", difference <= tolerance)
            if model.optional and documents.way == "packed" and mode.ignored is not False:
                unmarked = probes.logits_of(model.alone, documents.tokens)
                mode.ignored = not moved(base, unmarked).any()
    crossed = probes.crossing_gradients(documents)
    if crossed is not None:
        mode.add("isolated_backward", not crossed)
    else:
        mode.notes.append("No gradient can be taken.")
    largest = float(moves[slots].max()) if slots.any() else 0.0
    mode.largest = max(mode.largest, largest)
    isolated = not largest or (crossed is False and largest <= rounding and probes.routes(documents))
    mode.add("isolated_forward", isolated)
    if isolated:
        return
    last = documents.lengths[0] - 1
    if slots[0].any() and (after := int(slots[0].nonzero().max()) - last) > mode.after:
        mode.after, mode.endless = after, last + after == len(base) - 1
    first = int(slots.any(1).nonzero()[0])
    mode.module = mode.module or probes.first_module(documents, tokens[first], watched[first])


def _noise(documents: Documents, base: Tensor, moves: Tensor, mode: ModeResult, rounding: float) -> float:
    """Return the size of moves between two equal calls; below 0 if that is a leak."""
    noise = float(_moves(documents.logits(), base).max())
    differ = f"Two calls with the same tokens differ by {noise:.1g}"
    if noise > rounding:
        mode.notes.append(f"{differ}: something is carried from one call to the next.")
        return -1.0
    if not moves[0, documents.lengths[0] - 1] > 4 * noise:
        raise ValueError("logits: a changed token does not change its own logits, so no leak would show either")
    if noise:
        mode.notes.append(f"{differ}; smaller changes than 4 times that are not seen.")
    return 4 * noise


def _padding_is_harmless(documents: Documents) -> bool | None:
    """Return whether padded documents equal themselves alone up to rounding; None: refused."""
    with torch.no_grad():
        try:
            base = documents.logits()
        except Exception:  # of whatever kind a model refuses by
            return None
        tolerance, rounding = _limits(base, documents.model)
        if _from_alone(documents, base) > tolerance:
            return False
        pairs = documents.probes([len(documents.lengths) // 2])
        return all(_moves(documents.logits(tokens), base)[watched].max() <= rounding for tokens, watched in pairs)


def _limits(base: Tensor, model: CheckedCallable) -> tuple[float, float]:
    """Return the tolerance, relative, and the size of rounding, absolute.

    The coarsest dtype of logits and parameters decides: many models widen their logits at the end.
    """
    parameters = {parameter.dtype for module in model.modules for parameter in module.parameters()}
    dtype = max((parameters & TOLERANCES.keys()) | {base.dtype}, key=TOLERANCES.__getitem__)
    return TOLERANCES[dtype], ROUNDING[dtype] * float(base[base.isfinite()].abs().max())


def _moves(logits: Tensor, base: Tensor) -> Tensor:
    """Return each token's largest change of a logit, (L,); 0 if bitwise equal, infinite to or from NaN."""
    by = torch.where(moved(logits, base), (logits - base).abs().nan_to_num(nan=torch.inf), 0.0)
    return by.amax(-1).double()


def _from_alone(documents: Documents, base: Tensor) -> float:
    """Return the largest ||packed - alone|| / ||alone|| over finite entries; infinite if others differ."""
    largest = 0.0
    for packed, alone in zip(base.split(documents.lengths), documents.alone()):
        finite = packed.isfinite() & alone.isfinite()
        if not torch.equal(packed[~finite], alone[~finite]):
            return torch.inf
        packed, alone = packed[finite].double(), alone[finite].double()
        largest = max(largest, float((packed - alone).norm() / alone.norm()))
    return largest


@dataclass
class ModeResult:
    """Hold the findings in one mode, or of a callable. None: not seen.

    Attributes:
        isolated_forward: changing other documents changes no bit of a document's logits.
        isolated_backward: a document's loss has no gradient at other documents' tokens.
        same_as_alone: packed logits equal those of each document alone within the tolerance.
        largest: largest change of another document's logits; rounding alone if ``isolated_forward``.
        after: tokens behind a document that its last token reaches; ``endless``: up to the end of the row.
        module: the first module whose output another document changes.
        difference: largest relative difference between a document packed and alone.
        ignored: the boundary argument changes no bit.
        raises: the error of a model that refuses the boundary argument.
        notes: further sentences.
    """

    isolated_forward: bool | None = None
    isolated_backward: bool | None = None
    same_as_alone: bool | None = None
    largest: float = 0.0
    after: int = 0
    endless: bool = False
    module: str | None = None
    difference: float | None = None
    ignored: bool | None = None
    raises: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        return self.isolated_forward is False or self.isolated_backward is False

    def add(self, name: str, holds: bool) -> None:
        """Record whether a property holds in one more row."""
        setattr(self, name, getattr(self, name) is not False and holds)

    def sentences(self, name: str, boundaries: str) -> Iterator[str]:
        if self.raises is not None:
            yield f"{name}: refuses {boundaries}: {self.raises}"
            return
        changed = "no bit of a document's logits"
        if not self.isolated_forward:
            reach = f", {self.after} tokens behind it" if self.after else ""
            changed = f"a document's logits, by up to {self.largest:.2g}{reach}"
        elif self.largest:
            changed = f"a document's logits by rounding alone ({self.largest:.1g}), without a gradient"
        yield f"{name}: changing other documents changes {changed}."
        if self.isolated_backward is not None:
            yield f"  A document's loss has {'no' if self.isolated_backward else 'a'} gradient at another document's tokens."
        if self.module is not None:
            yield f"  The first module that leaks is {self.module}."
        if self.difference is not None:
            verb = "equal" if self.same_as_alone else "differ from"
            yield f"  Packed logits {verb} those of each document alone: relative difference {self.difference:.1g}."
        if self.ignored:
            yield f"  The model ignores {boundaries} silently: without it, every bit is the same."
        yield from (f"  {note}" for note in dict.fromkeys(self.notes))


def _of_modes(name: str, combine: Callable[[Iterator[Any]], Any]) -> Any:
    """Make a property that combines all modes' findings; None without one."""

    def get(self: LeakCheckResult) -> Any:
        values = [value for mode in self.modes.values() if (value := getattr(mode, name)) is not None]
        return combine(iter(values)) if values else None

    return property(get)


@dataclass
class LeakCheckResult:
    """Hold the result of ``leakcheck``; ``str`` gives it in sentences.

    Attributes:
        boundaries: how documents were marked: the argument's name, layout (a MambaLM), lengths (a callable).
        modes: findings by mode.
        padding: by side, whether padded documents equal themselves alone whatever the padding holds (None: refused); for
            models that take an attention_mask, and a MambaLM. No part of ``leaks``.
    """

    boundaries: str
    modes: dict[str, ModeResult]
    padding: dict[str, bool | None] = field(default_factory=dict)

    @property
    def leaks(self) -> bool:
        """Anything crosses a boundary, forward or backward, in any mode."""
        return any(mode.leaks for mode in self.modes.values())

    isolated_forward = _of_modes("isolated_forward", all)
    isolated_backward = _of_modes("isolated_backward", all)
    same_as_alone = _of_modes("same_as_alone", all)
    raises = _of_modes("raises", next)
    module = _of_modes("module", next)
    ignored = _of_modes("ignored", any)
    reach = _of_modes("after", max)

    @property
    def ok(self) -> bool:
        """Nothing leaks, nothing is refused, and documents are what they are alone."""
        return not self.leaks and self.raises is None and self.same_as_alone is not False

    def __str__(self) -> str:
        head = f"Nothing crosses a document boundary (boundaries: {self.boundaries})."
        if self.leaks:
            head = f"Documents leak (boundaries: {self.boundaries})."
        elif self.raises is not None:
            head = f"Nothing was checked: the model refuses {self.boundaries}."
        elif self.same_as_alone is False:
            head = f"No document changes another (boundaries: {self.boundaries}), but packed they are not what they are alone."
        lines = [head, *(s for name, mode in self.modes.items() for s in mode.sentences(name, self.boundaries))]
        verbs = {None: "are refused", True: "equal themselves alone", False: "differ from themselves alone"}
        return "\n".join(lines + [f"Padding on the {side}: documents {verbs[v]}." for side, v in self.padding.items()])
