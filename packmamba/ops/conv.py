"""The depthwise causal convolution over packed documents: argument checks and the compiled operator.

Nothing is saved for the backward but the arguments: it computes the sums before the activation
again, which costs a few multiplications a number where another tensor of the activations' size
would cost memory and its bytes.

Shapes: B rows, L slots, S documents, D channels, W taps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.cuda import launch, scans_by_tensor_cores
from packmamba.ops.custom_op import (
    KERNELS,
    Nothing,
    Outputs,
    PackedOperator,
    declare,
    dense,
    empty_grad_like,
    unit_stride,
)


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
    """Convolve documents causally, channel by channel (``causal_conv1d_fn``).

    ``y[t] = activation(bias + sum_j weight[:, W-1-j] * x[t-j])``, where x before a document is its
    initial state, or zero (packed: PackMamba, arXiv 2408.03865). Differentiable in every tensor,
    also through the final state.

    Args (others, dtypes and strides as of ``ssm_pack``):
        x: (B, L, D).
        weight: (D, W), W from 2 to 4; x's dtype or float32.
        bias: (D,), like weight; None: zero.
        activation: "silu" or None.
        initial_state: (S, D, W-1), the inputs before each document, oldest first, whatever
            ``layout.continues`` says; x's dtype or float32; None: zeros.
        return_final_state: also return each document's last inputs, like initial_state, which a
            shorter document keeps in part; its dtype, else x's.

    Returns y (B, L, D) in x's dtype, zero at padding, which is never read; with
    ``return_final_state`` a pair. Raises TypeError or ValueError.
    """
    checks.check_activations(x, "x")
    layout = checks.check_layout(layout, x, "x")
    channels = x.shape[2]
    width = checks.check_columns(weight, "weight", channels, 2, 4)
    checks.check_tensors(
        x,
        "x",
        (x.dtype, torch.float32),
        weight=(weight, (channels, width)),
        bias=(bias, (channels,)),
        initial_state=(initial_state, (layout.num_documents, channels, width - 1)),
    )
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    checks.check_flags(return_final_state=return_final_state)
    arguments = ConvArguments(
        x=x,
        weight=weight,
        bias=bias,
        initial_state=initial_state,
        layout=layout,
        activation=activation,
        return_final_state=return_final_state,
    )
    y, final_state = choose(backend, x.device, "conv1d_pack")(arguments)
    return (y, final_state) if return_final_state else y


class ConvArguments(NamedTuple):
    """Arguments of every implementation, checked."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    activation: str | None
    return_final_state: bool


def _forward(a: ConvArguments, needs_backward: bool) -> tuple[Outputs, Nothing]:
    inputs = _inputs(a)
    outputs = _allocate(a, inputs["weight"].dtype)
    inputs["y"] = outputs.y
    inputs["final_state"] = outputs.final_state
    KERNELS[a.x.device.type]["conv1d_forward"](inputs)
    if outputs.final_state is not None:
        outputs = outputs._replace(final_state=outputs.final_state.to(_state_dtype(a)))
    return outputs, Nothing()


def _fake(a: ConvArguments, needs_backward: bool) -> tuple[Outputs, Nothing]:
    return _allocate(a, _state_dtype(a)), Nothing()


def _allocate(a: ConvArguments, state_dtype: torch.dtype) -> Outputs:
    """Allocate y (B, L, D), and final states (S, D, W-1) if they are returned."""
    final_state = None
    if a.return_final_state:
        channels, width = a.weight.shape
        shape = (a.layout.starts.shape[0], channels, width - 1)
        final_state = a.x.new_empty(shape, dtype=state_dtype)
    return Outputs(y=empty_grad_like(a.x), final_state=final_state)


def _state_dtype(a: ConvArguments) -> torch.dtype:
    return a.x.dtype if a.initial_state is None else a.initial_state.dtype


def _backward(a: ConvArguments, saved: Nothing, grads: Outputs) -> dict[str, Tensor | None]:
    inputs = _inputs(a)
    dy = a.x.new_zeros(a.x.shape) if grads.y is None else unit_stride(grads.y)
    dfinal = None
    if a.return_final_state and grads.final_state is not None:
        dfinal = dense(grads.final_state.to(inputs["weight"].dtype))
    tensors = {name: inputs[name] for name in ("x", "weight", "bias", "initial_state")}
    gradients = {f"d{name}": empty_grad_like(tensor) for name, tensor in tensors.items()}
    arguments = inputs | gradients
    arguments["dy"] = dy
    arguments["dfinal"] = dfinal
    KERNELS[a.x.device.type]["conv1d_backward"](arguments)
    for name in tensors:
        gradient = gradients[f"d{name}"]
        if gradient is not None:
            gradients[f"d{name}"] = gradient.to(getattr(a, name).dtype)
    return gradients


def _inputs(a: ConvArguments) -> dict[str, Any]:
    """Name what both kernels read, as kernels/*/bindings do.

    Activations lie as they came; parameters and states are made dense, in the accumulation dtype.
    """
    dtype = checks.accumulation_dtype(a.x.dtype)
    return {
        "x": a.x,
        "weight": dense(a.weight.to(dtype)),
        "bias": None if a.bias is None else dense(a.bias.to(dtype)),
        "starts": a.layout.starts,
        "ends": a.layout.ends,
        "initial_state": None if a.initial_state is None else dense(a.initial_state.to(dtype)),
        "silu": a.activation == "silu",
    }


def _cuda_forward(arguments: dict[str, Any]) -> None:
    _launch("conv1d_forward", "forward", arguments)


def _cuda_backward(arguments: dict[str, Any]) -> None:
    _launch("conv1d_backward", "backward", arguments)


def _launch(name: str, direction: str, arguments: dict[str, Any]) -> None:
    """Launch a kernel with the schedule that the scan will have; the convolution itself cuts nothing."""
    x = arguments["x"]
    launch(name, direction, arguments, like=x, cuts=scans_by_tensor_cores(x, states=16))


declare("conv1d_forward", cuda=_cuda_forward)
declare("conv1d_backward", cuda=_cuda_backward)
compiled: PackedOperator[ConvArguments] = PackedOperator(
    "conv1d_pack",
    arguments=ConvArguments,
    outputs=Outputs,
    saved=Nothing,
    forward=_forward,
    fake=_fake,
    backward=_backward,
)
