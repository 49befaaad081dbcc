"""From convolution to last projection by two operators and matrix products; autograd keeps what it needs."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from packmamba.ops.conv.arguments import ConvArguments
from packmamba.ops.conv.reference import conv1d_pack_vectorised
from packmamba.ops.inner.arguments import InnerArguments
from packmamba.ops.scan.arguments import ScanArguments
from packmamba.ops.scan.reference import ssm_pack_vectorised


def composed(a: InnerArguments, conv1d_pack: Callable, ssm_pack: Callable) -> tuple[Tensor | None, ...]:
    """By two implementations of the operators."""
    x_weight, dt_weight, out_weight = (weight.to(a.xz.dtype) for weight in (a.x_weight, a.dt_weight, a.out_weight))
    x, z = a.xz.chunk(2, dim=-1)
    x, conv_final = conv1d_pack(
        ConvArguments(x, a.conv_weight, a.conv_bias, a.conv_state, a.conv_layout, "silu", a.return_state)
    )
    delta, B, C = a.parts(F.linear(x, x_weight))
    y, ssm_final = ssm_pack(
        ScanArguments(
            x,
            F.linear(delta, dt_weight),
            a.A,
            B,
            C,
            a.D,
            z,
            a.delta_bias,
            a.ssm_state,
            a.ssm_layout,
            True,
            a.return_state,
        )
    )
    return F.linear(y, out_weight), conv_final, ssm_final


def inner_pack(a: InnerArguments) -> tuple[Tensor | None, ...]:
    """By the references."""
    return composed(a, conv1d_pack_vectorised, ssm_pack_vectorised)
