"""The selective scan over packed documents. Shapes: B rows, L slots, S documents, D channels, N states."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.errors import KernelError, expect
from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.cuda import launch, scans_by_tensor_cores
from packmamba.ops.custom_op import KERNELS, declare, dense, empty_grad_like, register, unit_stride

SAVED_TOKENS, SAVED_CHANNELS = 32, 16  # tokens between saved states; channels are a multiple
BACKWARD_SHARED_BYTES = 113 << 10
"""Shared memory of a block of the scan's tensor-core backward."""


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
    """Scan documents by Mamba's recurrence, each from zero or from its initial state.

    ``delta' = softplus(delta + delta_bias)``, ``h[t] = exp(delta'[t] A) h[t-1] + delta'[t] B[t] u[t]``,
    ``y[t] = (C[t] . h[t] + D u[t]) * silu(z[t])`` (Mamba, arXiv 2312.00752; packed: PackMamba, arXiv 2408.03865).
    Differentiable in every tensor, also through the final state.

    Args:
        u, delta, z: (B, L, D), of one dtype: bfloat16, float16, float32 or (not on a GPU) float64; any row stride, unit
            channel stride. z None: no gate.
        B, C: (B, L, N), like u.
        A: (D, N), negative; float32 (float64 beside float64 activations), as are D and delta_bias.
        D, delta_bias: (D,), the skip, and what is added to delta; None: zero.
        delta_softplus: apply softplus to delta after its bias.
        layout: where documents lie; None: each row is one.
        initial_state: (S, D, N) in A's dtype, the state each document starts from, whatever ``layout.continues`` says;
            None: zero.
        return_final_state: also return each document's last state, like initial_state.
        backend: a name in ``ops.BACKENDS``.

    Returns y (B, L, D) in u's dtype, zero at padding, which is never read; with ``return_final_state`` a pair.
    Raises TypeError or ValueError.
    """
    checks.check_activations(u, "u")
    layout = checks.check_layout(layout, u, "u")
    rows, row_length, channels = shape = u.shape
    states = checks.check_columns(A, "A", channels, 1, 256)
    near, wide = (u.dtype,), (checks.accumulation_dtype(u.dtype),)
    by_token = rows, row_length, states
    checks.check_tensors(
        u, "u", near, True, delta=(delta, shape), B=(B, by_token), C=(C, by_token), z=(z, shape)
    )
    checks.check_tensors(
        u, "u", wide, A=(A, (channels, states)), D=(D, (channels,)), delta_bias=(delta_bias, (channels,)),
        initial_state=(initial_state, (layout.num_documents, channels, states)),
    )  # fmt: skip
    checks.check_flags(delta_softplus=delta_softplus, return_final_state=return_final_state)
    a = ScanArguments(
        u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, return_final_state
    )
    y, final_state = choose(backend, u.device, "ssm_pack")(a)
    return (y, final_state) if return_final_state else y


class ScanArguments(NamedTuple):
    """Arguments of every implementation."""

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


def _forward(a: ScanArguments, keep: bool) -> tuple[Tensor | None, ...]:
    results = _fake(a, keep)
    KERNELS[a.u.device.type]["ssm_forward"](*_kernel_arguments(a), *results)
    return results


def _fake(a: ScanArguments, keep: bool) -> tuple[Tensor | None, ...]:
    return allocate_scan(a.u, a.A, a.layout.starts, a.return_final_state, keep)


def allocate_scan(
    u: Tensor, A: Tensor, starts: Tensor, return_final_state: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Allocate y, final states and saved states."""
    channels, states = A.shape
    y = empty_grad_like(u)
    final = A.new_empty((starts.shape[0], channels, states)) if return_final_state else None
    intervals = u.shape[0] * u.shape[1] // SAVED_TOKENS
    if not keep:
        return y, final, None
    if u.is_cuda:  # 16 bits a number, or 32 bits at half as many tokens
        return y, final, A.new_empty((intervals, channels, states), dtype=torch.bfloat16)
    # A document's states begin at its number + its start // SAVED_TOKENS: none overlap.
    padded = -(-channels // SAVED_CHANNELS) * SAVED_CHANNELS
    return y, final, A.new_empty((starts.shape[0] + intervals, padded, states))


def _backward(a: ScanArguments, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    dy, dfinal = grads
    gradients = tuple(map(empty_grad_like, a[:9]))
    KERNELS[a.u.device.type]["ssm_backward"](
        a.u.new_zeros(a.u.shape) if dy is None else unit_stride(dy),
        dense(dfinal) if a.return_final_state else None,
        *_kernel_arguments(a), *saved, *gradients,
    )  # fmt: skip
    return gradients


def _kernel_arguments(a: ScanArguments) -> tuple:
    u, delta, A, B, C, D, z, delta_bias, initial_state, layout, delta_softplus, _ = a
    return (
        u, delta, A.contiguous(), B, C, dense(D), z, dense(delta_bias), delta_softplus, layout.starts, layout.ends,
        dense(initial_state),
    )  # fmt: skip


def _cuda_forward(*arguments: Any) -> None:
    u, saved = arguments[0], arguments[-1]
    cuts = _cuts(*arguments[:7])
    if cuts and saved is not None:
        _check_backward_fits(u.device)
    launch("ssm_forward", "forward", arguments, u, arguments[9:11], cuts)


def _cuda_backward(*arguments: Any, y: Tensor | None = None) -> None:
    """Launch the backward; write the forward's output to ``y`` if given."""
    cuts = _cuts(*arguments[2:9])
    if cuts and not _even(arguments[0]):
        arguments = (arguments[0].contiguous(), *arguments[1:])
    launch("ssm_backward", "backward", arguments, arguments[2], arguments[11:13], cuts, (y,))


@functools.cache
def _check_backward_fits(device: torch.device) -> None:
    """Check the GPU's shared memory before the forward. Raises KernelError."""
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", BACKWARD_SHARED_BYTES)
    got = f"{room >> 10}; take float16 or float32 activations instead of bfloat16"
    needed = f"{BACKWARD_SHARED_BYTES >> 10} KiB of shared memory a block"
    expect(room >= BACKWARD_SHARED_BYTES, "GPU", needed, got, KernelError)


def _even(tensor: Tensor) -> bool:
    rows, tokens, _ = tensor.stride()
    return not ((tensor.data_ptr() | rows << 1 | tokens << 1) & 3)


def _cuts(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None
) -> bool:
    tensors = (u, delta, B, C) if z is None else (u, delta, B, C, z)
    return scans_by_tensor_cores(u, A.shape[1]) and all(map(_even, tensors))


declare("ssm_forward", outputs=3, cuda=_cuda_forward)
declare("ssm_backward", outputs=9, cuda=_cuda_backward)
compiled = register("ssm_pack", ScanArguments, _forward, _fake, _backward, outputs=2, saved=1, gradients=9)
