# mypy: ignore-errors
"""Mamba-2's backward on a GPU, in Triton: kernels split so that each one's tiles stay in registers.

Blocks, chunks, segments and letters are those of ``ssd_triton_forward``. For a chunk of one head with the state S before it,
the gradient E of the state after it, steps d, scores ``G[i, j] = C[i] B[j]`` and decays ``a[i, j]`` from token j to token i
(from 0, the chunk's start; to Q, its end)::

    dy x pairs    W[i, j] = (dy[i] x[j]) a[i, j],  j <= i
    dC[i] = sum over heads of   a[i, 0] dy[i] S + sum over j of W[i, j] d[j] B[j]
    dB[j] = sum over heads of   d[j] a[Q, j] x[j] E + sum over i of W[i, j] d[j] C[i]
    dx[j] = d[j] (a[Q, j] B[j] E + sum over i of G[i, j] a[i, j] dy[i]) + D dy[j]
    dd[j] = added[j] + sum over i of W[i, j] G[i, j] + A dlog[j]
    dlog[t] = sums of what decays over step t: passes from t on, d added before t, and <S, E> a[Q, 0]
    added[j] = a[Q, j] x[j] E B[j],   passes[i] = a[i, 0] dy[i] S C[i] + sums of W G d over pairs that end less those that start

| kernel | a program | tile of sums | bound by |
| --- | --- | --- | --- |
| ``walk_states`` | a segment, a head, a direction | (N, 64) | bytes: states in bfloat16, written |
| ``state_parts`` | a block, 32 heads, dC or dB | (64, N) | bytes: states, read |
| ``pair_parts`` | a pair of blocks, 16 heads | (64, 64) | latency |
| ``input_gradients`` | a block, 8 heads | (64, 64) | bytes, latency |
| ``finish`` | a block, 64 states of a group | (64, 64) | bytes of the shares |
| ``step_gradients`` | a chunk, 8 heads | | bytes |

No atomics: a sum over heads has shares, each of consecutive heads, that ``finish`` adds in order. At 16384 tokens, 64 heads of
64 channels, 128 states, bfloat16: about 1.9 GB in 1.0 ms on an H100.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from packmamba.ops.ssd_triton_forward import (
    BLOCK,
    CHUNK,
    describe,
    load_chunk,
    load_decays,
    load_head,
    load_tile,
    multiply,
    step_size,
    store_tile,
    tokens_of,
    wide,
)


class Sums(NamedTuple):
    """How a kernel sums over a group's heads: in shares of consecutive heads."""

    heads: Any  # of a share; the last one may have fewer
    shares: Any  # of a group


@triton.jit
def heads_of(some, sums, shared):
    """Return the group of a share, and its first head and the one after its last; shares of all groups are numbered."""
    group = some // sums.shares
    first = group * shared + some % sums.shares * sums.heads
    return group, first, tl.minimum(first + sums.heads, (group + 1) * shared)


@triton.jit
def state_part(
    along, values, values_stride, values_head, states, others, sums, through, share, decays, sizes, k, chunk, row, heads,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr, INDEX: tl.constexpr,
    GRADIENT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Sum over heads ``scale * values @ state`` of a block; write ``scale * (values . state along)`` by head.

    The state before a chunk, dy and C; GRADIENT: the gradient of the state after it, x and B. others: the other states.
    """
    begin, count, lead, index, other = chunk
    group, first, last = heads
    PARTS: tl.constexpr = (P + T - 1) // T
    i = tl.arange(0, BLOCK)
    late = row + lead >= BLOCK
    base = states + wide(index) * sizes.heads * PARTS * M * T
    width = (sizes.heads - 1) * values_head + P
    value_tiles = describe(values, count, values_stride, width, BLOCK, T, TMA)
    state_tiles = describe(base, sizes.heads * PARTS * M, T, T, M, T, TMA)
    total_sum = tl.zeros((BLOCK, M), tl.float32)
    for head in range(first, last):
        blocks = decays.blocks + 2 * wide(k) * sizes.heads + head
        before, after = tl.load(blocks), tl.load(blocks + sizes.heads)
        whole = tl.where(late, after, before)
        step, total = load_decays(decays, head, sizes.slots, begin, count, row, whole, BLOCK)
        if GRADIENT:
            decay = tl.exp2(whole - total + tl.where(late, 0.0, after))
            scale = decay * step
        else:
            decay = tl.exp2(total + tl.where(late, before, 0.0))
            scale = decay
        product = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            value = load_head(
                value_tiles, values, count, values_stride, head, values_head, row, part, P, T, TMA
            ).to(tl.float32)
            state = load_tile(
                state_tiles, base, sizes.heads * PARTS * M, T, T, (head * PARTS + part) * M, 0, M, T, TMA
            )
            total_sum += multiply(value * scale[:, None], tl.trans(state), DTYPE, PRECISION)
            product += tl.sum(multiply(along, state, DTYPE, PRECISION) * value, 1)
        at = wide(head) * sizes.slots + begin + row + i
        tl.store(sums + at, product * decay, (row + i >= 0) & (row + i < count))
    return total_sum


@triton.jit
def state_parts(
    inputs, states, dstates, passes, added, through, shares, decays, chunks, sizes, sums,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute the parts of dC, dB, passes and added that come of the states around a chunk, and ``through``.

    shares: (2, shares of a group, slots, G, N), of dC, then of dB. INITIAL, FINAL: whether documents' first states before (last after)
    chunks are stored.
    """
    PARTS: tl.constexpr = (P + T - 1) // T
    groups = sizes.heads // sizes.shared
    block, role = tl.program_id(0) % 2, tl.program_id(0) // 2 % 2
    some, k = tl.program_id(0) // 4 % (groups * sums.shares), tl.program_id(0) // 4 // (groups * sums.shares)
    begin, count, lead, before, after = load_chunk(chunks, k)
    row = BLOCK * block - lead
    if (row + BLOCK <= 0) | (row >= count):
        return
    before, after = k if INITIAL else before, k if FINAL else after
    if tl.where(role == 0, before, after) < 0:
        return
    heads = heads_of(some, sums, sizes.shared)
    group, first, last = heads
    rows = row + tl.arange(0, BLOCK)
    n = tl.arange(0, M)
    if role == 0:
        values = tokens_of(inputs.dy, begin, sizes.row_length, 0)
        C = tokens_of(inputs.C, begin, sizes.row_length, group)
        along = load_tile(None, C, count, inputs.C.token, N, row, 0, BLOCK, M, False)
        out = state_part(
            along, values, inputs.dy.token, inputs.dy.head, states, dstates, passes, through, shares, decays, sizes, k,
            (begin, count, lead, before, after), row, heads,
            P, N, T, M, 0, False, DTYPE, PRECISION, TMA,
        )  # fmt: skip
        if (after >= 0) & (row <= 0):
            # <S, E> of each head, by the first block's program.
            p = tl.arange(0, T)
            inside = tl.arange(0, M)[:, None] * T + p[None, :]
            for head in range(first, last):
                inner = tl.zeros((T, T), tl.float32)
                for part in tl.static_range(PARTS):
                    place = (head * PARTS + part) * M * T
                    size = wide(sizes.heads) * PARTS * M * T
                    S = tl.load(states + before * size + place + inside)
                    E = tl.load(dstates + after * size + place + inside)
                    inner += multiply(tl.trans(S), E, DTYPE, PRECISION)
                trace = tl.sum(tl.sum(tl.where(p[:, None] == p[None, :], inner, 0.0), 1), 0)
                blocks = decays.blocks + 2 * wide(k) * sizes.heads + head
                decay = tl.exp2(tl.load(blocks) + tl.load(blocks + sizes.heads))
                tl.store(through + wide(k) * sizes.heads + head, trace * decay)
    else:
        values = tokens_of(inputs.x, begin, sizes.row_length, 0)
        B = tokens_of(inputs.B, begin, sizes.row_length, group)
        along = load_tile(None, B, count, inputs.B.token, N, row, 0, BLOCK, M, False)
        out = state_part(
            along, values, inputs.x.token, inputs.x.head, dstates, states, added, through, shares, decays, sizes, k,
            (begin, count, lead, after, before), row, heads,
            P, N, T, M, 0, True, DTYPE, PRECISION, TMA,
        )  # fmt: skip
    share = wide(role * sums.shares + some % sums.shares) * sizes.slots
    at = ((share + begin + rows)[:, None] * groups + group) * N + n[None, :]
    tl.store(shares + at, out, ((rows >= 0) & (rows < count))[:, None] & (n < N)[None, :])


@triton.jit
def pair_parts(
    inputs, pairs, passes, of_x, crossing, partial_D, decays, chunks, sizes, sums,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    SKIP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Take pairs of tokens of two blocks, over a share of a group's heads: ``pairs`` sums W d; sums of W G d and W G go to slots, by head.

    pairs: (shares, slots, CHUNK), the second dimension later tokens. A block with itself writes passes, of_x and shares of
    dD; both blocks of a chunk write ``crossing``: sums over earlier tokens at the later block's, over later at the earlier's.
    """
    PARTS: tl.constexpr = (P + T - 1) // T
    groups = sizes.heads // sizes.shared
    kind = tl.program_id(0) % 3
    some, k = tl.program_id(0) // 3 % (groups * sums.shares), tl.program_id(0) // 3 // (groups * sums.shares)
    begin, count, lead, _, _ = load_chunk(chunks, k)
    early = (BLOCK if kind == 1 else 0) - lead
    late = (0 if kind == 0 else BLOCK) - lead
    if (early + BLOCK <= 0) | (late >= count):
        return
    at = (begin, count, early, late, kind)
    if kind == 2:
        sum_pairs = pairs_of_blocks(
            inputs, passes, of_x, crossing, partial_D, decays, sizes, sums, k, some, at,
            P, N, T, M, SKIP, True, DTYPE, PRECISION, TMA,
        )  # fmt: skip
    else:
        sum_pairs = pairs_of_blocks(
            inputs, passes, of_x, crossing, partial_D, decays, sizes, sums, k, some, at,
            P, N, T, M, SKIP, False, DTYPE, PRECISION, TMA,
        )  # fmt: skip
    i = tl.arange(0, BLOCK)
    place = (wide(some) * sizes.slots + begin + late + i)[:, None] * CHUNK
    column = (BLOCK if kind == 1 else 0) + i
    tl.store(pairs + place + column[None, :], sum_pairs, ((late + i >= 0) & (late + i < count))[:, None])


@triton.jit
def pairs_of_blocks(
    inputs, passes, of_x, crossing, partial_D, decays, sizes, sums, k, some, at,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    SKIP: tl.constexpr, CROSS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the sum of W d over heads; CROSS: of two blocks."""
    begin, count, early, late, kind = at
    PARTS: tl.constexpr = (P + T - 1) // T
    group, first, last = heads_of(some, sums, sizes.shared)
    i = tl.arange(0, BLOCK)
    B = tokens_of(inputs.B, begin, sizes.row_length, group)
    C = tokens_of(inputs.C, begin, sizes.row_length, group)
    Bk = load_tile(None, B, count, inputs.B.token, N, early, 0, BLOCK, M, False)
    Ck = load_tile(None, C, count, inputs.C.token, N, late, 0, BLOCK, M, False)
    scores = multiply(Ck, tl.trans(Bk), DTYPE, PRECISION)
    diagonal = i[:, None] == i[None, :]
    below = i[:, None] > i[None, :]
    own = tl.sum(tl.where(diagonal, scores, 0.0), 1)
    x = tokens_of(inputs.x, begin, sizes.row_length, 0)
    dy = tokens_of(inputs.dy, begin, sizes.row_length, 0)
    x_width, dy_width = (sizes.heads - 1) * inputs.x.head + P, (sizes.heads - 1) * inputs.dy.head + P
    x_tiles = describe(x, count, inputs.x.token, x_width, BLOCK, T, TMA)
    dy_tiles = describe(dy, count, inputs.dy.token, dy_width, BLOCK, T, TMA)
    sum_pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
    for head in range(first, last):
        blocks = decays.blocks + 2 * wide(k) * sizes.heads + head
        whole = tl.load(blocks + (sizes.heads if kind == 1 else 0))
        step, total = load_decays(decays, head, sizes.slots, begin, count, early, whole, BLOCK)
        slot = wide(head) * sizes.slots + begin
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for part in tl.static_range(PARTS):
            xk = load_head(x_tiles, x, count, inputs.x.token, head, inputs.x.head, early, part, P, T, TMA)
            dyk = load_head(dy_tiles, dy, count, inputs.dy.token, head, inputs.dy.head, late, part, P, T, TMA)
            product += multiply(dyk, tl.trans(xk), DTYPE, PRECISION)
            if SKIP == 2 and not CROSS:
                p = part * T + tl.arange(0, T)
                of_D = tl.sum(dyk.to(tl.float32) * xk.to(tl.float32), 0)
                place = (wide(2 * k + kind) * sizes.heads + head) * P + p
                tl.store(partial_D + place, of_D, p < P)
        if CROSS:
            # Through the middle of the chunk: a product of decays that are at most 1.
            late_whole = tl.load(blocks + sizes.heads)
            _, late_total = load_decays(decays, head, sizes.slots, begin, count, late, late_whole, BLOCK)
            product *= tl.exp2(late_total)[:, None] * tl.exp2(whole - total)[None, :]
            sum_pairs += product * step[None, :]
            product *= scores
            tl.store(crossing + slot + early + i, tl.sum(product, 0), early + i >= 0)
            of_earlier = tl.sum(product * step[None, :], 1)
            tl.store(crossing + slot + late + i, of_earlier, late + i < count)
        else:
            same = tl.sum(tl.where(diagonal, product, 0.0), 1)
            if SKIP == 1:
                tl.store(partial_D + wide(2 * k + kind) * sizes.heads + head, tl.sum(same, 0))
            product = tl.where(below, product * tl.exp2(total[:, None] - total[None, :]), 0.0)
            sum_pairs += (product + tl.where(diagonal, same[:, None], 0.0)) * step[None, :]
            product *= scores
            to_later = tl.sum(product, 0)
            of_earlier = tl.sum(product * step[None, :], 1)
            inside = (early + i >= 0) & (early + i < count)
            tl.store(of_x + slot + early + i, to_later + same * own, inside)
            tl.store(passes + slot + early + i, of_earlier - step * to_later, inside)
    return sum_pairs


@triton.jit
def input_gradients(
    inputs, D, dstates, dx, decays, chunks, sizes, sums,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    SKIP: tl.constexpr, FINAL: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dx of a block, over a share of a group's heads."""
    PARTS: tl.constexpr = (P + T - 1) // T
    groups = sizes.heads // sizes.shared
    block = tl.program_id(0) % 2
    some, k = tl.program_id(0) // 2 % (groups * sums.shares), tl.program_id(0) // 2 // (groups * sums.shares)
    begin, count, lead, _, after = load_chunk(chunks, k)
    row = BLOCK * block - lead
    if (row + BLOCK <= 0) | (row >= count):
        return
    if (block == 0) & (row + BLOCK < count):
        block_inputs(
            inputs, D, dstates, dx, decays, sizes, sums, k, (begin, count, lead, after), row, some,
            P, N, T, M, SKIP, FINAL, True, DTYPE, PRECISION,
        )  # fmt: skip
    else:
        block_inputs(
            inputs, D, dstates, dx, decays, sizes, sums, k, (begin, count, lead, after), row, some,
            P, N, T, M, SKIP, FINAL, False, DTYPE, PRECISION,
        )  # fmt: skip


@triton.jit
def block_inputs(
    inputs, D, dstates, dx, decays, sizes, sums, k, chunk, row, some,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    SKIP: tl.constexpr, FINAL: tl.constexpr, NEXT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``input_gradients``; NEXT: the chunk has a later block."""
    begin, count, lead, after = chunk
    PARTS: tl.constexpr = (P + T - 1) // T
    after = k if FINAL else after
    index = wide(tl.maximum(after, 0))
    group, first, last = heads_of(some, sums, sizes.shared)
    i, p = tl.arange(0, BLOCK), tl.arange(0, T)
    B = tokens_of(inputs.B, begin, sizes.row_length, group)
    C = tokens_of(inputs.C, begin, sizes.row_length, group)
    Bk = load_tile(None, B, count, inputs.B.token, N, row, 0, BLOCK, M, False)
    Ck = load_tile(None, C, count, inputs.C.token, N, row, 0, BLOCK, M, False)
    scores = multiply(Bk, tl.trans(Ck), DTYPE, PRECISION)
    own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1)
    if NEXT:
        Ck = load_tile(None, C, count, inputs.C.token, N, row + BLOCK, 0, BLOCK, M, False)
        next_scores = multiply(Bk, tl.trans(Ck), DTYPE, PRECISION)
    late = row + lead >= BLOCK
    for head in range(first, last):
        blocks = decays.blocks + 2 * wide(k) * sizes.heads + head
        early_whole, late_whole = tl.load(blocks), tl.load(blocks + sizes.heads)
        whole = tl.where(late, late_whole, early_whole)
        step, total = load_decays(decays, head, sizes.slots, begin, count, row, whole, BLOCK)
        to_end = tl.exp2(whole - total)
        weights = tl.where(
            i[:, None] < i[None, :], scores * tl.exp2(total[None, :] - total[:, None]), 0.0
        )
        if NEXT:
            unused, next_total = load_decays(decays, head, sizes.slots, begin, count, row + BLOCK, late_whole, BLOCK)
            next_weights = next_scores * tl.exp2(next_total)[None, :]
        skip = tl.load(D + head) if SKIP == 1 else 0.0
        for part in tl.static_range(PARTS):
            width = P - part * T
            dy = tokens_of(inputs.dy, begin, sizes.row_length, head) + part * T
            state = (index * sizes.heads + head) * PARTS + part
            state = tl.load(dstates + state * M * T + tl.arange(0, M)[:, None] * T + p[None, :])
            out = multiply(Bk, state, DTYPE, PRECISION)
            out = tl.where(after >= 0, out, 0.0)
            if NEXT:
                dyk = load_tile(None, dy, count, inputs.dy.token, width, row + BLOCK, 0, BLOCK, T, False)
                out = out * tl.exp2(late_whole) + multiply(next_weights, dyk, DTYPE, PRECISION)
            out *= to_end[:, None]
            dyk = load_tile(None, dy, count, inputs.dy.token, width, row, 0, BLOCK, T, False)
            out += multiply(weights, dyk, DTYPE, PRECISION)
            if SKIP == 2:
                skip = tl.load(D + head * P + part * T + p, p < width, 0.0)[None, :]
            out = out * step[:, None] + (own * step)[:, None] * dyk.to(tl.float32) + skip * dyk.to(tl.float32)
            written = dx + (begin * sizes.heads + head) * P + part * T
            store_tile(None, written, count, sizes.heads * P, width, row, 0, out, BLOCK, T, False)


@triton.jit
def finish(
    inputs, shares, number, pairs, pair_number, dB, dC, chunks, sizes,
    N: tl.constexpr, M: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dB and dC of a block and M states of a group: shares in order, then pairs by C and B.

    number, pair_number: of a group's shares in ``shares`` and ``pairs``.
    """
    COLUMNS: tl.constexpr = (N + M - 1) // M
    groups = sizes.heads // sizes.shared
    block, column = tl.program_id(0) % 2, tl.program_id(0) // 2 % COLUMNS
    group, k = tl.program_id(0) // 2 // COLUMNS % groups, tl.program_id(0) // 2 // COLUMNS // groups
    begin, count, lead, before, after = load_chunk(chunks, k)
    before, after = k if INITIAL else before, k if FINAL else after
    row = BLOCK * block - lead
    if (row + BLOCK <= 0) | (row >= count):
        return
    i, n = tl.arange(0, BLOCK), column * M + tl.arange(0, M)
    B = tokens_of(inputs.B, begin, sizes.row_length, group)
    C = tokens_of(inputs.C, begin, sizes.row_length, group)
    rows = row + i
    inside = (rows >= 0) & (rows < count)
    mask = inside[:, None] & (n < N)[None, :]
    place = ((begin + rows)[:, None] * groups + group) * N + n[None, :]
    size = wide(sizes.slots) * groups * N
    of_C = tl.zeros((BLOCK, M), tl.float32)
    of_B = tl.zeros((BLOCK, M), tl.float32)
    for share in range(number):
        of_C += tl.load(shares + wide(share) * size + place, mask & (before >= 0), 0.0)
        of_B += tl.load(shares + (number + share) * size + place, mask & (after >= 0), 0.0)
    own = sum_pairs(pairs, group, sizes.slots, begin, count, row, BLOCK * block, pair_number)
    Bk = load_tile(None, B, count, inputs.B.token, N, row, column * M, BLOCK, M, False)
    Ck = load_tile(None, C, count, inputs.C.token, N, row, column * M, BLOCK, M, False)
    of_C += multiply(own, Bk, DTYPE, PRECISION)
    of_B += multiply(tl.trans(own), Ck, DTYPE, PRECISION)
    if block == 1:
        if lead < BLOCK:
            crossing = sum_pairs(pairs, group, sizes.slots, begin, count, row, 0, pair_number)
            Bk = load_tile(None, B, count, inputs.B.token, N, row - BLOCK, column * M, BLOCK, M, False)
            of_C += multiply(crossing, Bk, DTYPE, PRECISION)
    else:
        if row + BLOCK < count:
            crossing = sum_pairs(pairs, group, sizes.slots, begin, count, row + BLOCK, 0, pair_number)
            Ck = load_tile(None, C, count, inputs.C.token, N, row + BLOCK, column * M, BLOCK, M, False)
            of_B += multiply(tl.trans(crossing), Ck, DTYPE, PRECISION)
    tl.store(dC + place, of_C.to(dC.dtype.element_ty), mask)
    tl.store(dB + place, of_B.to(dB.dtype.element_ty), mask)


@triton.jit
def sum_pairs(pairs, group, slots, begin, count, row, column, number):
    """Sum the shares of ``pair_parts`` of a group, of later tokens from a row and earlier ones from a column."""
    i = tl.arange(0, BLOCK)
    inside = ((row + i >= 0) & (row + i < count))[:, None]
    out = tl.zeros((BLOCK, BLOCK), tl.float32)
    for share in range(number):
        place = wide(group * number + share) * slots + begin + row + i
        out += tl.load(pairs + place[:, None] * CHUNK + column + i[None, :], inside, 0.0)
    return out


@triton.jit
def step_gradients(
    delta, A, bias, parts, through, ddelta, partial, decays, chunks, sizes, low, high, row_stride, token_stride,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Compute ddelta of a chunk and HEADS heads, and its shares of the gradients of A and the bias: partial (2, K, H).

    parts: passes and added of states, passes and of_x of pairs, crossing; each (H, slots).
    """
    k = tl.program_id(0)
    begin, count, lead, before, after = load_chunk(chunks, k)
    before, after = k if INITIAL else before, k if FINAL else after
    q, head = tl.arange(0, CHUNK), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rows, is_head = q - lead, head < sizes.heads
    inside = ((rows >= 0) & (rows < count))[:, None] & is_head[None, :]
    rate, offset = tl.load(A + head, is_head, 0.0), tl.zeros((HEADS,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + head, is_head, 0.0)
    row = begin // sizes.row_length
    base = delta + row * row_stride + (begin - row * sizes.row_length) * token_stride
    value = tl.load(base + rows[:, None] * token_stride + head[None, :], inside, 0.0)
    size, slope = step_size(value.to(tl.float32), offset[None, :], low, high, SOFTPLUS, LIMIT)
    size = tl.where(inside, size, 0.0)
    at = wide(head)[None, :] * sizes.slots + begin + rows[:, None]
    state_passes, state_added, pair_passes, of_x, crossing = parts
    passes = tl.load(pair_passes + at, inside, 0.0)
    passes += tl.load(state_passes + at, inside & (before >= 0), 0.0)
    added = tl.load(state_added + at, inside & (after >= 0), 0.0)
    direct = added + tl.load(of_x + at, inside, 0.0)
    # Pairs across the middle, where the chunk has both blocks.
    late = (q >= BLOCK)[:, None]
    across = tl.load(crossing + at, inside & (lead < BLOCK) & (lead + count > BLOCK), 0.0)
    passes += tl.where(late, across, -size * across)
    direct += tl.where(late, 0.0, across)
    added *= size
    dlog = tl.cumsum(passes, 0, reverse=True) + tl.cumsum(added, 0) - added
    around = is_head & (count > 0) & (before >= 0) & (after >= 0)
    dlog += tl.load(through + wide(k) * sizes.heads + head, around, 0.0)[None, :]
    dlog = tl.where(inside, dlog, 0.0)
    gradient = (direct + dlog * rate[None, :]) * slope
    gradient = tl.where(inside, gradient, 0.0)
    place = (begin + rows)[:, None] * sizes.heads + head[None, :]
    tl.store(ddelta + place, gradient.to(ddelta.dtype.element_ty), inside)
    share = partial + wide(k) * sizes.heads + head
    tl.store(share, tl.sum(dlog * size, 0), is_head)
    if bias is not None:
        chunks_bound = wide(tl.num_programs(0))
        tl.store(share + chunks_bound * sizes.heads, tl.sum(gradient, 0), is_head)
