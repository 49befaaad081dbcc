"""Launches the scan's CUDA kernels; arguments are those of kernels/cpu/bindings.cpp, by position."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from packmamba.errors import KernelError
from packmamba.ops.cuda.launch import launch, scans_by_tensor_cores

BACKWARD_SHARED_BYTES = 109 << 10
"""Of a block of the scan's backward by tensor cores."""


def ssm_forward(*arguments: Any) -> None:
    u, kept = arguments[0], arguments[-1]
    cuts = _cuts(*arguments[:7])
    if cuts and kept is not None:
        _check_backward_fits(u.device)
    launch("ssm_forward", "forward", arguments, u, arguments[9:11], cuts)


def ssm_backward(*arguments: Any, y: Tensor | None = None) -> None:
    """With ``y``, written to it: the forward's output, from the states that the backward replays."""
    dy, u = arguments[0], arguments[2]
    cuts = _cuts(*arguments[2:9])
    if cuts and not _even(dy):
        arguments = (dy.contiguous(), *arguments[1:])
    launch("ssm_backward", "backward", arguments, u, arguments[11:13], cuts, (y,))


@functools.cache
def _check_backward_fits(device: torch.device) -> None:
    """Before anything that will be differentiated is computed."""
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", BACKWARD_SHARED_BYTES)
    if room < BACKWARD_SHARED_BYTES:
        raise KernelError(
            f"the scan's gradients of bfloat16 activations with 16 states need {BACKWARD_SHARED_BYTES >> 10} KiB of shared "
            f"memory a block, this GPU has {room >> 10}; take float16 or float32 activations, or backend 'mamba_ssm' or "
            "'reference'"
        )


def _even(tensor: Tensor) -> bool:
    """Whether pairs of 16-bit channels can be read at once."""
    rows, tokens, _ = tensor.stride()
    return not ((tensor.data_ptr() | rows << 1 | tokens << 1) & 3)


def _cuts(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> bool:
    if not scans_by_tensor_cores(u, A.shape[1]):
        return False
    return _even(u) and _even(delta) and _even(B) and _even(C) and (z is None or _even(z))
