"""CUDA launches, and their schedule: a layout as work items, made on the device once for every layer."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from packmamba.layout import Schedules
from packmamba.ops.build import operator

SEGMENT = 1024
"""Tokens between the places, counted from a document's token 0, at which the scan combines states (kernels/cuda/params.h)."""
CUT_SHARE = {"forward": 1.4, "backward": 0.6}
"""Documents above this share of a scheduler's tokens are cut in segments that are walked at once, and scanned twice."""
NEVER = 2**31 - 1
# Documents of one window share a work item: minimum slots, maximum windows.
MIN_WINDOW, WINDOWS = 128, 128
WARP_CHANNELS = 16

Args = tuple[Tensor, int, int, int]
_capture: object | None = None  # inside ``one_capture``


class Schedule:
    """Hold a schedule: what its tensors' versions were, its memory and its plan."""

    made_of: tuple | None = None
    args: Args


def plan(
    slots: int, longest: int, channels: int, cuts: bool, device: torch.device, direction: str
) -> tuple[int, int, int]:
    """Return (cut_above, cut_length, window) of a batch for a direction of ``CUT_SHARE``."""
    window = max(MIN_WINDOW, slots // WINDOWS)
    if not cuts or longest < SEGMENT:
        return NEVER, NEVER, window
    share = slots * -(-channels // WARP_CHANNELS) // _schedulers(device)
    cut_above = max(SEGMENT, int(share * CUT_SHARE[direction]))
    # The grid has room for 65535 segments walked at once.
    return (NEVER if longest <= cut_above or slots > SEGMENT << 15 else cut_above), SEGMENT, window


def schedule(
    starts: Tensor, ends: Tensor, rows: int, row_length: int, channels: int, cuts: bool, direction: str,
    stream: int | None = None,
) -> Args:  # fmt: skip
    """Return the batch's schedule and its plan, made on the device at the first call for a layout.

    A graph under capture makes its own, since its layout is filled again before each replay: at every call, or at the first
    inside ``one_capture``. So does each stream: another's work might come before a schedule is there.
    """
    schedules = schedules_of(starts)
    stream = torch._C._cuda_getCurrentRawStream(starts.get_device()) if stream is None else stream
    made_of = (ends.data_ptr(), *versions(starts, ends))
    key = (direction, rows, row_length, channels, cuts, stream)
    known = schedules.get(key)
    if known is not None and known.made_of == made_of:
        return known.args
    longest = NEVER if schedules.get("longest") is None else schedules["longest"]
    planned = plan(rows * row_length, longest, channels, cuts, starts.device, direction)
    known = schedules[key] = schedules.setdefault((planned, rows, row_length, stream), Schedule())
    if known.made_of != made_of:
        size = operator("cuda", "schedule_size")(starts.numel(), rows, row_length, *planned)
        memory = starts.new_empty(size)
        operator("cuda", "schedule")(
            starts, ends, schedules.get("offsets"), rows, row_length, *planned, memory, stream
        )
        known.made_of, known.args = made_of, (memory, *planned)
    return known.args


def versions(*tensors: Tensor) -> tuple:
    """Return what changes when a layout's tensors may have: their versions, and a graph's capture."""
    capture = (_capture or object()) if torch._C._cuda_isCurrentStreamCapturing() else None
    return (*(0 if tensor.is_inference() else tensor._version for tensor in tensors), capture)


def schedules_of(starts: Tensor) -> dict:
    """Return the schedules of the layout with these starts."""
    schedules = getattr(starts, "schedules", ())
    if type(schedules) is not Schedules:  # a copy's, or none
        starts.schedules = schedules = Schedules(schedules)  # type: ignore[attr-defined]
    return schedules


@contextmanager
def one_capture() -> Iterator[None]:
    """Share schedules among the calls of one graph capture, in which nothing writes to layouts."""
    global _capture
    _capture = object()
    try:
        yield
    finally:
        _capture = None


def scans_by_tensor_cores(u: Tensor, states: int) -> bool:
    """Return whether the tensor-core scan runs, which may cut long documents."""
    return states == 16 and u.dtype == torch.bfloat16 and u.shape[2] % 2 == 0


def check_has_kernels(u: Tensor) -> None:
    if u.dtype == torch.float64:
        raise TypeError("float64 activations have no CUDA kernels; expected bfloat16, float16 or float32")


def launch(
    name: str,
    direction: str,
    arguments: tuple,
    u: Tensor,
    documents: tuple[Tensor, Tensor],
    cuts: bool,
    last: tuple = (),
) -> None:
    """Launch a kernel on activations like u (B, L, D) of documents (starts, ends); cuts: long ones may be cut."""
    check_has_kernels(u)
    device = u.get_device()
    if device != current_device():
        with torch.cuda.device(device):
            launch(name, direction, arguments, u, documents, cuts, last)
        return
    rows, row_length, channels = u.shape
    stream = torch._C._cuda_getCurrentRawStream(device)
    args = schedule(*documents, rows, row_length, channels, cuts, direction, stream)
    operator("cuda", name)(*arguments, *args, stream, *last)


def current_device() -> int:
    return torch._C._cuda_getDevice()


@functools.cache
def _schedulers(device: torch.device) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
