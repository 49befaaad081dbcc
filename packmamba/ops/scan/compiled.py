"""The scan by compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from packmamba.ops.kernels import KERNELS, declare
from packmamba.ops.registered import dense, register, room_like, unit_stride
from packmamba.ops.scan.arguments import ScanArguments
from packmamba.ops.scan.cuda import ssm_backward, ssm_forward

# As in the kernels: tokens between states that the scan keeps for its backward, and what channels are padded to.
KEPT_TOKENS = 32
KEPT_CHANNELS = 16


def _forward(a: ScanArguments, keep: bool) -> tuple[Tensor | None, ...]:
    """y, the final state, and states kept for the backward."""
    results = scan_room(a.u, a.A, a.layout.starts, a.return_final_state, keep)
    KERNELS[a.u.device.type]["ssm_forward"](*_kernel_arguments(a), *results)
    return results


def _fake(a: ScanArguments, keep: bool) -> tuple[Tensor | None, ...]:
    return scan_room(a.u, a.A, a.layout.starts, a.return_final_state, keep)


def scan_room(
    u: Tensor, A: Tensor, starts: Tensor, return_final_state: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for the scan's y, final states and what it keeps for its backward."""
    channels, states = A.shape
    y = room_like(u)
    final = A.new_empty((starts.shape[0], channels, states)) if return_final_state else None
    if not keep:
        return y, final, None
    intervals = u.shape[0] * u.shape[1] // KEPT_TOKENS
    if u.is_cuda:
        # Room for 16 bits a number, which is also 32 bits at half as many tokens.
        return y, final, torch.empty((intervals, channels, states), dtype=torch.bfloat16, device=u.device)
    # A document's kept states begin at its number + its start // KEPT_TOKENS: none overlap, without sums over lengths.
    padded = -(-channels // KEPT_CHANNELS) * KEPT_CHANNELS
    return y, final, A.new_empty((starts.shape[0] + intervals, padded, states))


def _backward(a: ScanArguments, kept: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    dy, dfinal = grads
    gradients = tuple(map(room_like, a[:9]))
    KERNELS[a.u.device.type]["ssm_backward"](
        a.u.new_zeros(a.u.shape) if dy is None else unit_stride(dy),
        dense(dfinal) if a.return_final_state else None,
        *_kernel_arguments(a), *kept, *gradients,
    )  # fmt: skip
    return gradients


def _kernel_arguments(a: ScanArguments) -> tuple:
    """As the kernels take them; activations of any row stride, parameters dense."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, _ = a
    return (
        u, delta, A.contiguous(), B, C, dense(D), z, dense(delta_bias), delta_softplus, layout.starts, layout.ends,
        dense(initial_state),
    )  # fmt: skip


declare("ssm_forward", outputs=3, cuda=ssm_forward)
declare("ssm_backward", outputs=9, cuda=ssm_backward)
ssm_pack = register("ssm_pack", ScanArguments, _forward, _fake, _backward, outputs=2, kept=1, gradients=9)
