"""Depthwise causal convolution over packed documents. Shapes: B rows, L slots, S documents, D channels, W taps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.cuda import launch, scans_by_tensor_cores
from packmamba.ops.custom_op import KERNELS, declare, dense, empty_grad_like, register, unit_stride


def conv1d_pack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: SequenceLayout | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Any:
    """Convolve documents causally: ``y[t] = activation(bias + sum_j weight[:, W-1-j] * x[t-j])`` (arXiv 2408.03865).

    Differentiable in every tensor, also through the final state.

    Args (others, dtypes and strides as of ``ssm_pack``):
        x: (B, L, D).
        weight: (D, W), W from 2 to 4; x's dtype or float32.
        bias: (D,), like weight; None: zero.
        activation: "silu" or None.
        initial_state: (S, D, W-1), the inputs before each document, oldest first, whatever ``layout.continues`` says; x's
            dtype or float32; None: zeros.
        return_final_state: also return each document's last inputs, like initial_state, which a shorter document keeps in
            part; its dtype, else x's.

    Returns y (B, L, D) in x's dtype, zero at padding, which is never read; with ``return_final_state`` a pair.
    Raises TypeError or ValueError.
    """
    checks.check_activations(x, "x")
    layout = checks.check_layout(layout, x, "x")
    channels, dtypes = x.shape[2], (x.dtype, torch.float32)
    width = checks.check_columns(weight, "weight", channels, 2, 4)
    states = initial_state, (layout.num_documents, channels, width - 1)
    checks.check_tensors(
        x, "x", dtypes, weight=(weight, (channels, width)), bias=(bias, (channels,)), initial_state=states
    )
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    checks.check_flags(return_final_state=return_final_state)
    a = ConvArguments(x, weight, bias, initial_state, layout, activation, return_final_state)
    y, final_state = choose(backend, x.device, "conv1d_pack")(a)
    return (y, final_state) if return_final_state else y


class ConvArguments(NamedTuple):
    """Arguments of every implementation."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    activation: str | None
    return_final_state: bool


def _forward(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    dtype = checks.accumulation_dtype(a.x.dtype)
    y, final = _outputs(a, dtype)
    KERNELS[a.x.device.type]["conv1d_forward"](*_kernel_arguments(a, dtype), y, final)
    return y, None if final is None else final.to(_state_dtype(a))


def _fake(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    return _outputs(a, _state_dtype(a))


def _outputs(a: ConvArguments, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    channels, width = a.weight.shape
    shape = a.layout.starts.shape[0], channels, width - 1
    return empty_grad_like(a.x), a.x.new_empty(shape, dtype=dtype) if a.return_final_state else None


def _state_dtype(a: ConvArguments) -> torch.dtype:
    return a.x.dtype if a.initial_state is None else a.initial_state.dtype


def _backward(a: ConvArguments, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    dy, dfinal = grads
    dtype = checks.accumulation_dtype(a.x.dtype)
    arguments = _kernel_arguments(a, dtype)
    gradients = tuple(map(empty_grad_like, (*arguments[:3], arguments[5])))
    KERNELS[a.x.device.type]["conv1d_backward"](
        a.x.new_zeros(a.x.shape) if dy is None else unit_stride(dy),
        dense(dfinal.to(dtype)) if a.return_final_state and dfinal is not None else None,
        *arguments, *gradients,
    )  # fmt: skip
    return tuple(None if t is None else gradient.to(t.dtype) for gradient, t in zip(gradients, a[:4]))


def _kernel_arguments(a: ConvArguments, dtype: torch.dtype) -> tuple:
    weight, bias, initial_state = (None if t is None else dense(t.to(dtype)) for t in a[1:4])
    return a.x, weight, bias, a.layout.starts, a.layout.ends, initial_state, a.activation == "silu"


def _cuda_forward(*arguments: Any) -> None:
    cuts = scans_by_tensor_cores(arguments[0], 16)  # the scan's schedule, where the scan will have one
    launch("conv1d_forward", "forward", arguments, arguments[0], arguments[3:5], cuts)


def _cuda_backward(*arguments: Any) -> None:
    cuts = scans_by_tensor_cores(arguments[2], 16)
    launch("conv1d_backward", "backward", arguments, arguments[2], arguments[5:7], cuts)


declare("conv1d_forward", outputs=2, cuda=_cuda_forward)
declare("conv1d_backward", outputs=4, cuda=_cuda_backward)
compiled = register(
    "conv1d_pack", ConvArguments, _forward, _fake, _backward, outputs=2, saved=0, gradients=4
)
