"""What the convolution takes. Shapes: B rows, L slots, S documents, D channels, W taps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import check_flag, check_is_tensor, check_tensor


class ConvArguments(NamedTuple):
    """Arguments of every implementation, under the names of ``ops.conv1d_pack``; the layout is there."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    layout: SequenceLayout
    activation: str | None
    return_final_state: bool

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the final state."""
        return self.x.dtype if self.initial_state is None else self.initial_state.dtype

    def check(self) -> None:
        """Against x and the layout, which are right."""
        x, weight, bias, initial_state, layout, activation, return_final_state = self
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
        if activation is not None and not (isinstance(activation, str) and activation == "silu"):
            raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
        check_flag("return_final_state", return_final_state)
