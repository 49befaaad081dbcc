"""Convert attention_mask and boundary arguments of a Hugging Face batch to a layout. Shapes: B rows, L slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout

KNOWN = "5.17 to 5.24"
"""Versions of transformers that the patch was written for."""
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Packing(NamedTuple):
    """Documents of a batch, handed to every layer in place of an attention mask.

    Attributes:
        layout: padding before a row's first token is a document of its own there, since a layout's padding is a row's tail.
            None: each row is one document.
        left: (B, L) bool, that padding; None if there is none.
        last: (B,) int64 or slice, the document that each row ends with, if each row is one up to its end; else None.
        packed: whether a row holds more than one document.
    """

    layout: SequenceLayout | None
    left: Tensor | None
    last: Tensor | slice | None
    packed: bool


WHOLE_ROWS = Packing(None, None, slice(None), False)


def find(
    shape: tuple[int, int], device: torch.device, attention_mask: Tensor | None, given: Mapping[str, Tensor]
) -> Packing:
    """Find the documents of a batch.

    Args:
        shape: (B, L).
        device: of the layout.
        attention_mask: (B, L), 0 before or behind a row's tokens, else 1.
        given: some of ``BOUNDARIES``, by name; they must agree. None: each row's tokens are one document.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if attention_mask is None and not given:
        return WHOLE_ROWS
    real = torch.ones(shape, dtype=torch.bool) if attention_mask is None else _real(attention_mask, shape)
    padded = attention_mask is not None and not bool(real.all())
    first = torch.zeros_like(real)
    first[:, 0] = True
    if padded:
        first = real & (real.cumsum(1) == 1)
    starts, source = first, ""
    for name, value in given.items():
        if name == "position_ids" and len(given) > 1 and isinstance(value, Tensor) and value.shape == real.shape:
            value = value - value[first.to(value.device)].min() if bool(first.any()) else value  # may start above 0
        found = BOUNDARIES[name](name, value, real, first)
        if source and not torch.equal(found, starts):
            place = (found != starts).nonzero()[0].tolist()
            raise ValueError(f"{name}: expected the documents of {source}, got others at {place}")
        starts, source = found, name
    packed = bool((starts.sum(1) > 1).any())
    if not packed and not padded:
        return WHOLE_ROWS
    slot = torch.arange(shape[1]).expand(shape)
    position = slot - torch.where(starts, slot, 0).cummax(1).values
    left: Tensor | None = None
    last: Tensor | None = None
    if padded:
        before = ~real & (real.cumsum(1) == 0) & real.any(1, keepdim=True)
        position = torch.where(real | before, position, -1)
        left = before.to(device) if bool(before.any()) else None
    layout = SequenceLayout.from_position_indices(position)
    if not packed and bool(real[:, -1].all()):
        last = (layout.ends % shape[1] == 0).nonzero().flatten().to(device)
    return Packing(layout.to(device), left, last, packed)


def _check(name: str, wrong: Tensor, expected: str, values: Tensor) -> None:
    """Raise ValueError naming the first wrong row and position."""
    if wrong.any():
        b, t = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"{name}[{b}, {t}]: expected {expected}, got {values[b, t].item()}")


def _real(attention_mask: Tensor, shape: tuple[int, int]) -> Tensor:
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(attention_mask).__name__}")
    mask = _matrix("attention_mask", attention_mask.cpu(), shape)
    expected = "0 (padding) or 1 (documents are marked by position_ids, seq_idx or cu_seq_lens_q)"
    _check("attention_mask", (mask != 0) & (mask != 1), expected, mask)
    real = mask.bool()
    again = torch.zeros_like(real)
    again[:, 1:] = real[:, 1:] & ~real[:, :-1] & (real.cumsum(1) > 1)[:, 1:]
    _check("attention_mask", again, "padding only before and behind a row's tokens, not a gap", mask)
    return real


def _position_ids(name: str, value: Tensor, real: Tensor, first: Tensor) -> Tensor:
    position = _matrix(name, _integers(name, value), real.shape)
    _check(
        name, first & (position != 0), "0 at a row's first token (above: give seq_idx or cu_seq_lens_q, too)", position
    )
    goes_on = position == position.roll(1, dims=1) + 1
    _check(name, real & (position != 0) & ~goes_on, "0 (a document starts) or one more than before", position)
    return real & (position == 0)


def _seq_idx(name: str, value: Tensor, real: Tensor, first: Tensor) -> Tensor:
    idx = _matrix(name, _integers(name, value), real.shape)
    _check(name, real & (idx < 0), "at least 0 (attention_mask marks padding)", idx)
    starts = real & (first | (idx != idx.roll(1, dims=1)))
    for b in range(len(idx)):
        ids, counts = idx[b][starts[b]].unique(return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"{name}[{b}]: expected an id's tokens side by side, got {int(ids[counts > 1][0])} again")
    return starts


def _cu_seq_lens(name: str, value: Tensor, real: Tensor, first: Tensor) -> Tensor:
    cu, slots = _integers(name, value), real.numel()
    if cu.dim() != 1 or cu.numel() < 2:
        raise ValueError(f"{name}: expected shape (S + 1,) for S documents, got {tuple(cu.shape)}")
    if not real.all():
        raise ValueError(f"{name}: expected no padding in attention_mask, got {int((~real).sum())} padded slots")
    if cu[0] != 0 or cu[-1] != slots:
        fix = "; end a padded tail as a document of its own, or mark it by attention_mask beside position_ids"
        got = f"{int(cu[0])} to {int(cu[-1])}{fix if cu[-1] < slots else ''}"
        raise ValueError(f"{name}: expected to run from 0 to B * L = {slots}, got {got}")
    if len(wrong := (cu.diff() <= 0).nonzero().flatten()):
        raise ValueError(f"{name}: expected to increase strictly, got {cu[wrong[0] :][:2].tolist()}")
    starts = torch.zeros(slots, dtype=torch.bool)
    starts[cu[:-1]] = True
    starts = starts.view(real.shape)
    if not starts[:, 0].all():
        raise ValueError(f"{name}: expected each row to start with a document, got {cu.tolist()!s:.60}")
    return starts


BOUNDARIES: dict[str, Callable[[str, Tensor, Tensor, Tensor], Tensor]] = {
    "position_ids": _position_ids,
    "seq_idx": _seq_idx,
    "cu_seq_lens_q": _cu_seq_lens,
    "cu_seq_lens_k": _cu_seq_lens,
}
"""Boundary arguments: (name, value, real tokens, first ones) -> (B, L) bool, true where a document starts."""


def _integers(name: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected an integer tensor, got {getattr(value, 'dtype', type(value).__name__)}")
    return value.to("cpu", torch.int64)


def _matrix(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape (B, L) = {tuple(shape)} like the tokens, got {tuple(value.shape)}")
    return value
