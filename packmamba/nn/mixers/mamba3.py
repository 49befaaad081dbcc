"""The Mamba-3 mixer (SISO, MIMO) on packed documents: trapezoidal rule, rotating keys and queries.

Of a head, with v = x (P), k and q from B and C (N), step size dt, decay exp(-a dt), and lambda
between 0 and 1:

    h[t] = exp(-a[t] dt[t]) (h[t-1] + (1 - lambda[t]) dt[t] v[t-1] (outer) k[t-1])
           + lambda[t] dt[t] v[t] (outer) k[t]
    y[t] = h[t] q[t] + D v[t]

So a token's outer product enters twice: with its own weight, and with the next token's. Both at
once are Mamba-2's recurrence (``ops.ssd_pack``), whose output then holds what only the next token's
may, ``(1 - lambda[t+1]) dt[t+1] (k[t] . q[t]) v[t]``, and gives it back token by token. A
document's last token has no next one.

k and q are rotated, in pairs of coordinates, by the sum of the document's angles up to the token.
Only differences of sums reach an output. So a document's state is held in the frame of its last
token: a piece that goes on from it starts its sum at zero, as every document does, a scheme that
hands on one part of a state hands on no angle that belongs to another, and the mean of many
documents' states (``fitted_noise``) is one of tensors in one frame. mamba-ssm's state has a fourth
tensor, the sum, and rotates the others by it.

MIMO has R of v, k and q a head and token, which share a state:

    h[t] += lambda[t] dt[t] sum over r of v[t, r] (outer) k[t, r],  y[t, r] = h[t] q[t, r] + D v[t, r]

with v[t, r] = mimo_x[r] x[t]; the layer's output is the sum over r of mimo_o[r] y[t, r]
silu(mimo_z[r] z[t]). The scan then walks R slots a token, of which the first alone decays the
state. In slot r the state holds k[t, s] for s <= r only; ``_within_token`` adds s > r, as it takes
away what only the next token may hold.

Shapes: B rows, L slots, S documents, R ranks (SISO: 1), H heads, P headdim, G ngroups, N d_state,
n angles.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba import ops
from packmamba.errors import expect
from packmamba.nn.init import Projection
from packmamba.nn.mixers.mixer import HeadMixer, State, call
from packmamba.ops.backends import backend_name
from packmamba.ops.checks import accumulation_dtype, is_transforming
from packmamba.ops.context_parallel import first_after, sum_before
from packmamba.ops.simple_gla import LEAST_STEP
from packmamba.ops.ssd import elementwise

EPSILON = 1e-5  # of every norm
# Parts of a turn in which angles are summed; a token's angle may be up to 2**15 turns.
PARTS = 2**48


class PackedMamba3(HeadMixer):
    """Compute Mamba-3 on packed documents.

    Parameters have the names, shapes and initialisation of state-spaces' Mamba3 (mamba_ssm/modules/
    mamba3.py). Angles, decays and norms are computed in float32 or wider; the scan reads bfloat16
    beside bfloat16.

    Args (others as of PackedMamba2):
        rope_fraction: share of N that rotates, 0.5 or 1.
        decay: how a comes from its projection: "heavy_tail", 1 + x from zero on and 1 / (1 - x)
            below (mamba-ssm from June 2026); or "softplus" (mamba-ssm before, and fla). The same
            weights compute another model, and mamba-ssm's checkpoints do not say which.
        A_floor: minimum of a.
        is_outproj_norm: normalise each head before the gate.
        is_mimo: mix ``mimo_rank`` inputs and outputs a head by one state. Coordinates (i, i + N/2)
            rotate together then, and (2i, 2i + 1) without, as in mamba-ssm: MIMO of rank 1 and SISO
            are different models.
        mimo_rank: R of MIMO.
        recompute: the backward computes all between the projections again.

    Raises TypeError or ValueError that names the argument.
    """

    NO_WEIGHT_DECAY = ("dt_bias", "D", "B_bias", "C_bias")
    PUBLISHED = {"state_spaces": "Mamba3"}
    WITHOUT_EFFECT = ("chunk_size", "dropout", "fuse_pregate_headwise_norm")
    EXPLICIT = {"decay": "heavy_tail"}

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        decay: str = EXPLICIT["decay"],
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "headdim": headdim, "ngroups": ngroups}
        sizes |= {"mimo_rank": mimo_rank}
        flags = {"is_outproj_norm": is_outproj_norm, "is_mimo": is_mimo}
        super().__init__(sizes, flags, (dt_min, dt_max, dt_init_floor), backend)
        expect(d_state % 2 == 0 or not is_mimo, "d_state", "an even number with is_mimo", d_state)
        expect(decay in ("heavy_tail", "softplus"), "decay", "'heavy_tail' or 'softplus'", repr(decay))
        expect(rope_fraction in (0.5, 1.0), "rope_fraction", "0.5 or 1.0", rope_fraction)
        self.num_angles = int(d_state * rope_fraction) // 2
        expect(self.num_angles, "d_state", f"a pair to rotate with rope_fraction={rope_fraction}", d_state)
        self.is_mimo = is_mimo
        self.rank = rank = mimo_rank if is_mimo else 1
        self.A_floor = A_floor
        self.decay = decay
        self.recompute = recompute
        # z, x, B, C, dt, a, lambda, angles
        self.parts = [self.d_inner] * 2 + [rank * ngroups * d_state] * 2 + [self.nheads] * 3 + [self.num_angles]
        self.in_proj = Projection(d_model, sum(self.parts), bias=False)
        self._make_parameters(d_state)
        k_shape = (rank, self.nheads, d_state) if is_mimo else (self.nheads, d_state)
        v_shape = (self.nheads, headdim)
        self.state_shapes = {"k_state": k_shape, "v_state": v_shape, "ssm_state": (*v_shape, d_state)}
        self._reset_own()
        # Holds the weight of a norm of each head.
        self.norm = nn.RMSNorm(self.d_inner, eps=EPSILON) if is_outproj_norm else None
        self.out_proj = Projection(self.d_inner, d_model, bias=False)
        self._mark_parameters()

    def _make_parameters(self, d_state: int) -> None:
        """Make parameters that are no projection's, empty, in the order of published checkpoints."""
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        self.B_bias = nn.Parameter(torch.empty(self.nheads, self.rank, d_state))
        self.C_bias = nn.Parameter(torch.empty(self.nheads, self.rank, d_state))
        self.B_norm = nn.RMSNorm(d_state, eps=EPSILON)
        self.C_norm = nn.RMSNorm(d_state, eps=EPSILON)
        self.D = nn.Parameter(torch.empty(self.nheads))
        if self.is_mimo:
            # Of x, of the gate z and of the output: (H, R, P).
            self.mimo_x = nn.Parameter(torch.empty(self.nheads, self.rank, self.headdim))
            self.mimo_z = nn.Parameter(torch.empty(self.nheads, self.rank, self.headdim))
            self.mimo_o = nn.Parameter(torch.empty(self.nheads, self.rank, self.headdim))

    def _reset_own(self) -> None:
        super()._reset_own()
        nn.init.ones_(self.B_bias)
        nn.init.ones_(self.C_bias)
        if self.is_mimo:
            nn.init.constant_(self.mimo_x, 1 / self.rank)
            nn.init.ones_(self.mimo_z)
            nn.init.constant_(self.mimo_o, 1 / self.rank)

    def _mix(self, projected: Tensor, *layouts_and_state: Any) -> tuple[Tensor, Any]:
        """Mix in_proj's output; conv_layout says whose previous token's k and v a token reads."""
        y, state = call(self._scan, projected, *layouts_and_state, recompute=self.recompute)
        return self.out_proj(y), state

    def _scan(
        self, projected: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        """Return out_proj's input (B, L, H P), and final states or None."""
        one_layout = conv_layout is ssm_layout
        # An outer product that enters inside a document would have no place in the scan.
        expect(one_layout or state is None, "state", "None where conv_layout is not ssm_layout", "states")
        documents = self._check_documents(projected, conv_layout, ssm_layout, state)
        conv_layout, ssm_layout, k_before, v_before, h = documents
        is_shared = conv_layout.crossing or ssm_layout.crossing
        expect(one_layout or not is_shared, "conv_layout", "ssm_layout where ranks share rows", "another")
        document = ssm_layout.slot_documents()
        conv_document = document if one_layout else conv_layout.slot_documents()
        # Absent documents of a CUDA graph lie behind every slot.
        first = ssm_layout.starts.clamp(max=document.numel() - 1)
        wide = accumulation_dtype(projected.dtype)
        z, *others = projected.split(self.parts, dim=-1)
        # Converted apart: else torch.compile computes each element's gradient by all their branches.
        x, B, C, dt, rate, trapezoid, angle = (part.to(wide) for part in others)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        k = self._per_head(B, self.B_norm, self.B_bias)
        q = self._per_head(C, self.C_norm, self.C_bias)
        dt = elementwise(F.softplus, dt + self.dt_bias)
        step = (self._rate(rate) * dt).clamp(min=LEAST_STEP)
        theta = self._sum_turns(elementwise(torch.tanh, angle) / 2, dt, ssm_layout, document, first)
        cos = elementwise(torch.cos, theta)[:, :, None]
        sin = elementwise(torch.sin, theta)[:, :, None]

        share = elementwise(torch.sigmoid, trapezoid)
        from_previous = (1 - share) * dt
        from_next = _next(from_previous, document, conv_document)
        if ssm_layout.crossing:
            from_next = torch.cat([from_next[:, :-1], first_after(from_previous, ssm_layout)], dim=1)
        if not one_layout:
            k_before, v_before = _before(k, x, first, conv_document)
        if k_before is not None and v_before is not None:
            entering = self._entering(k_before, v_before, _at(from_previous, first))
            h = entering if h is None else h + entering
        v = self._per_rank(x, "mimo_x")
        weight = share * dt + from_next
        rotated_k = _rotate(k, cos, sin)
        rotated_q = _rotate(q, cos, sin)
        # float16 would overflow: a step may be far smaller than the next one, which the weight
        # holds.
        dtype = wide if projected.dtype == torch.float16 else projected.dtype
        of_scan = {"layout": _stretch(ssm_layout, self.rank), "initial_state": h, "return_final_state": return_state}
        y, h = self._walk(v, rotated_k, rotated_q, weight, step, dtype, **of_scan)
        y = y + self._within_token(q, k, v, weight, from_next)
        y = self._gate(y, z.to(wide)).to(projected.dtype)
        return y, self._final_state(k, x, h, cos, sin, ssm_layout) if return_state else None

    def _final_state(self, k: Tensor, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, layout: Any) -> State:
        """Return the last tokens' k and x, and the scan's states h in their frame."""
        last = (layout.ends - 1).clamp(max=layout.num_slots - 1)
        k, x, cos, sin = (_at(tensor, last) for tensor in (k, x, cos, sin))
        k = k.view(-1, *self.state_shapes["k_state"])
        return k, x, _rotate(h, cos[:, 0, :, None], -sin[:, 0, :, None])

    def _entering(self, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        """Return what the tokens before documents add to states (S, H, P, N), by weights (S, H)."""
        v = self._per_rank(weight[..., None] * v, "mimo_x")
        return (v[..., None] * k.view(-1, self.rank, self.nheads, self.d_state)[..., None, :]).sum(1)

    def _walk(
        self, v: Tensor, k: Tensor, q: Tensor, weight: Tensor, step: Tensor, dtype: torch.dtype, **of_scan: Any
    ) -> tuple[Tensor, Any]:
        """Scan rotated k and q: return y (B, L, R, H, P), and final states or None.

        Args:
            weight, step: (B, L, H), of what a token adds, and of its decay.
            dtype: of the scan's x, B and C.
            of_scan: the layout of the scan's slots, and other arguments of ``ssd_pack``.
        """
        # The state decays at a token's first slot. Inputs are v times the weight over the step, by
        # which the scan multiplies them.
        steps = F.pad(step[:, :, None], (0, 0, 0, self.rank - 1), value=LEAST_STEP)
        x = v * (weight[:, :, None] / steps)[..., None]
        x, B, C = (tensor.flatten(1, 2).to(dtype) for tensor in (x, k, q))
        A = step.new_full((self.nheads,), -1)
        scanned = ops.ssd_pack(x, steps.flatten(1, 2), A, B, C, backend=self.backend, **of_scan)
        y, final_state = scanned if of_scan["return_final_state"] else (scanned, None)
        return y.unflatten(1, (-1, self.rank)), final_state

    def _within_token(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, from_next: Tensor) -> Tensor:
        """Return what to add to the scan's outputs (B, L, R, H, P): a token's effect on itself.

        At query r the scan's state holds the outer products of the token's keys s <= r alone, each
        by ``weight``, which counts what enters with the next token (``from_next``). So add
        weight (k[s] . q[r]) v[s] of each s > r, subtract from_next (k[s] . q[r]) v[s] of every s,
        and add D v[r].
        """
        # Masks (R of q, R of k, 1).
        is_same = torch.eye(self.rank, dtype=v.dtype, device=v.device)[..., None]
        is_later = torch.ones(self.rank, self.rank, dtype=v.dtype, device=v.device).triu(1)[..., None]
        product = (q[:, :, :, None] * k[:, :, None]).sum(-1)  # (B, L, R, R, H)
        of_pair = is_same * self.D + (weight[:, :, None, None] * is_later - from_next[:, :, None, None]) * product
        return (of_pair[..., None] * v[:, :, None]).sum(3)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalise outputs (B, L, R, H, P) if asked to, gate, and sum over ranks: (B, L, H P)."""
        if self.norm is not None:
            y = F.rms_norm(y, y.shape[-1:], eps=self.norm.eps) * self.norm.weight.view(y.shape[-2:])
        z = self._per_rank(z.unflatten(-1, (self.nheads, self.headdim)), "mimo_z")
        y = y * elementwise(F.silu, z)
        if self.is_mimo:
            y = y * self.mimo_o.transpose(0, 1)
        return y.sum(2).flatten(-2)

    def _per_rank(self, x: Tensor, weight: str) -> Tensor:
        """Give each rank of MIMO its x (..., H, P) times the weight by name: (..., R, H, P)."""
        x = x.unsqueeze(-3)
        return x * getattr(self, weight).transpose(0, 1) if self.is_mimo else x

    def _rate(self, projected: Tensor) -> Tensor:
        """Return a (B, L, H), the rate of decay, from its projection."""
        if self.decay == "softplus":
            rate = elementwise(F.softplus, projected)
        else:
            rate = F.relu(projected) + 1 / (1 - projected.clamp(max=0))
        return rate.clamp(min=self.A_floor)

    def _per_head(self, projected: Tensor, norm: nn.RMSNorm, bias: Tensor) -> Tensor:
        """Normalise B or C (B, L, R G N); give each head its group's and a bias: (B, L, R, H, N)."""
        by_group = projected.unflatten(-1, (self.rank, self.ngroups, self.d_state))
        by_group = F.rms_norm(by_group, (self.d_state,), eps=norm.eps) * norm.weight
        by_head = by_group.repeat_interleave(self.nheads // self.ngroups, dim=3) + bias.transpose(0, 1)
        if not self.is_mimo:
            return by_head
        # Coordinates (i, i + N/2) become (2i, 2i + 1), which rotate: k and q are only multiplied
        # with each other.
        return by_head.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    def _sum_turns(self, rate: Tensor, dt: Tensor, layout: Any, document: Tensor, first: Tensor) -> Tensor:
        """Sum turns, rate (B, L, n) times dt (B, L, H), from each document's start to each token.

        Return angles (B, L, H, n).

        In integers, whose sums are exact and wrap at whole turns: neither documents before nor a
        document's length cost a bit. The gradient is that of a sum by ``ops.ssm_pack``, or, of
        float32 on a GPU, of the kernels that sum there.
        """
        on_gpu = rate.is_cuda and backend_name(self.backend, rate.device) == "cuda"
        if on_gpu and rate.dtype == torch.float32 and layout.crossing is None and not is_transforming():
            from packmamba.ops.angles_triton import sum_angles  # which imports Triton

            return sum_angles(rate.contiguous(), dt.contiguous(), layout.starts, layout.ends)
        turns = rate[:, :, None] * dt[..., None]
        parts = (turns.detach() * PARTS).round().to(torch.int64)
        # Transposed: a GPU sums numbers that lie side by side in parallel.
        total = parts.flatten(0, 1).flatten(1).T.cumsum(1).T.reshape(turns.shape)
        before = _at(total - parts, first)
        if layout.crossing:
            before = before - sum_before(parts, layout)
        # The last row is padding's, whose document is -1.
        before = F.pad(before, (0, 0, 0, 0, 0, 1))
        theta = ((total - before[document]) % PARTS).to(turns.dtype) * (2 * math.pi / PARTS)
        # Forward-mode derivatives need no gradients to be enabled.
        if not torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0:
            return theta
        radians = (2 * math.pi * turns).flatten(-2)
        ones = torch.ones_like(radians)
        A = torch.zeros_like(radians[0, 0, :, None])
        B = C = ones[..., :1]
        summed = ops.ssm_pack(radians, ones, A, B, C, layout=layout, backend=self.backend).view(turns.shape)
        return theta + (summed - summed.detach())


def _at(tensor: Tensor, slots: Tensor) -> Tensor:
    """Return rows (S, ...) of a tensor (B, L, ...) at slots (S,)."""
    return tensor.flatten(0, 1).index_select(0, slots)


def _before(k: Tensor, v: Tensor, first: Tensor, document: Tensor) -> tuple[Tensor, ...]:
    """Return k and v of the tokens before slots ``first`` (S,).

    They are 0 for a token of another document (B, L).
    """
    before = (first - 1).clamp(min=0)
    reads = (first > 0) & (_at(document, before) == _at(document, first))
    k, v = _at(k, before), _at(v, before)
    return torch.where(reads.view(-1, 1, 1, 1), k, 0), torch.where(reads.view(-1, 1, 1), v, 0)


def _next(weight: Tensor, *documents: Tensor) -> Tensor:
    """Return the weight (B, L, H) of each slot's next token, 0 if that is another document's.

    ``documents``: (B, L) each; a token belongs to another one by any of them.
    """
    row_length = weight.shape[1]
    has_next = torch.arange(row_length, device=weight.device) < row_length - 1
    for document in documents:
        has_next = has_next & (document == document.roll(-1, 1))
    return torch.where(has_next[..., None], weight.roll(-1, 1), 0)


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate n pairs of coordinates (2i, 2i + 1) of vectors (..., N) by angles (..., n)."""
    rotating = 2 * cos.shape[-1]
    even, odd = vectors[..., 0:rotating:2], vectors[..., 1:rotating:2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return torch.cat([pairs.flatten(-2), vectors[..., rotating:]], dim=-1)


def _stretch(layout: Any, rank: int) -> Any:
    """Return the layout of rows in which each token has ``rank`` slots."""
    if rank == 1:
        return layout
    crossing = layout.crossing
    if crossing is not None:
        places = [(row, columns * rank) for row, columns in crossing.places]
        crossing = replace(crossing, places=places, tail=_stretch(crossing.tail, rank))
    stretched: Any = {"shape": (layout.shape[0], layout.shape[1] * rank)}
    for name in ("starts", "ends", "offsets", "num_tokens", "longest"):
        value = getattr(layout, name)
        stretched[name] = None if value is None else value * rank  # unknown stays unknown
    return replace(layout, **stretched, flowing=None, origin=None, crossing=crossing)
