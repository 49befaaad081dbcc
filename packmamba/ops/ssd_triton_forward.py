# mypy: ignore-errors
"""Mamba-2's forward on a GPU, in Triton: step sizes, states where segments start, outputs.

A document is cut by its positions, offsets included, whatever stands beside it (tokens of one document, offset 70)::

    position    0        64       128      192      256                      2048
    block       |  -  |---|--------|--------|--------| ...                    |     64
    chunk       |    ------|-----------------|------- ...                     |    128
    segment     |    ---------------------------------------------------------|-- 2048
                     first token

A tile lies on this grid: of a first block that begins inside, and of a last one, some rows hold no token. They are read as
zeros and never written: by a tensor descriptor that is bounded at the first and the last token (``TMA``), else by masks. So
nothing of a neighbour enters, NaN included.

| kernel | a program | bound by |
| --- | --- | --- |
| ``write_steps`` | a chunk and 16 heads | bytes: delta, and 8 bytes a token and head |
| ``walk_states`` (ENDS) | a segment, a head, 64 channels: state at its end from zero | latency: a chain of chunks |
| ``combine`` | a document, 1024 of its states: states at segments' ends in turn | bytes: 8 a state of a segment |
| ``walk`` | a segment, a head, 64 channels: outputs, block by block | latency: a chain of 32 blocks of 3 products each |
| ``zero_padding`` | 32 slots | bytes of padding |

``walk`` reads x and writes y once; B and C are read by every head of a group, from the cache. At 16384 tokens, 64 heads of 64
channels, 128 states, bfloat16: 273 MB in 0.25 ms on an H100.

Letters: L slots of a row, H heads, P channels of a head, N states; T channels of a tile, M states of a tile (P and N, padded
to powers of two), Q rows of a tile. Logarithms of decays are to the base 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)
"""Tokens of a block: rows of most tiles."""
CHUNK = tl.constexpr(128)
"""Tokens of a chunk, at whose start the backward has a state."""


class Rows(NamedTuple):
    """Activations of (B, L, heads or groups, width), and their strides; those of width are 1."""

    pointer: Any
    row: Any
    token: Any
    head: Any


class Activations(NamedTuple):
    """What a kernel reads of its arguments' tokens; None: absent, or not read."""

    x: Any
    B: Any
    C: Any
    z: Any = None
    dy: Any = None


class Decays(NamedTuple):
    """Step sizes, and logarithms of decays."""

    steps: Any  # (H, slots)
    totals: Any  # (H, slots): from a block's start to each token, included
    blocks: Any  # (2 K, H): over a block


class Sizes(NamedTuple):
    """Numbers that a kernel is not compiled for."""

    row_length: Any
    slots: Any
    heads: Any
    shared: Any  # heads of a group


@triton.jit
def step_size(delta, bias, low, high, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    """Return step sizes and their derivatives."""
    size = delta + bias
    slope = tl.full(size.shape, 1.0, tl.float32)
    if SOFTPLUS:
        slope = 1 / (1 + tl.exp(-size))
        size = tl.where(size > 20, size, tl.log(1 + tl.exp(size)))
    if LIMIT:
        slope = tl.where((size >= low) & (size <= high), slope, 0.0)
        size = tl.minimum(tl.maximum(size, low), high)
    return size, slope


@triton.jit
def wide(value):
    """Convert an integer to 64 bits."""
    return tl.zeros((), tl.int64) + value


@triton.jit
def load_chunk(chunks, k):
    """Return a chunk's first slot, tokens, rows of its tile before these, and indices of states before and after (-1: none)."""
    entry = chunks + 5 * k
    return (
        tl.load(entry).to(tl.int64),
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
    )


@triton.jit
def load_segment(segments, i):
    """Return as ``load_chunk``; then the document and the first chunk."""
    entry = segments + 7 * i
    begin, count, lead = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    before, after = tl.load(entry + 3), tl.load(entry + 4)
    return begin, count, lead, before, after, tl.load(entry + 5), tl.load(entry + 6)


@triton.jit
def tokens_of(rows, begin, row_length, head):
    """Return the address of a head's channels at a slot."""
    row = begin // row_length
    return (
        rows.pointer
        + row * rows.row
        + (begin - row * row_length) * rows.token
        + wide(head) * rows.head
    )


@triton.jit
def describe(base, count, token_stride, width, Q: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Return a descriptor of tiles (Q, WIDTH) that is bounded to these tokens and to a width; without TMA the base."""
    if TMA:
        return tl.make_tensor_descriptor(base, [count, width], [token_stride, 1], [Q, WIDTH])
    else:
        return base


@triton.jit
def load_tile(
    descriptor, base, count, token_stride, width, row, column, Q: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Load (Q, WIDTH) from a row, which may be negative, and a column; zero outside."""
    if TMA:
        return descriptor.load([row, column])
    else:
        rows = row + tl.arange(0, Q)
        columns = column + tl.arange(0, WIDTH)
        inside = ((rows >= 0) & (rows < count))[:, None] & (columns < width)[None, :]
        return tl.load(base + rows[:, None] * token_stride + columns[None, :], inside, 0.0)


@triton.jit
def load_head(
    descriptor, base, count, token_stride, head, head_stride, row, part, P: tl.constexpr, T: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Load (BLOCK, T), a part of a head's channels, of all heads' rows."""
    if TMA:
        return descriptor.load([row, head * head_stride + part * T])
    else:
        base += wide(head) * head_stride
        return load_tile(None, base, count, token_stride, P, row, part * T, BLOCK, T, False)


@triton.jit
def store_tile(
    descriptor, base, count, token_stride, width, row, column, value, Q: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Store what ``load_tile`` would load. Descriptors load from negative rows, but do not store there."""
    value = value.to(base.dtype.element_ty)
    if TMA:
        if row >= 0:
            descriptor.store([row, column], value)
        else:
            store_masked(base, count, token_stride, width, row, column, value, Q, WIDTH)
    else:
        store_masked(base, count, token_stride, width, row, column, value, Q, WIDTH)


@triton.jit
def store_masked(
    base, count, token_stride, width, row, column, value, Q: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    rows = row + tl.arange(0, Q)
    columns = column + tl.arange(0, WIDTH)
    inside = ((rows >= 0) & (rows < count))[:, None] & (columns < width)[None, :]
    tl.store(base + rows[:, None] * token_stride + columns[None, :], value, inside)


@triton.jit
def load_decays(decays, head, slots, begin, count, row, whole, Q: tl.constexpr):
    """Return a tile's step sizes, zero without a token, and logarithms of decays from its start to each row."""
    rows = row + tl.arange(0, Q)
    inside = (rows >= 0) & (rows < count)
    at = wide(head) * slots + begin + rows
    total = tl.load(decays.totals + at, inside, 0.0)
    return tl.load(decays.steps + at, inside, 0.0), tl.where(rows < count, total, whole)


@triton.jit
def multiply(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision=PRECISION)


@triton.jit
def load_state(states, index, head, heads, part, P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr):
    """Load a tile (M, T) of float32 states (..., H, P, N)."""
    n, p = tl.arange(0, M), part * T + tl.arange(0, T)
    at = (wide(index) * heads + head) * P * N + p[None, :] * N + n[:, None]
    return tl.load(states + at, (n < N)[:, None] & (p < P)[None, :], 0.0)


@triton.jit
def store_state(states, index, head, heads, part, state, P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr):
    n, p = tl.arange(0, M), part * T + tl.arange(0, T)
    at = (wide(index) * heads + head) * P * N + p[None, :] * N + n[:, None]
    tl.store(states + at, state, (n < N)[:, None] & (p < P)[None, :])


@triton.jit
def write_steps(
    delta, A, bias, decays, chunks, sizes, low, high, row_stride, token_stride,
    HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write ``decays`` of a chunk and HEADS heads."""
    k = tl.program_id(0)
    begin, count, lead, _, _ = load_chunk(chunks, k)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < sizes.heads
    rate = tl.load(A + head, is_head, 0.0) * 1.4426950408889634
    offset = tl.zeros((HEADS,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + head, is_head, 0.0)
    row = begin // sizes.row_length
    base = delta + row * row_stride + (begin - row * sizes.row_length) * token_stride
    for block in tl.static_range(2):
        rows = BLOCK * block - lead + tl.arange(0, BLOCK)
        inside = ((rows >= 0) & (rows < count))[:, None] & is_head[None, :]
        value = tl.load(base + rows[:, None] * token_stride + head[None, :], inside, 0.0)
        size, _ = step_size(value.to(tl.float32), offset[None, :], low, high, SOFTPLUS, LIMIT)
        size = tl.where(inside, size, 0.0)
        change = size * rate[None, :]
        at = head.to(tl.int64)[None, :] * sizes.slots + begin + rows[:, None]
        tl.store(decays.steps + at, size, inside)
        tl.store(decays.totals + at, tl.cumsum(change, 0), inside)
        whole = decays.blocks + wide(2 * k + block) * sizes.heads + head
        tl.store(whole, tl.sum(change, 0), is_head)


@triton.jit
def walk(
    inputs, D, initial, starts, y, dz, ungated, decays, segments, order, sizes,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr, SKIP: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Walk a segment: write y, or with dy the gradients of z and of the output before the gate.

    starts: states at starts of segments that are not a document's first. SKIP: dimensions of D.
    """
    PARTS: tl.constexpr = (P + T - 1) // T
    tiles = sizes.heads * PARTS
    tile = tl.program_id(0) % tiles
    head, part = tile // PARTS, tile % PARTS
    begin, count, lead, before, _, document, chunk = load_segment(
        segments, tl.load(order + tl.program_id(0) // tiles)
    )
    if count == 0:
        return
    width = P - part * T
    x = tokens_of(inputs.x, begin, sizes.row_length, head) + part * T
    B = tokens_of(inputs.B, begin, sizes.row_length, head // sizes.shared)
    C = tokens_of(inputs.C, begin, sizes.row_length, head // sizes.shared)
    x_tiles = describe(x, count, inputs.x.token, width, BLOCK, T, TMA)
    B_tiles = describe(B, count, inputs.B.token, N, BLOCK, M, TMA)
    C_tiles = describe(C, count, inputs.C.token, N, BLOCK, M, TMA)
    written = (begin * sizes.heads + head) * P + part * T
    stride = sizes.heads * P
    if inputs.z is not None:
        z = tokens_of(inputs.z, begin, sizes.row_length, head) + part * T
        z_tiles = describe(z, count, inputs.z.token, width, BLOCK, T, TMA)
    if inputs.dy is not None:
        dy = inputs.dy.pointer + written
        dy_tiles = describe(dy, count, stride, width, BLOCK, T, TMA)
        dz_tiles = describe(dz + written, count, stride, width, BLOCK, T, TMA)
        ungated_tiles = describe(ungated + written, count, stride, width, BLOCK, T, TMA)
    else:
        y_tiles = describe(y + written, count, stride, width, BLOCK, T, TMA)

    p, i = tl.arange(0, T), tl.arange(0, BLOCK)
    skip = tl.zeros((T,), tl.float32)
    if SKIP == 1:
        skip += tl.load(D + head)
    if SKIP == 2:
        skip += tl.load(D + head * P + part * T + p, p < width, 0.0)
    state = tl.zeros((M, T), tl.float32)
    if starts is not None:
        if before >= 0:
            state = load_state(starts, before, head, sizes.heads, part, P, N, T, M)
    if initial is not None:
        if before < 0:
            state = load_state(initial, document, head, sizes.heads, part, P, N, T, M)
    for block in range(lead // BLOCK, tl.cdiv(lead + count, BLOCK)):
        row = BLOCK * block - lead
        whole = tl.load(decays.blocks + wide(2 * chunk + block) * sizes.heads + head)
        step, total = load_decays(decays, head, sizes.slots, begin, count, row, whole, BLOCK)
        Ck = load_tile(C_tiles, C, count, inputs.C.token, N, row, 0, BLOCK, M, TMA)
        Bk = load_tile(B_tiles, B, count, inputs.B.token, N, row, 0, BLOCK, M, TMA)
        xk = load_tile(x_tiles, x, count, inputs.x.token, width, row, 0, BLOCK, T, TMA)
        # The part of earlier blocks, then that of earlier tokens; a token's own is not rounded to x's dtype.
        out = multiply(Ck, state, DTYPE, PRECISION) * tl.exp2(total)[:, None]
        scores = multiply(Ck, tl.trans(Bk), DTYPE, PRECISION) * step[None, :]
        own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1)
        scores = tl.where(
            i[:, None] > i[None, :], scores * tl.exp2(total[:, None] - total[None, :]), 0.0
        )
        out += multiply(scores, xk, DTYPE, PRECISION)
        xf = xk.to(tl.float32)
        out += (own[:, None] + skip[None, :]) * xf
        if inputs.z is not None:
            zk = load_tile(z_tiles, z, count, inputs.z.token, width, row, 0, BLOCK, T, TMA).to(tl.float32)
            gate = 1 / (1 + tl.exp(-zk))
        if inputs.dy is not None:
            dyk = load_tile(dy_tiles, dy, count, stride, width, row, 0, BLOCK, T, TMA).to(tl.float32)
            dzk = dyk * out * gate * (1 + zk * (1 - gate))
            store_tile(dz_tiles, dz + written, count, stride, width, row, 0, dzk, BLOCK, T, TMA)
            dyk = dyk * zk * gate
            store_tile(ungated_tiles, ungated + written, count, stride, width, row, 0, dyk, BLOCK, T, TMA)
        else:
            if inputs.z is not None:
                out = out * zk * gate
            store_tile(y_tiles, y + written, count, stride, width, row, 0, out, BLOCK, T, TMA)
        scaled = xf * (step * tl.exp2(whole - total))[:, None]
        state = state * tl.exp2(whole) + multiply(tl.trans(Bk), scaled, DTYPE, PRECISION)


@triton.jit
def walk_chunks(
    left, left_stride, right, right_stride, state, stored, decays, chunks, segment, head, part, sizes,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    REVERSE: tl.constexpr, ENDS: tl.constexpr, EVERY: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk a segment's chunks by B and x, or backwards by C and dy; return the state.

    Stores the state at which each chunk is met; ENDS: none, but the last chunk is walked too. EVERY: also a document's first.
    """
    begin, count, lead, first = segment
    number = tl.cdiv(lead + count, CHUNK)
    i, width = tl.arange(0, CHUNK), P - part * T
    PARTS: tl.constexpr = (P + T - 1) // T
    inside_tile = tl.arange(0, M)[:, None] * T + tl.arange(0, T)[None, :]
    for met in range(number if ENDS else number - 1):
        place = number - 1 - met if REVERSE else met
        row = CHUNK * place - lead
        if not ENDS:
            k = first + place
            index = k if EVERY else tl.load(chunks + 5 * k + (4 if REVERSE else 3))
            at = ((wide(index) * sizes.heads + head) * PARTS + part) * M * T
            tl.store(stored + at + inside_tile, state.to(DTYPE), index >= 0)
        blocks = decays.blocks + 2 * wide(first + place) * sizes.heads + head
        early, late = tl.load(blocks), tl.load(blocks + sizes.heads)
        step, total = load_decays(decays, head, sizes.slots, begin, count, row, late, CHUNK)
        total += tl.where(i >= BLOCK, early, 0.0)
        scale = tl.exp2(total) if REVERSE else step * tl.exp2(early + late - total)
        along = load_tile(None, left, count, left_stride, N, row, 0, CHUNK, M, False)
        value = load_tile(None, right, count, right_stride, width, row, 0, CHUNK, T, False)
        value = value.to(tl.float32) * scale[:, None]
        state = state * tl.exp2(early + late) + multiply(tl.trans(along), value, DTYPE, PRECISION)
    if not ENDS:
        k = first if REVERSE else first + number - 1
        index = k if EVERY else tl.load(chunks + 5 * k + (4 if REVERSE else 3))
        at = ((wide(index) * sizes.heads + head) * PARTS + part) * M * T
        tl.store(stored + at + inside_tile, state.to(DTYPE), index >= 0)
    return state


@triton.jit
def walk_states(
    inputs, initial, starts, final, states, dfinal, ends, dinitial, dstates, decays, chunks, segments, order, sizes,
    P: tl.constexpr, N: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, ENDS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk the states of a segment and their gradients, which are two roles of programs, chunk by chunk.

    Writes states before chunks and gradients of states after chunks. ENDS: from zero, and only the last one, to ``starts`` of
    the next segment or ``final`` (reverse: ``ends`` of the previous segment or ``dinitial``).
    """
    PARTS: tl.constexpr = (P + T - 1) // T
    DIRECTIONS: tl.constexpr = FORWARD + REVERSE
    tiles = sizes.heads * PARTS * DIRECTIONS
    tile = tl.program_id(0) % tiles
    reverse = tile % DIRECTIONS if FORWARD else 1
    head, part = tile // DIRECTIONS // PARTS, tile // DIRECTIONS % PARTS
    begin, count, lead, before, after, document, first = load_segment(
        segments, tl.load(order + tl.program_id(0) // tiles)
    )
    if count == 0:
        return
    segment = (begin, count, lead, first)
    state = tl.zeros((M, T), tl.float32)
    if FORWARD:
        if reverse == 0:
            if ENDS:
                if (after < 0) & (final is None):
                    return
            else:
                if starts is not None:
                    if before >= 0:
                        state = load_state(starts, before, head, sizes.heads, part, P, N, T, M)
                if initial is not None:
                    if before < 0:
                        state = load_state(initial, document, head, sizes.heads, part, P, N, T, M)
            left = tokens_of(inputs.B, begin, sizes.row_length, head // sizes.shared)
            right = tokens_of(inputs.x, begin, sizes.row_length, head) + part * T
            state = walk_chunks(
                left, inputs.B.token, right, inputs.x.token, state, states, decays, chunks, segment, head, part, sizes,
                P, N, T, M, False, ENDS, initial is not None, DTYPE, PRECISION,
            )  # fmt: skip
            if ENDS:
                if after >= 0:
                    store_state(starts, after, head, sizes.heads, part, state, P, N, T, M)
                if final is not None:
                    if after < 0:
                        store_state(final, document, head, sizes.heads, part, state, P, N, T, M)
    if REVERSE:
        if reverse == 1:
            if ENDS:
                if (before < 0) & (dinitial is None):
                    return
            else:
                if ends is not None:
                    if after >= 0:
                        state = load_state(ends, after, head, sizes.heads, part, P, N, T, M)
                if dfinal is not None:
                    if after < 0:
                        state = load_state(dfinal, document, head, sizes.heads, part, P, N, T, M)
            left = tokens_of(inputs.C, begin, sizes.row_length, head // sizes.shared)
            right = tokens_of(inputs.dy, begin, sizes.row_length, head) + part * T
            state = walk_chunks(
                left, inputs.C.token, right, inputs.dy.token, state, dstates, decays, chunks, segment, head, part, sizes,
                P, N, T, M, True, ENDS, dfinal is not None, DTYPE, PRECISION,
            )  # fmt: skip
            if ENDS:
                if before >= 0:
                    store_state(ends, before, head, sizes.heads, part, state, P, N, T, M)
                if dinitial is not None:
                    if before < 0:
                        store_state(dinitial, document, head, sizes.heads, part, state, P, N, T, M)


@triton.jit
def combine(
    outer, between, last, decays, segments, documents, sizes, state_size,
    REVERSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add to each segment's state from zero what it began with: ``decay * state + local``, segment by segment.

    outer: states before a document's first segment, None: zero; between: at segments' ends, (..., H, P, N); last: after the
    last segment, None: not wanted. REVERSE: of gradients, from the last segment to the first.
    """
    head = tl.program_id(1)
    document = tl.program_id(0)
    first, number = tl.load(documents + 2 * document), tl.load(documents + 2 * document + 1)
    if (number <= 1) & (last is None):
        return
    place = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    mask = place < state_size
    own = (wide(document) * sizes.heads + head) * state_size + place
    state = tl.zeros((WIDTH,), tl.float32)
    if outer is not None:
        state = tl.load(outer + own, mask, 0.0)
    for met in range(number):
        i = first + (number - 1 - met if REVERSE else met)
        begin, count, lead, before, after, _, chunk = load_segment(segments, i)
        change = tl.zeros((32,), tl.float32)
        for block in range(0, 2 * tl.cdiv(lead + count, CHUNK), 32):
            some = block + tl.arange(0, 32)
            at = wide(2 * chunk + some) * sizes.heads + head
            change += tl.load(decays.blocks + at, some < 2 * tl.cdiv(lead + count, CHUNK), 0.0)
        state = state * tl.exp2(tl.sum(change, 0))
        index = before if REVERSE else after
        if index >= 0:
            target = between + (wide(index) * sizes.heads + head) * state_size + place
            state += tl.load(target, mask, 0.0)
            tl.store(target, state, mask)
        else:
            if last is not None:
                state += tl.load(last + own, mask, 0.0)
    if last is not None:
        tl.store(last + own, state, mask)


@triton.jit
def zero_padding(outputs, widths, padding, slots, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Zero the padding of contiguous (slots, width)."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    hole = tl.load(padding + slot, slot < slots, 0) != 0
    if tl.max(hole.to(tl.int32), 0) > 0:
        for i in tl.static_range(len(outputs)):
            for w in range(0, widths[i], WIDTH):
                column = w + tl.arange(0, WIDTH)
                at = slot.to(tl.int64)[:, None] * widths[i] + column[None, :]
                zeros = tl.zeros((ROWS, WIDTH), outputs[i].dtype.element_ty)
                tl.store(outputs[i] + at, zeros, hole[:, None] & (column < widths[i])[None, :])
