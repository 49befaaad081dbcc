"""The packed operators token by token: the specification, in loops that say what they compute and
nothing else.

Every backend is held against them in float64; autograd differentiates them. Sums and states are
float32, or float64 for float64 activations.

Shapes: B rows, L slots, S documents, D channels, N states, W taps, H heads, P channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba import PackedMamba3, SequenceLayout
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import SsdArguments

# (slot, state before it) -> (output of the slot, state after it).
Step = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def _by_token(layout: SequenceLayout, like: Tensor, states: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Step each document from its state, token by token.

    Return outputs as ``like`` (B, L, ...), zero at padding, and the last states (S, ...).
    """
    y = [like.new_zeros(like.shape[2:], dtype=states.dtype)] * layout.num_slots
    finals = []
    for state, start, end in zip(states, layout.starts.tolist(), layout.ends.tolist()):
        for t in range(start, end):
            y[t], state = step(t, state)
        finals.append(state)
    return torch.stack(y).view(like.shape).to(like.dtype), torch.stack(finals) if finals else states


def conv1d_pack_loops(a: ConvArguments) -> tuple[Tensor, Tensor]:
    """Convolve token by token; return y (B, L, D) and final states (S, D, W-1)."""
    dtype = accumulation_dtype(a.x.dtype)
    x = a.x.flatten(0, 1).to(dtype)
    weight = a.weight.to(dtype)
    states = _conv_states(a)

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, x[t, :, None]], 1)
        y = (weight * window).sum(1)
        if a.bias is not None:
            y = y + a.bias.to(dtype)
        return F.silu(y) if a.activation == "silu" else y, window[:, 1:]

    y, final_state = _by_token(a.layout, a.x, states.to(dtype), step)
    return y, final_state.to(states.dtype)


def _conv_states(a: ConvArguments) -> Tensor:
    if a.initial_state is not None:
        return a.initial_state
    channels, width = a.weight.shape
    return a.x.new_zeros(a.layout.num_documents, channels, width - 1)


def ssm_pack_loops(a: ScanArguments) -> tuple[Tensor, Tensor]:
    """Scan token by token; return y (B, L, D) and final states (S, D, N)."""
    dtype = a.A.dtype
    u, delta, B, C = (tensor.flatten(0, 1).to(dtype) for tensor in (a.u, a.delta, a.B, a.C))

    def step(t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        size = _step_size(delta[t], a.delta_bias, a.delta_softplus)
        h = torch.exp(size[:, None] * a.A) * h + (size * u[t])[:, None] * B[t]
        y = (h * C[t]).sum(-1)
        if a.D is not None:
            y = y + a.D * u[t]
        return _gated(y, a.z, t), h

    states = a.initial_state
    if states is None:
        states = a.A.new_zeros(a.layout.num_documents, *a.A.shape)
    return _by_token(a.layout, a.u, states, step)


def ssd_pack_loops(a: SsdArguments) -> tuple[Tensor, Tensor]:
    """Scan token by token; return y (B, L, H, P) and final states (S, H, P, N)."""
    dtype = a.A.dtype
    heads = a.x.shape[2]
    x = a.x.flatten(0, 1).to(dtype)
    delta = a.delta.flatten(0, 1).to(dtype)
    B, C = (  # (B L, H, 1, N): each head reads its group's
        tensor.flatten(0, 1).to(dtype).repeat_interleave(heads // tensor.shape[2], dim=1)[:, :, None]
        for tensor in (a.B, a.C)
    )

    def step(t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        size = _step_size(delta[t], a.delta_bias, a.delta_softplus)
        if a.delta_limit is not None:
            size = size.clamp(*a.delta_limit)
        h = torch.exp(size * a.A)[:, None, None] * h + (size[:, None] * x[t])[..., None] * B[t]
        y = (h * C[t]).sum(-1)
        if a.D is not None:
            y = y + (a.D if a.D.dim() == 2 else a.D[:, None]) * x[t]
        return _gated(y, a.z, t), h

    states = a.A.new_zeros(a.state_shape) if a.initial_state is None else a.initial_state
    return _by_token(a.layout, a.x, states, step)


def mamba3_loops(mixer: PackedMamba3, hidden: Tensor, layout: SequenceLayout, states: tuple) -> tuple[Tensor, list]:
    """Mix hidden (B, L, d_model) by Mamba-3's equations (arXiv 2603.15569), token by token; return
    also final states.

    With complex numbers, one for two coordinates that rotate: a state turns with its keys.
    ``states``, by document: k (H, N), of MIMO (R, H, N), and v (H, P) of the token before, h (H, P,
    N), all in the frame of that token, where angles are zero.
    """
    H, P, N, G, n, R = mixer.nheads, mixer.headdim, mixer.d_state, mixer.ngroups, mixer.num_angles, mixer.rank
    weights = [2 * [H * P], 2 * [R * G * N], 3 * [H], [n]]
    # By rank: of inputs, gates and outputs, (R, H, P).
    of_ranks = [
        getattr(mixer, f"mimo_{name}").transpose(0, 1) if mixer.is_mimo else torch.ones(1, 1, 1) for name in "xzo"
    ]
    # Which coordinates rotate together, the pairs side by side.
    places = torch.arange(N).view(2, -1).T.flatten() if mixer.is_mimo else torch.arange(N)
    rows = (hidden.flatten(0, 1) @ mixer.in_proj.weight.T).split(sum(weights, []), 1)

    def turned(x: Tensor, angle: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous())
        turning = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return torch.cat([turning, x[..., 2 * n :]], -1)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    mixed = [hidden.new_zeros(H * P)] * layout.num_slots
    finals = []
    for k_before, v_before, h, start, end in zip(*states, layout.starts.tolist(), layout.ends.tolist()):
        theta = hidden.new_zeros(H, n)
        k_before_shape = k_before.shape
        for t in range(start, end):
            z, v, B, C, dt, A, trapezoid, angle = (part[t] for part in rows)
            v = v.view(H, P)
            dt = F.softplus(dt + mixer.dt_bias)
            A = F.softplus(A) if mixer.decay == "softplus" else torch.where(A >= 0, 1 + A, 1 / (1 - A))
            A = -torch.clamp(A, min=mixer.A_floor)
            theta = (theta + math.pi * torch.tanh(angle) * dt[:, None]) % (2 * math.pi)
            k, q = (
                (normed(x.view(R, G, N), norm.weight).repeat_interleave(H // G, 1) + bias.transpose(0, 1))[..., places]
                for x, norm, bias in ((B, mixer.B_norm, mixer.B_bias), (C, mixer.C_norm, mixer.C_bias))
            )
            k, q = turned(k, theta), turned(q, theta)
            share = torch.sigmoid(trapezoid)
            alpha = torch.exp(A * dt)
            beta, gamma = (1 - share) * dt * alpha, share * dt
            h = alpha[:, None, None] * h
            for r, of_x in enumerate(of_ranks[0]):
                h = h + beta[:, None, None] * (of_x * v_before)[..., None] * k_before.view(R, H, N)[r, :, None]
                h = h + gamma[:, None, None] * (of_x * v)[..., None] * k[r, :, None]
            for r, (of_x, of_z, of_o) in enumerate(zip(*of_ranks)):
                y = (h * q[r, :, None]).sum(-1) + mixer.D[:, None] * of_x * v
                if mixer.norm is not None:
                    y = normed(y, mixer.norm.weight.view(H, P))
                mixed[t] = mixed[t] + (of_o * y * F.silu(of_z * z.view(H, P))).flatten()
            k_before, v_before = k, v
        k_before = turned(k_before.view(R, H, N), -theta).view(k_before_shape)
        finals.append((k_before, v_before, turned(h, -theta[:, None].expand(H, P, n))))
    mixed = torch.stack(mixed).view(*layout.shape, H * P)
    return mixed @ mixer.out_proj.weight.T, [torch.stack(parts) for parts in zip(*finals)]


def _gated(y: Tensor, z: Tensor | None, slot: int) -> Tensor:
    return y if z is None else y * F.silu(z.flatten(0, 1)[slot].to(y.dtype))


def _step_size(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    if delta_bias is not None:
        delta = delta + delta_bias
    return F.softplus(delta) if delta_softplus else delta
