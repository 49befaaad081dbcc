"""The selective scan over packed documents. Shapes: B rows, L slots, S documents, D channels, N states per channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import compiled, mamba_ssm
from packmamba.ops.backends import choose
from packmamba.ops.checks import accumulation_dtype, check_activations, check_is_tensor, check_layout, check_tensor
from packmamba.ops.reference import ssm_pack_vectorised

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "reference": ssm_pack_vectorised,
    "cpu": compiled.ssm_pack,
    "cuda": compiled.ssm_pack,
    "mamba_ssm": mamba_ssm.ssm_pack,
}


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
    rows, row_length, channels = u.shape
    parameter_dtype = (accumulation_dtype(u.dtype),)
    check_is_tensor(A, "A")
    if A.dim() != 2 or not 1 <= A.shape[1] <= 256:
        raise ValueError(f"A: expected shape ({channels}, N) with N from 1 to 256, got {tuple(A.shape)}")
    states = A.shape[1]
    check_tensor(A, "A", (channels, states), parameter_dtype, u, "u")
    activations = [("delta", delta, channels), ("B", B, states), ("C", C, states)]
    if z is not None:
        activations.append(("z", z, channels))
    for name, tensor, width in activations:
        check_tensor(tensor, name, (rows, row_length, width), (u.dtype,), u, "u", unit_stride=True)
    for name, parameter in (("D", D), ("delta_bias", delta_bias)):
        if parameter is not None:
            check_tensor(parameter, name, (channels,), parameter_dtype, u, "u")
    if initial_state is not None:
        shape = (layout.num_documents, channels, states)
        check_tensor(initial_state, "initial_state", shape, parameter_dtype, u, "u")
    run = choose(backend, u.device, IMPLEMENTATIONS)
    y, final_state = run(u, delta, A, B, C, D, z, delta_bias, delta_softplus, layout, initial_state, return_final_state)
    return (y, final_state) if return_final_state else y
