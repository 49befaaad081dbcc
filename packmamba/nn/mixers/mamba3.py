"""The Mamba-3 mixer (SISO) on packed documents: a trapezoidal rule; keys and queries that rotate.

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

Shapes: B rows, L slots, S documents, H heads, P headdim, G ngroups, N d_state, n angles.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba import ops
from packmamba.errors import expect
from packmamba.nn.init import Projection
from packmamba.nn.mixers.mixer import HeadMixer, State, call
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.simple_gla import LEAST_STEP
from packmamba.ops.ssd import elementwise

EPSILON = 1e-5  # of every norm
# Parts of a turn in which angles are summed; a token's angle may be up to 2**15 turns.
PARTS = 2**48


class PackedMamba3(HeadMixer):
    """Compute Mamba-3 without MIMO on packed documents.

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
        is_mimo: False; MIMO is not here.
        recompute: the backward computes all between the projections again.

    Raises TypeError or ValueError that names the argument.
    """

    NO_WEIGHT_DECAY = ("dt_bias", "D", "B_bias", "C_bias")
    PUBLISHED = {"state_spaces": "Mamba3"}
    WITHOUT_EFFECT = ("chunk_size", "dropout", "mimo_rank", "fuse_pregate_headwise_norm")
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
        decay: str = EXPLICIT["decay"],
        recompute: bool = False,
        backend: str | None = None,
    ) -> None:
        sizes = {"d_model": d_model, "d_state": d_state, "expand": expand, "headdim": headdim, "ngroups": ngroups}
        flags = {"is_outproj_norm": is_outproj_norm, "is_mimo": is_mimo}
        super().__init__(sizes, flags, (dt_min, dt_max, dt_init_floor), backend)
        expect(not is_mimo, "is_mimo", "False (SISO alone)", is_mimo)
        expect(decay in ("heavy_tail", "softplus"), "decay", "'heavy_tail' or 'softplus'", repr(decay))
        expect(rope_fraction in (0.5, 1.0), "rope_fraction", "0.5 or 1.0", rope_fraction)
        self.num_angles = int(d_state * rope_fraction) // 2
        expect(self.num_angles, "d_state", f"a pair to rotate with rope_fraction={rope_fraction}", d_state)
        self.A_floor = A_floor
        self.decay = decay
        self.recompute = recompute
        # z, x, B, C, dt, a, lambda, angles
        self.parts = [self.d_inner] * 2 + [ngroups * d_state] * 2 + [self.nheads] * 3 + [self.num_angles]
        self.in_proj = Projection(d_model, sum(self.parts), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.nheads))
        # One row: MIMO has as many as its rank.
        self.B_bias = nn.Parameter(torch.empty(self.nheads, 1, d_state))
        self.C_bias = nn.Parameter(torch.empty(self.nheads, 1, d_state))
        self.B_norm = nn.RMSNorm(d_state, eps=EPSILON)
        self.C_norm = nn.RMSNorm(d_state, eps=EPSILON)
        self.D = nn.Parameter(torch.empty(self.nheads))
        of_head = {"k_state": (d_state,), "v_state": (headdim,), "ssm_state": (headdim, d_state)}
        self.state_shapes = {name: (self.nheads, *shape) for name, shape in of_head.items()}
        self._reset_own()
        # Holds the weight of a norm of each head.
        self.norm = nn.RMSNorm(self.d_inner, eps=EPSILON) if is_outproj_norm else None
        self.out_proj = Projection(self.d_inner, d_model, bias=False)
        self._mark_parameters()

    @torch.no_grad()
    def _reset_own(self) -> None:
        super()._reset_own()
        nn.init.ones_(self.B_bias)
        nn.init.ones_(self.C_bias)

    def _mix(self, projected: Tensor, *layouts_and_state: Any) -> tuple[Tensor, Any]:
        """Mix in_proj's output; conv_layout says whose previous token's k and v a token reads."""
        y, state = call(self._scan, projected, *layouts_and_state, recompute=self.recompute)
        return self.out_proj(y), state

    def _scan(
        self, projected: Tensor, conv_layout: Any, ssm_layout: Any, state: State | None, return_state: bool
    ) -> tuple[Tensor, State | None]:
        """Return out_proj's input (B, L, H P), and final states or None."""
        expect(ssm_layout is None or ssm_layout.crossing is None, "layout", "rows that no ranks share", "shared ones")
        one_layout = conv_layout is ssm_layout
        # An outer product that enters inside a document would have no place in the scan.
        expect(one_layout or state is None, "state", "None where conv_layout is not ssm_layout", "states")
        documents = self._check_documents(projected, conv_layout, ssm_layout, state)
        conv_layout, ssm_layout, k_before, v_before, h = documents
        document = ssm_layout.slot_documents()
        conv_document = document if one_layout else conv_layout.slot_documents()
        # Absent documents of a CUDA graph lie behind every slot.
        first = ssm_layout.starts.clamp(max=document.numel() - 1)
        last = (ssm_layout.ends - 1).clamp(max=document.numel() - 1)
        wide = accumulation_dtype(projected.dtype)
        z, x, B, C, dt, rate, trapezoid, angle = projected.to(wide).split(self.parts, dim=-1)
        v = x.unflatten(-1, (self.nheads, self.headdim))
        k = self._per_head(B, self.B_norm, self.B_bias)
        q = self._per_head(C, self.C_norm, self.C_bias)
        dt = elementwise(F.softplus, dt + self.dt_bias)
        step = (self._rate(rate) * dt).clamp(min=LEAST_STEP)
        turns = elementwise(torch.tanh, angle)[:, :, None] * (dt / 2)[..., None]
        theta = self._sum_turns(turns, ssm_layout, document, first)
        cos = elementwise(torch.cos, theta)
        sin = elementwise(torch.sin, theta)

        share = elementwise(torch.sigmoid, trapezoid)
        from_previous = (1 - share) * dt
        from_next = _next(from_previous, document, conv_document)
        # Tokens of the scan are v times this; it multiplies them by the step, which is the decay's.
        scale = (share * dt + from_next) / step
        if not one_layout:
            k_before, v_before = _before(k, v, first, conv_document)
        if k_before is not None and v_before is not None:
            entering = (_at(from_previous, first)[..., None] * v_before)[..., None] * k_before[:, :, None]
            h = entering if h is None else h + entering
        # float16 would overflow: a step may be far smaller than the next one, which scale holds.
        near = wide if projected.dtype == torch.float16 else projected.dtype
        scanned = ops.ssd_pack(
            x=(v * scale[..., None]).to(near),
            delta=step,
            A=step.new_full((self.nheads,), -1),
            B=_rotate(k, cos, sin).to(near),
            C=_rotate(q, cos, sin).to(near),
            layout=ssm_layout,
            initial_state=h,
            return_final_state=return_state,
            backend=self.backend,
        )
        y = scanned[0] if return_state else scanned
        y = y + (self.D - from_next * (k * q).sum(-1))[..., None] * v
        if self.norm is not None:
            y = F.rms_norm(y, y.shape[-1:], eps=self.norm.eps) * self.norm.weight.view(y.shape[-2:])
        y = (y.flatten(-2) * elementwise(F.silu, z)).to(projected.dtype)
        if not return_state:
            return y, None
        k, v, cos, sin = (_at(tensor, last) for tensor in (k, v, cos, sin))
        return y, (k, v, _rotate(scanned[1], cos[:, :, None], -sin[:, :, None]))

    def _rate(self, projected: Tensor) -> Tensor:
        """Return a (B, L, H), the rate of decay, from its projection."""
        if self.decay == "softplus":
            rate = elementwise(F.softplus, projected)
        else:
            rate = F.relu(projected) + 1 / (1 - projected.clamp(max=0))
        return rate.clamp(min=self.A_floor)

    def _per_head(self, projected: Tensor, norm: nn.RMSNorm, bias: Tensor) -> Tensor:
        """Normalise B or C (B, L, G N), and give each head its group's, plus its bias: (B, L, H, N)."""
        by_group = F.rms_norm(projected.unflatten(-1, (self.ngroups, -1)), (self.d_state,), eps=norm.eps)
        by_group = by_group * norm.weight
        return by_group.repeat_interleave(self.nheads // self.ngroups, dim=2) + bias.squeeze(1)

    def _sum_turns(self, turns: Tensor, layout: Any, document: Tensor, first: Tensor) -> Tensor:
        """Sum turns (B, L, H, n) from each document's start to each token; return angles from 0 to 2 pi.

        In integers, whose sums are exact and wrap at whole turns: neither documents before nor a
        document's length cost a bit. The gradient is that of a sum by ``ops.ssm_pack``.
        """
        parts = (turns.detach() * PARTS).round().to(torch.int64)
        # Transposed: a GPU sums numbers that lie side by side in parallel.
        total = parts.flatten(0, 1).flatten(1).T.cumsum(1).T.reshape(turns.shape)
        # The last row is padding's, whose document is -1.
        before = F.pad(_at(total - parts, first), (0, 0, 0, 0, 0, 1))
        theta = ((total - before[document]) % PARTS).to(turns.dtype) * (2 * math.pi / PARTS)
        if not torch.is_grad_enabled():
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
    """Return k and v of the tokens before slots ``first`` (S,); 0 for a token of another document (B, L)."""
    before = (first - 1).clamp(min=0)
    reads = (first > 0) & (_at(document, before) == _at(document, first))
    return tuple(torch.where(reads[:, None, None], _at(tensor, before), 0) for tensor in (k, v))


def _next(weight: Tensor, *documents: Tensor) -> Tensor:
    """Return the weight (B, L, H) of each slot's next token, 0 if that is another document's, by any (B, L)."""
    row_length = weight.shape[1]
    has_next = torch.arange(row_length, device=weight.device) < row_length - 1
    for document in documents:
        has_next = has_next & (document == document.roll(-1, 1))
    return torch.where(has_next[..., None], weight.roll(-1, 1), 0)


def _rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first n pairs of coordinates (2i, 2i + 1) of vectors (..., N) by angles (..., n)."""
    rotating = 2 * cos.shape[-1]
    even, odd = vectors[..., 0:rotating:2], vectors[..., 1:rotating:2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return torch.cat([pairs.flatten(-2), vectors[..., rotating:]], dim=-1)
