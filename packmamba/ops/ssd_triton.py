# mypy: ignore-errors
"""Mamba-2's scan on a GPU, in Triton, in chunks from document starts.

Forward: a program walks one head of one document, its state in registers. Backward: the same walk writes states at chunks'
starts, its mirror image dx and the gradients of states at chunks' ends; then a program takes a chunk and some heads of a
group, for pairs of tokens and a share of dB and dC. No atomics: sums have one order.
Shapes: K chunks of Q tokens, H heads, P channels, N states.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packmamba.ops import cuda
from packmamba.ops.custom_op import dense

CHUNK = 64
HEADS = 16
"""Maximum heads of a group that one program of the backward sums."""
WALK, BACK, CHUNKS = ({"num_warps": warps, "num_stages": stages} for warps, stages in ((4, 2), (4, 2), (8, 3)))


class Plan(NamedTuple):
    """Hold chunks of documents; K is the maximum, absent ones have no tokens."""

    start: Tensor  # (K,) first slot
    length: Tensor  # (K,)
    # (S, 6), longest first: number, first chunk, chunks, start, end, where its first chunk would start
    documents: Tensor
    padding: Tensor  # (B L,) 1 at padding


def plan(layout: Any, offsets: Tensor | None, rows: int, row_length: int) -> Plan:
    """Make the plan on the device; cached with the layout."""
    schedules = cuda.schedules_of(layout.starts)
    tensors = [layout.starts, layout.ends, *([] if offsets is None else [offsets])]
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
def _step(delta, bias, low, high, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    v = delta + bias
    slope = tl.full(v.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = 1 / (1 + tl.exp(-v))
        v = tl.where(v > 20, v, tl.log(1 + tl.exp(v)))
    if LIMIT:
        slope = tl.where((v >= low) & (v <= high), slope, 0.0)
        v = tl.minimum(tl.maximum(v, low), high)
    return v, slope


@triton.jit
def _of_chunk(delta, bias, A, start, length, L, H, low, high, d_b, d_l,
    Q: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return tokens, heads, masks of both, A, and step sizes and slopes (Q, HEADS), zero outside."""
    q, h = tl.arange(0, Q), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    of_h = h < H
    inside = (q < length)[:, None] & of_h[None, :]
    row = start // L
    t = start - row * L + q
    b0 = tl.load(bias + h, of_h, 0.0)[None, :] if BIAS else 0.0
    step = tl.load(delta + row * d_b + t[:, None] * d_l + h[None, :], inside, 0.0).to(tl.float32)
    step, slope = _step(step, b0, low, high, SOFTPLUS, LIMIT)
    return (q, h, of_h, inside, tl.load(A + h, of_h, 0.0), tl.where(inside, step, 0.0), tl.where(inside, slope, 0.0))


@triton.jit
def _steps(
    delta, A, bias, steps, totals, chunk_start, chunk_length, L, H, slots, low, high, d_b, d_l,
    Q: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write step sizes, and sums of step * A from a chunk's start to each token: (H, slots)."""
    start, length = (tl.load(chunk_start + tl.program_id(0)).to(tl.int64), tl.load(chunk_length + tl.program_id(0)))
    q, h, _, inside, a, step, _ = _of_chunk(
        delta, bias, A, start, length, L, H, low, high, d_b, d_l, Q, HEADS, SOFTPLUS, LIMIT, BIAS
    )
    place = h.to(tl.int64)[None, :] * slots + start + q[:, None]
    tl.store(steps + place, step, inside)
    tl.store(totals + place, tl.cumsum(step * a[None, :], 0), inside)


@triton.jit
def _steps_back(
    delta, A, bias, steps, totals, passes, of_x, added, through, ddelta, partial_A, partial_bias,
    chunk_start, chunk_length, L, H, slots, low, high, d_b, d_l,
    Q: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute ddelta, and a chunk's shares of the gradients of A and the bias."""
    k = tl.program_id(0).to(tl.int64)
    start, length = tl.load(chunk_start + k).to(tl.int64), tl.load(chunk_length + k)
    q, h, of_h, inside, a, step, slope = _of_chunk(
        delta, bias, A, start, length, L, H, low, high, d_b, d_l, Q, HEADS, SOFTPLUS, LIMIT, BIAS
    )
    place = h.to(tl.int64)[None, :] * slots + start + q[:, None]
    before = tl.load(added + place, inside, 0.0) * step
    dlog = tl.cumsum(tl.load(passes + place, inside, 0.0), 0, reverse=True) + tl.cumsum(before, 0) - before
    dlog = tl.where(inside, dlog + tl.load(through + k * H + h, of_h & (length > 0), 0.0)[None, :], 0.0)
    grad = (tl.load(of_x + place, inside, 0.0) + tl.load(added + place, inside, 0.0) + dlog * a[None, :]) * slope
    tl.store(ddelta + (start + q)[:, None] * H + h[None, :], grad.to(ddelta.dtype.element_ty), inside)
    tl.store(partial_A + k * H + h, tl.sum(dlog * step, 0), of_h)
    if BIAS:
        tl.store(partial_bias + k * H + h, tl.sum(grad, 0), of_h)


@triton.jit
def _dot(a, b, DTYPE: tl.constexpr):
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def _dot_of_state(C, state, OUT: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply C by the state; for bfloat16 outputs the state in two parts, to hide its rounding."""
    out = _dot(C, state, DTYPE)
    if OUT and DTYPE == tl.bfloat16:
        out += _dot(C, state - state.to(DTYPE).to(tl.float32), DTYPE)
    return out


@triton.jit
def _dot_of_gated(dy, x, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply dy by x's transpose; gated dy is no bfloat16; sums cancel."""
    if GATE and DTYPE == tl.bfloat16:
        return tl.dot(dy, tl.trans(x.to(tl.float32)), input_precision="tf32")
    return _dot(dy, tl.trans(x), DTYPE)


@triton.jit
def _gated(dy, z, row, t, h, p, mask, place, z_b, z_l, z_h, GATE: tl.constexpr):
    """Return the gradient before the gate, and dz's factor of the ungated output."""
    dyk = tl.load(dy + place, mask, 0.0).to(tl.float32)
    of_z = dyk
    if GATE:
        zk = tl.load(z + row * z_b + t[:, None] * z_l + h * z_h + p[None, :], mask, 0.0).to(tl.float32)
        open_ = 1 / (1 + tl.exp(-zk))
        of_z = dyk * open_ * (1 + zk * (1 - open_))
        dyk = dyk * zk * open_
    return dyk, of_z


@triton.jit
def _document(
    documents, D, H, L,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Return a program's head and document, indices and masks, D, and where its states are."""
    h, own_row = tl.program_id(0) % H, documents + 6 * (tl.program_id(0) // H)
    number, k0, n = tl.load(own_row), tl.load(own_row + 1), tl.load(own_row + 2)
    begin, end, grid = tl.load(own_row + 3), tl.load(own_row + 4), tl.load(own_row + 5)
    q, p, s = tl.arange(0, Q), tl.arange(0, PB), tl.arange(0, NB)
    of_p, of_s = p < P, s < N
    skip = tl.zeros((PB,), tl.float32)
    if SKIP == 1:
        skip += tl.load(D + h)
    if SKIP == 2:
        skip += tl.load(D + h * P + p, of_p, 0.0)
    own = (number.to(tl.int64) * H + h) * P * N + p[None, :] * N + s[:, None]
    both = of_s[:, None] & of_p[None, :]
    return h, k0, n, begin, end, grid, begin.to(tl.int64) // L, q, p, s, of_p, of_s, skip, own, both


@triton.jit
def _decay(steps, totals, at, inside, length, Q: tl.constexpr):
    """Return a chunk's step sizes, zero outside, their sums times A, and the last of these."""
    q = tl.arange(0, Q)
    whole = tl.load(totals + at + length - 1)
    return tl.load(steps + at + q, inside, 0.0), tl.load(totals + at + q, inside, whole), whole


@triton.jit
def _walk(
    x, B, C, D, z, initial, y, final, states, dy, dz, passes, steps, totals,
    documents,
    L, H, slots,
    x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Walk one head of one document; OUT: write y, else states at chunks' starts, passes and dz.

    SHARED: heads of a group.
    """
    h, k0, n, begin, end, grid, row, q, p, s, of_p, of_s, skip, own, both = _document(
        documents, D, H, L, P, N, PB, NB, Q, SKIP
    )
    state = tl.zeros((NB, PB), tl.float32)
    if INITIAL:
        state = tl.load(initial + own, both, 0.0)
    for i in range(n):
        start = tl.maximum(begin, grid + i * Q)
        length = tl.minimum(end, grid + i * Q + Q) - start
        inside = q < length
        t = start - row * L + q
        in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
        xk = tl.load(x + row * x_b + t[:, None] * x_l + h * x_h + p[None, :], in_p, 0.0)
        Bk = tl.load(B + row * B_b + t[:, None] * B_l + h // SHARED * B_g + s[None, :], in_s, 0.0)
        Ck = tl.load(C + row * C_b + t[:, None] * C_l + h // SHARED * C_g + s[None, :], in_s, 0.0)
        at = h.to(tl.int64) * slots + start
        step, total, whole = _decay(steps, totals, at, inside, length, Q)
        xf = xk.to(tl.float32)
        place = (start + q).to(tl.int64)[:, None] * H * P + h * P + p[None, :]
        out = _dot_of_state(Ck, state, OUT, DTYPE) * tl.exp(total)[:, None]
        if not OUT:
            dyk, of_z = _gated(dy, z, row, t, h, p, in_p, place, z_b, z_l, z_h, GATE)
            tl.store(passes + at + q, tl.sum(out * dyk, 1), inside)
            saved_at = ((k0 + i).to(tl.int64) * H + h) * N * P + s[:, None] * P + p[None, :]
            tl.store(states + saved_at, state.to(DTYPE), both)
        if OUT or GATE:
            scores = _dot(Ck, tl.trans(Bk), DTYPE) * step[None, :]
            own_score = tl.sum(tl.where(q[:, None] == q[None, :], scores, 0.0), 1)  # not rounded to x's dtype
            scores = tl.where(q[:, None] > q[None, :], scores * tl.exp(total[:, None] - total[None, :]), 0.0)
            out += _dot(scores, xk, DTYPE) + (own_score[:, None] + skip[None, :]) * xf
            if not OUT:
                tl.store(dz + place, (of_z * out).to(DTYPE), in_p)
            else:
                if GATE:
                    zk = tl.load(z + row * z_b + t[:, None] * z_l + h * z_h + p[None, :], in_p, 0.0).to(tl.float32)
                    out = out * zk / (1 + tl.exp(-zk))
                tl.store(y + place, out.to(DTYPE), in_p)
        scaled = xf * (step * tl.exp(whole - total))[:, None]
        state = state * tl.exp(whole) + _dot(tl.trans(Bk), scaled, DTYPE)
    if FINAL:
        tl.store(final + own, state, both)


@triton.jit
def _walk_back(
    x, dy, B, C, D, z, dfinal, dinitial, states, dstates, dx, added, through, steps, totals,
    documents,
    L, H, slots,
    x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Walk one head of one document backwards; write dx and gradients of states at chunks' ends."""
    h, k0, n, begin, end, grid, row, q, p, s, of_p, of_s, skip, own, both = _document(
        documents, D, H, L, P, N, PB, NB, Q, SKIP
    )
    state = tl.zeros((NB, PB), tl.float32)
    if FINAL:
        state = tl.load(dfinal + own, both, 0.0)
    for i in range(n):
        k = (k0 + n - 1 - i).to(tl.int64)
        start = tl.maximum(begin, grid + (n - 1 - i) * Q)
        length = tl.minimum(end, grid + (n - i) * Q) - start
        inside = q < length
        t = start - row * L + q
        in_p, in_s = inside[:, None] & of_p[None, :], inside[:, None] & of_s[None, :]
        saved_at = (k * H + h) * N * P + s[:, None] * P + p[None, :]
        tl.store(dstates + saved_at, state.to(DTYPE), both)
        at = h.to(tl.int64) * slots + start
        step, total, whole = _decay(steps, totals, at, inside, length, Q)
        Bk = tl.load(B + row * B_b + t[:, None] * B_l + h // SHARED * B_g + s[None, :], in_s, 0.0)
        Ck = tl.load(C + row * C_b + t[:, None] * C_l + h // SHARED * C_g + s[None, :], in_s, 0.0)
        place = (start + q).to(tl.int64)[:, None] * H * P + h * P + p[None, :]
        dyk, _ = _gated(dy, z, row, t, h, p, in_p, place, z_b, z_l, z_h, GATE)
        scores = _dot(Bk, tl.trans(Ck), DTYPE)
        scores = tl.where(q[:, None] <= q[None, :], scores * tl.exp(total[None, :] - total[:, None]), 0.0)
        seen = tl.load(states + saved_at, both, 0.0).to(tl.float32)
        tl.store(through + k * H + h, tl.sum(tl.sum(seen * state, 1), 0) * tl.exp(whole))
        of_x = _dot(Bk, state, DTYPE) * tl.exp(whole - total)[:, None]
        xk = tl.load(x + row * x_b + t[:, None] * x_l + h * x_h + p[None, :], in_p, 0.0)
        tl.store(added + at + q, tl.sum(of_x * xk.to(tl.float32), 1), inside)
        of_x += _dot(scores, dyk, DTYPE)
        tl.store(dx + place, (of_x * step[:, None] + skip[None, :] * dyk).to(DTYPE), in_p)
        state = state * tl.exp(whole) + _dot(tl.trans(Ck), dyk * tl.exp(total)[:, None], DTYPE)
    if INITIAL:
        tl.store(dinitial + own, state, both)


@triton.jit
def _chunk(
    dy, x, B, C, z, states, dstates, passes, of_x, partial_D, partial_BC, steps, totals, chunk_start, chunk_length, L, H, slots,
    x_b, x_l, x_h, B_b, B_l, B_g, C_b, C_l, C_g, z_b, z_l, z_h,
    P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, Q: tl.constexpr, SHARED: tl.constexpr,
    SKIP: tl.constexpr, EACH: tl.constexpr, GATE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Take a chunk and EACH heads of a group: pairs of tokens, and their share of dB and dC."""
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
    both = of_s[:, None] & of_p[None, :]
    group = some * EACH // SHARED
    Bk = tl.load(B + row * B_b + t[:, None] * B_l + group * B_g + s[None, :], in_s, 0.0)
    Ck = tl.load(C + row * C_b + t[:, None] * C_l + group * C_g + s[None, :], in_s, 0.0)
    scores = _dot(Ck, tl.trans(Bk), DTYPE)
    dB = tl.zeros((Q, NB), tl.float32)
    dC = tl.zeros((Q, NB), tl.float32)
    sum_pairs = tl.zeros((Q, Q), tl.float32)
    for i in range(EACH):
        h = some * EACH + i
        at = h.to(tl.int64) * slots + start
        step, total, whole = _decay(steps, totals, at, inside, length, Q)
        place = (start + q)[:, None] * H * P + h * P + p[None, :]
        xk = tl.load(x + row * x_b + t[:, None] * x_l + h * x_h + p[None, :], in_p, 0.0)
        dyk, _ = _gated(dy, z, row, t, h, p, in_p, place, z_b, z_l, z_h, GATE)
        pairs = _dot_of_gated(dyk, xk, GATE, DTYPE)
        if SKIP == 1:
            own_pairs = tl.where(q[:, None] == q[None, :], pairs, 0.0)
            tl.store(partial_D + k.to(tl.int64) * H + h, tl.sum(tl.sum(own_pairs, 1), 0))
        if SKIP == 2:
            tl.store(partial_D + (k.to(tl.int64) * H + h) * P + p, tl.sum(dyk * xk.to(tl.float32), 0), of_p)
        pairs = tl.where(q[:, None] >= q[None, :], pairs * tl.exp(total[:, None] - total[None, :]), 0.0)
        sum_pairs += pairs * step[None, :]
        pairs *= scores
        tl.store(of_x + at + q, tl.sum(pairs, 0), inside)
        pairs = tl.where(q[:, None] > q[None, :], pairs * step[None, :], 0.0)
        moved = tl.load(passes + at + q, inside, 0.0)
        tl.store(passes + at + q, moved + tl.sum(pairs, 1) - tl.sum(pairs, 0), inside)
        saved_at = (k.to(tl.int64) * H + h) * N * P + s[:, None] * P + p[None, :]
        state, dstate = (tl.load(states + saved_at, both, 0.0), tl.load(dstates + saved_at, both, 0.0))
        dC += _dot(dyk * tl.exp(total)[:, None], tl.trans(state), DTYPE)
        dB += _dot(xk.to(tl.float32) * (step * tl.exp(whole - total))[:, None], tl.trans(dstate), DTYPE)
    dC += _dot(sum_pairs, Bk, DTYPE)
    dB += _dot(tl.trans(sum_pairs), Ck, DTYPE)
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
"""Dtypes of products and saved states, by the activations': float16 would miss its tolerance."""


class Problem:
    """Hold what the kernels are launched with."""

    def __init__(self, a: Any) -> None:
        (rows, length, heads, channels), (groups, states) = a.x.shape, a.B.shape[2:]
        self.chunks, self.slots = plan(a.layout, a.offsets, rows, length), rows * length
        low, high = (0.0, 0.0) if a.delta_limit is None else a.delta_limit
        self.place = (self.chunks.start, self.chunks.length, length, heads, self.slots)
        self.sizes = self.place[2:]
        self.limits = (float(low), float(high), a.delta.stride(0), a.delta.stride(1))
        self.of_steps = {
            "Q": CHUNK, "HEADS": 16, "SOFTPLUS": a.delta_softplus, "LIMIT": a.delta_limit is not None,
            "BIAS": a.delta_bias is not None,
        }  # fmt: skip
        self.constants = {
            "P": channels, "N": states, "PB": max(16, triton.next_power_of_2(channels)),
            "NB": max(16, triton.next_power_of_2(states)), "Q": CHUNK, "SHARED": heads // groups,
            "GATE": a.z is not None, "DTYPE": TYPES[a.x.dtype],
        }  # fmt: skip
        self.skip = 0 if a.D is None else a.D.dim()
        z = a.x if a.z is None else a.z
        for name, axes, tensor in (("x", "blh", a.x), ("B", "blg", a.B), ("C", "blg", a.C), ("z", "blh", z)):
            self.constants |= {f"{name}_{axis}": stride for axis, stride in zip(axes, tensor.stride())}
        self.by_chunk = (len(self.chunks.start), triton.cdiv(heads, 16))
        self.by_document = (heads * len(a.layout.starts),)
        self.steps, self.totals = (a.A.new_empty(heads, self.slots) for _ in range(2))
        _steps[self.by_chunk](
            a.delta, a.A, a.delta_bias, self.steps, self.totals, *self.place, *self.limits, **self.of_steps
        )


def _dense(a: Any) -> Any:
    return a._replace(**{name: dense(getattr(a, name)) for name in ("A", "D", "delta_bias", "initial_state")})


def forward(a: Any) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack``."""
    a = _dense(a)
    y, final = (a.x.new_empty(a.x.shape), a.A.new_zeros(a.state_shape) if a.return_final_state else None)
    if not len(a.layout.starts):
        return y.zero_(), final
    of = Problem(a)
    _walk[of.by_document](
        a.x, a.B, a.C, a.D, a.z, a.initial_state, y, final, None, None, None, None, of.steps, of.totals, of.chunks.documents,
        *of.sizes, **of.constants, SKIP=of.skip, INITIAL=a.initial_state is not None, FINAL=final is not None, OUT=True, **WALK,
    )  # fmt: skip
    zero_padding(of.chunks, y)
    return y, final


def backward(a: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    a = _dense(a)
    (groups, states), (heads, channels), of = a.B.shape[2:], a.x.shape[2:], Problem(a)
    dy = a.x.new_zeros(a.x.shape) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    count = len(of.chunks.start)
    wide = a.x.dtype if a.x.dtype == torch.bfloat16 else torch.float32
    at_starts, at_ends = (a.x.new_empty(count, heads, states, channels, dtype=wide) for _ in range(2))
    dx, ddelta = a.x.new_empty(a.x.shape), a.x.new_empty(a.delta.shape)
    dz = None if a.z is None else a.x.new_empty(a.x.shape)
    initial = a.initial_state is not None
    dinitial = torch.zeros_like(a.initial_state) if initial else None
    passes, added, of_x = (torch.empty_like(of.steps) for _ in range(3))
    through, partial_A, partial_bias = (a.A.new_empty(count, heads) for _ in range(3))
    partial_D = None if a.D is None else a.A.new_zeros(count, *a.D.shape)
    _walk[of.by_document](
        a.x, a.B, a.C, a.D, a.z, a.initial_state, None, None, at_starts, dy, dz, passes, of.steps, of.totals,
        of.chunks.documents, *of.sizes, **of.constants, SKIP=of.skip, INITIAL=initial, FINAL=False, OUT=False, **WALK,
    )  # fmt: skip
    _walk_back[of.by_document](
        a.x, dy, a.B, a.C, a.D, a.z, dfinal, dinitial, at_starts, at_ends, dx, added, through, of.steps, of.totals,
        of.chunks.documents, *of.sizes, **of.constants, SKIP=of.skip, INITIAL=initial, FINAL=dfinal is not None, **BACK,
    )  # fmt: skip
    shared = heads // groups
    each = next(n for n in range(min(HEADS, shared), 0, -1) if shared % n == 0)
    partial_BC = a.A.new_empty(shared // each, of.slots, groups, 2, states)
    _chunk[(heads // each * count,)](
        dy, a.x, a.B, a.C, a.z, at_starts, at_ends, passes, of_x, partial_D, partial_BC, of.steps, of.totals,
        *of.place, **of.constants, SKIP=of.skip, EACH=each, **CHUNKS,
    )  # fmt: skip
    del at_starts, at_ends
    _steps_back[of.by_chunk](
        a.delta, a.A, a.delta_bias, of.steps, of.totals, passes, of_x, added, through, ddelta, partial_A, partial_bias,
        *of.place, *of.limits, **of.of_steps,
    )  # fmt: skip
    dB, dC = (part.reshape(a.B.shape).to(a.B.dtype) for part in partial_BC.sum(0).unbind(2))
    zero_padding(of.chunks, dx, ddelta, dz, dB := dB.contiguous(), dC := dC.contiguous())
    dD = None if partial_D is None else partial_D.sum(0)
    dbias = None if a.delta_bias is None else partial_bias.sum(0)
    return dx, ddelta, partial_A.sum(0), dB, dC, dD, dz, dbias, dinitial
