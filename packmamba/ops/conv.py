"""Depthwise causal convolution over packed documents. Shapes: B rows, L slots, S documents, D channels, W taps.

The compiled kernels read weight, bias and states in float32 (float64 beside float64 activations).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.checks import accumulation_dtype
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
    """Convolve documents causally: ``y[t] = activation(bias + sum_j weight[:, W-1-j] * x[t-j])``.

    Before a document, ``x`` is its initial state. The convolution of PackMamba (arXiv 2408.03865), with states. Differentiable
    in every tensor, also through the final state.

    Args:
        x: (B, L, D), bfloat16, float16, float32 or float64 (not on a GPU's kernels); any row stride, unit channel
            stride.
        weight: (D, W), W from 2 to 4; x's dtype or float32.
        bias: (D,), like weight.
        layout: where documents lie; None: each row is one.
        activation: "silu" or None.
        initial_state: (S, D, W-1), the inputs before each document, oldest first, used whatever ``layout.continues``
            says; None: zeros. x's dtype or float32.
        return_final_state: also return the last W-1 inputs of each document (S, D, W-1), in initial_state's dtype, else
            x's; a document shorter than that keeps the newer part of its initial state in front.
        backend: see ``ops.BACKENDS``.

    Returns:
        y (B, L, D) in x's dtype, zero at padding, whose contents are never looked at; and the final state if asked for.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came, before any work.
    """
    checks.check_activations(x, "x")
    layout = checks.check_layout(layout, x, "x")
    a = ConvArguments(x, weight, bias, initial_state, layout, activation, return_final_state)
    a.check()
    y, final_state = choose(backend, x.device, "conv1d_pack")(a)
    return (y, final_state) if return_final_state else y


class ConvArguments(NamedTuple):
    """Arguments of every implementation, under the names of ``ops.conv1d_pack``; the layout is never None."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    activation: str | None
    return_final_state: bool

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of the final state."""
        return self.x.dtype if self.initial_state is None else self.initial_state.dtype

    def check(self) -> None:
        """Check the other arguments against x and the layout."""
        x, weight, bias, initial_state, layout, activation, return_final_state = self
        channels = x.shape[2]
        checks.check_is_tensor(weight, "weight")
        if weight.dim() != 2 or not 2 <= weight.shape[1] <= 4:
            raise ValueError(f"weight: expected shape ({channels}, W) with W from 2 to 4, got {tuple(weight.shape)}")
        width = weight.shape[1]
        dtypes = (x.dtype, torch.float32)
        checks.check_tensor(weight, "weight", (channels, width), dtypes, x, "x")
        if bias is not None:
            checks.check_tensor(bias, "bias", (channels,), dtypes, x, "x")
        if initial_state is not None:
            shape = (layout.num_documents, channels, width - 1)
            checks.check_tensor(initial_state, "initial_state", shape, dtypes, x, "x")
        if activation is not None and not (isinstance(activation, str) and activation == "silu"):
            raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
        checks.check_flag("return_final_state", return_final_state)


def _forward(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    """Return y, the final state, and the widened weight, bias and initial state."""
    x, weight, _, _, layout, activation, return_final_state = a
    widened = _widened(a)
    y, final = empty_grad_like(x), None
    if return_final_state:
        final = x.new_empty(_state_shape(a), dtype=accumulation_dtype(x.dtype))
    KERNELS[x.device.type]["conv1d_forward"](x, *_places(a, widened), activation == "silu", y, final)
    if final is not None:
        final = final.to(a.state_dtype)
    return (y, final, *widened) if keep else (y, final, None, None, None)


def _fake(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    final = a.x.new_empty(_state_shape(a), dtype=a.state_dtype) if a.return_final_state else None
    return empty_grad_like(a.x), final, *(_widened(a) if keep else (None, None, None))


def _backward(a: ConvArguments, widened: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    x, weight, bias, initial_state, _, activation, return_final_state = a
    dy, dfinal = grads
    places = _places(a, widened)
    dx, dweight, dbias, dinitial = map(empty_grad_like, (x, *places[:2], places[4]))
    KERNELS[x.device.type]["conv1d_backward"](
        x.new_zeros(x.shape) if dy is None else unit_stride(dy),
        dfinal.to(dweight.dtype).contiguous() if return_final_state and dfinal is not None else None,
        x, *places, activation == "silu", dx, dweight, dbias, dinitial,
    )  # fmt: skip
    return dx, _as(dweight, weight), _as(dbias, bias), _as(dinitial, initial_state)


def _widened(a: ConvArguments) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Convert weight, bias and initial state to the kernels' dtype; None for those absent or of that dtype."""
    _, weight, bias, initial_state, *_ = a
    wide = accumulation_dtype(a.x.dtype)
    return (
        None if weight.dtype == wide else weight.to(wide),
        None if bias is None or bias.dtype == wide else bias.to(wide),
        None if initial_state is None or initial_state.dtype == wide else initial_state.to(wide),
    )


def _places(a: ConvArguments, widened: tuple) -> tuple[Any, ...]:
    """Return weight, bias, starts, ends, initial_state as the kernels read them."""
    _, weight, bias, initial_state, layout, _, _ = a
    weight, bias, initial_state = map(_dense, (weight, bias, initial_state), widened)
    return weight, bias, layout.starts, layout.ends, initial_state


def _dense(given: Any, wide: Tensor | None) -> Any:
    return dense(given) if wide is None or not wide.numel() else wide.contiguous()


def _state_shape(a: ConvArguments) -> tuple[int, ...]:
    channels, width = a.weight.shape
    return a.layout.starts.shape[0], channels, width - 1


def _as(gradient: Any, tensor: Tensor | None) -> Tensor | None:
    return gradient if tensor is None or gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)


def _cuda_forward(*arguments: Any) -> None:
    x = arguments[0]
    # The scan's schedule, where the scan will have one.
    launch("conv1d_forward", "forward", arguments, x, arguments[3:5], scans_by_tensor_cores(x, 16))


def _cuda_backward(*arguments: Any) -> None:
    x = arguments[2]
    launch("conv1d_backward", "backward", arguments, x, arguments[5:7], scans_by_tensor_cores(x, 16))


declare("conv1d_forward", outputs=2, cuda=_cuda_forward)
declare("conv1d_backward", outputs=4, cuda=_cuda_backward)
compiled = register("conv1d_pack", ConvArguments, _forward, _fake, _backward, outputs=2, kept=3, gradients=4)
