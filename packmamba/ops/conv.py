"""The depthwise causal convolution over packed documents: checks, and the compiled operator.

Nothing is saved for the backward but the arguments: it computes the sums before the activation
again, which costs a few multiplications a number where another tensor of the activations' size
would cost memory and its bytes.

Shapes: B rows, L slots, S documents, D channels, W taps.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.ops import checks, context_parallel
from packmamba.ops.cuda import launch, scans_by_tensor_cores
from packmamba.ops.custom_op import KERNELS, Outputs, PackedOperator, declare, dense, to_dtype, unit_stride


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
    # Parameters and state: x's dtype, as in a model that was cast, or float32, as under autocast.
    dtypes = (x.dtype, torch.float32)
    checks.check_tensors(x, "x", dtypes, weight=(weight, (channels, width)), bias=(bias, (channels,)))
    state_shape = (layout.num_documents, channels, width - 1)
    checks.check_tensors(x, "x", dtypes, initial_state=(initial_state, state_shape))
    expect(activation in (None, "silu"), "activation", "'silu' or None", repr(activation))
    checks.check_flags(return_final_state=return_final_state)
    arguments = ConvArguments(x, weight, bias, initial_state, layout, activation, return_final_state)
    return context_parallel.run("conv1d_pack", arguments, backend)


class ConvArguments(NamedTuple):
    """Arguments of every implementation, checked."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    activation: str | None
    return_final_state: bool


class Nothing(NamedTuple):
    """Saved for the backward, which needs the arguments alone."""


def of_layer(a: Any, x: Tensor) -> ConvArguments:
    """Return the convolution's arguments in a layer's fused operator.

    a: arguments of the fused operator; x: the convolution's input (B, L, D).
    """
    return ConvArguments(
        x=x,
        weight=a.conv_weight,
        bias=a.conv_bias,
        initial_state=a.conv_state,
        layout=a.conv_layout,
        activation="silu",
        return_final_state=a.return_state,
    )


def backward_of_layer(
    a: Any, x: Tensor, dx: Tensor, dy: Tensor, dfinal: Tensor | None, gradients: dict[str, Tensor | None]
) -> None:
    """Compute the convolution's gradients in a fused operator's backward.

    a, x: as of ``of_layer``; dx: where the gradient of x goes; dy, dfinal: those of its results;
    gradients: those of the fused operator, which get the parameters' and the state's.
    """
    written = {"dx": dx, "dweight": gradients["dconv_weight"], "dbias": gradients["dconv_bias"]}
    backward_into(of_layer(a, x), dy, dfinal, dinitial_state=gradients["dconv_state"], **written)


def compiled(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.conv1d_pack`` by compiled kernels.

    These take parameters and state in the accumulation dtype.
    """
    wide = checks.accumulation_dtype(a.x.dtype)
    parameters = {name: to_dtype(getattr(a, name), wide) for name in ("weight", "bias", "initial_state")}
    y, final_state = _operator(a._replace(**parameters))
    state_dtype = a.x.dtype if a.initial_state is None else a.initial_state.dtype
    return y, to_dtype(final_state, state_dtype)


def _forward(a: ConvArguments, needs_backward: bool) -> tuple[Outputs, Nothing]:
    outputs, saved = _allocate(a, needs_backward)
    KERNELS[a.x.device.type]["conv1d_forward"](_inputs(a) | outputs._asdict())
    return outputs, saved


def _allocate(a: ConvArguments, needs_backward: bool) -> tuple[Outputs, Nothing]:
    """Allocate y (B, L, D), and final states (S, D, W-1) if returned."""
    channels, width = a.weight.shape
    documents = a.layout.starts.shape[0]
    final_state = a.weight.new_empty(documents, channels, width - 1) if a.return_final_state else None
    return Outputs(y=a.x.new_empty(a.x.shape), final_state=final_state), Nothing()


def _backward(a: ConvArguments, saved: Nothing, grads: Outputs) -> dict[str, Tensor | None]:
    gradients = _operator.signature.allocate_gradients(a)
    # No gradient of y: only the final state was used.
    dy = a.x.new_zeros(a.x.shape) if grads.y is None else unit_stride(grads.y)
    backward_into(a, dy, grads.final_state, **gradients)
    return gradients


def backward_into(a: ConvArguments, dy: Tensor, dfinal: Tensor | None, **gradients: Tensor | None) -> None:
    """Compute gradients into dx, dweight, dbias and dinitial_state; dy has unit channel stride."""
    dfinal = dense(dfinal) if a.return_final_state else None
    KERNELS[a.x.device.type]["conv1d_backward"]({**_inputs(a), "dy": dy, "dfinal": dfinal, **gradients})


def _inputs(a: ConvArguments) -> dict[str, Any]:
    """Name what both kernels read, as kernels/*/bindings do.

    x lies as it came; parameters and states are made dense.
    """
    return a._asdict() | {
        "weight": dense(a.weight),
        "bias": dense(a.bias),
        "initial_state": dense(a.initial_state),
        "silu": a.activation == "silu",
        "starts": a.layout.starts,
        "ends": a.layout.ends,
    }


def _launch(name: str, direction: str, arguments: dict[str, Any]) -> None:
    """Launch a kernel with the schedule that the scan will have.

    The convolution itself cuts nothing.
    """
    x = arguments["x"]
    # Which scan comes is not known here: assume 16 states, Mamba-1's usual number.
    launch(name, direction, arguments, like=x, tensor_cores=scans_by_tensor_cores(x, states=16))


declare("conv1d_forward", cuda=functools.partial(_launch, "conv1d_forward", "forward"))
declare("conv1d_backward", cuda=functools.partial(_launch, "conv1d_backward", "backward"))
_operator: PackedOperator[ConvArguments] = PackedOperator(
    "conv1d_pack", arguments=ConvArguments, saved=Nothing, forward=_forward, fake=_allocate, backward=_backward
)
