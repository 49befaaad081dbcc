"""Plain implementations of the packed operators: loops, which are the specification, and a vectorised path.

Autograd differentiates each. Shapes: B rows, L slots, S documents, K chunks, D channels, N states, W taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments
from packmamba.ops.inner import InnerArguments
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import Chunks, SsdArguments


def conv1d_pack_loops(a: ConvArguments) -> tuple[Tensor, Tensor]:
    """Convolve token by token."""
    x, weight, bias, initial_state, layout, activation, _ = a
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
    final_state = torch.stack(finals) if finals else slots.new_zeros(0, x.shape[2], width - 1)
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    return torch.stack(y).view(x.shape).to(x.dtype), final_state.to(state_dtype)


def conv1d_pack_vectorised(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Convolve all tokens at once, tap by tap."""
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


def ssm_pack_loops(a: ScanArguments) -> tuple[Tensor, Tensor]:
    """Scan token by token."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, _ = a
    dtype = accumulation_dtype(u.dtype)
    u_slots, delta_slots, B_slots, C_slots = (tensor.flatten(0, 1) for tensor in (u, delta, B, C))
    y = [torch.zeros_like(u_slots[0], dtype=dtype)] * layout.num_slots
    finals = []
    for s, (start, end) in enumerate(zip(layout.starts.tolist(), layout.ends.tolist())):
        h = torch.zeros_like(A) if initial_state is None else initial_state[s]
        for t in range(start, end):
            x_t, B_t, C_t = u_slots[t].to(dtype), B_slots[t].to(dtype), C_slots[t].to(dtype)
            step = _step_size(delta_slots[t].to(dtype), delta_bias, delta_softplus)
            h = torch.exp(step[:, None] * A) * h + (step * x_t)[:, None] * B_t
            y[t] = (h * C_t).sum(-1)
            if D is not None:
                y[t] = y[t] + D * x_t
            if z is not None:
                y[t] = y[t] * F.silu(z.flatten(0, 1)[t].to(dtype))
        finals.append(h)
    final_state = torch.stack(finals) if finals else A.new_zeros(0, *A.shape)
    return torch.stack(y).view(u.shape).to(u.dtype), final_state


def ssd_pack_loops(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Scan token by token: states of (H, P, N)."""
    x, delta, A, B, C, D, z, delta_bias, initial_state, _, layout, delta_softplus, delta_limit, return_final_state = a
    dtype = accumulation_dtype(x.dtype)
    x_slots, delta_slots = x.flatten(0, 1).to(dtype), delta.flatten(0, 1).to(dtype)
    heads_of_a_group = x.shape[2] // B.shape[2]
    B_slots, C_slots = (t.flatten(0, 1).to(dtype).repeat_interleave(heads_of_a_group, dim=1) for t in (B, C))
    y = [torch.zeros_like(x_slots[0])] * layout.num_slots
    finals = []
    for s, (start, end) in enumerate(zip(layout.starts.tolist(), layout.ends.tolist())):
        h = A.new_zeros(*x.shape[2:], B.shape[3]) if initial_state is None else initial_state[s]
        for t in range(start, end):
            step = _step_size(delta_slots[t], delta_bias, delta_softplus)
            if delta_limit is not None:
                step = step.clamp(*delta_limit)
            h = torch.exp(step * A)[:, None, None] * h + (step[:, None] * x_slots[t])[..., None] * B_slots[t][:, None]
            y[t] = (h * C_slots[t][:, None]).sum(-1)
            if D is not None:
                y[t] = y[t] + (D if D.dim() == 2 else D[:, None]) * x_slots[t]
            if z is not None:
                y[t] = y[t] * F.silu(z.flatten(0, 1)[t].to(dtype))
        finals.append(h)
    final_state = None
    if return_final_state:
        final_state = torch.stack(finals) if finals else A.new_zeros(a.state_shape)
    return torch.stack(y).view(x.shape).to(x.dtype), final_state


def ssm_pack_vectorised(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Scan all chunks of all documents in parallel: from zero for their end states, then each from its start state."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, return_final_state = a
    dtype = accumulation_dtype(u.dtype)
    chunks = Chunks(layout, None)
    steps = max(1, int(chunks.inside.any(0).sum()))
    slot, inside = (part[:, :steps].T.contiguous() for part in (chunks.slot, chunks.inside))
    inside = inside[..., None]

    def by_step(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, slot.flatten()).unflatten(0, slot.shape).to(dtype)

    x, B_steps, C_steps = by_step(u), by_step(B), by_step(C)
    size = torch.where(inside, _step_size(by_step(delta), delta_bias, delta_softplus), 0)
    drive = torch.where(inside, size * x, 0)

    first = A.new_zeros(layout.num_documents, *A.shape) if initial_state is None else initial_state
    continued = (chunks.index + 1 < chunks.count[chunks.document]).nonzero().flatten()
    none = A.new_zeros(chunks.index.numel(), *A.shape)
    _, ends = _scan_steps(size[:, continued], drive[:, continued], B_steps[:, continued], None, A, none[continued])
    decays = torch.exp(size[:, continued].sum(0)[..., None] * A)
    starts = chunks.pass_states(first, none.index_copy(0, continued, ends), none.index_copy(0, continued, decays))
    y, ends = _scan_steps(size, drive, B_steps, C_steps, A, starts)
    assert y is not None
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(by_step(z))
    inside = inside.flatten()
    output = torch.zeros_like(u.flatten(0, 1), dtype=dtype)
    output = output.index_copy(0, slot.flatten()[inside], y.flatten(0, 1)[inside])
    final_state = ends[chunks.last] if return_final_state else None
    return output.view(u.shape).to(u.dtype), final_state


def _step_size(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    if delta_bias is not None:
        delta = delta + delta_bias
    return F.softplus(delta) if delta_softplus else delta


def _scan_steps(
    size: Tensor, drive: Tensor, B: Tensor, C: Tensor | None, A: Tensor, h: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Step chunks through time: size, drive (time, K, D), B, C (time, K, N), h (K, D, N) -> y (time, K, D), h."""
    y = []
    for t in range(size.shape[0]):
        h = torch.addcmul(drive[t, :, :, None] * B[t, :, None, :], torch.exp(size[t, :, :, None] * A), h)
        if C is not None:
            # Not a matmul: autocast would round the states to 16 bits.
            y.append((h * C[t, :, None, :]).sum(-1))
    return (torch.stack(y) if y else None), h


def inner_pack_composed(
    a: InnerArguments, conv1d_pack: Callable = conv1d_pack_vectorised, ssm_pack: Callable = ssm_pack_vectorised
) -> tuple[Tensor | None, ...]:
    """Compute ``ops.inner_pack`` by implementations of the two operators."""
    x_weight, dt_weight, out_weight = (weight.to(a.xz.dtype) for weight in (a.x_weight, a.dt_weight, a.out_weight))
    x, z = a.xz.chunk(2, dim=-1)
    conv = ConvArguments(x, a.conv_weight, a.conv_bias, a.conv_state, a.conv_layout, "silu", a.return_state)
    x, conv_final = conv1d_pack(conv)
    delta, B, C = a.parts(F.linear(x, x_weight))
    delta = F.linear(delta, dt_weight)
    scan = ScanArguments(x, delta, a.A, B, C, a.D, z, a.delta_bias, a.ssm_state, a.ssm_layout, True, a.return_state)
    y, ssm_final = ssm_pack(scan)
    return F.linear(y, out_weight), conv_final, ssm_final
