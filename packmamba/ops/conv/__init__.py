"""Depthwise causal convolution over packed documents. Shapes: B rows, L slots, S documents, D channels, W taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import compiled, mamba_ssm
from packmamba.ops.backends import choose
from packmamba.ops.checks import check_activations, check_is_tensor, check_layout, check_tensor
from packmamba.ops.reference import conv1d_pack_vectorised

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "reference": conv1d_pack_vectorised,
    "cpu": compiled.conv1d_pack,
    "cuda": compiled.conv1d_pack,
    "mamba_ssm": mamba_ssm.conv1d_pack,
}


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
    channels = x.shape[2]
    check_is_tensor(weight, "weight")
    if weight.dim() != 2 or not 2 <= weight.shape[1] <= 4:
        raise ValueError(f"weight: expected shape ({channels}, W) with W from 2 to 4, got {tuple(weight.shape)}")
    width = weight.shape[1]
    dtypes = (x.dtype, torch.float32)
    check_tensor(weight, "weight", (channels, width), dtypes, x, "x")
    if bias is not None:
        check_tensor(bias, "bias", (channels,), dtypes, x, "x")
    if initial_state is not None:
        shape = (layout.num_documents, channels, width - 1)
        check_tensor(initial_state, "initial_state", shape, dtypes, x, "x")
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    run = choose(backend, x.device, IMPLEMENTATIONS)
    y, final_state = run(x, weight, bias, layout, activation, initial_state, return_final_state)
    return (y, final_state) if return_final_state else y
