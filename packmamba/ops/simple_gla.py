"""Linear attention with one decay a head, in the notation of its papers, by Mamba-2's scan.

    paper        ssd_pack                     shape
    q, k         C, B                         (B, L, H, K): every head its own, so G = H and N = K
    v            x * delta                    (B, L, H, V): V = P
    g            delta * A, the log decay     (B, L, H), or (H,) where it is constant

``ssd_pack`` multiplies a token by the step size that also decides its decay. A
constant g is A, with steps of 1. Where g is a token's own, A is -1, the step -g,
and the scan's input v / -g, whose product with the step is v again. The gradient
of g is then a difference of two numbers 1 / -g as large, so that the scan reads
float32: in 16 bits its rounding would drown the gradient where a decay is near 1.
"""

from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.ssd import MOST_STATES, ssd_pack

# Minimum of a step size, by which v is divided: its square is a float32, and a decay by it 1.
LEAST_STEP = 1e-15
# Maximum of one: a decay by it is 0, and v over it is no zero.
MOST_STEP = 1e4


def simple_gla_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    layout: SequenceLayout | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute linear attention with a decay a head.

    Each document starts from zero, or from its initial state.

    ``h[t] = exp(g[t]) h[t-1] + v[t] (outer) k[t]``; ``o[t] = scale h[t] q[t]``. This
    is simple gated linear attention, as fla's ``chunk_simple_gla``; RetNet (arXiv
    2307.08621) and lightning attention (arXiv 2405.17381) with a constant g a head.
    Differentiable in every tensor. A g of a token's own is scanned in float32
    whatever the dtype, and its gradient has a relative error of about 1e-7 / -g.

    Args (layout, strides, states and padding as of ``ssd_pack``):
        q, k: (B, L, H, K), K at most 256. v: (B, L, H, V). All of one dtype.
        g: (B, L, H) or (H,), the decay's logarithm, in
            v's dtype or float32; above 0 it counts as 0.
        scale: of the outputs; None: 1 / sqrt(K).
        initial_state: (S, H, V, K).

    Returns o (B, L, H, V) in v's dtype, zero at padding; with ``return_final_state`` a pair.
    Raises TypeError or ValueError.
    """
    checks.check_activations(v, "v", "(B, L, H, V)")
    checks.check_activations(q, "q", "(B, L, H, K)")
    checks.check_is_tensor(g, "g")
    layout = checks.check_layout(layout, v, "v")
    shape = (*v.shape[:3], q.shape[-1])
    checks.check_tensors(v, "v", (v.dtype,), True, q=(q, shape), k=(k, shape))
    checks.check_size("q", q.shape[-1], MOST_STATES)
    wide = checks.accumulation_dtype(v.dtype)
    checks.check_tensors(v, "v", (v.dtype, wide), g=(g, v.shape[2:3] if g.dim() == 1 else v.shape[:3]))
    x = v
    if g.dim() == 1:
        A = g.to(wide).clamp(max=0)
        step = torch.ones_like(v[..., 0], dtype=wide)
    else:
        A = torch.full_like(v[0, 0, :, 0], -1, dtype=wide)
        # Padding may hold NaN, with which the gradient's zeros there would be NaN.
        is_padding = layout.slot_documents()[..., None] < 0
        step = (-g.to(wide)).clamp(LEAST_STEP, MOST_STEP).masked_fill(is_padding, 1)
        x = v / step[..., None]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B = k.to(x.dtype)
    C = q.to(x.dtype) * scale
    states: Any = {"initial_state": initial_state, "return_final_state": return_final_state}
    scanned = ssd_pack(x, step, A, B, C, layout=layout, backend=backend, **states)
    return (scanned[0].to(v.dtype), scanned[1]) if return_final_state else scanned.to(v.dtype)
