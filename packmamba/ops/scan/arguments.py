"""What the scan takes. Shapes: B rows, L slots, S documents, D channels, N states per channel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import accumulation_dtype, check_flag, check_is_tensor, check_tensor


class ScanArguments(NamedTuple):
    """Arguments of every implementation, under the names of ``ops.ssm_pack``; the layout is there."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    delta_softplus: bool
    return_final_state: bool

    def check(self) -> None:
        """Against u and the layout, which are right."""
        u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, return_final_state = self
        rows, row_length, channels = shape = u.shape
        check_is_tensor(A, "A")
        if A.dim() != 2 or not 1 <= A.shape[1] <= 256:
            raise ValueError(f"A: expected shape ({channels}, N) with N from 1 to 256, got {tuple(A.shape)}")
        states = A.shape[1]
        near, wide = (u.dtype,), (accumulation_dtype(u.dtype),)
        check_tensor(A, "A", (channels, states), wide, u, "u")
        check_tensor(delta, "delta", shape, near, u, "u", True)
        for name, tensor in (("B", B), ("C", C)):
            check_tensor(tensor, name, (rows, row_length, states), near, u, "u", True)
        if z is not None:
            check_tensor(z, "z", shape, near, u, "u", True)
        if D is not None:
            check_tensor(D, "D", (channels,), wide, u, "u")
        if delta_bias is not None:
            check_tensor(delta_bias, "delta_bias", (channels,), wide, u, "u")
        if initial_state is not None:
            check_tensor(initial_state, "initial_state", (layout.num_documents, channels, states), wide, u, "u")
        check_flag("delta_softplus", delta_softplus)
        check_flag("return_final_state", return_final_state)
