"""From convolution to last projection by compiled kernels, as one operator.

Its backward is explicit: gradients of the convolution's input and of the gate land in the two halves of one tensor, those of
delta, B and C in the three parts of another, and nothing is copied or concatenated; and it may keep less than autograd would
(``recompute``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.inner.arguments import InnerArguments
from packmamba.ops.kernels import KERNELS
from packmamba.ops.registered import dense, register, room_like
from packmamba.ops.scan.compiled import scan_room

MAKE_Y = ("cuda",)
"""Devices whose ``ssm_backward`` also writes y if asked to."""


def inner_pack(a: InnerArguments) -> tuple[Tensor, ...]:
    wide = accumulation_dtype(a.xz.dtype)
    used = (None if weight.dtype == a.xz.dtype else weight.detach().to(a.xz.dtype) for weight in a[3:6])
    x_used, dt_used, out_used = used
    mixed, conv_final, ssm_final = _inner_pack(
        a._replace(
            conv_weight=a.conv_weight.to(wide),
            conv_bias=None if a.conv_bias is None else a.conv_bias.to(wide),
            conv_state=None if a.conv_state is None else a.conv_state.to(wide),
            x_used=x_used,
            dt_used=dt_used,
            out_used=out_used,
        )
    )
    if a.return_state:
        conv_final = conv_final.to(a.xz.dtype if a.conv_state is None else a.conv_state.dtype)
    return mixed, conv_final, ssm_final


# Launching must not take longer than the GPU's work on a small model, so views are made once and nothing is looked up twice.
def _forward(a: InnerArguments, keep: bool) -> tuple[Tensor | None, ...]:
    """mixed, both final states, and for the backward: the scan's kept states, projected, x, delta, y."""
    x_in, z = a.xz.chunk(2, dim=2)
    y, conv_final, ssm_final, kept = _room(a, x_in, keep)
    x = torch.empty_like(y)
    convolve, scan = _kernel_arguments(a)
    kernels = KERNELS[y.device.type]
    kernels["conv1d_forward"](x_in, *convolve, x, conv_final)
    x_weight, dt_weight, out_weight = a.weights
    projected = _linear(x, x_weight)
    low, B, C = a.parts(projected)
    delta = _linear(low, dt_weight)
    A, D, *others = scan
    kernels["ssm_forward"](x, delta, A, B, C, D, z, *others, y, ssm_final, kept)
    return _linear(y, out_weight), conv_final, ssm_final, kept, *_kept(a, keep, (projected, x, delta, y))


def _fake(a: InnerArguments, keep: bool) -> tuple[Tensor | None, ...]:
    y, *others = _room(a, a.xz.chunk(2, dim=2)[0], keep)
    mixed, projected = (y.new_empty(*y.shape[:2], weight.shape[0]) for weight in (a.out_weight, a.x_weight))
    return mixed, *others, *_kept(a, keep, (projected, torch.empty_like(y), torch.empty_like(y), y))


def _room(a: InnerArguments, x_in: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """For y, both final states and the states that the scan keeps."""
    channels, width = a.conv_weight.shape
    y, ssm_final, kept = scan_room(x_in, a.A, a.ssm_layout.starts, a.return_state, keep)
    shape = (a.conv_layout.starts.shape[0], channels, width - 1)
    return y, a.conv_weight.new_empty(shape) if a.return_state else None, ssm_final, kept


def _kept(a: InnerArguments, keep: bool, values: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Of projected, x, delta and y what the backward is to find."""
    whole = keep and not a.recompute
    wanted = (keep, whole, whole, whole or (keep and a.xz.device.type not in MAKE_Y))
    return tuple(value if keeps else None for value, keeps in zip(values, wanted))


def _kernel_arguments(a: InnerArguments) -> tuple[tuple, tuple]:
    """The convolution's from weight to silu; the scan's A, D, and what follows z: delta_bias to initial_state."""
    conv, scan = a.conv_layout, a.ssm_layout
    return (
        (dense(a.conv_weight), dense(a.conv_bias), conv.starts, conv.ends, dense(a.conv_state), True),
        (dense(a.A), dense(a.D), dense(a.delta_bias), True, scan.starts, scan.ends, dense(a.ssm_state)),
    )


def _backward(a: InnerArguments, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    kept, projected, x, delta, y = saved
    dmixed, dconv_final, dssm_final = grads
    gradients: Any = tuple(map(room_like, a[:GRADIENTS]))
    dxz, dweight, dbias, dx_weight, ddt_weight, dout_weight, dA, dD, ddelta_bias, dconv, dssm = gradients
    if dmixed is None:
        dmixed = a.xz.new_zeros(*a.xz.shape[:2], len(a.out_weight))
    if not a.return_state:
        dconv_final = dssm_final = None
    if dssm is not None:
        dssm.zero_()  # of documents that are absent (training.graphs) nothing writes it
    kernels = KERNELS[a.xz.device.type]
    (x_in, z), (dx, dz) = a.xz.chunk(2, dim=2), dxz.chunk(2, dim=2)
    convolve, (A, D, *others) = _kernel_arguments(a)
    low, B, C = a.parts(projected)
    x_weight, dt_weight, out_weight = a.weights
    if a.recompute:
        x = torch.empty_like(x_in, memory_format=torch.contiguous_format)
        kernels["conv1d_forward"](x_in, *convolve, x, None)
        delta = _linear(low, dt_weight)
    by_slot = dmixed.flatten(0, 1)
    dy = torch.empty_like(x)
    torch.mm(by_slot, out_weight, out=dy.flatten(0, 1))
    make_y = {}
    if y is None or not y.numel():
        make_y["y"] = y = torch.empty_like(x)
    du, ddelta, dprojected = torch.empty_like(x), torch.empty_like(x), torch.empty_like(projected)
    dlow, dB, dC = a.parts(dprojected)
    kernels["ssm_backward"](
        dy, dense(dssm_final), x, delta, A, B, C, D, z, *others, kept,
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dssm, **make_y,
    )  # fmt: skip
    _product(by_slot.t(), y.flatten(0, 1), dout_weight)
    by_slot, dprojected_by_slot = ddelta.flatten(0, 1), dprojected.flatten(0, 1)
    torch.mm(by_slot, dt_weight, out=dlow.flatten(0, 1))
    _product(by_slot.t(), low.flatten(0, 1), ddt_weight)
    _product(dprojected_by_slot.t(), x.flatten(0, 1), dx_weight)
    du.flatten(0, 1).addmm_(dprojected_by_slot, x_weight)
    kernels["conv1d_backward"](du, dense(dconv_final), x_in, *convolve, dx, dweight, dbias, dconv)
    return gradients


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, L, K), of any token stride, by a weight (M, K). By ``out=``, which autocast leaves alone."""
    y = x.new_empty(*x.shape[:2], weight.shape[0])
    torch.mm(x.flatten(0, 1), weight.t(), out=y.flatten(0, 1))
    return y


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, rounded to out's dtype alone where PyTorch can."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and a.dtype.itemsize == 2:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b, out=a.new_empty(out.shape)))


GRADIENTS = 11
_inner_pack = register("inner_pack", InnerArguments, _forward, _fake, _backward, outputs=3, kept=5, gradients=GRADIENTS)
