"""Convert boundary arguments of a Hugging Face batch to a layout. Shapes: B rows, L slots."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.layout import SequenceLayout, check_all, integer_tensor

# Versions of transformers that are known.
KNOWN = "5.17 to 5.24"
BOUNDARIES = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


class Packing(NamedTuple):
    """Hold the documents of a batch, for every layer in place of an attention mask."""

    # SequenceLayout; padding before a row's tokens is a document; None: each row is one.
    layout: Any
    left: Tensor | None  # (B, L) bool, that padding; None: there is none
    # (B,) int64, the document at each row's end; None: rows hold several.
    last: Tensor | slice | None
    packed: bool  # whether a row holds several documents


WHOLE_ROWS = Packing(None, None, slice(None), False)


def find(
    shape: tuple[int, int], device: torch.device, attention_mask: Tensor | None, given: Mapping[str, Tensor]
) -> Packing:
    """Find the documents of a batch (B, L), with a layout on ``device``.

    Args:
        attention_mask: (B, L), 0 before or behind a row's tokens, else 1.
        given: some of ``BOUNDARIES``, by name; they must
            agree. None: each row's tokens are one document.

    Raises TypeError or ValueError.
    """
    if attention_mask is None and not given:
        return WHOLE_ROWS
    real = torch.ones(shape, dtype=torch.bool) if attention_mask is None else _real(attention_mask, shape)
    # Tokens so far in the row; a slot before the first of them is padding on the left.
    count = real.cumsum(1)
    before = (count == 0) & real.any(1, keepdim=True)
    rows = torch.where(real, 1, torch.where(before, 0, -1))  # ids of what a mask alone tells apart
    layout, source = None, ""
    for name, value in given.items():
        parsed = _layout(name, value, rows, real & (count == 1), len(given) > 1)
        expect(layout is None or parsed == layout, name, f"the documents of {source}", "others")
        layout, source = parsed, name
    layout = SequenceLayout.from_seq_idx(rows) if layout is None else layout
    # One document for each row's tokens, and one for padding before them; more means packed.
    packed = layout.num_documents > int(before.any(1).sum() + real.any(1).sum())
    if not packed and bool(real.all()):
        return WHOLE_ROWS
    left, last = before.to(device) if bool(before.any()) else None, None
    # Rows that end with a token: their last documents' states are what a cache continues from.
    if not packed and bool(real[:, -1].all()):
        last = (layout.ends % shape[1] == 0).nonzero().flatten().to(device)
    return Packing(layout.to(device), left, last, packed)


def _layout(name: str, value: Tensor, rows: Tensor, first: Tensor, shifted: bool) -> SequenceLayout:
    """Convert a boundary argument.

    rows (B, L): 1 at tokens, 0 before, -1 behind; shifted: positions may start above 0.
    """
    given, real = integer_tensor(value, name), rows > 0
    if name.startswith("cu_"):
        expect(real.all(), name, "no padding in attention_mask", f"{int((~real).sum())} padded slots")
        return SequenceLayout.from_cu_seqlens(given, rows.shape[0], rows.shape[1], name)
    expect(given.shape == rows.shape, name, f"shape {tuple(rows.shape)} like the tokens", tuple(given.shape))
    # Beside another argument positions may begin above 0: count from the least first one.
    if name == "position_ids" and shifted and bool(first.any()):
        given = given - given[first].min()
    check_all((given >= 0) | ~real, name, "at least 0 (attention_mask marks padding)", given)
    if name == "seq_idx":
        # 0 is the document of padding before the tokens.
        return SequenceLayout.from_seq_idx(torch.where(real, given + 1, rows), name)
    expected = "0 at a row's first token (above: give seq_idx or cu_seq_lens_q, too)"
    check_all((given == 0) | ~first, name, expected, given)
    # Padding before the tokens counts its own positions, as a document.
    before = torch.where(rows == 0, torch.arange(rows.shape[1]), rows)
    return SequenceLayout.from_position_indices(torch.where(real, given, before), name)


def _real(attention_mask: Tensor, shape: tuple[int, int]) -> Tensor:
    name, kind = "attention_mask", type(attention_mask).__name__
    expect(isinstance(attention_mask, Tensor), name, "a tensor", kind, TypeError)
    expect(attention_mask.shape == shape, name, f"shape {shape} like the tokens", tuple(attention_mask.shape))
    mask = attention_mask.cpu()
    expected = "0 (padding) or 1 (documents are marked by position_ids, seq_idx or cu_seq_lens_q)"
    check_all((mask == 0) | (mask == 1), name, expected, mask)
    real = mask.bool()
    # A token that follows padding although its row had tokens before.
    again = torch.zeros_like(real)
    again[:, 1:] = real[:, 1:] & ~real[:, :-1] & (real.cumsum(1) > 1)[:, 1:]
    check_all(~again, name, "padding only before and behind a row's tokens", mask)
    return real
