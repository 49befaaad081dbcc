"""Plain implementations of the packed operators: loops, which are the specification, and a vectorised path.

Autograd differentiates each. Shapes: B rows, L slots, S documents, K chunks, D channels, N states, W taps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments
from packmamba.ops.inner import InnerArguments
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import Chunks, SsdArguments, chunked


def _by_token(
    layout: SequenceLayout,
    like: Tensor,
    states: Tensor,
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Step each document from its state by ``step(slot, state) -> (y, state)``; return y as ``like``, and last states."""
    y = [like.new_zeros(like.shape[2:], dtype=states.dtype)] * layout.num_slots
    finals = []
    for state, start, end in zip(states, layout.starts.tolist(), layout.ends.tolist()):
        for t in range(start, end):
            y[t], state = step(t, state)
        finals.append(state)
    return torch.stack(y).view(like.shape).to(like.dtype), torch.stack(finals) if finals else states


def conv1d_pack_loops(a: ConvArguments) -> tuple[Tensor, Tensor]:
    """Convolve token by token."""
    x, weight, bias, initial_state, layout, activation, _ = a
    dtype = accumulation_dtype(x.dtype)
    slots, taps = x.flatten(0, 1).to(dtype), weight.to(dtype)

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, slots[t, :, None]], 1)
        y = (taps * window).sum(1) if bias is None else (taps * window).sum(1) + bias.to(dtype)
        return F.silu(y) if activation == "silu" else y, window[:, 1:]

    y, final_state = _by_token(layout, x, _conv_states(a).to(dtype), step)
    return y, final_state.to(_conv_states(a).dtype)


def _conv_states(a: ConvArguments) -> Tensor:
    channels, width = a.weight.shape
    return (
        a.x.new_zeros(a.layout.num_documents, channels, width - 1)
        if a.initial_state is None
        else a.initial_state
    )


def conv1d_pack(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Convolve all tokens at once, tap by tap."""
    x, weight, bias, _, layout, activation, return_final_state = a
    dtype, states = accumulation_dtype(x.dtype), _conv_states(a)
    before = states.shape[2]
    slots, taps, token = x.flatten(0, 1).to(dtype), weight.to(dtype), layout.token_slots
    begin = layout.lengths.cumsum(0) - layout.lengths + torch.arange(len(states), device=x.device) * before
    lags = torch.arange(before, device=x.device)
    place = torch.arange(len(token), device=x.device) + (layout.documents.flatten()[token] + 1) * before
    inputs = slots.new_zeros(len(token) + len(states) * before, x.shape[2])
    inputs = inputs.index_copy(0, place, slots.index_select(0, token))
    inputs = inputs.index_copy(
        0, (begin[:, None] + lags).flatten(), states.to(dtype).transpose(1, 2).flatten(0, 1)
    )
    y = inputs.index_select(0, place) * taps[:, -1]
    for lag in range(1, before + 1):
        y = y + inputs.index_select(0, place - lag) * taps[:, -1 - lag]
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    output = torch.zeros_like(slots).index_copy(0, token, y).view(x.shape).to(x.dtype)
    if not return_final_state:
        return output, None
    last = inputs[(begin + layout.lengths)[:, None] + lags].transpose(1, 2)
    return output, last.to(states.dtype).contiguous()


def ssm_pack_loops(a: ScanArguments) -> tuple[Tensor, Tensor]:
    """Scan token by token."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, _ = a
    u_slots, delta, B, C = (tensor.flatten(0, 1).to(A.dtype) for tensor in (u, delta, B, C))

    def step(t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        size = _step_size(delta[t], delta_bias, delta_softplus)
        h = torch.exp(size[:, None] * A) * h + (size * u_slots[t])[:, None] * B[t]
        y = (h * C[t]).sum(-1) if D is None else (h * C[t]).sum(-1) + D * u_slots[t]
        return y if z is None else y * F.silu(z.flatten(0, 1)[t].to(y.dtype)), h

    states = A.new_zeros(layout.num_documents, *A.shape) if initial_state is None else initial_state
    return _by_token(layout, u, states, step)


def ssd_pack_loops(a: SsdArguments) -> tuple[Tensor, Tensor]:
    """Scan token by token: states of (H, P, N)."""
    (x, delta, A, B, C, D, z, delta_bias, initial_state, _, layout, delta_softplus, delta_limit, _) = a
    x_slots, delta = x.flatten(0, 1).to(A.dtype), delta.flatten(0, 1).to(A.dtype)
    B, C = (
        t.flatten(0, 1).to(A.dtype).repeat_interleave(x.shape[2] // t.shape[2], dim=1)[:, :, None]
        for t in (B, C)
    )

    def step(t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        size = _step_size(delta[t], delta_bias, delta_softplus)
        if delta_limit is not None:
            size = size.clamp(*delta_limit)
        h = torch.exp(size * A)[:, None, None] * h + (size[:, None] * x_slots[t])[..., None] * B[t]
        y = (h * C[t]).sum(-1)
        if D is not None:
            y = y + (D if D.dim() == 2 else D[:, None]) * x_slots[t]
        return y if z is None else y * F.silu(z.flatten(0, 1)[t].to(y.dtype)), h

    states = A.new_zeros(a.state_shape) if initial_state is None else initial_state
    return _by_token(layout, x, states, step)


def ssm_pack(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Scan all chunks at once: from zero for their end states, then from their start states."""
    (u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, return_final_state) = a
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
    _, ends = _scan_steps(
        size[:, continued], drive[:, continued], B_steps[:, continued], None, A, none[continued]
    )
    decays = torch.exp(size[:, continued].sum(0)[..., None] * A)
    starts = chunks.pass_states(
        first, none.index_copy(0, continued, ends), none.index_copy(0, continued, decays)
    )
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


ssd_pack = chunked


def mamba_inner(
    a: InnerArguments, conv1d_pack: Callable = conv1d_pack, ssm_pack: Callable = ssm_pack
) -> tuple[Tensor | None, ...]:
    """Compute ``ops.mamba_inner`` by implementations of the two operators."""
    x_weight, dt_weight, out_weight = (
        weight.to(a.xz.dtype) for weight in (a.x_weight, a.dt_weight, a.out_weight)
    )
    x, z = a.xz.chunk(2, dim=-1)
    conv = ConvArguments(x, a.conv_weight, a.conv_bias, a.conv_state, a.conv_layout, "silu", a.return_state)
    x, conv_final = conv1d_pack(conv)
    delta, B, C = a.parts(F.linear(x, x_weight))
    delta = F.linear(delta, dt_weight)
    scan = ScanArguments(
        x, delta, a.A, B, C, a.D, z, a.delta_bias, a.ssm_state, a.ssm_layout, True, a.return_state
    )
    y, ssm_final = ssm_pack(scan)
    return F.linear(y, out_weight), conv_final, ssm_final
