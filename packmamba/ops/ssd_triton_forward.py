# mypy: ignore-errors
"""Mamba-2's forward on a GPU, in Triton: step sizes, states where segments start, outputs.

Blocks, chunks and segments are those of ``ssd_triton_plan``. Only the tail of a tile may hold no
token: its rows are read as zeros and never written, by a tensor descriptor that ends at the
segment's last token (``TMA``), else by masks. So nothing of a neighbour enters, NaN included.

| kernel | a program | bound by |
| --- | --- | --- |
| ``write_steps`` | a chunk and 16 heads | bytes: delta, and 8 bytes a token and head |
| ``walk_states`` (ENDS) | a segment, a head, 64 channels: state at its end from zero | latency: a chain of chunks |
| ``combine`` | a document, 1024 of its states: states at segments' ends in turn | bytes: 8 a state of a segment |
| ``walk`` | a segment, a head, 64 channels: outputs, block by block | latency: a chain of 32 blocks of 4 products each |
| ``zero_padding`` | 32 slots | bytes of padding |

``walk`` reads x and writes y once; B and C are read by every head of a group, from the cache. At
16384 tokens, 64 heads of 64 channels, 128 states, bfloat16: 273 MB in 0.3 ms on an H100.

Letters: K chunks, H heads, P channels of a head, N states; T channels of a tile, M states of a tile
(P and N, padded to powers of two), Q rows of a tile. Logarithms of decays are to the base 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from packmamba.ops.ssd_triton_plan import BLOCK, CHUNK, load_chunk, load_segment


class Rows(NamedTuple):
    """Activations of (B, L, heads or groups, width), and their strides; those of width are 1."""

    pointer: Any
    row: Any
    token: Any
    head: Any


class Activations(NamedTuple):
    """Hold what a kernel reads of its arguments' tokens; None: absent, or not read."""

    x: Any
    B: Any
    C: Any
    z: Any = None
    dy: Any = None


class Decays(NamedTuple):
    """Step sizes and logarithms of decays, by chunk; past its last token no step and no decay."""

    steps: Any  # (H, K * CHUNK)
    totals: Any  # (H, K * CHUNK): from a block's start to each token, included


class Sizes(NamedTuple):
    """Numbers that a kernel is not compiled for."""

    row_length: Any
    heads: Any
    shared: Any  # heads of a group
    rows: Any  # K * CHUNK
    # Columns of ``Plan.chunks``: where the state before a chunk is, and the gradient of the one
    # after.
    before: Any
    after: Any


class Steps(NamedTuple):
    """Say how delta becomes step sizes."""

    delta: Any
    bias: Any  # (H,) or None
    low: Any
    high: Any
    row: Any  # strides of delta
    token: Any


class Role(NamedTuple):
    """States (or gradients) that ``walk_states`` reads and writes; None: absent, or not wanted."""

    outer: Any  # before (after) documents
    between: Any  # between segments
    last: Any  # after (before) documents
    stored: Any  # before (after) chunks


class Tile(NamedTuple):
    """Hold what a kernel is compiled for."""

    P: tl.constexpr
    N: tl.constexpr
    T: tl.constexpr
    M: tl.constexpr
    parts: tl.constexpr  # tiles of a head's channels
    skip: tl.constexpr  # dimensions of D, 0: absent
    described: bool  # whether tensor descriptors are used
    dtype: Any  # of products' operands
    precision: str


@triton.jit
def step_size(delta, bias, low, high, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr):
    """Return step sizes and their derivatives."""
    size = delta + bias
    slope = tl.full(size.shape, 1.0, tl.float32)
    # As PyTorch: above 20 softplus is the identity in float32. Its derivative is the sigmoid.
    if SOFTPLUS:
        slope = 1 / (1 + tl.exp(-size))
        size = tl.where(size > 20, size, tl.log(1 + tl.exp(size)))
    if LIMIT:
        # Beyond a limit the step size is constant.
        slope = tl.where((size >= low) & (size <= high), slope, 0.0)
        size = tl.minimum(tl.maximum(size, low), high)
    return size, slope


@triton.jit
def wide(value):
    """Convert an integer to 64 bits."""
    return tl.zeros((), tl.int64) + value


@triton.jit
def tokens_of(rows, begin, row_length, head):
    """Return the address of a head's channels at a slot."""
    row = begin // row_length
    return rows.pointer + row * rows.row + (begin - row * row_length) * rows.token + wide(head) * rows.head


@triton.jit
def view(base, count, stride, width, Q: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """Return a view of ``count`` rows of a width, loaded and stored by tiles (Q, WIDTH)."""
    descriptor = base
    if DESCRIBED:
        # Tokens by channels: a view lies in one row of the batch, so one stride tells its tokens.
        descriptor = tl.make_tensor_descriptor(base, [count, width], [stride, 1], [Q, WIDTH])
    return descriptor, base, count, stride, width


@triton.jit
def tile_places(count, stride, width, row, column, Q: tl.constexpr, WIDTH: tl.constexpr):
    """Return where the elements of a tile lie from its tensor's base, and which ones are inside."""
    rows = row + tl.arange(0, Q)
    columns = column + tl.arange(0, WIDTH)
    return rows[:, None] * stride + columns[None, :], (rows < count)[:, None] & (columns < width)[None, :]


@triton.jit
def load(tiles, row, column, Q: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """Load (Q, WIDTH) from a row and a column; zero outside."""
    descriptor, base, count, stride, width = tiles
    if DESCRIBED:
        return descriptor.load([row, column])
    else:
        place, inside = tile_places(count, stride, width, row, column, Q, WIDTH)
        return tl.load(base + place, inside, 0.0)


@triton.jit
def store(tiles, row, column, value, Q: tl.constexpr, WIDTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """Store what ``load`` would load."""
    descriptor, base, count, stride, width = tiles
    value = value.to(base.dtype.element_ty)
    if DESCRIBED:
        descriptor.store([row, column], value)
    else:
        place, inside = tile_places(count, stride, width, row, column, Q, WIDTH)
        tl.store(base + place, value, inside)


@triton.jit
def view_group(rows, begin, count, group, sizes, Q: tl.constexpr, tile: tl.constexpr, DESCRIBED: tl.constexpr):
    """View a group's B or C from a slot."""
    return view(tokens_of(rows, begin, sizes.row_length, group), count, rows.token, tile.N, Q, tile.M, DESCRIBED)


@triton.jit
def view_part(rows, begin, count, head, part, sizes, Q: tl.constexpr, tile: tl.constexpr, DESCRIBED: tl.constexpr):
    """View a part of a head's channels from a slot."""
    base = tokens_of(rows, begin, sizes.row_length, head) + part * tile.T
    return view(base, count, rows.token, tile.P - part * tile.T, Q, tile.T, DESCRIBED)


@triton.jit
def load_decays(decays, head, sizes, k, row, Q: tl.constexpr):
    """Return step sizes of Q rows of a chunk, and logarithms of decays from a block's start."""
    at = wide(head) * sizes.rows + wide(k) * CHUNK + row + tl.arange(0, Q)
    return tl.load(decays.steps + at), tl.load(decays.totals + at)


@triton.jit
def load_wholes(decays, head, sizes, k):
    """Return the logarithms of the decays over both blocks of a chunk."""
    at = decays.totals + wide(head) * sizes.rows + wide(k) * CHUNK
    return tl.load(at + BLOCK - 1), tl.load(at + CHUNK - 1)


@triton.jit
def load_skip(D, head, part, tile: tl.constexpr):
    """Return D of a part of a head's channels."""
    p = part * tile.T + tl.arange(0, tile.T)
    skip = tl.zeros((tile.T,), tl.float32)
    if tile.skip == 1:
        skip += tl.load(D + head)
    if tile.skip == 2:
        skip += tl.load(D + head * tile.P + p, p < tile.P, 0.0)
    return skip


@triton.jit
def multiply(a, b, tile: tl.constexpr):
    """Multiply matrices of ``tile.dtype``."""
    return tl.dot(a.to(tile.dtype), b.to(tile.dtype), input_precision=tile.precision)


@triton.jit
def multiply_state(C, state, tile: tl.constexpr):
    """Multiply C by a state, which is rounded.

    A small one in two parts, since over few products rounding does not average.
    """
    out = multiply(C, state, tile)
    if tile.M <= 32 and tile.dtype == tl.bfloat16:
        out += multiply(C, state - state.to(tile.dtype).to(tl.float32), tile)
    return out


@triton.jit
def state_places(index, head, part, sizes, tile: tl.constexpr):
    """Return where a tile (M, T) of states (..., H, P, N) lies, and which of it is inside."""
    n, p = tl.arange(0, tile.M), part * tile.T + tl.arange(0, tile.T)
    at = (wide(index) * sizes.heads + head) * tile.P * tile.N + p[None, :] * tile.N + n[:, None]
    return at, (n < tile.N)[:, None] & (p < tile.P)[None, :]


@triton.jit
def first_state(outer, between, boundary, document, head, part, sizes, tile: tl.constexpr):
    """Return a segment's first state: between segments, its document's ``outer``, or zero."""
    state = tl.zeros((tile.M, tile.T), tl.float32)
    if between is not None:
        if boundary >= 0:
            at, inside = state_places(boundary, head, part, sizes, tile)
            state = tl.load(between + at, inside, 0.0)
    if outer is not None:
        if boundary < 0:
            at, inside = state_places(document, head, part, sizes, tile)
            state = tl.load(outer + at, inside, 0.0)
    return state


@triton.jit
def load_steps(
    steps, begin, count, row, head, sizes, Q: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Return step sizes of Q tokens of some heads, their derivatives, and which are of a token."""
    is_head = head < sizes.heads
    rows = row + tl.arange(0, Q)
    inside = (rows < count)[:, None] & is_head[None, :]
    offset = tl.zeros_like(head).to(tl.float32)
    if steps.bias is not None:
        offset = tl.load(steps.bias + head, is_head, 0.0)
    # A chunk lies in one row of the batch.
    first = begin // sizes.row_length
    base = steps.delta + first * steps.row + (begin - first * sizes.row_length) * steps.token
    value = tl.load(base + rows[:, None] * steps.token + head[None, :], inside, 0.0).to(tl.float32)
    size, slope = step_size(value, offset[None, :], steps.low, steps.high, SOFTPLUS, LIMIT)
    return tl.where(inside, size, 0.0), slope, inside


@triton.jit
def write_steps(
    steps, A, decays, chunks, sizes, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Write ``decays`` of a chunk and HEADS heads."""
    k = tl.program_id(0)
    begin, count, _, _ = load_chunk(chunks, k)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < sizes.heads
    rate = tl.load(A + head, is_head, 0.0) * 1.4426950408889634  # log2(e): decays are powers of two
    for block in tl.static_range(2):
        size, _, _ = load_steps(steps, begin, count, BLOCK * block, head, sizes, BLOCK, SOFTPLUS, LIMIT)
        row = wide(k) * CHUNK + BLOCK * block + tl.arange(0, BLOCK)
        at = wide(head)[None, :] * sizes.rows + row[:, None]
        tl.store(decays.steps + at, size, is_head[None, :])
        # Sums of log2 decays start again in each block, so that their differences lose few bits.
        tl.store(decays.totals + at, tl.cumsum(size * rate[None, :], 0), is_head[None, :])


@triton.jit
def walk(inputs, D, initial, starts, y, decays, segments, order, sizes, tile: tl.constexpr):
    """Walk a segment and write y.

    starts: states at starts of segments that are not a document's first.
    """
    # Neighbouring programs share a segment, and its B and C; long segments start first.
    part = tl.program_id(0) % tile.parts
    head = tl.program_id(0) // tile.parts % sizes.heads
    i = tl.load(order + tl.program_id(0) // (sizes.heads * tile.parts))
    begin, count, before, _, document, chunk = load_segment(segments, i)
    # The table has room for more segments than there are.
    if count == 0:
        return
    group = head // sizes.shared
    x_tiles = view_part(inputs.x, begin, count, head, part, sizes, BLOCK, tile, tile.described)
    B_tiles = view_group(inputs.B, begin, count, group, sizes, BLOCK, tile, tile.described)
    C_tiles = view_group(inputs.C, begin, count, group, sizes, BLOCK, tile, tile.described)
    if inputs.z is not None:
        z_tiles = view_part(inputs.z, begin, count, head, part, sizes, BLOCK, tile, False)
    written = y + (begin * sizes.heads + head) * tile.P + part * tile.T
    y_tiles = view(written, count, sizes.heads * tile.P, tile.P - part * tile.T, BLOCK, tile.T, tile.described)
    skip = load_skip(D, head, part, tile)
    # S, (M, T): N states by P channels, in float32.
    state = first_state(initial, starts, before, document, head, part, sizes, tile)
    i = tl.arange(0, BLOCK)
    for row in range(0, count, BLOCK):
        # d (step sizes), logs of a (decay from the block's
        # start to each token, and over the block).
        step, total = load_decays(decays, head, sizes, chunk, row, BLOCK)
        whole = tl.load(decays.totals + wide(head) * sizes.rows + wide(chunk) * CHUNK + row + BLOCK - 1)
        Ck = load(C_tiles, row, 0, BLOCK, tile.M, tile.described)
        Bk = load(B_tiles, row, 0, BLOCK, tile.M, tile.described)
        xk = load(x_tiles, row, 0, BLOCK, tile.T, tile.described)
        if inputs.z is not None:
            # No product takes it, so that its descriptor's load
            # would not be started early; one through registers is.
            zk = load(z_tiles, row, 0, BLOCK, tile.T, False)
        # The part of earlier tokens of the block, then that of earlier blocks; a token's own is not
        # rounded to x's dtype. G[i, j] d[j] = C[i] B[j] d[j].
        scores = multiply(Ck, tl.trans(Bk), tile) * step[None, :]
        # Earlier blocks: y[i] = a[i, 0] C[i] S.
        out = multiply_state(Ck, state, tile) * tl.exp2(total)[:, None]
        # The block itself: y[i] += G a d x[j] summed over j < i, then j = i, and D x[i].
        own = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), 1)
        scores = tl.where(i[:, None] > i[None, :], scores * tl.exp2(total[:, None] - total[None, :]), 0.0)
        out += multiply(scores, xk, tile)
        xf = xk.to(tl.float32)
        out += (own[:, None] + skip[None, :]) * xf
        # y silu(z).
        if inputs.z is not None:
            zk = zk.to(tl.float32)
            out = out * zk / (1 + tl.exp(-zk))
        store(y_tiles, row, 0, out, BLOCK, tile.T, tile.described)
        # S = a[Q, 0] S + sum over j of a[Q, j] d[j] B[j] x[j].
        scaled = xf * (step * tl.exp2(whole - total))[:, None]
        state = state * tl.exp2(whole) + multiply(tl.trans(Bk), scaled, tile)


@triton.jit
def walk_chunks(
    left, right, outer, between, last, stored, decays, chunks, segment, head, part, sizes, tile: tl.constexpr,
    REVERSE: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Walk a segment's chunks by B and x, or backwards by C and dy, in one role of ``walk_states``.

    Stores the state at which each chunk is met; the last chunk
    is not walked. ENDS: it is, and that state alone is stored.
    """
    # near, far: boundaries between segments where the
    # walk begins and ends, -1 at documents' edges.
    begin, count, near, far, document, first = segment
    # Backwards the segment is entered at its end.
    if REVERSE:
        near, far = far, near
    number = tl.cdiv(count, CHUNK)
    steps = number - 1
    state = tl.zeros((tile.M, tile.T), tl.float32)
    # Only a state that somebody reads is worth the walk.
    if ENDS:
        steps = tl.where((far >= 0) | (last is not None), number, 0)
    else:
        state = first_state(outer, between, near, document, head, part, sizes, tile)
    along = view_group(left, begin, count, head // sizes.shared, sizes, CHUNK, tile, False)
    values = view_part(right, begin, count, head, part, sizes, CHUNK, tile, False)
    late_rows = tl.arange(0, CHUNK) >= BLOCK
    for met in range(steps):
        place = number - 1 - met if REVERSE else met
        if not ENDS:
            store_chunk_state(stored, chunks, first + place, head, part, sizes, state, tile, REVERSE)
        # Logs are from a block's start: continue those of the second block from the first.
        step, total = load_decays(decays, head, sizes, first + place, 0, CHUNK)
        early, late = load_wholes(decays, head, sizes, first + place)
        total += tl.where(late_rows, early, 0.0)
        # Forward d[j] a[Q, j], to the chunk's end; reverse a[i, 0], to its start.
        scale = tl.exp2(total) if REVERSE else step * tl.exp2(early + late - total)
        across = load(along, CHUNK * place, 0, CHUNK, tile.M, False)
        value = load(values, CHUNK * place, 0, CHUNK, tile.T, False).to(tl.float32) * scale[:, None]
        # S = a[Q, 0] S + sum of B d a x; reverse: E = a[Q, 0] E + sum of C a dy.
        state = state * tl.exp2(early + late) + multiply(tl.trans(across), value, tile)
    if ENDS:
        if far >= 0:
            at, inside = state_places(far, head, part, sizes, tile)
            tl.store(between + at, state, inside)
        if last is not None:
            if far < 0:
                at, inside = state_places(document, head, part, sizes, tile)
                tl.store(last + at, state, inside)
    else:
        # The chunk that is met last is not walked: no chunk of this segment reads what follows it.
        end = first if REVERSE else first + number - 1
        store_chunk_state(stored, chunks, end, head, part, sizes, state, tile, REVERSE)


@triton.jit
def store_chunk_state(stored, chunks, k, head, part, sizes, state, tile: tl.constexpr, REVERSE: tl.constexpr):
    """Store the state before a chunk (reverse: after it) in a whole tile, if it is wanted."""
    _, _, before, after = load_chunk(chunks, k, sizes.before, sizes.after)
    index = after if REVERSE else before
    at = ((wide(index) * sizes.heads + head) * tile.parts + part) * tile.M * tile.T
    inside_tile = tl.arange(0, tile.M)[:, None] * tile.T + tl.arange(0, tile.T)[None, :]
    tl.store(stored + at + inside_tile, state.to(tile.dtype), index >= 0)


@triton.jit
def walk_states(
    inputs, forward, reverse, decays, chunks, segments, order, sizes, tile: tl.constexpr,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Walk a segment's states and their gradients, two roles of programs, chunk by chunk.

    forward, reverse: what the roles read and write: ``stored``; if there is one role only,
    ``between`` and ``last``, of walks from zero. FORWARD, REVERSE: whether the role is there.
    """
    # With both roles states are stored at every chunk; with one, at segments' ends.
    roles: tl.constexpr = FORWARD + REVERSE
    ENDS: tl.constexpr = roles == 1
    role = tl.program_id(0) % roles
    part = tl.program_id(0) // roles % tile.parts
    head = tl.program_id(0) // roles // tile.parts % sizes.heads
    i = tl.load(order + tl.program_id(0) // roles // (sizes.heads * tile.parts))
    # Longest segments first, as in ``walk``.
    segment = load_segment(segments, i)
    if segment[1] == 0:
        return
    if FORWARD:
        if role == 0:
            walk_chunks(
                inputs.B, inputs.x, forward.outer, forward.between, forward.last, forward.stored,
                decays, chunks, segment, head, part, sizes, tile, False, ENDS,
            )  # fmt: skip
    if REVERSE:
        if role == roles - 1:
            walk_chunks(
                inputs.C, inputs.dy, reverse.outer, reverse.between, reverse.last, reverse.stored,
                decays, chunks, segment, head, part, sizes, tile, True, ENDS,
            )  # fmt: skip


@triton.jit
def combine(
    outer, between, last, decays, segments, totals, documents, sizes, state_size,
    REVERSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add to segments' states from zero what they began with, in order: ``decay * state + local``.

    outer: states before a document's first segment, None: zero; between:
    at segments' ends, (..., H, P, N); last: after the last segment, None:
    not wanted. REVERSE: of gradients, from the last segment to the first.
    """
    document, head = tl.program_id(0), tl.program_id(1)
    # Numbers of segments up to this document, and before it.
    end = tl.load(totals + documents + document)
    first = tl.load(totals + documents + document - 1, document > 0, 0)
    number = end - first
    if (number <= 1) & (last is None):
        return
    place = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    mask = place < state_size
    own = (wide(document) * sizes.heads + head) * state_size + place
    state = tl.zeros((WIDTH,), tl.float32)
    if outer is not None:
        state = tl.load(outer + own, mask, 0.0)
    # With S from zero in ``between``: S[end] = a S[start] + S from zero, in order.
    for met in range(number):
        i = end - 1 - met if REVERSE else first + met
        _, count, before, after, _, chunk = load_segment(segments, i)
        # Log of the decay over the segment: its blocks' sums, 32 blocks at a time.
        change = tl.zeros((32,), tl.float32)
        wholes = decays.totals + wide(head) * sizes.rows + wide(chunk) * CHUNK + BLOCK - 1
        for block in range(0, count, 32 * BLOCK):
            start = block + BLOCK * tl.arange(0, 32)
            change += tl.load(wholes + start, start < count, 0.0)
        decay = tl.exp2(tl.zeros((WIDTH,), tl.float32) + tl.sum(change, 0))
        index = before if REVERSE else after
        # Rounded once, by name: a pass that is cut here takes
        # the other branch, and must have the same bits.
        if index >= 0:
            target = between + (wide(index) * sizes.heads + head) * state_size + place
            state = tl.fma(state, decay, tl.load(target, mask, 0.0))
            tl.store(target, state, mask)
        else:
            if last is not None:
                state = tl.fma(state, decay, tl.load(last + own, mask, 0.0))
    if last is not None:
        tl.store(last + own, state, mask)


@triton.jit
def zero_padding(outputs, widths, padding, slots, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Zero the padding of ``Rows``, each of so many numbers a slot side by side."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Most groups of slots have no padding: they only read the flags.
    hole = tl.load(padding + slot, slot < slots, 0) != 0
    if tl.max(hole.to(tl.int32), 0) > 0:
        for i in tl.static_range(len(outputs)):
            for w in range(0, widths[i], WIDTH):
                column = w + tl.arange(0, WIDTH)
                at = slot.to(tl.int64)[:, None] * outputs[i].token + column[None, :]
                zeros = tl.zeros((ROWS, WIDTH), outputs[i].pointer.dtype.element_ty)
                tl.store(outputs[i].pointer + at, zeros, hole[:, None] & (column < widths[i])[None, :])
