"""Check operators' arguments before any kernel runs.

An error names the argument, what was expected and what came.

Checks read shapes, dtypes, strides and devices, which the host knows: none waits for a GPU, but for
the first conversion of boundaries that come as a tensor on one (``boundary_layout``), which every
layer then shares.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from packmamba.errors import expect
from packmamba.layout import SequenceLayout, check_all

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIONAL = {"bias", "D", "z", "delta_bias", "initial_state", "conv_bias"}
OPTIONAL |= {"conv_state", "ssm_state", "k_state", "v_state"}
"""Arguments that may be None."""
_layouts = WeakTensorKeyDictionary()
"""Layouts of a caller's boundaries. No attribute of the tensor, which would be saved with it."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, states and the scan's parameters.

    dtype: of the activations beside them.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_activations(tensor: Tensor, name: str, shape: str = "(B, L, D)") -> None:
    """Check an operator's first argument. Raises ValueError, TypeError.

    It has as many dimensions as ``shape`` names, none empty, a dtype of ``ACTIVATION_DTYPES`` and
    unit channel stride.
    """
    check_is_tensor(tensor, name)
    if tensor.dim() != shape.count(",") + 1 or 0 in tensor.shape:
        raise ValueError(f"{name}: expected shape {shape} with no empty dimension, got {tuple(tensor.shape)}")
    expect(tensor.dtype in ACTIVATION_DTYPES, name, "bfloat16, float16, float32 or float64", tensor.dtype, TypeError)
    _check_channel_stride(tensor, name)


def check_tensors(
    like: Tensor, like_name: str, dtypes: tuple, unit_stride: bool = False, /, **tensors: tuple[Any, tuple]
) -> None:
    """Check other tensors beside the first, ``like``. Raises ValueError, TypeError.

    Args:
        dtypes: those allowed.
        unit_stride: whether channels must lie side by side.
        tensors: (tensor, shape) by argument; those of ``OPTIONAL`` may be None.
    """
    for name, (tensor, shape) in tensors.items():
        if tensor is None and name in OPTIONAL:
            continue
        check_is_tensor(tensor, name)
        if tensor.shape != shape:
            expected = f"{tuple(shape)} to go with {like_name} {tuple(like.shape)}"
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype not in dtypes:
            expected = f"{' or '.join(dict.fromkeys(map(str, dtypes)))} beside {like_name} of {like.dtype}"
            raise TypeError(f"{name}: expected {expected}, got {tensor.dtype}")
        _check_device(tensor, name, like, like_name)
        if unit_stride:
            _check_channel_stride(tensor, name)


def check_layout(layout: SequenceLayout | None, like: Tensor, like_name: str, name: str = "layout") -> SequenceLayout:
    """Check and return the layout of ``like`` (B, L, ...); None: each row is one document.

    Raises ValueError, TypeError.
    """
    rows, row_length = shape = like.shape[:2]
    if layout is None:
        return _rows_layout(rows, row_length, like)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"{name}: expected a SequenceLayout or None, got {type(layout).__name__}")
    if layout.shape != shape:
        expected = f"shape {tuple(shape)} like {like_name}"
        raise ValueError(f"{name}: expected {expected}, got {layout.shape}; set row_length")
    _check_device(layout, name, like, like_name)
    return layout


def boundary_layout(hidden: Tensor, **boundaries: Any) -> SequenceLayout | None:
    """Convert boundaries beside hidden (B, L, d_model) to a layout on its device, or None.

    Args:
        boundaries: ``seq_idx``, ``cu_seqlens`` or ``position_indices`` as of
            ``SequenceLayout.from_*``, or a ``layout``; several must name the same documents. Raises
            ValueError, TypeError.
    """
    first, source = None, ""
    for name, value in boundaries.items():
        if value is None:
            continue
        layout = _convert(name, value, hidden)
        if first is None:
            first, source = layout, name
        elif not (torch.equal(first.starts, layout.starts) and torch.equal(first.ends, layout.ends)):
            raise ValueError(f"{name}: expected the documents of {source}, got others")
    return first


def _convert(name: str, value: Any, hidden: Tensor) -> SequenceLayout:
    """Convert once: the layout is kept as an attribute of the tensor, until that is written to."""
    if isinstance(value, SequenceLayout):
        return value
    check_is_tensor(value, name)
    rows, width = hidden.shape[:2]
    has_shape = name == "cu_seqlens" or value.shape == (rows, width)
    expect(has_shape, name, f"shape {(rows, width)} like the hidden states", tuple(value.shape))
    # All layers have one tensor: it is read once, as that waits for a GPU. In inference mode it has
    # no version; memory on the host may be written to by others (NumPy).
    version = None if value.is_inference() else value._version
    key = (version, torch.is_inference_mode_enabled(), (rows, width), hidden.device)
    cached_key, cached, copy = _layouts.get(value, (None, None, None))
    if version is not None and cached_key == key and (copy is None or torch.equal(copy, value)):
        return cached
    if name == "cu_seqlens":
        layout = SequenceLayout.from_cu_seqlens(value, rows, width)
    elif name == "seq_idx":
        layout = SequenceLayout.from_seq_idx(value)
    else:
        layout = SequenceLayout.from_position_indices(value)
        check_all(value[:, :1] <= 0, name, "0 where a row starts", value)
    layout = layout.to(hidden.device)
    _layouts[value] = (key, layout, value.clone() if value.device.type == "cpu" else None)
    return layout


def check_is_tensor(tensor: object, name: str) -> None:
    """Raise TypeError unless it is a tensor."""
    expect(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__, TypeError)


def check_columns(matrix: Tensor, name: str, rows: int, least: int, most: int) -> int:
    """Check that a parameter is a matrix of ``least`` to ``most`` columns; return how many.

    ``rows``: for the error alone; ``check_tensors`` checks them. Raises ValueError, TypeError.
    """
    check_is_tensor(matrix, name)
    if matrix.dim() != 2 or not least <= matrix.shape[1] <= most:
        raise ValueError(f"{name}: expected shape ({rows}, {least} to {most}), got {tuple(matrix.shape)}")
    return matrix.shape[1]


def check_flags(**flags: object) -> None:
    """Raise TypeError unless each is True or False."""
    for name, flag in flags.items():
        expect(flag is True or flag is False, name, "True or False", repr(flag), TypeError)


def check_size(name: str, size: object, most: int) -> None:
    """Raise ValueError unless it is an integer from 1 to ``most``."""
    is_size = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= most
    expect(is_size, name, f"an integer from 1 to {most}", repr(size))


def is_tracing() -> bool:
    """Return whether a compiler, a functorch transform or a dispatch mode intercepts calls."""
    return torch.compiler.is_compiling() or is_transforming() or torch._C._len_torch_dispatch_stack() > 0


def is_transforming() -> bool:
    """Return whether a transform of torch.func (vmap, grad, jvp) is active."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms(name: str, tensors: Iterable[Any]) -> None:
    """Raise RuntimeError if a transform of torch.func maps or differentiates a tensor.

    Compiled operators call this.
    """
    functorch = torch._C._functorch
    for tensor in tensors:
        if tensor is not None and (functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor)):
            remedy = "take backend='reference', or put vmap's samples in rows"
            raise RuntimeError(f"{name}: expected tensors outside vmap and torch.func.grad, got one inside; {remedy}")


def _rows_layout(rows: int, row_length: int, like: Tensor) -> SequenceLayout:
    """Return a cached layout of one document per row.

    Each stream has its own, since another could read too early.
    """
    # Made anew: a graph must not hold a cached tensor of outside, nor the cache one of a graph.
    if is_tracing() or (like.is_cuda and torch._C._cuda_isCurrentStreamCapturing()):
        return SequenceLayout.from_rows(rows, row_length, like.device)
    stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
    return _cached_rows_layout(rows, row_length, like.device, stream)


@functools.lru_cache(maxsize=16)
def _cached_rows_layout(rows: int, row_length: int, device: torch.device, stream: int) -> SequenceLayout:
    with torch.inference_mode(False):  # an inference tensor could not be saved for a backward
        return SequenceLayout.from_rows(rows, row_length, device)


def _check_device(value: Tensor | SequenceLayout, name: str, like: Tensor, like_name: str) -> None:
    if value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} like {like_name}, got {value.device}")


def _check_channel_stride(tensor: Tensor, name: str) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected unit channel stride, got stride {tensor.stride(-1)}; use .contiguous()")
