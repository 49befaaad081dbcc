"""Launches the CUDA kernels: what they take is checked, their schedule, device and stream are found."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from packmamba.errors import KernelError
from packmamba.ops.build import operator
from packmamba.ops.cuda.schedule import current_stream, schedule

BACKWARD_SHARED_BYTES = 109 << 10
"""Of a block of the scan's backward by tensor cores."""


def scans_by_tensor_cores(u: Tensor, states: int) -> bool:
    """Whether the kernels may cut long documents; those for any dtype and number of states do not."""
    return states == 16 and u.dtype == torch.bfloat16 and u.shape[2] % 2 == 0


def _launch(
    name: str, direction: str, arguments: tuple, u: Tensor, documents: tuple, cuts: bool, last: tuple = ()
) -> None:
    if u.dtype == torch.float64:
        raise TypeError("float64 activations have no CUDA kernels; expected bfloat16, float16 or float32")
    device = u.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _launch(name, direction, arguments, u, documents, cuts, last)
        return
    rows, row_length, channels = u.shape
    starts, ends = documents
    stream = current_stream(device)
    found = schedule(starts, ends, rows, row_length, channels, cuts, direction, stream)
    operator("cuda", name)(*arguments, *found, stream, *last)


# Arguments are those of kernels/cpu/bindings.cpp, by position.
def conv1d_forward(*arguments: Any) -> None:
    x = arguments[0]
    # The scan's schedule, where it will have one.
    _launch("conv1d_forward", "forward", arguments, x, arguments[3:5], scans_by_tensor_cores(x, 16))


def conv1d_backward(*arguments: Any) -> None:
    x = arguments[2]
    _launch("conv1d_backward", "backward", arguments, x, arguments[5:7], scans_by_tensor_cores(x, 16))


def ssm_forward(*arguments: Any) -> None:
    u, kept = arguments[0], arguments[-1]
    cuts = _cuts(*arguments[:7])
    if cuts and kept is not None:
        _check_backward_fits(u.device)
    _launch("ssm_forward", "forward", arguments, u, arguments[9:11], cuts)


def ssm_backward(*arguments: Any, y: Tensor | None = None) -> None:
    """With ``y``, written to it: the forward's output, from the states that the backward replays."""
    dy, u = arguments[0], arguments[2]
    cuts = _cuts(*arguments[2:9])
    if cuts and not _even(dy):
        arguments = (dy.contiguous(), *arguments[1:])
    _launch("ssm_backward", "backward", arguments, u, arguments[11:13], cuts, (y,))


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
    return (
        scans_by_tensor_cores(u, A.shape[1])
        and _even(u)
        and _even(delta)
        and _even(B)
        and _even(C)
        and (z is None or _even(z))
    )


KERNELS = {f.__name__: f for f in (conv1d_forward, conv1d_backward, ssm_forward, ssm_backward)}
