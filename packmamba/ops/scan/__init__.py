"""The selective scan over packed documents. Shapes: B rows, L slots, S documents, D channels, N states per channel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.backends import choose
from packmamba.ops.checks import check_activations, check_layout
from packmamba.ops.scan.arguments import ScanArguments


def ssm_pack(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    layout: SequenceLayout | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Mamba's recurrence, started anew (or from a given state) at each document.

    ``delta' = softplus(delta + delta_bias)``, ``h[t] = exp(delta'[t] A) h[t-1] + delta'[t] B[t] u[t]``,
    ``y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])`` (Mamba, arXiv 2312.00752; packed: PackMamba, arXiv 2408.03865).
    Differentiable in every tensor, also through the final state.

    Args:
        u, delta, z: (B, L, D), one dtype of bfloat16, float16, float32 or float64 (not on a GPU's kernels); any row
            stride, unit channel stride. z None: no gate.
        B, C: (B, L, N), like u.
        A: (D, N), negative; float32 (float64 with float64 activations), as are D and delta_bias.
        D: (D,), the skip; None: none.
        delta_bias: (D,), added to delta; None: zero.
        delta_softplus: whether delta passes through softplus after its bias.
        layout: where documents lie; None: each row is one.
        initial_state: (S, D, N), the state each document starts from, whatever ``layout.continues`` says; None: zero.
            A's dtype.
        return_final_state: also return each document's last state, (S, D, N) in A's dtype.
        backend: see ``ops.BACKENDS``.

    Returns:
        y (B, L, D) in u's dtype, zero at padding, whose contents are never looked at; and the final state if asked for.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before any work.
    """
    check_activations(u, "u")
    layout = check_layout(layout, u, "u")
    a = ScanArguments(u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, return_final_state)
    a.check()
    y, final_state = choose(backend, u.device, "ssm_pack")(a)
    return (y, final_state) if return_final_state else y
