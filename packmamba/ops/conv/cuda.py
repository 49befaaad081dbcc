"""Launches the convolution's CUDA kernels; arguments are those of kernels/cpu/bindings.cpp, by position."""

from __future__ import annotations

from typing import Any

from packmamba.ops.cuda.launch import launch, scans_by_tensor_cores


def conv1d_forward(*arguments: Any) -> None:
    x = arguments[0]
    # With the scan's schedule, where it will have one.
    launch("conv1d_forward", "forward", arguments, x, arguments[3:5], scans_by_tensor_cores(x, 16))


def conv1d_backward(*arguments: Any) -> None:
    x = arguments[2]
    launch("conv1d_backward", "backward", arguments, x, arguments[5:7], scans_by_tensor_cores(x, 16))
