"""The convolution by compiled kernels, which read weight, bias and states in float32 (float64 beside float64)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv.arguments import ConvArguments
from packmamba.ops.conv.cuda import conv1d_backward, conv1d_forward
from packmamba.ops.kernels import KERNELS, declare
from packmamba.ops.registered import dense, register, room_like, unit_stride


def _forward(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    """y, the final state, and what the kernels read instead of weight, bias and initial state."""
    x, weight, _, _, layout, activation, return_final_state = a
    widened = _widened(a)
    y, final = room_like(x), None
    if return_final_state:
        final = x.new_empty(_state_shape(a), dtype=accumulation_dtype(x.dtype))
    KERNELS[x.device.type]["conv1d_forward"](x, *_places(a, widened), activation == "silu", y, final)
    if final is not None:
        final = final.to(a.state_dtype)
    return (y, final, *widened) if keep else (y, final, None, None, None)


def _fake(a: ConvArguments, keep: bool) -> tuple[Tensor | None, ...]:
    final = a.x.new_empty(_state_shape(a), dtype=a.state_dtype) if a.return_final_state else None
    return room_like(a.x), final, *(_widened(a) if keep else (None, None, None))


def _backward(a: ConvArguments, widened: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    x, weight, bias, initial_state, _, activation, return_final_state = a
    dy, dfinal = grads
    places = _places(a, widened)
    dx, dweight, dbias, dinitial = map(room_like, (x, *places[:2], places[4]))
    KERNELS[x.device.type]["conv1d_backward"](
        x.new_zeros(x.shape) if dy is None else unit_stride(dy),
        dfinal.to(dweight.dtype).contiguous() if return_final_state and dfinal is not None else None,
        x, *places, activation == "silu", dx, dweight, dbias, dinitial,
    )  # fmt: skip
    return dx, _as(dweight, weight), _as(dbias, bias), _as(dinitial, initial_state)


def _widened(a: ConvArguments) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Weight, bias and initial state in the kernels' dtype; None for those that are absent or have it."""
    _, weight, bias, initial_state, *_ = a
    wide = accumulation_dtype(a.x.dtype)
    return (
        None if weight.dtype == wide else weight.to(wide),
        None if bias is None or bias.dtype == wide else bias.to(wide),
        None if initial_state is None or initial_state.dtype == wide else initial_state.to(wide),
    )


def _places(a: ConvArguments, widened: tuple) -> tuple[Any, ...]:
    """weight, bias, starts, ends, initial_state as the kernels read them."""
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


declare("conv1d_forward", outputs=2, cuda=conv1d_forward)
declare("conv1d_backward", outputs=4, cuda=conv1d_backward)
conv1d_pack = register("conv1d_pack", ConvArguments, _forward, _fake, _backward, outputs=2, kept=3, gradients=4)
