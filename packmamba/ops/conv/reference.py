"""Two plain implementations of the packed convolution.

The loops are the specification: every token of every document in turn. The vectorised path computes the same, all tokens at
once. Autograd differentiates both. Sums are float32, or float64 for float64 activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv.arguments import ConvArguments


def conv1d_pack_loops(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """The convolution, token by token."""
    x, weight, bias, initial_state, layout, activation, return_final_state = a
    dtype = accumulation_dtype(x.dtype)
    width = weight.shape[1]
    slots = x.flatten(0, 1)
    y = [torch.zeros_like(slots[0], dtype=dtype)] * layout.num_slots
    finals = []
    for s, (start, end) in enumerate(zip(layout.starts.tolist(), layout.ends.tolist())):
        if initial_state is None:
            window = [torch.zeros_like(slots[0], dtype=dtype)] * (width - 1)
        else:
            window = list(initial_state[s].to(dtype).unbind(-1))
        for t in range(start, end):
            window.append(slots[t].to(dtype))
            total = sum(weight[:, k].to(dtype) * window[-width + k] for k in range(width))
            assert isinstance(total, Tensor)
            y[t] = total if bias is None else total + bias.to(dtype)
            if activation == "silu":
                y[t] = F.silu(y[t])
        finals.append(torch.stack(window[1 - width :], dim=-1))
    final_state = None
    if return_final_state:
        state_dtype = x.dtype if initial_state is None else initial_state.dtype
        empty = slots.new_zeros(0, x.shape[2], width - 1, dtype=state_dtype)
        final_state = torch.stack(finals).to(state_dtype) if finals else empty
    return torch.stack(y).view(x.shape).to(x.dtype), final_state


def conv1d_pack_vectorised(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """The convolution, all tokens at once, tap by tap."""
    x, weight, bias, initial_state, layout, activation, return_final_state = a
    dtype = accumulation_dtype(x.dtype)
    width = weight.shape[1]
    slots = x.flatten(0, 1).to(dtype)
    taps = weight.to(dtype)
    before = None if initial_state is None else initial_state.to(dtype)
    token = (layout.documents.flatten() >= 0).nonzero().flatten()
    document = layout.documents.flatten()[token].long()
    place = token - layout.starts[document]
    y = slots.index_select(0, token) * taps[:, -1]
    for lag in range(1, width):
        inside = place >= lag
        # An earlier token of the same document, never another's: its slot is not even read.
        source = torch.where(inside, token - lag, token - place)
        tap = torch.where(inside[:, None], slots.index_select(0, source), 0)
        if before is not None:
            early = (~inside).nonzero().flatten()
            tap = tap.index_copy(0, early, before[document[early], :, width - 1 + place[early] - lag])
        y = y + tap * taps[:, -1 - lag]
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    output = torch.zeros_like(slots).index_copy(0, token, y).view(x.shape).to(x.dtype)
    if not return_final_state:
        return output, None
    place = layout.lengths[:, None].long() + torch.arange(1 - width, 0, device=x.device)
    last = slots[layout.starts[:, None] + place.clamp(min=0)]
    last = torch.where((place >= 0)[..., None], last, 0).transpose(1, 2)
    if before is not None:
        kept = (place + width - 1).clamp(max=width - 2)
        kept = before.gather(2, kept[:, None].expand(-1, x.shape[2], -1))
        last = torch.where((place >= 0)[:, None], last, kept)
    return output, last.to(x.dtype if initial_state is None else initial_state.dtype).contiguous()
