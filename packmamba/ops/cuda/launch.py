"""Launches a CUDA kernel: its schedule, device and stream are found."""

from __future__ import annotations

import torch
from torch import Tensor

from packmamba.ops.build import operator
from packmamba.ops.cuda.schedule import current_device, current_stream, schedule


def scans_by_tensor_cores(u: Tensor, states: int) -> bool:
    """Whether the scan's kernels may cut long documents; those for any dtype and number of states do not."""
    return states == 16 and u.dtype == torch.bfloat16 and u.shape[2] % 2 == 0


def launch(
    name: str, direction: str, arguments: tuple, u: Tensor, documents: tuple, cuts: bool, last: tuple = ()
) -> None:
    """``torch.ops.packmamba_cuda.<name>`` of the arguments, then the schedule and its plan, the stream, and ``last``.

    Args:
        direction: forward or backward.
        u: (B, L, D), any of the activations; documents: its layout's starts and ends; cuts: whether long ones may be cut.
    """
    if u.dtype == torch.float64:
        raise TypeError("float64 activations have no CUDA kernels; expected bfloat16, float16 or float32")
    device = u.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            launch(name, direction, arguments, u, documents, cuts, last)
        return
    rows, row_length, channels = u.shape
    starts, ends = documents
    stream = current_stream(device)
    found = schedule(starts, ends, rows, row_length, channels, cuts, direction, stream)
    operator("cuda", name)(*arguments, *found, stream, *last)
