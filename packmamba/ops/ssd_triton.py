# mypy: ignore-errors
"""Mamba-2's scan on a GPU, in Triton. Chunks are anchored at document starts, so masks are only tails.

Forward: a program walks one head of one document, its state in registers. Backward: the same walk writes the states at chunks'
starts, its mirror image their gradients at chunks' ends; then a program takes a chunk and some heads of a group, and sums their
dB and dC. No atomics: sums over chunks and heads have one order. Shapes: K chunks of Q tokens, H heads, P channels, N states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packmamba.ops import cuda
from packmamba.ops.custom_op import dense

CHUNK = 64
HEADS = 8
"""Heads of a group that one program of the backward sums, at most."""
WALK, X, BC = ({"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 2), (4, 1), (8, 2)))


class Plan(NamedTuple):
    """Chunks of a layout's documents; K is the most that there can be, those that are absent have no tokens."""

    start: Tensor  # (K,) first slot
    length: Tensor  # (K,)
    documents: (
        Tensor  # (S, 6): number, first chunk, chunks, start, end, where its first chunk would start; longest first
    )
    padding: Tensor  # (B L,) 1 at padding


def plan(layout: Any, offsets: Tensor | None, rows: int, row_length: int) -> Plan:
    """Make the plan on the device, without waiting for it; cached with the layout."""
    schedules, tensors = (
        cuda.schedules_of(layout.starts),
        [layout.starts, layout.ends, *([] if offsets is None else [offsets])],
    )
    stream = torch.cuda.current_stream(layout.starts.device).cuda_stream if layout.starts.is_cuda else 0
    made_of = (*(tensor.data_ptr() for tensor in tensors), *cuda.versions(*tensors))
    known = schedules.get(("ssd", rows, row_length, stream))
    if known is None or known[0] != made_of:
        known = schedules["ssd", rows, row_length, stream] = (made_of, _plan(layout, offsets, rows * row_length))
    return known[1]


def _plan(layout: Any, offsets: Tensor | None, slots: int) -> Plan:
    starts, ends = layout.starts.long(), layout.ends.long()
    before = torch.zeros_like(starts) if offsets is None else offsets.long() % CHUNK
    count = torch.where(ends > starts, (before + ends - starts + CHUNK - 1) // CHUNK, 0)
    behind = count.cumsum(0)
    chunk = torch.arange(2 * len(starts) + slots // CHUNK, device=starts.device)
    document = torch.searchsorted(behind, chunk, right=True).clamp(max=len(starts) - 1)
    end = (starts - before)[document] + (chunk - (behind - count)[document] + 1) * CHUNK
    start = torch.maximum(starts[document], end - CHUNK)
    length = torch.where(chunk < behind[-1], torch.minimum(ends[document], end) - start, 0)
    slot = torch.arange(slots, device=starts.device)
    at = torch.searchsorted(ends, slot, right=True).clamp(max=len(starts) - 1)
    padding = (slot < starts[at]) | (slot >= ends[at])
    order = torch.argsort(count, descending=True, stable=True)
    documents = torch.stack([order, *(of[order] for of in (behind - count, count, starts, ends, starts - before))], 1)
    return Plan(*(tensor.int() for tensor in (torch.where(length > 0, start, 0), length, documents, padding)))


@triton.jit
def _step(delta, bias, low, high, inside, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    """Return step sizes, zero outside, and their slope over delta."""
    v = delta + bias
    slope = tl.full(v.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = 1 / (1 + tl.exp(-v))
        v = tl.where(v > 20, v, tl.log(1 + tl.exp(tl.minimum(v, 20.0))))
    if LIMIT:
        slope = tl.where((v >= low) & (v <= high), slope, 0.0)
        v = tl.minimum(tl.maximum(v, low), high)
    return tl.where(inside, v, 0.0), tl.where(inside, slope, 0.0)


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr):
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def _dot_of_gated(dy, x, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply dy by x's transpose; a gated dy is no bfloat16 number, and sums over channels cancel."""
    if GATE and DTYPE == tl.bfloat16:
        return tl.dot(dy, tl.trans(x.to(tl.float32)), input_precision="tf32")
    return _dot(dy, tl.trans(x), DTYPE)


@triton.jit
def _walk(
    x, delta, A, B, C, D, z, bias, initial, y, final, states,
    documents,
    L, H, low, high,
    x_b, x_l, x_h, d_b, d_l, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Walk one head of one document; OUT: write y, else the states at chunks' starts. SHARED: heads of a group."""
    h, own_row = tl.program_id(0) % H, documents + 6 * (tl.program_id(0) // H)
    document, k0, n = tl.load(own_row), tl.load(own_row + 1), tl.load(own_row + 2)
    begin, end, grid = tl.load(own_row + 3), tl.load(own_row + 4), tl.load(own_row + 5)
    row = begin.to(tl.int64) // L
    slot0 = row * L
    q, p, s = tl.arange(0, Q), tl.arange(0, PB), tl.arange(0, NB)
    of_p, of_s = p < P, s < N
    a = tl.load(A + h)
    b0 = tl.load(bias + h) if BIAS else 0.0
    own = (document.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
    both = of_p[:, None] & of_s[None, :]
    state = tl.zeros((PB, NB), tl.float32)
    if INITIAL:
        state = tl.load(initial + own, both, 0.0)
    for i in range(n):
        k = k0 + i
        start = tl.maximum(begin, grid + i * Q)
        inside = start + q < tl.minimum(end, grid + i * Q + Q)
        t = (start - slot0).to(tl.int64) + q
        in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
        xk = tl.load(x + row * x_b + t[:, None] * x_l + h * x_h + p[None, :], in_p, 0.0)
        Bk = tl.load(B + row * B_b + t[:, None] * B_l + h // SHARED * B_g + s[None, :], in_s, 0.0)
        step = tl.load(delta + row * d_b + t * d_l + h, inside, 0.0).to(tl.float32)
        step, _ = _step(step, b0, low, high, inside, SOFTPLUS, LIMIT)
        total = tl.cumsum(step * a, 0)
        whole = tl.sum(step * a, 0)
        if OUT:
            Ck = tl.load(C + row * C_b + t[:, None] * C_l + h // SHARED * C_g + s[None, :], in_s, 0.0)
            scores = _dot(Ck, tl.trans(Bk), DTYPE) * step[None, :]
            scores = tl.where(q[:, None] >= q[None, :], scores * tl.exp(total[:, None] - total[None, :]), 0.0)
            out = _dot(scores, xk, DTYPE) + _dot(Ck, tl.trans(state), DTYPE) * tl.exp(total)[:, None]
            if SKIP == 1:
                out += tl.load(D + h) * xk.to(tl.float32)
            if SKIP == 2:
                out += tl.load(D + h * P + p, of_p, 0.0)[None, :] * xk.to(tl.float32)
            if GATE:
                zk = tl.load(z + row * z_b + t[:, None] * z_l + h * z_h + p[None, :], in_p, 0.0).to(tl.float32)
                out = out * zk / (1 + tl.exp(-zk))
            place = (start + q).to(tl.int64)[:, None] * H * P + h * P + p[None, :]
            tl.store(y + place, out.to(DTYPE), in_p)
        else:
            place = (k.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
            tl.store(states + place, state.to(DTYPE), both)
        kept = xk.to(tl.float32) * (step * tl.exp(whole - total))[:, None]
        state = state * tl.exp(whole) + _dot(tl.trans(kept), Bk, DTYPE)
    if FINAL:
        tl.store(final + own, state, both)


@triton.jit
def _gated(dy, z, row, t, h, p, mask, place, z_b, z_l, z_h, GATE: tl.constexpr):
    """Return the gradient before the gate, and what dz is of the ungated output."""
    dyk = tl.load(dy + place, mask, 0.0).to(tl.float32)
    of_z = dyk
    if GATE:
        zk = tl.load(z + row * z_b + t[:, None] * z_l + h * z_h + p[None, :], mask, 0.0).to(tl.float32)
        open_ = 1 / (1 + tl.exp(-zk))
        of_z = dyk * open_ * (1 + zk * (1 - open_))
        dyk = dyk * zk * open_
    return dyk, of_z


@triton.jit
def _walk_back(
    dy, delta, A, C, z, bias, dfinal, dinitial, dstates,
    documents,
    L, H, low, high,
    d_b, d_l, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Walk one head of one document backwards; write the gradients of the states at chunks' ends."""
    h, own_row = tl.program_id(0) % H, documents + 6 * (tl.program_id(0) // H)
    document, k0, n = tl.load(own_row), tl.load(own_row + 1), tl.load(own_row + 2)
    begin, end, grid = tl.load(own_row + 3), tl.load(own_row + 4), tl.load(own_row + 5)
    row = begin.to(tl.int64) // L
    slot0 = row * L
    q, p, s = tl.arange(0, Q), tl.arange(0, PB), tl.arange(0, NB)
    of_p, of_s = p < P, s < N
    a = tl.load(A + h)
    b0 = tl.load(bias + h) if BIAS else 0.0
    own = (document.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
    both = of_p[:, None] & of_s[None, :]
    state = tl.zeros((PB, NB), tl.float32)
    if FINAL:
        state = tl.load(dfinal + own, both, 0.0)
    for i in range(n):
        k = k0 + n - 1 - i
        start = tl.maximum(begin, grid + (n - 1 - i) * Q)
        inside = start + q < tl.minimum(end, grid + (n - i) * Q)
        t = (start - slot0).to(tl.int64) + q
        in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
        place = (k.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
        tl.store(dstates + place, state.to(DTYPE), both)
        Ck = tl.load(C + row * C_b + t[:, None] * C_l + h // SHARED * C_g + s[None, :], in_s, 0.0)
        place = (start + q).to(tl.int64)[:, None] * H * P + h * P + p[None, :]
        dyk, _ = _gated(dy, z, row, t, h, p, in_p, place, z_b, z_l, z_h, GATE)
        step = tl.load(delta + row * d_b + t * d_l + h, inside, 0.0).to(tl.float32)
        step, _ = _step(step, b0, low, high, inside, SOFTPLUS, LIMIT)
        total = tl.cumsum(step * a, 0)
        state = state * tl.exp(tl.sum(step * a, 0)) + _dot(tl.trans(dyk * tl.exp(total)[:, None]), Ck, DTYPE)
    if INITIAL:
        tl.store(dinitial + own, state, both)


@triton.jit
def _chunk_inputs(
    dy, x, delta, A, z, bias, k, start, row, t, h, p, inside, in_p, L, H, low, high, x_b, x_l, x_h, d_b, d_l, z_b, z_l, z_h,
    P: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    a = tl.load(A + h)
    b0 = tl.load(bias + h) if BIAS else 0.0
    step = tl.load(delta + row * d_b + t * d_l + h, inside, 0.0).to(tl.float32)
    step, slope = _step(step, b0, low, high, inside, SOFTPLUS, LIMIT)
    place = (start + tl.arange(0, Q))[:, None] * H * P + h * P + p[None, :]
    xk = tl.load(x + row * x_b + t[:, None] * x_l + h * x_h + p[None, :], in_p, 0.0)
    dyk, of_z = _gated(dy, z, row, t, h, p, in_p, place, z_b, z_l, z_h, GATE)
    return a, step, slope, place, xk, dyk, of_z


@triton.jit
def _chunk_x(
    dy, x, delta, A, B, C, D, z, bias, states, dstates, dx, ddelta, dz, partial_A, partial_D, partial_bias,
    chunk_start, chunk_length, L, H, low, high,
    x_b, x_l, x_h, d_b, d_l, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take one chunk and head: gradients of x, delta and z, and shares of those of A, D and the bias."""
    h, k = tl.program_id(0) % H, tl.program_id(0) // H
    start, length = tl.load(chunk_start + k).to(tl.int64), tl.load(chunk_length + k)
    q, p, s = tl.arange(0, Q), tl.arange(0, PB), tl.arange(0, NB)
    of_p, of_s = p < P, s < N
    row = start // L
    t = start - row * L + q
    inside = q < length
    in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
    both = of_p[:, None] & of_s[None, :] & (length > 0)
    group = h // SHARED
    Bk = tl.load(B + row * B_b + t[:, None] * B_l + group * B_g + s[None, :], in_s, 0.0)
    Ck = tl.load(C + row * C_b + t[:, None] * C_l + group * C_g + s[None, :], in_s, 0.0)
    a, step, slope, place, xk, dyk, of_z = _chunk_inputs(
        dy, x, delta, A, z, bias, k, start, row, t, h, p, inside, in_p, L, H, low, high,
        x_b, x_l, x_h, d_b, d_l, z_b, z_l, z_h, P, SOFTPLUS, LIMIT, GATE, BIAS, Q,
    )  # fmt: skip
    total = tl.cumsum(step * a, 0)
    whole = tl.sum(step * a, 0)
    seen_by, to_end = tl.exp(total), tl.exp(whole - total)
    at = (k.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
    dstate = tl.load(dstates + at, both, 0.0)
    state = tl.load(states + at, both, 0.0)
    later = _dot(Bk, tl.trans(dstate), DTYPE) * to_end[:, None]
    seen = _dot(Ck, tl.trans(state), DTYPE) * seen_by[:, None]
    through = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0) * tl.exp(whole)
    weighed = _dot(Ck, tl.trans(Bk), DTYPE)
    weighed = tl.where(q[:, None] >= q[None, :], weighed * tl.exp(total[:, None] - total[None, :]), 0.0)
    xf = xk.to(tl.float32)
    skip = tl.zeros((PB,), tl.float32)
    if SKIP == 1:
        skip += tl.load(D + h)
    if SKIP == 2:
        skip += tl.load(D + h * P + p, of_p, 0.0)
    if GATE:
        ungated = _dot(weighed * step[None, :], xk, DTYPE) + seen + skip[None, :] * xf
        tl.store(dz + place, (of_z * ungated).to(DTYPE), in_p)
    of_x = _dot(tl.trans(weighed), dyk, DTYPE) + later
    tl.store(dx + place, (of_x * step[:, None] + skip[None, :] * dyk).to(DTYPE), in_p)
    # Gradients of step * A: pairs of earlier and later tokens, the state at the start as tokens from here on see it, what
    # earlier tokens add to the state at the end, and the one in the other.
    moved = _dot_of_gated(dyk, xk, GATE, DTYPE) * step[None, :] * weighed
    moved = tl.where(q[:, None] > q[None, :], moved, 0.0)
    passes = tl.sum(moved, 1) - tl.sum(moved, 0) + tl.sum(seen * dyk, 1)
    added = tl.sum(later * xf, 1) * step
    dlog = tl.cumsum(passes, 0, reverse=True) + tl.cumsum(added, 0) - added + through
    dlog = tl.where(inside, dlog, 0.0)
    grad = (tl.sum(of_x * xf, 1) + dlog * a) * slope
    tl.store(ddelta + (start + q) * H + h, grad.to(DTYPE), inside)
    tl.store(partial_A + k * H + h, tl.sum(dlog * step, 0))
    if BIAS:
        tl.store(partial_bias + k * H + h, tl.sum(grad, 0))
    if SKIP:
        tl.store(partial_D + (k.to(tl.int64) * H + h) * P + p, tl.sum(dyk * xf, 0), of_p)


@triton.jit
def _chunk_BC(
    dy, x, delta, A, B, C, z, bias, states, dstates, partial_BC, chunk_start, chunk_length, L, H, slots, low, high,
    x_b, x_l, x_h, d_b, d_l, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    EACH: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take one chunk and EACH heads of a group: their share of the gradients of B and C."""
    some, k = tl.program_id(0) % (H // EACH), tl.program_id(0) // (H // EACH)
    start, length = tl.load(chunk_start + k).to(tl.int64), tl.load(chunk_length + k)
    if length == 0:
        return
    q, p, s = tl.arange(0, Q), tl.arange(0, PB), tl.arange(0, NB)
    of_p, of_s = p < P, s < N
    row = start // L
    t = start - row * L + q
    inside = q < length
    in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
    both = of_p[:, None] & of_s[None, :]
    group = some * EACH // SHARED
    dB = tl.zeros((Q, NB), tl.float32)
    dC = tl.zeros((Q, NB), tl.float32)
    sum_scores = tl.zeros((Q, Q), tl.float32)
    for i in range(EACH):
        h = some * EACH + i
        a, step, _, _, xk, dyk, _ = _chunk_inputs(
            dy, x, delta, A, z, bias, k, start, row, t, h, p, inside, in_p, L, H, low, high,
            x_b, x_l, x_h, d_b, d_l, z_b, z_l, z_h, P, SOFTPLUS, LIMIT, GATE, BIAS, Q,
        )  # fmt: skip
        total = tl.cumsum(step * a, 0)
        whole = tl.sum(step * a, 0)
        at = (k.to(tl.int64) * H + h) * P * N + p[:, None] * N + s[None, :]
        dscores = _dot_of_gated(dyk, xk, GATE, DTYPE) * step[None, :]
        sum_scores += tl.where(q[:, None] >= q[None, :], dscores * tl.exp(total[:, None] - total[None, :]), 0.0)
        dC += _dot(dyk * tl.exp(total)[:, None], tl.load(states + at, both, 0.0), DTYPE)
        dB += _dot(xk.to(tl.float32) * (step * tl.exp(whole - total))[:, None], tl.load(dstates + at, both, 0.0), DTYPE)
    Bk = tl.load(B + row * B_b + t[:, None] * B_l + group * B_g + s[None, :], in_s, 0.0)
    dC += _dot(sum_scores, Bk, DTYPE)
    Ck = tl.load(C + row * C_b + t[:, None] * C_l + group * C_g + s[None, :], in_s, 0.0)
    dB += _dot(tl.trans(sum_scores), Ck, DTYPE)
    groups = H // SHARED
    share = some - group * (SHARED // EACH)
    place = ((share.to(tl.int64) * slots + start + q)[:, None] * groups + group) * 2 * N + s[None, :]
    tl.store(partial_BC + place, dB, in_s)
    tl.store(partial_BC + place + N, dC, in_s)


@triton.jit
def _zero(out, padding, slots, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    hole = tl.load(padding + slot, slot < slots, 0) != 0
    if tl.sum(hole.to(tl.int32), 0) > 0:
        for w in range(0, width, WIDTH):
            column = w + tl.arange(0, WIDTH)
            at = slot.to(tl.int64)[:, None] * width + column[None, :]
            zeros = tl.zeros((ROWS, WIDTH), tl.float32).to(out.dtype.element_ty)
            tl.store(out + at, zeros, hole[:, None] & (column < width)[None, :])


def zero_padding(chunks: Plan, *tensors: Tensor | None) -> None:
    """Zero the padding of contiguous (B, L, ...)."""
    slots = len(chunks.padding)
    for tensor in tensors:
        if tensor is not None:
            _zero[(triton.cdiv(slots, 32),)](tensor, chunks.padding, slots, tensor.numel() // slots, 32, 256)


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float32, torch.float32: tl.float32}
"""Dtypes of products' operands and of saved states, by that of the activations: float16 would miss its tolerance."""


def _settings(a: Any) -> tuple[dict[str, Any], dict[str, int], tuple]:
    """Return constants of all kernels, strides by name, and (L, H, low, high)."""
    (_, length, heads, channels), states = a.x.shape, a.B.shape[3]
    low, high = (0.0, 0.0) if a.delta_limit is None else a.delta_limit
    constants = {
        "P": channels, "N": states, "PB": max(16, triton.next_power_of_2(channels)),
        "NB": max(16, triton.next_power_of_2(states)), "Q": CHUNK, "SHARED": heads // a.B.shape[2],
        "SOFTPLUS": a.delta_softplus, "LIMIT": a.delta_limit is not None, "GATE": a.z is not None,
        "BIAS": a.delta_bias is not None, "DTYPE": TYPES[a.x.dtype],
    }  # fmt: skip
    z = a.x if a.z is None else a.z
    strides = dict(zip(("x_b", "x_l", "x_h"), a.x.stride())) | dict(zip(("d_b", "d_l"), a.delta.stride()))
    for name, tensor in (("B", a.B), ("C", a.C)):
        strides |= dict(zip((f"{name}_b", f"{name}_l", f"{name}_g"), tensor.stride()))
    strides |= dict(zip(("z_b", "z_l", "z_h"), z.stride()))
    return constants, strides, (length, heads, float(low), float(high))


def _dense(a: Any) -> Any:
    """Copy parameters and states that are not contiguous: the kernels index them without strides."""
    return a._replace(**{name: dense(getattr(a, name)) for name in ("A", "D", "delta_bias", "initial_state")})


def forward(a: Any) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack``."""
    a = _dense(a)
    rows, length, heads, _ = a.x.shape
    constants, strides, sizes = _settings(a)
    y, documents = a.x.new_empty(a.x.shape), len(a.layout.starts)
    final = a.A.new_zeros(a.state_shape) if a.return_final_state else None
    if not documents:
        return y.zero_(), final
    chunks = plan(a.layout, a.offsets, rows, length)
    _walk[(heads * documents,)](
        a.x, a.delta, a.A, a.B, a.C, a.D, a.z, a.delta_bias, a.initial_state, y, final, None,
        chunks.documents, *sizes, **strides, **constants,
        SKIP=0 if a.D is None else a.D.dim(), INITIAL=a.initial_state is not None, FINAL=final is not None, OUT=True, **WALK,
    )  # fmt: skip
    zero_padding(chunks, y)
    return y, final


def backward(a: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the nine tensors."""
    a = _dense(a)
    (rows, length, heads, channels), (groups, states) = a.x.shape, a.B.shape[2:]
    constants, strides, sizes = _settings(a)
    chunks, documents = plan(a.layout, a.offsets, rows, length), len(a.layout.starts)
    dy = a.x.new_zeros(a.x.shape) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    count, slots = len(chunks.start), rows * length
    wide = a.x.dtype if a.x.dtype == torch.bfloat16 else torch.float32
    at_starts, at_ends = (a.x.new_empty(count, heads, channels, states, dtype=wide) for _ in range(2))
    place = (chunks.start, chunks.length)
    dinitial = None if a.initial_state is None else torch.zeros_like(a.initial_state)
    initial, skip = a.initial_state is not None, 0 if a.D is None else a.D.dim()
    _walk[(heads * documents,)](
        a.x, a.delta, a.A, a.B, a.C, None, None, a.delta_bias, a.initial_state, None, None, at_starts, chunks.documents, *sizes,
        **strides, **constants, SKIP=0, INITIAL=initial, FINAL=False, OUT=False, **WALK,
    )  # fmt: skip
    _walk_back[(heads * documents,)](
        dy, a.delta, a.A, a.C, a.z, a.delta_bias, dfinal, dinitial, at_ends, chunks.documents, *sizes,
        **{name: of for name, of in strides.items() if name[0] in "dCz"}, **constants, INITIAL=initial,
        FINAL=dfinal is not None, **WALK,
    )  # fmt: skip
    each = next(n for n in range(min(HEADS, heads // groups), 0, -1) if heads // groups % n == 0)
    dx, ddelta = a.x.new_empty(a.x.shape), a.x.new_empty(a.delta.shape)
    dz = None if a.z is None else a.x.new_empty(a.x.shape)
    partial_BC = a.A.new_empty(heads // groups // each, slots, groups, 2, states)
    partial_A, partial_bias = a.A.new_empty(count, heads), a.A.new_empty(count, heads)
    partial_D = None if a.D is None else a.A.new_empty(count, heads, channels)
    _chunk_x[(heads * count,)](
        dy, a.x, a.delta, a.A, a.B, a.C, a.D, a.z, a.delta_bias, at_starts, at_ends, dx, ddelta, dz, partial_A, partial_D,
        partial_bias, *place, *sizes, **strides, **constants, SKIP=skip, **X,
    )  # fmt: skip
    _chunk_BC[(heads // each * count,)](
        dy, a.x, a.delta, a.A, a.B, a.C, a.z, a.delta_bias, at_starts, at_ends, partial_BC, *place, *sizes[:2], slots,
        *sizes[2:], **strides, **constants, EACH=each, **BC,
    )  # fmt: skip
    del at_starts, at_ends
    dB, dC = (part.reshape(a.B.shape).to(a.B.dtype) for part in partial_BC.sum(0).unbind(2))
    zero_padding(chunks, dx, ddelta, dz, dB := dB.contiguous(), dC := dC.contiguous())
    dD = None
    if a.D is not None and partial_D is not None:
        dD = partial_D.sum(0) if a.D.dim() == 2 else partial_D.sum((0, 2))
    dbias = None if a.delta_bias is None else partial_bias.sum(0)
    return dx, ddelta, partial_A.sum(0), dB, dC, dD, dz, dbias, dinitial
