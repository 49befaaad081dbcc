"""The CUDA kernels behind ``compiled``: the batch's schedules, made once and shared by every layer, the device and the stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from packmamba.errors import KernelError
from packmamba.layout import SequenceLayout
from packmamba.ops import build

# Documents are cut only where they would leave the chip idle: pieces scan their tokens twice.
MIN_CUT_ABOVE = 384
CUT_SHARE = {"forward": 0.45, "backward": 0.6}
"""Documents are cut above this share of the tokens that each scheduler gets. A warp alone is slower than its share of a full
scheduler by 2.4 in the forward, by 2 in the backward."""
CUT_LENGTHS = (128, 256)
NEVER = 2**31 - 1
MIN_WINDOW, WINDOWS = 128, 128
"""Documents that begin in the same window of slots share a work item: at least so many slots, at most so many windows."""
WARP_CHANNELS = 16
BACKWARD_SHARED_BYTES = 109 << 10
"""Of a block of the scan's backward by tensor cores."""

# By the layout's starts: (what else it was made of, schedule); and the longest document.
_schedules: WeakIdKeyDictionary = WeakIdKeyDictionary()
_longest: WeakIdKeyDictionary = WeakIdKeyDictionary()
_captured: WeakIdKeyDictionary | None = None  # inside ``one_capture``


def note(layout: SequenceLayout) -> None:
    """What the host knows of a layout that its tensors do not say without a wait: it saves empty launches."""
    if layout.longest is not None and layout.device.type == "cuda" and not torch.compiler.is_compiling():
        _longest[layout.starts] = (_version(layout.starts), layout.longest)


def plan(
    slots: int, longest: int, channels: int, cuts: bool, device: torch.device, direction: str
) -> tuple[int, int, int]:
    """(cut_above, cut_length, window) of a batch, from what the host knows without waiting for the device.

    direction: forward or backward.
    """
    window = max(MIN_WINDOW, slots // WINDOWS)
    # Tokens that each scheduler gets, of one warp's channels: a document much shorter than that cannot hold the others up.
    share = slots * -(-channels // WARP_CHANNELS) // _schedulers(device)
    cut_above = max(MIN_CUT_ABOVE, int(share * CUT_SHARE[direction]))
    if not cuts or longest <= cut_above:
        return NEVER, NEVER, window
    low, high = CUT_LENGTHS
    # The grid has room for 65535 pieces.
    cut_length = max(min(high, max(low, cut_above // 12)), slots // 16384) // 32 * 32
    return max(cut_above, cut_length), cut_length, window


def schedule(
    starts: Tensor, ends: Tensor, rows: int, row_length: int, channels: int, cuts: bool, direction: str
) -> tuple[Tensor, int, int, int]:
    """The batch's schedule and its plan; made on the device at the first call for a layout, found again by later ones.

    A graph under capture makes its own, since its layout's tensors are filled again before each replay: at every call, or at
    the first inside ``one_capture``.
    """
    version, longest = _longest.get(starts, (None, row_length))
    longest = longest if version == _version(starts) else row_length
    key = plan(rows * row_length, longest, channels, cuts, starts.device, direction)
    capturing = torch.cuda.is_current_stream_capturing()
    made_of = (ends.data_ptr(), _version(starts), _version(ends), rows, row_length, key)
    found = _captured if capturing else _schedules
    cached: dict = {} if found is None else found.setdefault(starts, {})
    if made_of not in cached:
        shape = (starts.numel(), rows, row_length, *key)
        memory = starts.new_empty(torch.ops.packmamba_cuda.schedule_size(*shape))
        torch.ops.packmamba_cuda.schedule(starts, ends, rows, row_length, *key, memory, _stream(starts))
        cached[made_of] = memory
    return cached[made_of], *key


def scans_by_tensor_cores(u: Tensor, states: int) -> bool:
    """Whether the kernels may cut long documents; those for any dtype and number of states do not."""
    return u.dtype == torch.bfloat16 and states == 16 and u.shape[2] % 2 == 0


@contextmanager
def one_capture() -> Iterator[None]:
    """Around the capture of one graph in which nothing writes to layouts: its calls share their schedules."""
    global _captured
    _captured = WeakIdKeyDictionary()
    try:
        yield
    finally:
        _captured = None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@functools.cache
def _schedulers(device: torch.device) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _stream(tensor: Tensor) -> int:
    # As torch.cuda.current_stream, without an object for each call: operators are called often, and some are short.
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def _run(
    name: str, *arguments: Any, activations: Tensor, starts: Tensor, ends: Tensor, cuts: bool, last: tuple = ()
) -> None:
    build.load("cuda")
    if activations.dtype == torch.float64:
        raise TypeError("float64 activations have no CUDA kernels; expected bfloat16, float16 or float32")
    rows, row_length, channels = activations.shape
    device = activations.device.index
    with nullcontext() if device == torch.cuda.current_device() else torch.cuda.device(device):
        found = schedule(starts, ends, rows, row_length, channels, cuts, name.split("_")[-1])
        getattr(torch.ops.packmamba_cuda, name).default(*arguments, *found, _stream(activations), *last)


def conv1d_forward(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, ends: Tensor, *others: Any) -> None:
    arguments = (x, weight, bias, starts, ends, *others)
    _run("conv1d_forward", *arguments, activations=x, starts=starts, ends=ends, cuts=scans_by_tensor_cores(x, 16))


def conv1d_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    *others: Any,
) -> None:
    arguments = (dy, dfinal, x, weight, bias, starts, ends, *others)
    _run("conv1d_backward", *arguments, activations=x, starts=starts, ends=ends, cuts=scans_by_tensor_cores(x, 16))


def ssm_forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, delta_bias: Tensor | None,
    delta_softplus: bool, starts: Tensor, ends: Tensor, *others: Any,
) -> None:  # fmt: skip
    arguments = (u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, *others)
    cuts = _cuts(u, delta, B, C, z, A.shape[1])
    if cuts and others[-1] is not None:
        _check_backward_fits(u.device)
    _run("ssm_forward", *arguments, activations=u, starts=starts, ends=ends, cuts=cuts)


def ssm_backward(
    dy: Tensor, dfinal: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, delta_bias: Tensor | None, delta_softplus: bool, starts: Tensor, ends: Tensor, *others: Any,
    y: Tensor | None = None,
) -> None:  # fmt: skip
    """With ``y``, written to it: the forward's output, from the states that the backward replays."""
    cuts = _cuts(u, delta, B, C, z, A.shape[1])
    if cuts and not _even(dy):
        dy = dy.contiguous()
    arguments = (dy, dfinal, u, delta, A, B, C, D, z, delta_bias, delta_softplus, starts, ends, *others)
    _run("ssm_backward", *arguments, activations=u, starts=starts, ends=ends, cuts=cuts, last=(y,))


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
    return tensor.data_ptr() % 4 == 0 and tensor.stride(0) % 2 == 0 and tensor.stride(1) % 2 == 0


def _cuts(u: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor | None, states: int) -> bool:
    aligned = all(_even(tensor) for tensor in (u, delta, B, C, z) if tensor is not None)
    return scans_by_tensor_cores(u, states) and aligned


KERNELS = {f.__name__: f for f in (conv1d_forward, conv1d_backward, ssm_forward, ssm_backward)}
