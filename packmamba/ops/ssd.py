"""Mamba-2's scan (SSD) over packed documents, in chunks from document starts.

Shapes: B rows, L slots, S documents, H heads, P channels of a head, G groups, N states, K chunks, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.cuda import check_has_kernels
from packmamba.ops.custom_op import Outputs, PackedOperator, empty_grad_like

CHUNK = 64
"""A chunk ends where a document's position is a multiple of this."""
MOST_STATES = 256
BATCH_SCORES = 1 << 22
"""Scores (K, H, Q, Q) at a time."""
TILES = (1, 16, CHUNK)
"""Slots of a chunk on a CPU: the fewest that hold its tokens, so that a document of a token does not pay 64.

By a chunk's own tokens alone, so that a document's bits are the same whatever stands beside it.
"""
VECTORS = 64
"""A multiple of the numbers that one round of a processor's vector loop takes."""


def ssd_pack(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    delta_limit: tuple[float, float] | None = None,
    layout: SequenceLayout | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Scan documents by Mamba-2's recurrence, each from zero or from its initial state.

    ``d = softplus(delta + delta_bias)``, clamped to delta_limit; ``h[t] = exp(d[t] A) h[t-1] + d[t] x[t] (outer) B[t]``;
    ``y[t] = (h[t] C[t] + D x[t]) * silu(z[t])`` (Mamba-2, arXiv 2405.21060). Head h reads B and C of group h // (H / G).
    Differentiable in every tensor, also through the final state.

    Args (others, dtypes and strides as of ``ssm_pack``):
        x, z, delta: (B, L, H, P), (B, L, H, P), (B, L, H).
        A, delta_bias: (H,). D: (H,) or (H, P).
        B, C: (B, L, G, N); H is a multiple of G, N at most 256.
        delta_limit: (low, high), to which delta is clamped last; None: no limit.
        initial_state: (S, H, P, N).

    Returns y (B, L, H, P) in x's dtype, zero at padding, which is never read; with ``return_final_state`` a pair.
    Raises TypeError or ValueError.
    """
    checks.check_activations(x, "x", "(B, L, H, P)")
    layout = checks.check_layout(layout, x, "x")
    rows, row_length, heads, channels = shape = x.shape
    near, wide = (x.dtype,), (checks.accumulation_dtype(x.dtype),)
    checks.check_is_tensor(B, "B")
    if B.dim() != 4 or not 1 <= B.shape[3] <= MOST_STATES or not B.shape[2] or heads % B.shape[2]:
        expected = f"({rows}, {row_length}, G, N) with G dividing {heads} and N from 1 to {MOST_STATES}"
        raise ValueError(f"B: expected shape {expected}, got {tuple(B.shape)}")
    by_group = rows, row_length, *B.shape[2:]
    checks.check_tensors(x, "x", near, True, delta=(delta, shape[:3]), B=(B, by_group), C=(C, by_group), z=(z, shape))
    skip = (heads, channels) if isinstance(D, Tensor) and D.dim() == 2 else (heads,)
    checks.check_tensors(
        x, "x", wide, A=(A, (heads,)), D=(D, skip), delta_bias=(delta_bias, (heads,)),
        initial_state=(initial_state, (layout.num_documents, heads, channels, B.shape[3])),
    )  # fmt: skip
    checks.check_flags(delta_softplus=delta_softplus, return_final_state=return_final_state)
    if delta_limit is not None:
        pair = isinstance(delta_limit, (tuple, list)) and len(delta_limit) == 2
        if (
            not pair
            or not all(isinstance(one, (int, float)) for one in delta_limit)
            or delta_limit[0] > delta_limit[1]
        ):
            raise ValueError(f"delta_limit: expected (low, high) with low at most high, or None, got {delta_limit!r}")
    a = SsdArguments(
        x, delta, A, B, C, D, z, delta_bias, initial_state, layout.offsets, layout, delta_softplus, delta_limit,
        return_final_state,
    )  # fmt: skip
    y, final_state = choose(backend, x.device, "ssd_pack")(a)
    return (y, final_state) if return_final_state else y


class SsdArguments(NamedTuple):
    """Arguments of every implementation; offsets: the layout's, None: zeros."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    offsets: Tensor | None
    layout: SequenceLayout
    delta_softplus: bool
    delta_limit: tuple[float, float] | None
    return_final_state: bool

    def aligned(self) -> SsdArguments:
        """Pad states to a multiple of 16: products of matrices that begin off alignment round otherwise."""
        states = self.B.shape[3]
        if states % 16 == 0:
            return self
        pad = (0, -states % 16)
        initial = None if self.initial_state is None else F.pad(self.initial_state, pad)
        return self._replace(B=F.pad(self.B, pad), C=F.pad(self.C, pad), initial_state=initial)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of states (S, H, P, N)."""
        return self.layout.starts.shape[0], *self.x.shape[2:], self.B.shape[3]


class Tile(NamedTuple):
    """Chunks of as many slots, which are met together. Shapes: K chunks of it, Q slots."""

    chunks: Tensor  # (K,)
    slot: Tensor  # (K, Q), tokens' slots; past a chunk's end its last token's
    inside: Tensor  # (K, Q) bool, whether there is a token
    has_before: bool  # whether there are states before these chunks
    has_after: bool  # whether states after these chunks are wanted

    def gather(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather (B, L, ...) to (K, Q, ...), zero without a token."""
        tokens = tensor.flatten(0, 1)[self.slot].to(dtype)
        return torch.where(self.inside.view(*self.inside.shape, *(1,) * (tensor.dim() - 2)), tokens, 0)


class Chunks:
    """Cut a layout's documents in chunks, in document order.

    Attributes:
        count, first, last: (S,), a document's number of chunks, its first and last one.
        document, index, reverse: (K,), a chunk's document, its place there, the chunk at that place from the end.
        start, end: (K,), a chunk's first slot, and the one after its last.
    """

    def __init__(self, layout: SequenceLayout, offsets: Tensor | None) -> None:
        starts, ends = layout.starts.long(), layout.ends.long()
        before = torch.zeros_like(starts) if offsets is None else offsets.long() % CHUNK
        self.count = (before + ends - starts + CHUNK - 1) // CHUNK
        self.last = self.count.cumsum(0) - 1
        self.first = self.last + 1 - self.count
        document = self.document = torch.repeat_interleave(self.count)
        self.index = torch.arange(document.numel(), device=starts.device) - self.first[document]
        chunk_end = (starts - before)[document] + (self.index + 1) * CHUNK
        self.start = torch.maximum(starts[document], chunk_end - CHUNK)
        self.end = torch.minimum(ends[document], chunk_end)

    def tile(self, chunks: Tensor, width: int, has_before: bool = True, has_after: bool = True) -> Tile:
        """Lay chunks of at most ``width`` tokens side by side."""
        slot = self.start[chunks, None] + torch.arange(width, device=chunks.device)
        end = self.end[chunks, None]
        return Tile(chunks, torch.minimum(slot, end - 1), slot < end, has_before, has_after)

    def tiles(self, heads: int, before_first: bool, after_last: bool) -> list[Tile]:
        """Sort chunks by what they need: slots by their own number of tokens, states before and after.

        before_first, after_last: whether there are states before documents, and whether those after them are wanted.
        """
        widths = torch.tensor(TILES, device=self.start.device)
        width = torch.searchsorted(widths, self.end - self.start)
        before = (self.index > 0) | before_first
        after = (self.index + 1 < self.count[self.document]) | after_last
        kind = 4 * width + 2 * before + after
        tiles = []
        nothing = 2 * before_first + after_last  # of rows of padding: one tile without chunks
        for number in kind.unique().tolist() or [nothing]:
            size = TILES[number // 4]
            chunks = (kind == number).nonzero().flatten()
            for some in chunks.split(max(1, BATCH_SCORES // (heads * size * size))):
                tiles.append(self.tile(some, size, bool(number & 2), bool(number & 1)))
        return tiles

    def pass_states(
        self, outer: Tensor | None, local: States, decay: Tensor, reverse: bool = False
    ) -> tuple[States, Tensor | None]:
        """Walk each document's chunks: after a chunk the state is ``decay * state + local``.

        Args:
            outer: (S, ...), states before documents; None: zero.
            local: what chunks add, of those after which a state is wanted.
            decay: (K, ...), of each chunk.
            reverse: walk from a document's last chunk to its first.

        Returns states before chunks (reverse: after them), and after documents (before them) if ``local`` has these.
        """
        edge, step = (self.last, -1) if reverse else (self.first, 1)
        documents = torch.arange(self.count.numel(), device=decay.device)
        state, passed, chunks = outer, [], []
        for level in range(int(self.count.max()) if len(documents) else 1):
            longer = self.count[documents] > level
            documents = documents[longer]
            chunk = edge[documents] + step * level
            if level:
                here = state if state is None or longer.all() else state[longer]
                state = _after(here, local.of(chunk - step), decay[chunk - step])
            if state is not None:
                passed.append(state)
                chunks.append(chunk)
        states = States.cat(passed, chunks, like=local)
        edge = self.first if reverse else self.last
        if len(edge) and local.row[edge[0]] < 0:
            return states, None
        final = local.of(edge)
        met = (states.row[edge] >= 0).nonzero().flatten()
        if len(met) == len(edge):
            final = _after(states.of(edge), final, decay[edge])
        elif len(met):  # a longer document's, where others have no state before them
            of_met = _after(states.of(edge[met]), final[met], decay[edge[met]])
            final = final.index_copy(0, met, of_met)
        return states, final


def _after(state: Tensor | None, local: Tensor, decay: Tensor) -> Tensor:
    return local if state is None else torch.addcmul(local, decay, state)


class States(NamedTuple):
    """States of some chunks, in any order."""

    values: Tensor
    row: Tensor  # (K,), where a chunk's is in ``values``, else -1

    @classmethod
    def cat(cls, values: list[Tensor], chunks: list[Tensor], like: States) -> States:
        """Join states of these chunks; none: in the shape of others."""
        row = torch.full_like(like.row, -1)
        if not values:
            return cls(like.values[:0], row)
        place = torch.cat(chunks)
        row[place] = torch.arange(len(place), device=row.device)
        return cls(values[0] if len(values) == 1 else torch.cat(values), row)

    def of(self, chunks: Tensor) -> Tensor:
        """Return the states of these chunks, which have one."""
        row = self.row[chunks]
        if torch.equal(row, torch.arange(len(self.values), device=row.device)):
            return self.values
        return self.values.index_select(0, row)


class Steps(NamedTuple):
    """Step sizes of chunks: (K, Q, H)."""

    size: Tensor
    slope: Tensor  # of size over delta
    total: Tensor  # sum of size * A, from a chunk's start to each token
    from_start: Tensor  # decay from a chunk's start to a token
    to_end: Tensor  # decay from a token to its chunk's end

    @classmethod
    def of(cls, a: SsdArguments, tile: Tile) -> Steps:
        """Compute step sizes and sums of log-decays of a tile's tokens."""
        dtype = checks.accumulation_dtype(a.x.dtype)
        delta = tile.gather(a.delta, dtype)
        size = delta if a.delta_bias is None else delta + a.delta_bias
        slope = torch.ones_like(size)
        if a.delta_softplus:
            size, slope = _elementwise(F.softplus, size), _elementwise(torch.sigmoid, size)
        if a.delta_limit is not None:
            low, high = a.delta_limit
            slope = torch.where((size >= low) & (size <= high), slope, 0)
            size = size.clamp(low, high)
        size = torch.where(tile.inside[..., None], size, 0)
        total = (size * a.A).cumsum(1)
        to_end = _elementwise(torch.exp, total[:, -1:] - total)
        return cls(size, slope, total, _elementwise(torch.exp, total), to_end)


class Tokens(NamedTuple):
    """Hold what a tile reads: x (K, Q, H, P), B and C (K, Q, G, N), and its steps."""

    tile: Tile
    x: Tensor
    B: Tensor
    C: Tensor
    steps: Steps

    @classmethod
    def of(cls, a: SsdArguments, tile: Tile) -> Tokens:
        """Gather a tile's x, B and C."""
        x, B, C = (tile.gather(tensor, a.A.dtype) for tensor in (a.x, a.B, a.C))
        return cls(tile, x, B, C, Steps.of(a, tile))


def chunked(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by matrix products; differentiable."""
    with torch.autocast(a.x.device.type, enabled=False):
        states, a = a.B.shape[3], a.aligned()
        chunks = Chunks(a.layout, a.offsets)
        tiles = chunks.tiles(a.x.shape[2], a.initial_state is not None, a.return_final_state)
        tokens = [Tokens.of(a, tile) for tile in tiles]
        before, final, _ = _states_before(a, chunks, tokens)
        outputs = []
        for of in tokens:
            start = before.of(of.tile.chunks) if of.tile.has_before else None
            y = _output(a, of, start)
            outputs.append(y if a.z is None else y * _elementwise(F.silu, of.tile.gather(a.z, y.dtype)))
        return _scatter(tiles, outputs, a.x), None if final is None else final[..., :states].contiguous()


def _output(a: SsdArguments, of: Tokens, start: Tensor | None) -> Tensor:
    """Compute y (K, Q, H, P) before the gate, from states (K, H, P, N) before chunks."""
    scores = _scores(of.B, of.C, of.x.shape[2]) * _decays(of.steps.total)
    scores = scores * of.steps.size.transpose(1, 2)[:, :, None]
    y = _multiply(scores, of.x.transpose(1, 2)).transpose(1, 2)
    if start is not None:
        y = y + _by_group(of.C, start) * of.steps.from_start[..., None]
    return y if a.D is None else y + _skip(a.D) * of.x


def _states_before(a: SsdArguments, chunks: Chunks, tokens: list[Tokens]) -> tuple[States, Tensor | None, Tensor]:
    """Compute states before chunks, final states, where tiles want them, and chunks' decays (K, H, 1, 1)."""
    none = States(a.A.new_empty(0, *a.state_shape[1:]), torch.full_like(chunks.index, -1))
    decays = [of.steps.from_start[:, -1, :, None, None] for of in tokens]
    every_chunk = torch.arange(len(chunks.index), device=a.x.device)
    decay = States.cat(decays, [of.tile.chunks for of in tokens], like=none).of(every_chunk)
    wanted = [of for of in tokens if of.tile.has_after]
    values = [_outer(of.x * (of.steps.size * of.steps.to_end)[..., None], of.B) for of in wanted]
    local = States.cat(values, [of.tile.chunks for of in wanted], like=none)
    states, final = chunks.pass_states(a.initial_state, local, decay)
    return states, final, decay


def _scatter(tiles: list[Tile], parts: list[Tensor], like: Tensor) -> Tensor:
    """Write each tile's (K, Q, ...) to slots, in like's shape and dtype, zero at padding."""
    flat = like.flatten(0, 1)
    zeros = torch.zeros_like(flat, dtype=parts[0].dtype, memory_format=torch.contiguous_format)
    slots = torch.cat([tile.slot[tile.inside] for tile in tiles])
    values = torch.cat([part[tile.inside] for tile, part in zip(tiles, parts)])
    return zeros.index_copy(0, slots, values).view(like.shape).to(like.dtype)


def _decays(total: Tensor) -> Tensor:
    """Compute (K, H, Q, Q): what token t sees of what token s adds."""
    total = total.transpose(1, 2)
    earlier = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).tril()
    return torch.where(earlier, total[..., None] - total[:, :, None], -torch.inf).exp()


def _scores(B: Tensor, C: Tensor, heads: int) -> Tensor:
    scores = _multiply(C.transpose(1, 2), B.permute(0, 2, 3, 1))
    return scores.repeat_interleave(heads // scores.shape[1], dim=1)


def _outer(x: Tensor, B: Tensor) -> Tensor:
    """Sum x[t] (outer) B[t] over each chunk: (K, Q, H, P), (K, Q, G, N) to (K, H, P, N)."""
    by_group = x.unflatten(2, (B.shape[2], -1)).flatten(3).permute(0, 2, 3, 1)
    return _multiply(by_group, B.transpose(1, 2)).unflatten(2, (-1, x.shape[3])).flatten(1, 2)


def _by_group(C: Tensor, state: Tensor) -> Tensor:
    """Apply states to C: (K, Q, G, N), (K, H, P, N) to (K, Q, H, P)."""
    by_group = state.unflatten(1, (C.shape[2], -1)).flatten(2, 3)
    out = _multiply(C.transpose(1, 2), by_group.mT)
    return out.unflatten(3, (-1, state.shape[2])).transpose(1, 2).flatten(2, 3)


def _of_states(x: Tensor, state: Tensor, groups: int) -> Tensor:
    """Sum x[t] states over a group's heads: (K, Q, H, P), (K, H, P, N) to (K, Q, G, N)."""
    by_group = x.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
    return _multiply(by_group, state.unflatten(1, (groups, -1)).flatten(2, 3)).transpose(1, 2)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; with a vector by products and sums, since BLAS rounds one otherwise than a batch."""
    if left.shape[-1] == 1:
        return left * right
    if right.shape[-1] == 1:
        return (left * right.mT).sum(-1, keepdim=True)
    if left.shape[-2] == 1:
        return (left.mT * right).sum(-2, keepdim=True)
    return left @ right


def _elementwise(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Apply a function to whole vectors: of the rest PyTorch takes each value by another, which rounds otherwise."""
    rest = -value.numel() % VECTORS
    if rest == 0:
        return function(value)
    return function(F.pad(value.flatten(), (0, rest)))[: value.numel()].view(value.shape)


def _skip(D: Tensor) -> Tensor:
    return D if D.dim() == 2 else D[:, None]


class TileGradients(NamedTuple):
    """Gradients of a tile's tokens, (K, Q, ...); log: of size * A."""

    x: Tensor
    size: Tensor
    log: Tensor
    B: Tensor
    C: Tensor


def _chunked_backward(a: SsdArguments, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``chunked``: of x, delta, A, B, C, D, z, delta_bias and the initial state.

    States are recomputed. Their gradients run against time from ``dfinal``, ``e[t-1] = exp(d[t] A) (e[t] + dy[t] C[t])``,
    chunk by chunk as states do. With both a tile's gradients need no other tile: ``_tile_gradients``. Then

        ddelta = (dsize + A dlog) slope,  dA = sum of d dlog,  dD = sum of dy x,  dbias = sum of ddelta
    """
    states, a = a.B.shape[3], a.aligned()
    chunks = Chunks(a.layout, a.offsets)
    tiles = chunks.tiles(a.x.shape[2], a.initial_state is not None, dfinal is not None)
    tokens = [Tokens.of(a, tile) for tile in tiles]
    before, _, decay = _states_before(a, chunks, tokens)

    # Of the output before the gate, and of z.
    starts = [before.of(tile.chunks) if tile.has_before else None for tile in tiles]
    pairs = [_gate_gradients(a, *of, dy) for of in zip(tokens, starts)]
    dys = [dseen for dseen, _ in pairs]
    dzs = [dz for _, dz in pairs if dz is not None]

    # Of states after chunks.
    wanted = [(of, dseen) for of, dseen in zip(tokens, dys) if of.tile.has_before]
    values = [_outer(dseen * of.steps.from_start[..., None], of.C) for of, dseen in wanted]
    local = States.cat(values, [of.tile.chunks for of, _ in wanted], like=before)
    outer = None if dfinal is None else F.pad(dfinal, (0, a.B.shape[3] - states))
    after, dinitial = chunks.pass_states(outer, local, decay, reverse=True)
    del local, values

    # Of tokens, then sums over them.
    found = []
    for of, start, dseen in zip(tokens, starts, dys):
        end = after.of(of.tile.chunks) if of.tile.has_after else None
        found.append(_tile_gradients(a, of, dseen, start, end))
    ddeltas = [(of.size + of.log * a.A) * t.steps.slope for of, t in zip(found, tokens)]
    dA = _total(of.log * t.steps.size for of, t in zip(found, tokens))
    dD = None if a.D is None else _total(dseen * of.x for of, dseen in zip(tokens, dys))
    dB, dC = (
        _scatter(tiles, parts, like)[..., :states].contiguous()
        for parts, like in (([of.B for of in found], a.B), ([of.C for of in found], a.C))
    )
    return (
        _scatter(tiles, [of.x for of in found], a.x), _scatter(tiles, ddeltas, a.delta), dA, dB, dC,
        dD if a.D is None or dD is None or a.D.dim() == 2 else dD.sum(1),
        None if a.z is None else _scatter(tiles, dzs, a.x),
        None if a.delta_bias is None else _total(ddeltas),
        None if dinitial is None else dinitial[..., :states].contiguous(),
    )  # fmt: skip


def _total(parts: Iterable[Tensor]) -> Tensor:
    """Sum (K, Q, ...) of all tiles over their tokens."""
    return torch.stack([part.sum((0, 1)) for part in parts]).sum(0)


def _gate_gradients(
    a: SsdArguments, of: Tokens, start: Tensor | None, dy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of a tile's output before the gate, ``dy silu(z)``, and of z, ``dy y silu'(z)``."""
    grad = torch.zeros_like(of.x) if dy is None else of.tile.gather(dy, a.A.dtype)
    if a.z is None:
        return grad, None
    z = of.tile.gather(a.z, a.A.dtype)
    gate = _elementwise(torch.sigmoid, z)
    return grad * z * gate, grad * gate * (1 + z * (1 - gate)) * _output(a, of, start)


def _tile_gradients(
    a: SsdArguments, of: Tokens, dy: Tensor, start: Tensor | None, end: Tensor | None
) -> TileGradients:
    """Compute the gradients of a tile's x, size, size * A, B and C.

    With a state h before a chunk, the gradient e of the state after it, and decays a[t, s] from token s to t (from 0, the
    chunk's start; to Q, its end), and G[t, s] = C[t] B[s], W[t, s] = a[t, s] (dy[t] x[s]) for s <= t:

        dC[t] = sum over heads of  a[t, 0] dy[t] h + sum over s of W[t, s] d[s] B[s]
        dB[s] = sum over heads of  a[Q, s] d[s] x[s] e + sum over t of W[t, s] d[s] C[t]
        dsize[s] = x[s] u[s],  dx[s] = d[s] u[s] + D dy[s],  u[s] = a[Q, s] e B[s] + sum over t of G[t, s] a[t, s] dy[t]
        dlog[t] = what decays over step t: what tokens from t on see of tokens before t, and h and these tokens in e
    """
    size, total, tile, groups = of.steps.size, of.steps.total, of.tile, of.B.shape[2]
    x, dy_heads = of.x, dy.transpose(1, 2)

    # Of pairs of tokens.
    decays, scores = _decays(total), _scores(of.B, of.C, x.shape[2])
    pairs = _multiply(dy_heads, x.permute(0, 2, 3, 1)) * decays * size.transpose(1, 2)[:, :, None]
    of_group = pairs.unflatten(1, (groups, -1)).sum(2)
    dC = _multiply(of_group, of.B.transpose(1, 2)).transpose(1, 2)
    dB = _multiply(of_group.mT, of.C.transpose(1, 2)).transpose(1, 2)
    of_x = _multiply((scores * decays).mT, dy_heads).transpose(1, 2)
    earlier = (pairs * scores).tril(-1)
    passes = (earlier.sum(3) - earlier.sum(2)).transpose(1, 2)

    # Of the state before, which every token sees, and the one after, to which every token adds.
    dlog = torch.zeros_like(size)
    if start is not None:
        dC = dC + _of_states(dy * of.steps.from_start[..., None], start, groups)
        passes = passes + (_by_group(of.C, start) * of.steps.from_start[..., None] * dy).sum(3)
    if end is not None:
        dB = dB + _of_states(x * (size * of.steps.to_end)[..., None], end, groups)
        later = _by_group(of.B, end) * of.steps.to_end[..., None]
        added = (later * x).sum(3) * size
        of_x, dlog = of_x + later, added.cumsum(1) - added
        if start is not None:
            dlog = dlog + ((start * end).sum((2, 3)) * of.steps.from_start[:, -1])[:, None]
    dlog = torch.where(tile.inside[..., None], dlog + passes.flip(1).cumsum(1).flip(1), 0)
    dsize = torch.where(tile.inside[..., None], (of_x * x).sum(3), 0)
    dx = of_x * size[..., None]
    return TileGradients(dx if a.D is None else dx + _skip(a.D) * dy, dsize, dlog, dB, dC)


class SsdSaved(NamedTuple):
    """Saved for the backward: nothing yet."""

    states: Tensor | None


def _forward(a: SsdArguments, needs_backward: bool) -> tuple[Outputs, SsdSaved]:
    forward = _kernels(a.x).forward if a.x.is_cuda else chunked
    y, final_state = forward(a)
    return Outputs(y=y, final_state=final_state), SsdSaved(states=None)


def _kernels(x: Tensor) -> Any:
    from packmamba.ops import ssd_triton  # which imports Triton

    check_has_kernels(x)
    return ssd_triton


def _fake(a: SsdArguments, needs_backward: bool) -> tuple[Outputs, SsdSaved]:
    final_state = a.A.new_empty(a.state_shape) if a.return_final_state else None
    return Outputs(y=empty_grad_like(a.x), final_state=final_state), SsdSaved(states=None)


def _backward(a: SsdArguments, saved: SsdSaved, grads: Outputs) -> dict[str, Tensor | None]:
    dfinal = grads.final_state if a.return_final_state else None
    if a.layout.starts.numel() == 0:
        tensors: Any = a[: compiled.signature.num_gradients]
        gradients = tuple(None if t is None else torch.zeros_like(t) for t in tensors)
    elif a.x.is_cuda:
        gradients = _kernels(a.x).backward(a, grads.y, dfinal)
    else:
        with torch.autocast(a.x.device.type, enabled=False):
            gradients = _chunked_backward(a, grads.y, dfinal)
    return dict(zip(compiled.signature.gradients, gradients))


compiled: PackedOperator[SsdArguments] = PackedOperator(
    "ssd_pack",
    arguments=SsdArguments,
    outputs=Outputs,
    saved=SsdSaved,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    constants=("offsets",),
)
