"""Mamba-2's scan (SSD) over packed documents, in chunks from document starts.

Shapes: B rows, L slots, S documents, H heads, P channels of a head, G groups, N states, K chunks, Q tokens of a chunk.
"""

from __future__ import annotations

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
    checks.check_tensors(
        x, "x", near, True, delta=(delta, shape[:3]), B=(B, by_group), C=(C, by_group), z=(z, shape)
    )
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
            raise ValueError(
                f"delta_limit: expected (low, high) with low at most high, or None, got {delta_limit!r}"
            )
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
        return self.layout.starts.shape[0], *self.x.shape[2:], self.B.shape[3]


class Chunks:
    """Cut a layout's documents in chunks, in document order.

    Attributes:
        count, first, last: (S,), a document's number of chunks, its first and last one.
        document, index, reverse: (K,), a chunk's document, its place there, the chunk at that place from the end.
        slot: (K, Q), tokens' slots; past a chunk's end its last token's. inside: (K, Q) bool, whether there is a token.
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
        start = torch.maximum(starts[document], chunk_end - CHUNK)
        end = torch.minimum(ends[document], chunk_end)
        slot = start[:, None] + torch.arange(CHUNK, device=starts.device)
        self.inside = slot < end[:, None]
        self.slot = torch.minimum(slot, end[:, None] - 1)
        self.reverse = (self.first + self.last)[document] - torch.arange(
            document.numel(), device=starts.device
        )

    def gather(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather (B, L, ...) to (K, Q, ...), zero without a token."""
        tokens = tensor.flatten(0, 1)[self.slot].to(dtype)
        return torch.where(self.inside.view(*self.inside.shape, *(1,) * (tensor.dim() - 2)), tokens, 0)

    def scatter(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Write (K, Q, ...) to slots, in like's shape and dtype, zero at padding."""
        slots = torch.zeros_like(
            like.flatten(0, 1), dtype=tokens.dtype, memory_format=torch.contiguous_format
        )
        out = slots.index_copy(0, self.slot[self.inside], tokens[self.inside])
        return out.view(like.shape).to(like.dtype)

    def pass_states(self, first: Tensor, local: Tensor, decay: Tensor, reverse: bool = False) -> Tensor:
        """Compute states at chunks' starts, (K, ...): ``decay * state + local`` is the next chunk's; reverse: at their ends."""
        if reverse:
            return self.pass_states(first, local[self.reverse], decay[self.reverse])[self.reverse]
        levels = [first]
        documents = torch.arange(self.count.numel(), device=first.device)
        for level in range(1, int(self.index.max()) + 1 if len(self.index) else 1):
            longer = self.count[documents] > level
            documents = documents[longer]
            chunk = self.first[documents] + level - 1
            levels.append(decay[chunk] * levels[-1][longer] + local[chunk])
        return torch.cat(levels)[torch.argsort(torch.argsort(self.index, stable=True))]


class Steps(NamedTuple):
    """Step sizes of chunks: (K, Q, H)."""

    size: Tensor
    slope: Tensor  # of size over delta
    total: Tensor  # sum of size * A, from a chunk's start to each token
    from_start: Tensor  # decay from a chunk's start to a token
    to_end: Tensor  # decay from a token to its chunk's end

    @classmethod
    def of(cls, a: SsdArguments, chunks: Chunks) -> Steps:
        dtype = checks.accumulation_dtype(a.x.dtype)
        delta = chunks.gather(a.delta, dtype)
        size = delta if a.delta_bias is None else delta + a.delta_bias
        slope = torch.ones_like(size)
        if a.delta_softplus:
            size, slope = F.softplus(size), torch.sigmoid(size)
        if a.delta_limit is not None:
            low, high = a.delta_limit
            slope = torch.where((size >= low) & (size <= high), slope, 0)
            size = size.clamp(low, high)
        size = torch.where(chunks.inside[..., None], size, 0)
        total = (size * a.A).cumsum(1)
        return cls(size, slope, total, total.exp(), (total[:, -1:] - total).exp())


def chunked(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by matrix products; differentiable."""
    with torch.autocast(a.x.device.type, enabled=False):
        states, a = a.B.shape[3], a.aligned()
        chunks = Chunks(a.layout, a.offsets)
        steps = Steps.of(a, chunks)
        x, B = chunks.gather(a.x, a.A.dtype), chunks.gather(a.B, a.A.dtype)
        start, local, decay = _states(a, chunks, steps, x, B)
        final = None
        if a.return_final_state:
            final = (decay[chunks.last] * start[chunks.last] + local[chunks.last])[
                ..., :states
            ].contiguous()
        del local
        C = chunks.gather(a.C, a.A.dtype)
        parts = []
        for part in _parts(x):
            scores = _scores(B[part], C[part], x.shape[2]) * _decays(steps.total[part])
            scores = scores * steps.size[part].transpose(1, 2)[:, :, None]
            within = _multiply(scores, x[part].transpose(1, 2)).transpose(1, 2)
            parts.append(within + _by_group(C[part], start[part]) * steps.from_start[part][..., None])
        y = torch.cat(parts)
        if a.D is not None:
            y = y + _skip(a.D) * x
        if a.z is not None:
            y = y * F.silu(chunks.gather(a.z, y.dtype))
        return chunks.scatter(y, a.x), final


def _states(
    a: SsdArguments, chunks: Chunks, steps: Steps, x: Tensor, B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states (K, H, P, N) at chunks' starts, what chunks add, and their decay (K, H, 1, 1)."""
    local = _outer(x * (steps.size * steps.to_end)[..., None], B)
    decay = steps.from_start[:, -1, :, None, None]
    first = a.A.new_zeros(a.state_shape) if a.initial_state is None else a.initial_state
    return chunks.pass_states(first, local, decay), local, decay


def _parts(x: Tensor) -> list[slice]:
    count = max(1, BATCH_SCORES // (x.shape[2] * CHUNK * CHUNK))
    return [slice(i, i + count) for i in range(0, max(1, x.shape[0]), count)]


def _decays(total: Tensor) -> Tensor:
    """Compute (K, H, Q, Q): what token t sees of what token s adds."""
    total = total.transpose(1, 2)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).tril()
    return torch.where(earlier, total[..., None] - total[:, :, None], -torch.inf).exp()


def _scores(B: Tensor, C: Tensor, heads: int) -> Tensor:
    scores = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)
    return scores.repeat_interleave(heads // scores.shape[1], dim=1)


def _outer(x: Tensor, B: Tensor) -> Tensor:
    """Sum x[t] (outer) B[t] over each chunk: (K, Q, H, P), (K, Q, G, N) to (K, H, P, N)."""
    by_group = x.unflatten(2, (B.shape[2], -1)).flatten(3).permute(0, 2, 3, 1)
    return (by_group @ B.transpose(1, 2)).unflatten(2, (-1, x.shape[3])).flatten(1, 2)


def _by_group(C: Tensor, state: Tensor) -> Tensor:
    """Apply states to C: (K, Q, G, N), (K, H, P, N) to (K, Q, H, P)."""
    by_group = state.unflatten(1, (C.shape[2], -1)).flatten(2, 3)
    out = _multiply(C.transpose(1, 2), by_group.mT)
    return out.unflatten(3, (-1, state.shape[2])).transpose(1, 2).flatten(2, 3)


def _of_states(x: Tensor, state: Tensor, groups: int) -> Tensor:
    """Sum x[t] states over a group's heads: (K, Q, H, P), (K, H, P, N) to (K, Q, G, N)."""
    by_group = x.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
    return (by_group @ state.unflatten(1, (groups, -1)).flatten(2, 3)).transpose(1, 2)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; a matrix and a vector by a sum, since BLAS rounds one otherwise than a batch."""
    return (left * right.mT).sum(-1, keepdim=True) if right.shape[-1] == 1 else left @ right


def _skip(D: Tensor) -> Tensor:
    return D if D.dim() == 2 else D[:, None]


def _chunked_backward(
    a: SsdArguments, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    (groups, states), heads, a = a.B.shape[2:], a.x.shape[2], a.aligned()
    chunks = Chunks(a.layout, a.offsets)
    steps = Steps.of(a, chunks)
    size, total = steps.size, steps.total
    x, B, C = (chunks.gather(tensor, a.A.dtype) for tensor in (a.x, a.B, a.C))
    start, _, decay = _states(a, chunks, steps, x, B)
    dy = torch.zeros_like(x) if dy is None else chunks.gather(dy, a.A.dtype)
    dz = None
    if a.z is not None:
        z = chunks.gather(a.z, a.A.dtype)
        open_, before = torch.sigmoid(z), dy
        dy = before * z * open_
        dz = before * open_ * (1 + z * (1 - open_))
    dseen = dy * steps.from_start[..., None]
    dlast = a.A.new_zeros(a.state_shape) if dfinal is None else F.pad(dfinal, (0, a.B.shape[3] - states))
    dlocal = _outer(dseen, C)
    dend = chunks.pass_states(dlast, dlocal, decay, reverse=True)
    dinitial = None
    if a.initial_state is not None:
        dinitial = (decay[chunks.first] * dend[chunks.first] + dlocal[chunks.first])[
            ..., :states
        ].contiguous()
    del dlocal
    dx, dB, dC = map(torch.empty_like, (x, B, C))
    dsize, dlog = torch.empty_like(size), torch.empty_like(size)
    for part in _parts(x):
        decays = _decays(total[part])
        weighed = decays * size[part].transpose(1, 2)[:, :, None]
        scores = _scores(B[part], C[part], heads)
        dscores = (dy[part].transpose(1, 2) @ x[part].permute(0, 2, 3, 1)) * weighed
        moved = (dscores * scores).tril(-1)
        of_group = dscores.unflatten(1, (groups, -1)).sum(2)
        dC[part] = (of_group @ B[part].transpose(1, 2)).transpose(1, 2) + _of_states(
            dseen[part], start[part], groups
        )
        scaled = x[part] * (size * steps.to_end)[part][..., None]
        dB[part] = (of_group.mT @ C[part].transpose(1, 2)).transpose(1, 2) + _of_states(
            scaled, dend[part], groups
        )
        seen = _by_group(C[part], start[part]) * steps.from_start[part][..., None]
        later = _by_group(B[part], dend[part]) * steps.to_end[part][..., None]
        dx[part] = _multiply((scores * decays).mT, dy[part].transpose(1, 2)).transpose(1, 2) + later
        # Gradients of size * A, by pairs of tokens, and states at both ends.
        passes = (moved.sum(3) - moved.sum(2)).transpose(1, 2) + (seen * dy[part]).sum(3)
        added = (later * x[part]).sum(3) * size[part]
        through = (start[part] * dend[part]).sum((2, 3)) * decay[part][..., 0, 0]
        dlog[part] = passes.flip(1).cumsum(1).flip(1) + added.cumsum(1) - added + through[:, None]
        dsize[part] = (dx[part] * x[part]).sum(3)
        if dz is not None:
            forward = _multiply(scores * weighed, x[part].transpose(1, 2))
            dz[part] *= forward.transpose(1, 2) + seen + (0 if a.D is None else _skip(a.D) * x[part])
    dx = dx * size[..., None]
    if a.D is not None:
        dx = dx + _skip(a.D) * dy
    inside = chunks.inside[..., None]
    dlog = torch.where(inside, dlog, 0)
    ddelta = torch.where(inside, (dsize + dlog * a.A) * steps.slope, 0)
    dD = None
    if a.D is not None:
        dD = (dy * x).sum((0, 1))
        dD = dD if a.D.dim() == 2 else dD.sum(1)
    return (
        chunks.scatter(dx, a.x), chunks.scatter(ddelta, a.delta), (dlog * size).sum((0, 1)),
        chunks.scatter(dB, a.B)[..., :states].contiguous(), chunks.scatter(dC, a.C)[..., :states].contiguous(), dD,
        None if dz is None else chunks.scatter(dz, a.x),
        None if a.delta_bias is None else ddelta.sum((0, 1)), dinitial,
    )  # fmt: skip


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
