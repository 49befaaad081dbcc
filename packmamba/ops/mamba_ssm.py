"""Baselines under our signatures: mamba-ssm's scan of Mamba-1 and causal-conv1d's convolution.

They know no documents: a layout may hold one per row, and padding is blanked, so that states pass
it unchanged. The selective scan and the convolution take channels first, so that tensors are
transposed, as in Mamba's block; that is part of their cost.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.ops import reference
from packmamba.ops.conv import ConvArguments
from packmamba.ops.inner import InnerArguments
from packmamba.ops.scan import ScanArguments


@functools.cache
def _peer(package: str, module: str, name: str) -> Callable[..., Any]:
    """Import a submodule's function without the package's ``__init__``, which imports far more."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ValueError(f"backend: 'mamba_ssm' needs {package.replace('_', '-')}, which is not installed")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def _real(layout: SequenceLayout) -> Tensor:
    """Mark slots that hold tokens, (B, L, 1).

    Raises ValueError if a row holds several documents.
    """
    expect(not layout.packed, "layout", "one document per row in backend 'mamba_ssm'", "more; layout.flow() leaks")
    return (layout.documents >= 0)[..., None]


def _blank(a: ScanArguments, real: Tensor, *tensors: Tensor | None) -> Any:
    """Zero step sizes and tensors (B, L, D) at padding, which keeps the state.

    Returns delta, then the tensors.
    """
    if a.layout.num_tokens == a.layout.num_slots:
        return a.delta, *tensors
    # A step of size 0 keeps the state: softplus(-1e4) is 0 in every dtype.
    delta = torch.where(real, a.delta, -1e4 if a.delta_softplus else 0)
    return delta, *(None if tensor is None else torch.where(real, tensor, 0) for tensor in tensors)


def ssm_pack(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssm_pack`` by mamba-ssm.

    It takes no initial state, and has no gradient through the final one.
    """
    expect(a.initial_state is None, "initial_state", "None in backend 'mamba_ssm'", "a tensor")
    real = _real(a.layout)
    scan = _peer("mamba_ssm", "ops.selective_scan_interface", "selective_scan_fn")
    delta, u, B, C, z = map(_channels_first, _blank(a, real, a.u, a.B, a.C, a.z))
    result = scan(u, delta, a.A, B, C, a.D, z, a.delta_bias, a.delta_softplus, a.return_final_state)
    y, final = result if a.return_final_state else (result, None)
    y = torch.where(real, y.transpose(1, 2), 0)
    # States by row: each document takes that of its row.
    return y, None if final is None else final[a.layout.rows.long()]


def _channels_first(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.transpose(1, 2).contiguous()


def conv1d_pack(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.conv1d_pack`` by causal-conv1d, without states."""
    expect(a.initial_state is None, "initial_state", "None in backend 'mamba_ssm'", "a tensor")
    expect(not a.return_final_state, "return_final_state", "False in backend 'mamba_ssm'", True)
    layout = a.layout
    real = _real(layout)
    convolve = _peer("causal_conv1d", "causal_conv1d_interface", "causal_conv1d_fn")
    # Zero at padding before the call, since it may hold NaN, and after it.
    x = torch.where(real, a.x, 0) if layout.num_tokens < layout.num_slots else a.x
    bias = None if a.bias is None else a.bias.to(x.dtype)
    y = convolve(x.transpose(1, 2), a.weight.to(x.dtype), bias, activation=a.activation)
    y = y.transpose(1, 2)
    # causal-conv1d needs a gradient with its shape's strides, also where a dimension is 1.
    if y.requires_grad and y.shape[1] == 1:
        y.register_hook(lambda dy: dy.new_empty(dy.shape).copy_(dy))
    return torch.where(real, y, 0), None


def mamba_inner(a: InnerArguments) -> tuple[Tensor | None, ...]:
    """Compute ``ops.mamba_inner`` by the two packages' operators, between matrix products."""
    return reference.mamba_inner(a, conv1d_pack, ssm_pack)
