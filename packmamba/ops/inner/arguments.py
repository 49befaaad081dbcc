"""What the operator from convolution to last projection takes. Shapes: B rows, L slots, D channels, N states, W taps, R rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import ACTIVATION_DTYPES, accumulation_dtype, check_is_tensor, check_tensor


class InnerArguments(NamedTuple):
    """Arguments of every implementation, under the names of ``inner_pack``; the layouts are there.

    x_used, dt_used, out_used: x_weight, dt_weight and out_weight in xz's dtype, where their own is another.
    """

    xz: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    x_weight: Tensor
    dt_weight: Tensor
    out_weight: Tensor
    A: Tensor
    D: Tensor
    delta_bias: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None
    x_used: Tensor | None
    dt_used: Tensor | None
    out_used: Tensor | None
    conv_layout: SequenceLayout
    ssm_layout: SequenceLayout
    return_state: bool
    recompute: bool

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """x_weight, dt_weight and out_weight in xz's dtype."""
        return tuple(own if used is None else used for own, used in zip(self[3:6], self[11:14]))

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Views of (B, L, R + 2 N): (B, L, R), (B, L, N), (B, L, N)."""
        rank, states = self.dt_weight.shape[1], self.A.shape[1]
        return projected.split((rank, states, states), dim=2)

    def check(self) -> None:
        """Against xz and the layouts, which are right."""
        xz, out_weight = self.xz, self.out_weight
        if xz.shape[2] % 2:
            raise ValueError(f"xz: expected shape (B, L, 2 D), got {tuple(xz.shape)}")
        channels = xz.shape[2] // 2
        sizes = []
        for name, matrix, expected, most in (
            ("conv_weight", self.conv_weight, "W) with W from 2 to 4", range(2, 5)),
            ("dt_weight", self.dt_weight, "R) with R at least 1", range(1, 2**31)),
            ("A", self.A, "N) with N from 1 to 256", range(1, 257)),
        ):
            check_is_tensor(matrix, name)
            if matrix.dim() != 2 or matrix.shape[1] not in most:
                raise ValueError(f"{name}: expected shape ({channels}, {expected}, got {tuple(matrix.shape)}")
            sizes.append(matrix.shape[1])
        width, rank, states = sizes
        check_is_tensor(out_weight, "out_weight")
        near, wide = (xz.dtype, torch.float32), (accumulation_dtype(xz.dtype),)
        for name, shape, dtypes in (
            ("conv_weight", (channels, width), near),
            ("conv_bias", (channels,), near),
            ("x_weight", (rank + 2 * states, channels), ACTIVATION_DTYPES),
            ("dt_weight", (channels, rank), ACTIVATION_DTYPES),
            ("out_weight", (*out_weight.shape[:1], channels), ACTIVATION_DTYPES),
            ("A", (channels, states), wide),
            ("D", (channels,), wide),
            ("delta_bias", (channels,), wide),
            ("conv_state", (self.conv_layout.num_documents, channels, width - 1), near),
            ("ssm_state", (self.ssm_layout.num_documents, channels, states), wide),
        ):
            tensor = getattr(self, name)
            if tensor is not None or name not in ("conv_bias", "conv_state", "ssm_state"):
                check_tensor(tensor, name, shape, dtypes, xz, "xz")
