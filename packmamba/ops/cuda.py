"""Launch CUDA kernels, and make what they share: the batch's schedule, its documents as work items.

A schedule is made on the device, so that the host need not wait for a layout's tensors, at the
first kernel that wants it, and is kept with the layout: it costs some microseconds a batch,
whatever the number of layers. It is made again where it might not hold: for another stream (its
work might come before a schedule is there), after a write to the layout, and in each capture of a
CUDA graph, whose layout is filled again before each replay.

It also decides where long documents are cut. Cuts lie at multiples of ``SEGMENT`` or
``FLOAT_SEGMENT`` from a document's token 0, whatever the batch, so that a document's bits do not
depend on its neighbours. The float32 scan always walks the segments of a document at once; for the
tensor-core scan the batch decides whether one work item walks them in turn, or several at once.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import Schedules, ceil_div
from packmamba.ops.custom_op import kernel

# Tokens from a document's token 0 between the places where the tensor-core scan combines states.
#
# kernels/cuda/params.h has the mechanism.
SEGMENT = 1024
# The same for the float32 scan (kernels/cuda/scan_any.cu), whose warps take longer for a token.
FLOAT_SEGMENT = 256
# Share of a scheduler's tokens above which the
# tensor-core scan walks a document's segments at once.
#
# That scans them twice, which pays where they would hold the others up.
CUT_SHARE = {"forward": 1.4, "backward": 0.6}
# A length that no document has.
NEVER = 2**31 - 1
# Documents of one window share a work item: minimum slots, maximum windows.
MIN_WINDOW = 128
WINDOWS = 128
# Channels of a warp of the tensor-core scan.
WARP_CHANNELS = 16

_capture: object | None = None  # inside ``one_capture``


class CutPlan(NamedTuple):
    """Say how a batch is made into work items, as kernels/cuda/params.h has it; in tokens.

    Attributes:
        cut_above: the segments of longer documents are walked at once, each by a work item of its
            own.
        cut_length: of a segment; ``NEVER`` where no document is as long.
        window: documents that begin in the same window of so many slots share a work item.
    """

    cut_above: int
    cut_length: int
    window: int


class KernelSchedule:
    """Hold a batch's work items, made by kernels/cuda/schedule.cu.

    Attributes:
        made_of: address and versions of the layout's tensors when it was made; None before.
        memory: its table on the device, int32.
        arguments: the kernels' arguments that name it, for every launch.
    """

    made_of: tuple | None = None
    memory: Tensor
    arguments: dict[str, Any]


def plan(
    slots: int, longest: int, channels: int, tensor_cores: bool, device: torch.device, direction: str
) -> CutPlan:
    """Plan the work of a batch.

    Args:
        slots: B * L.
        longest: tokens of the longest document, its offset included; ``NEVER`` if unknown.
        channels: D, of the scan that will be launched.
        tensor_cores: whether it is the tensor-core scan.
        direction: of ``CUT_SHARE``.
    """
    window = max(MIN_WINDOW, slots // WINDOWS)
    segment = SEGMENT if tensor_cores else FLOAT_SEGMENT
    # No document reaches a multiple of it: kernels without combinations are faster.
    if longest < segment:
        return CutPlan(cut_above=NEVER, cut_length=NEVER, window=window)
    if not tensor_cores:
        return CutPlan(cut_above=segment, cut_length=segment, window=window)
    # Tokens that each scheduler gets, of one warp's channels: a document much shorter than that
    # holds no other up.
    share = slots * ceil_div(channels, WARP_CHANNELS) // _schedulers(device)
    cut_above = max(segment, int(share * CUT_SHARE[direction]))
    # The grid has room for 65535 segments walked at once.
    if longest <= cut_above or slots > segment << 15:
        cut_above = NEVER
    return CutPlan(cut_above=cut_above, cut_length=segment, window=window)


def schedule(
    starts: Tensor, ends: Tensor, shape: Sequence[int], tensor_cores: bool, direction: str, stream: int
) -> KernelSchedule:
    """Return the batch's schedule, made on the device at the first call for a layout.

    A graph under capture makes its own, since its layout is filled again before each replay: at
    every call, or at the first inside ``one_capture``. So does each stream: another's work might
    come before a schedule is there.

    Args:
        starts, ends: the layout's, (S,) int32.
        shape: B, L, D.
    """
    rows, row_length, channels = shape
    schedules = schedules_of(starts)
    # The address of ``starts`` is not needed: the schedules are an attribute of it.
    made_of = (ends.data_ptr(), *versions(starts, ends))
    key = (direction, *shape, tensor_cores, stream)
    cached = schedules.get(key)
    if cached is not None and cached.made_of == made_of:
        return cached
    longest = NEVER if schedules.get("longest") is None else schedules["longest"]
    cut_plan = plan(rows * row_length, longest, channels, tensor_cores, starts.device, direction)
    # The length of the longest document is the host's knowledge; unknown, it may be any.
    # Shared by both directions and all widths whose plans are equal.
    cached = schedules.setdefault((cut_plan, rows, row_length, stream), KernelSchedule())
    schedules[key] = cached
    if cached.made_of != made_of:
        sizes = {"rows": rows, "row_length": row_length, **cut_plan._asdict()}
        size = kernel("cuda", "schedule_size")({"documents": starts.numel(), **sizes})
        memory = starts.new_empty(size)
        tensors = {"starts": starts, "ends": ends, "offsets": schedules.get("offsets")}
        kernel("cuda", "schedule")({**tensors, **sizes, "memory": memory, "stream": stream})
        # In place of the table made for the batch before.
        cached.made_of = made_of
        cached.memory = memory
        cached.arguments = {"schedule": memory, **cut_plan._asdict()}
    return cached


def versions(*tensors: Tensor) -> tuple:
    """Return what changes when a layout's tensors may have.

    These are their versions, and the capture of a graph.
    """
    # Outside ``one_capture`` a new object, equal to none: each call of a capture makes a schedule.
    capture = (_capture or object()) if torch._C._cuda_isCurrentStreamCapturing() else None
    # An inference tensor has no version counter.
    return (*(0 if tensor.is_inference() else tensor._version for tensor in tensors), capture)


def schedules_of(starts: Tensor) -> dict:
    """Return the schedules of the layout with these starts."""
    schedules = getattr(starts, "schedules", ())
    if type(schedules) is not Schedules:  # a copy's, or none
        schedules = Schedules(schedules)
        starts.schedules = schedules  # type: ignore[attr-defined]
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
    """Return whether the tensor-core scan takes activations (B, L, D)."""
    return states == 16 and u.dtype == torch.bfloat16 and u.shape[2] % 2 == 0


def check_has_kernels(u: Tensor) -> None:
    """Raise TypeError for activations in float64, which only the reference and the CPU take."""
    if u.dtype == torch.float64:
        raise TypeError("float64 activations have no CUDA kernels; expected bfloat16, float16 or float32")


def launch(name: str, direction: str, arguments: dict[str, Any], like: Tensor, tensor_cores: bool) -> None:
    """Launch a kernel with the batch's schedule.

    It runs on the current stream of the device that ``like`` lies on.

    Args:
        arguments: by name, as in kernels/cuda/bindings.cu, but for the schedule's and the stream.
        like: its activations, (B, L, D), whose documents ``starts`` and ``ends`` are.
        tensor_cores: whether the tensor-core scan takes the batch, whose schedule it has.
    """
    check_has_kernels(like)
    device = like.get_device()
    # Kernels are launched on the current device, which a tensor's need not be.
    if device != current_device():
        with torch.cuda.device(device):
            launch(name, direction, arguments, like, tensor_cores)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    work = schedule(arguments["starts"], arguments["ends"], like.shape, tensor_cores, direction, stream)
    kernel("cuda", name)({**arguments, **work.arguments, "stream": stream})


def current_device() -> int:
    """Return the index of the current GPU."""
    return torch._C._cuda_getDevice()


@functools.cache
def _schedulers(device: torch.device) -> int:
    # A multiprocessor has four warp schedulers.
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count
