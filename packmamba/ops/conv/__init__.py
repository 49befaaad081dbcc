"""Depthwise causal convolution over packed documents. Shapes: B rows, L slots, S documents, D channels, W taps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.backends import choose
from packmamba.ops.checks import check_activations, check_layout
from packmamba.ops.conv.arguments import ConvArguments


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
    """``y[t] = activation(bias + sum_j weight[:, W-1-j] * x[t-j])``; before a document, ``x`` is its initial state.

    The convolution of PackMamba (arXiv 2408.03865), with states. Differentiable in every tensor, also through the final
    state.

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
    check_activations(x, "x")
    layout = check_layout(layout, x, "x")
    a = ConvArguments(x, weight, bias, initial_state, layout, activation, return_final_state)
    a.check()
    y, final_state = choose(backend, x.device, "conv1d_pack")(a)
    return (y, final_state) if return_final_state else y
