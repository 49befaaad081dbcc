# mypy: ignore-errors
"""Mamba-2's backward on a GPU, in Triton: kernels split so that each one's tiles stay in registers.

Blocks, chunks and segments are those of ``ssd_triton_plan``, letters those of
``ssd_triton_forward``. For a chunk of one head with the state S before it, the gradient E of the
state after it, steps d, scores ``G[i, j] = C[i] B[j]`` and decays ``a[i, j]`` from token j to token
i (from 0, the chunk's start; to Q, its end)::

    dy x pairs    W[i, j] = (dy[i] x[j]) a[i, j],  j <= i
    dC[i] = sum over heads of   a[i, 0] dy[i] S + sum over j of W[i, j] d[j] B[j]
    dB[j] = sum over heads of   d[j] a[Q, j] x[j] E + sum over i of W[i, j] d[j] C[i]
    dx[j] = d[j] (a[Q, j] B[j] E + sum over i of G[i, j] a[i, j] dy[i]) + D dy[j]
    dd[j] = added[j] + sum over i of W[i, j] G[i, j] + A dlog[j]
    dlog[t] = sums of what decays over step t:
              passes from t on, d added before t, and <S, E> a[Q, 0]
    added[j] = a[Q, j] x[j] E B[j]
    passes[i] = a[i, 0] dy[i] S C[i] + sums of W G d over pairs that end less those that start

| kernel | a program | tile of sums | bound by |
| --- | --- | --- | --- |
| ``walk_states`` | a segment, a head, a direction | (N, 64) | bytes: states in bfloat16, written |
| ``state_parts`` | a block, 32 heads, dC or dB | (64, N) | bytes: states, read |
| ``pair_parts`` | a pair of blocks, 16 heads | (64, 64) | latency |
| ``input_gradients`` | a block, 8 heads | (64, 64) | bytes, latency |
| ``finish`` | a block, 64 states of a group, dC or dB | (64, 64) | bytes of the shares |
| ``step_gradients`` | a chunk, 8 heads | | bytes |

No atomics: a sum over heads has shares, each of consecutive heads, that ``finish`` adds in order;
where a group has one share, ``state_parts`` finishes it.
At 16384 tokens, 64 heads of 64 channels, 128 states, bfloat16: about 1.9 GB in 1.0 ms on an H100.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from packmamba.ops.ssd_triton_forward import (
    load,
    load_decays,
    load_skip,
    load_steps,
    load_wholes,
    multiply,
    store,
    tokens_of,
    view,
    view_group,
    view_part,
    wide,
)
from packmamba.ops.ssd_triton_plan import BLOCK, CHUNK, load_chunk


class Sums(NamedTuple):
    """Split a sum over a group's heads into shares of consecutive heads."""

    heads: Any  # of a share; the last one may have fewer
    shares: Any  # of a group


class ByRow(NamedTuple):
    """Hold what kernels find of each row of chunks, by head: (H, K * CHUNK)."""

    state_passes: Any
    added: Any
    pair_passes: Any
    of_x: Any
    crossing: Any


@triton.jit
def gate_gradients(inputs, dz, ungated, padding, sizes, slots, P: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr):
    """Compute the gradients of z and of the output before the gate, of ROWS slots of a head.

    dz holds this output before.
    """
    head = tl.program_id(1)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.arange(0, T)
    # Padding was never written: it is masked here and zeroed later.
    token = tl.load(padding + slot, slot < slots, 1) == 0
    inside = token[:, None] & (p < P)[None, :]
    row = slot // sizes.row_length
    row_place = row.to(tl.int64) * inputs.z.row + (slot - row * sizes.row_length) * wide(inputs.z.token)
    z = inputs.z.pointer + wide(head) * inputs.z.head + row_place[:, None] + p[None, :]
    z = tl.load(z, inside, 0.0).to(tl.float32)
    place = (slot * wide(sizes.heads) + head)[:, None] * P + p[None, :]
    dy = tl.load(inputs.dy.pointer + place, inside, 0.0).to(tl.float32)
    out = tl.load(dz + place, inside, 0.0).to(tl.float32)
    # silu(z) = z g with g = sigmoid(z); its derivative is g (1 + z (1 - g)).
    gate = 1 / (1 + tl.exp(-z))
    tl.store(dz + place, (dy * out * gate * (1 + z * (1 - gate))).to(dz.dtype.element_ty), inside)
    tl.store(ungated + place, (dy * z * gate).to(ungated.dtype.element_ty), inside)


@triton.jit
def heads_of(some, sums, shared):
    """Return the group of a share, and its first head and the one after its last.

    Shares of all groups are numbered.
    """
    group = some // sums.shares
    first = group * shared + some % sums.shares * sums.heads
    return group, first, tl.minimum(first + sums.heads, (group + 1) * shared)


@triton.jit
def load_group(rows, begin, count, group, row, sizes, tile: tl.constexpr):
    """Load (BLOCK, M) of a group's B or C."""
    return load(view_group(rows, begin, count, group, sizes, BLOCK, tile, False), row, 0, BLOCK, tile.M, False)


@triton.jit
def view_heads(rows, begin, count, sizes, tile: tl.constexpr):
    """View all heads' channels of a chunk; ``load_head`` loads from it."""
    # Heads are columns of one view, so that a loop over heads needs one descriptor.
    base = tokens_of(rows, begin, sizes.row_length, 0)
    return view(base, count, rows.token, (sizes.heads - 1) * rows.head + tile.P, BLOCK, tile.T, tile.described)


@triton.jit
def load_head(tiles, rows, head, part, row, tile: tl.constexpr):
    """Load (BLOCK, T), a part of a head's channels."""
    descriptor, base, count, stride, _ = tiles
    if tile.described:
        return descriptor.load([row, head * rows.head + part * tile.T])
    else:
        own = view(base + wide(head) * rows.head, count, stride, tile.P, BLOCK, tile.T, False)
        return load(own, row, part * tile.T, BLOCK, tile.T, False)


@triton.jit
def state_part(
    along, rows, states, sums, decays, sizes, begin, count, k, block, first, last,
    tile: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Sum ``scale * values @ state`` over heads; write ``decay * (values . state along)``.

    The state before a chunk, dy and C; GRADIENT: the gradient of the state after it, x and B.
    """
    row = BLOCK * block
    values = view_heads(rows, begin, count, sizes, tile)
    height = sizes.heads * tile.parts * tile.M
    state_tiles = view(states, height, tile.T, tile.T, tile.M, tile.T, tile.described)
    total_sum = tl.zeros((BLOCK, tile.M), tl.float32)
    for head in range(first, last):
        # Decay to the chunk's end (for E), or from its start (for S). Logs start again in the
        # second block, hence the first block's sum ``early``.
        early, late = load_wholes(decays, head, sizes, k)
        step, total = load_decays(decays, head, sizes, k, row, BLOCK)
        if GRADIENT:
            decay = tl.exp2(tl.where(block == 1, late, early + late) - total)
            scale = decay * step
        else:
            decay = tl.exp2(tl.where(block == 1, early, 0.0) + total)
            scale = decay
        product = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(tile.parts):
            value = load_head(values, rows, head, part, row, tile).to(tl.float32)
            state = load(state_tiles, (head * tile.parts + part) * tile.M, 0, tile.M, tile.T, tile.described)
            # dC[i] += a[i, 0] dy[i] S, or dB[j] += d[j] a[Q, j] x[j] E.
            total_sum += multiply(value * scale[:, None], tl.trans(state), tile)
            # passes: a[i, 0] dy[i] S C[i]; or added: a[Q, j] x[j] E B[j]; over all channels.
            product += tl.sum(multiply(along, state, tile) * value, 1)
        at = wide(head) * sizes.rows + wide(k) * CHUNK + row + tl.arange(0, BLOCK)
        tl.store(sums + at, product * decay)
    return total_sum


@triton.jit
def state_parts(
    inputs, states, dstates, found, through, shares, pairs, pair_number, dC, dB, decays, chunks, sizes, sums,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute what states around a chunk give to dC, dB, passes and added, and ``through``.

    shares: (2, shares of a group, G, K * CHUNK, N), of dC, then of dB, for ``finish``; None: a
    group has one share, and dC and dB are finished here.
    """
    groups = sizes.heads // sizes.shared
    # Programs: block, role (dC, dB), share of a group's heads, chunk.
    block, role = tl.program_id(0) % 2, tl.program_id(0) // 2 % 2
    some, k = tl.program_id(0) // 4 % (groups * sums.shares), tl.program_id(0) // 4 // (groups * sums.shares)
    begin, count, before, after = load_chunk(chunks, k, sizes.before, sizes.after)
    row = BLOCK * block
    has_state = tl.where(role == 0, before, after) >= 0
    # No such block, or no state there: readers skip what is not written.
    if (row >= count) | ((shares is not None) & (not has_state)):
        return
    group, first, last = heads_of(some, sums, sizes.shared)
    size = wide(sizes.heads) * tile.parts * tile.M * tile.T
    out = tl.zeros((BLOCK, tile.M), tl.float32)
    if has_state:
        if role == 0:
            along = load_group(inputs.C, begin, count, group, row, sizes, tile)
            out = state_part(
                along, inputs.dy, states + before * size, found.state_passes, decays, sizes, begin, count, k, block, first, last,
                tile, False,
            )  # fmt: skip
            if (after >= 0) & (block == 0):
                # <S, E> of each head: the trace of a product, by the first block's program.
                p = tl.arange(0, tile.T)
                inside = tl.arange(0, tile.M)[:, None] * tile.T + p[None, :]
                for head in range(first, last):
                    inner = tl.zeros((tile.T, tile.T), tl.float32)
                    for part in tl.static_range(tile.parts):
                        place = (head * tile.parts + part) * tile.M * tile.T
                        # (M, T) each: S before the chunk, E after it.
                        S = tl.load(states + before * size + place + inside)
                        E = tl.load(dstates + after * size + place + inside)
                        inner += multiply(tl.trans(S), E, tile)
                    trace = tl.sum(tl.sum(tl.where(p[:, None] == p[None, :], inner, 0.0), 1), 0)
                    early, late = load_wholes(decays, head, sizes, k)
                    tl.store(through + wide(k) * sizes.heads + head, trace * tl.exp2(early + late))
        else:
            along = load_group(inputs.B, begin, count, group, row, sizes, tile)
            out = state_part(
                along, inputs.x, dstates + after * size, found.added, decays, sizes, begin, count, k, block, first, last,
                tile, True,
            )  # fmt: skip
    if shares is None:
        finish_rows(
            out, inputs, pairs, pair_number, dC, dB, sizes, begin, count, k, group, role, block, 0, tile, tile.M
        )  # fmt: skip
    else:
        n = tl.arange(0, tile.M)
        # Shares of dC come first, then those of dB.
        share = (role * sums.shares + some % sums.shares) * groups + group
        tl.store(shares + share_places(share, sizes, k, row, n, tile.N), out, (n < tile.N)[None, :])


@triton.jit
def share_places(share, sizes, k, row, n, N: tl.constexpr):
    """Return where the rows of a block's share of dC or dB lie: (shares, K * CHUNK, N)."""
    rows = wide(k) * CHUNK + row + tl.arange(0, BLOCK)
    return (wide(share) * sizes.rows + rows)[:, None] * N + n[None, :]


@triton.jit
def pair_places(share, sizes, k, kind):
    """Return where the pairs of tokens of two blocks lie: (shares, K, 3, BLOCK, BLOCK)."""
    i = tl.arange(0, BLOCK)
    pairs = (wide(share) * (sizes.rows // CHUNK) + k) * 3 + kind
    return pairs * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]


@triton.jit
def pair_parts(inputs, pairs, found, partial_D, decays, chunks, sizes, sums, tile: tl.constexpr):
    """Take pairs of tokens of two blocks, over a share of a group's heads.

    ``pairs`` sums W d; sums of W G d and W G go to rows.

    pairs: see ``pair_places``; kinds are the first block with itself, the second with itself, later
    tokens of the second with earlier ones of the first. A block with itself writes passes, of_x and
    shares of dD; both blocks of a chunk write ``crossing``: sums over earlier tokens at the later
    block's, over later at the earlier's.
    """
    groups = sizes.heads // sizes.shared
    # Kinds 0 and 1: a block with itself; 2: the second block's tokens with the first's.
    kind = tl.program_id(0) % 3
    some, k = tl.program_id(0) // 3 % (groups * sums.shares), tl.program_id(0) // 3 // (groups * sums.shares)
    begin, count, _, _ = load_chunk(chunks, k)
    if (0 if kind == 0 else BLOCK) >= count:
        return
    if kind == 2:
        sum_pairs = pairs_of_blocks(
            inputs, found, partial_D, decays, sizes, sums, begin, count, k, some, kind, tile, True
        )  # fmt: skip
    else:
        sum_pairs = pairs_of_blocks(
            inputs, found, partial_D, decays, sizes, sums, begin, count, k, some, kind, tile, False
        )  # fmt: skip
    tl.store(pairs + pair_places(some, sizes, k, kind), sum_pairs)


@triton.jit
def pairs_of_blocks(
    inputs, found, partial_D, decays, sizes, sums, begin, count, k, some, kind, tile: tl.constexpr, CROSS: tl.constexpr
):  # fmt: skip
    """Return the sum of W d over heads; CROSS: of two blocks."""
    group, first, last = heads_of(some, sums, sizes.shared)
    # Rows where the earlier token j (of x, B) and the later token i (of dy, C) begin.
    early = BLOCK if kind == 1 else 0
    late = BLOCK if CROSS else early
    i = tl.arange(0, BLOCK)
    Bk = load_group(inputs.B, begin, count, group, early, sizes, tile)
    Ck = load_group(inputs.C, begin, count, group, late, sizes, tile)
    # G[i, j] = C[i] B[j], the same for all heads of the group.
    scores = multiply(Ck, tl.trans(Bk), tile)
    diagonal = i[:, None] == i[None, :]
    below = i[:, None] > i[None, :]
    # The diagonal apart: there the decay is 1, and a token meets itself.
    own = tl.sum(tl.where(diagonal, scores, 0.0), 1)
    x_tiles = view_heads(inputs.x, begin, count, sizes, tile)
    dy_tiles = view_heads(inputs.dy, begin, count, sizes, tile)
    sum_pairs = tl.zeros((BLOCK, BLOCK), tl.float32)
    for head in range(first, last):
        step, total = load_decays(decays, head, sizes, k, early, BLOCK)
        at = wide(head) * sizes.rows + wide(k) * CHUNK + i
        # Kinds 0 and 1 write dD, one place a block.
        share = wide(2 * k + kind) * sizes.heads + head
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for part in tl.static_range(tile.parts):
            xk = load_head(x_tiles, inputs.x, head, part, early, tile)
            dyk = load_head(dy_tiles, inputs.dy, head, part, late, tile)
            # dy[i] x[j], over all parts of the head's channels.
            product += multiply(dyk, tl.trans(xk), tile)
            if tile.skip == 2 and not CROSS:
                p = part * tile.T + tl.arange(0, tile.T)
                of_D = tl.sum(dyk.to(tl.float32) * xk.to(tl.float32), 0)
                tl.store(partial_D + share * tile.P + p, of_D, p < tile.P)
        if CROSS:
            # Through the middle of the chunk: a product of decays that are at most 1.
            whole, _ = load_wholes(decays, head, sizes, k)
            # W[i, j] = dy[i] x[j] a[i, j], whose sum with d[j] gives dB and dC.
            _, late_total = load_decays(decays, head, sizes, k, late, BLOCK)
            product *= tl.exp2(late_total)[:, None] * tl.exp2(whole - total)[None, :]
            sum_pairs += product * step[None, :]
            # W G: summed over later tokens for d[j], over earlier ones, with d, for decays.
            product *= scores
            tl.store(found.crossing + at + early, tl.sum(product, 0))
            tl.store(found.crossing + at + late, tl.sum(product * step[None, :], 1))
        else:
            # W on and below the diagonal; on it the decay is 1.
            same = tl.sum(tl.where(diagonal, product, 0.0), 1)
            if tile.skip == 1:
                tl.store(partial_D + share, tl.sum(same, 0))
            product = tl.where(below, product * tl.exp2(total[:, None] - total[None, :]), 0.0)
            sum_pairs += (product + tl.where(diagonal, same[:, None], 0.0)) * step[None, :]
            product *= scores
            # Sums over i > j (d[j] has them), and over j < i (pairs that end at i).
            to_later = tl.sum(product, 0)
            of_earlier = tl.sum(product * step[None, :], 1)
            tl.store(found.of_x + at + early, to_later + same * own)
            # A pair decays over the steps between its tokens:
            # it counts where it ends, not where it starts.
            tl.store(found.pair_passes + at + early, of_earlier - step * to_later)
    return sum_pairs


@triton.jit
def input_gradients(inputs, D, dstates, dx, decays, chunks, sizes, sums, tile: tl.constexpr):
    """Compute dx of a block, over a share of a group's heads."""
    groups = sizes.heads // sizes.shared
    block = tl.program_id(0) % 2
    some, k = tl.program_id(0) // 2 % (groups * sums.shares), tl.program_id(0) // 2 // (groups * sums.shares)
    begin, count, _, after = load_chunk(chunks, k, sizes.before, sizes.after)
    if BLOCK * block >= count:
        return
    # NEXT is compiled in: only a first block that has a second one after it reads that one.
    if (block == 0) & (BLOCK < count):
        block_inputs(
            inputs, D, dstates, dx, decays, sizes, sums, begin, count, after, k, 0, some, tile, True
        )  # fmt: skip
    else:
        block_inputs(
            inputs, D, dstates, dx, decays, sizes, sums, begin, count, after, k, block, some, tile, False
        )  # fmt: skip


@triton.jit
def block_inputs(
    inputs, D, dstates, dx, decays, sizes, sums, begin, count, after, k, block, some, tile: tl.constexpr, NEXT: tl.constexpr
):  # fmt: skip
    """Compute ``input_gradients``; NEXT: the chunk has a later block."""
    row = BLOCK * block
    # Without a state after the chunk any is loaded, and dropped by ``tl.where`` below.
    index = wide(tl.maximum(after, 0))
    group, first, last = heads_of(some, sums, sizes.shared)
    i, p = tl.arange(0, BLOCK), tl.arange(0, tile.T)
    Bk = load_group(inputs.B, begin, count, group, row, sizes, tile)
    Ck = load_group(inputs.C, begin, count, group, row, sizes, tile)
    # G transposed: rows are tokens j of this block, columns tokens i.
    scores = multiply(Bk, tl.trans(Ck), tile)
    own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1)
    # Tokens of the next block, which all come after those of this one.
    if NEXT:
        Ck = load_group(inputs.C, begin, count, group, BLOCK, sizes, tile)
        next_scores = multiply(Bk, tl.trans(Ck), tile)
    for head in range(first, last):
        early, late = load_wholes(decays, head, sizes, k)
        step, total = load_decays(decays, head, sizes, k, row, BLOCK)
        # Decay from each token to the end of its block.
        to_end = tl.exp2(tl.where(block == 1, late, early) - total)
        # G[i, j] a[i, j] for i > j.
        weights = tl.where(i[:, None] < i[None, :], scores * tl.exp2(total[None, :] - total[:, None]), 0.0)
        if NEXT:
            _, next_total = load_decays(decays, head, sizes, k, BLOCK, BLOCK)
            next_weights = next_scores * tl.exp2(next_total)[None, :]
        for part in tl.static_range(tile.parts):
            dy_tiles = view_part(inputs.dy, begin, count, head, part, sizes, BLOCK, tile, False)
            state = dstates + ((index * sizes.heads + head) * tile.parts + part) * tile.M * tile.T
            state = tl.load(state + tl.arange(0, tile.M)[:, None] * tile.T + p[None, :])
            # B[j] E; then both it and the next block's sum decay through what lies between.
            out = tl.where(after >= 0, multiply(Bk, state, tile), 0.0)
            if NEXT:
                dyk = load(dy_tiles, BLOCK, 0, BLOCK, tile.T, False)
                out = out * tl.exp2(late) + multiply(next_weights, dyk, tile)
            out *= to_end[:, None]
            # Tokens of this block, by their own decays.
            dyk = load(dy_tiles, row, 0, BLOCK, tile.T, False)
            out += multiply(weights, dyk, tile)
            skip = load_skip(D, head, part, tile)[None, :]
            # All of it by d[j]; the token itself, and D.
            out = out * step[:, None] + ((own * step)[:, None] + skip) * dyk.to(tl.float32)
            written = dx.pointer + begin * dx.token + head * dx.head + part * tile.T
            dx_tiles = view(written, count, dx.token, tile.P - part * tile.T, BLOCK, tile.T, False)
            store(dx_tiles, row, 0, out, BLOCK, tile.T, False)


@triton.jit
def finish(
    inputs, shares, number, pairs, pair_number, dC, dB, chunks, sizes, tile: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute dC or dB of a block and COLUMNS states of a group: shares in order, and pairs.

    number, pair_number: of a group's shares in ``shares`` and ``pairs``.
    """
    groups = sizes.heads // sizes.shared
    tiles = tl.cdiv(tile.N, COLUMNS)
    # Programs: block, role (dC, dB), columns of states, group, chunk.
    block, role = tl.program_id(0) % 2, tl.program_id(0) // 2 % 2
    column = tl.program_id(0) // 4 % tiles * COLUMNS
    group, k = tl.program_id(0) // 4 // tiles % groups, tl.program_id(0) // 4 // tiles // groups
    begin, count, before, after = load_chunk(chunks, k, sizes.before, sizes.after)
    row = BLOCK * block
    if row >= count:
        return
    n = column + tl.arange(0, COLUMNS)
    has_state = tl.where(role == 0, before, after) >= 0
    out = tl.zeros((BLOCK, COLUMNS), tl.float32)
    # What states gave: shares of heads in a fixed
    # order, so that sums have the same bits each time.
    for share in range(number):
        place = share_places((role * number + share) * groups + group, sizes, k, row, n, tile.N)
        out += tl.load(shares + place, (n < tile.N)[None, :] & has_state, 0.0)
    finish_rows(
        out, inputs, pairs, pair_number, dC, dB, sizes, begin, count, k, group, role, block, column, tile, COLUMNS
    )  # fmt: skip


@triton.jit
def finish_rows(
    out, inputs, pairs, pair_number, dC, dB, sizes, begin, count, k, group, role, block, column,
    tile: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add what pairs of tokens gave to ``out``, dC or dB of a block, and store it.

    dC = (W d) B, dB = (W d).T C, within the block; across the middle: dC of the second block, dB of
    the first.
    """
    row = BLOCK * block
    own = sum_pairs(pairs, group, sizes, k, block, pair_number)
    if role == 0:
        B_tiles = view_group(inputs.B, begin, count, group, sizes, BLOCK, tile, False)
        out += multiply(own, load(B_tiles, row, column, BLOCK, COLUMNS, False), tile)
        if block == 1:
            crossing = sum_pairs(pairs, group, sizes, k, 2, pair_number)
            out += multiply(crossing, load(B_tiles, 0, column, BLOCK, COLUMNS, False), tile)
        rows = dC.pointer + begin * dC.token + group * dC.head
        written = view(rows, count, dC.token, tile.N, BLOCK, COLUMNS, False)
    else:
        C_tiles = view_group(inputs.C, begin, count, group, sizes, BLOCK, tile, False)
        out += multiply(tl.trans(own), load(C_tiles, row, column, BLOCK, COLUMNS, False), tile)
        if (block == 0) & (count > BLOCK):
            crossing = sum_pairs(pairs, group, sizes, k, 2, pair_number)
            out += multiply(tl.trans(crossing), load(C_tiles, BLOCK, column, BLOCK, COLUMNS, False), tile)
        rows = dB.pointer + begin * dB.token + group * dB.head
        written = view(rows, count, dB.token, tile.N, BLOCK, COLUMNS, False)
    store(written, row, column, out, BLOCK, COLUMNS, False)


@triton.jit
def sum_pairs(pairs, group, sizes, k, kind, number):
    """Sum the shares of ``pair_parts`` of a group, in order."""
    out = tl.zeros((BLOCK, BLOCK), tl.float32)
    for share in range(number):
        out += tl.load(pairs + pair_places(group * number + share, sizes, k, kind))
    return out


@triton.jit
def step_gradients(
    steps, A, found, through, ddelta, partial, decays, chunks, sizes,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute ddelta of a chunk and HEADS heads, and its shares of the gradients of A and the bias.

    partial: (2, K, H), of those shares.
    """
    k = tl.program_id(0)
    begin, count, before, after = load_chunk(chunks, k, sizes.before, sizes.after)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head, row = head < sizes.heads, tl.arange(0, CHUNK)
    size, slope, inside = load_steps(steps, begin, count, 0, head, sizes, CHUNK, SOFTPLUS, LIMIT)
    at = wide(head)[None, :] * sizes.rows + (wide(k) * CHUNK + row)[:, None]
    # Everything that decays over step t begins before it and ends at t or later.
    passes = tl.load(found.pair_passes + at, inside, 0.0)
    passes += tl.load(found.state_passes + at, inside & (before >= 0), 0.0)
    added = tl.load(found.added + at, inside & (after >= 0), 0.0)
    # direct: what d[t] gives outside of decays.
    direct = added + tl.load(found.of_x + at, inside, 0.0)
    # Pairs across the middle, where the chunk has both blocks.
    late = (row >= BLOCK)[:, None]
    # Later tokens hold sums over earlier ones, which
    # end there; earlier ones sums that start there.
    across = tl.load(found.crossing + at, inside & (count > BLOCK), 0.0)
    passes += tl.where(late, across, -size * across)
    direct += tl.where(late, 0.0, across)
    # dlog[t]: passes from t on, d added before t (from the state's gradient), and <S, E>.
    added *= size
    dlog = tl.cumsum(passes, 0, reverse=True) + tl.cumsum(added, 0) - added
    around = is_head & (before >= 0) & (after >= 0)
    dlog += tl.load(through + wide(k) * sizes.heads + head, around, 0.0)[None, :]
    dlog = tl.where(inside, dlog, 0.0)
    rate = tl.load(A + head, is_head, 0.0)
    # d[t] scales a decay's logarithm by A; softplus and the limit have their slope.
    gradient = tl.where(inside, (direct + dlog * rate[None, :]) * slope, 0.0)
    place = (begin + row)[:, None] * ddelta.token + head[None, :]
    tl.store(ddelta.pointer + place, gradient.to(ddelta.pointer.dtype.element_ty), inside)
    # Shares of dA (sum of dlog d) and of the bias's gradient, which the host sums over chunks.
    share = partial + wide(k) * sizes.heads + head
    tl.store(share, tl.sum(dlog * size, 0), is_head)
    tl.store(share + wide(tl.num_programs(0)) * sizes.heads, tl.sum(gradient, 0), is_head)
