"""What follows a Mamba block's first projection, packed: convolution, the projections to delta, B and C, scan, last projection.

Written as one operator so that its backward is explicit: gradients of the convolution's input and of the gate land in the two
halves of one tensor, those of delta, B and C in the three parts of another, and nothing is copied or concatenated; and so that it
may keep less than autograd would (``recompute``). Shapes: B rows, L slots, S documents, D channels, N states, W taps, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import cuda
from packmamba.ops.backends import choose
from packmamba.ops.checks import (
    ACTIVATION_DTYPES,
    accumulation_dtype,
    check_activations,
    check_is_tensor,
    check_layout,
    check_tensor,
)
from packmamba.ops.compiled import KERNELS, define, dense, differentiate, like, present, scan_outputs
from packmamba.ops.conv import conv1d_pack
from packmamba.ops.scan import ssm_pack


def inner_pack(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_weight: Tensor,
    dt_weight: Tensor,
    A: Tensor,
    D: Tensor,
    delta_bias: Tensor,
    out_weight: Tensor,
    *,
    conv_layout: SequenceLayout | None = None,
    ssm_layout: SequenceLayout | None = None,
    conv_state: Tensor | None = None,
    ssm_state: Tensor | None = None,
    return_state: bool = False,
    recompute: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """``x, z = xz; x = conv1d_pack(x); delta, B, C = x @ x_weight.T``, then
    ``ssm_pack(x, delta @ dt_weight.T, A, B, C, D, z) @ out_weight.T``.

    Args:
        xz: (B, L, 2 D), the convolution's input and the gate.
        conv_weight, conv_bias: (D, W) and (D,) or None, of the convolution, whose activation is SiLU.
        x_weight, dt_weight, out_weight: (R + 2 N, D), (D, R) and (d_model, D), used in xz's dtype; the compiled kernels sum
            gradients of wider ones without rounding them to xz's.
        A, D, delta_bias: (D, N), (D,), (D,), as ``ssm_pack`` takes them.
        conv_layout, ssm_layout: where documents lie for the convolution and for the scan; None: each row is one.
        conv_state, ssm_state: as the operators' initial_state, indexed by the documents of their layouts.
        return_state: also return (final convolution state, final scan state).
        recompute: the backward computes the convolution's output and delta again instead of keeping them (compiled kernels only),
            and on a GPU y: its kernel has it at hand, from states that are rounded at times, so its bits may differ.
        backend: see ``ops.BACKENDS``.

    Returns:
        (B, L, d_model) in xz's dtype, and the final states or None.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_activations(xz, "xz")
    conv_layout = check_layout(conv_layout, xz, "xz", "conv_layout")
    ssm_layout = check_layout(ssm_layout, xz, "xz", "ssm_layout")
    given = (conv_weight, conv_bias, x_weight, dt_weight, A, D, delta_bias, out_weight, conv_state, ssm_state)
    _check_shapes(xz, *given, conv_layout.num_documents, ssm_layout.num_documents)
    run = choose(backend, xz.device, IMPLEMENTATIONS)
    mixed, *state = run(
        xz, conv_weight, conv_bias, x_weight, dt_weight, out_weight, A, D, delta_bias, conv_layout, ssm_layout, conv_state,
        ssm_state, return_state, recompute, backend,
    )  # fmt: skip
    return mixed, (state[0], state[1]) if return_state else None


def _check_shapes(
    xz: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, x_weight: Tensor, dt_weight: Tensor, A: Tensor, D: Tensor,
    delta_bias: Tensor, out_weight: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None, conv_documents: int,
    ssm_documents: int,
) -> None:  # fmt: skip
    if xz.shape[2] % 2:
        raise ValueError(f"xz: expected shape (B, L, 2 D), got {tuple(xz.shape)}")
    channels = xz.shape[2] // 2
    sizes = []
    for name, matrix, expected, most in (
        ("conv_weight", conv_weight, "W) with W from 2 to 4", range(2, 5)),
        ("dt_weight", dt_weight, "R) with R at least 1", range(1, 2**31)),
        ("A", A, "N) with N from 1 to 256", range(1, 257)),
    ):
        check_is_tensor(matrix, name)
        if matrix.dim() != 2 or matrix.shape[1] not in most:
            raise ValueError(f"{name}: expected shape ({channels}, {expected}, got {tuple(matrix.shape)}")
        sizes.append(matrix.shape[1])
    width, rank, states = sizes
    check_is_tensor(out_weight, "out_weight")
    near, wide = (xz.dtype, torch.float32), (accumulation_dtype(xz.dtype),)
    wanted: list[tuple[str, Any, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("conv_weight", conv_weight, (channels, width), near),
        ("conv_bias", conv_bias, (channels,), near),
        ("x_weight", x_weight, (rank + 2 * states, channels), ACTIVATION_DTYPES),
        ("dt_weight", dt_weight, (channels, rank), ACTIVATION_DTYPES),
        ("out_weight", out_weight, (*out_weight.shape[:1], channels), ACTIVATION_DTYPES),
        ("A", A, (channels, states), wide),
        ("D", D, (channels,), wide),
        ("delta_bias", delta_bias, (channels,), wide),
        ("conv_state", conv_state, (conv_documents, channels, width - 1), near),
        ("ssm_state", ssm_state, (ssm_documents, channels, states), wide),
    ]
    for name, tensor, shape, dtypes in wanted:
        if tensor is not None or name not in ("conv_bias", "conv_state", "ssm_state"):
            check_tensor(tensor, name, shape, dtypes, xz, "xz")


def _composed(
    xz: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, x_weight: Tensor, dt_weight: Tensor, out_weight: Tensor,
    A: Tensor, D: Tensor, delta_bias: Tensor, conv_layout: SequenceLayout, ssm_layout: SequenceLayout,
    conv_state: Tensor | None, ssm_state: Tensor | None, return_state: bool, recompute: bool, backend: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By the two public operators; autograd keeps what it needs."""
    x_weight, dt_weight, out_weight = (weight.to(xz.dtype) for weight in (x_weight, dt_weight, out_weight))
    x, z = xz.chunk(2, dim=-1)
    x = conv1d_pack(
        x, conv_weight, conv_bias, layout=conv_layout, activation="silu", initial_state=conv_state,
        return_final_state=return_state, backend=backend,
    )  # fmt: skip
    x, *conv_final = x if return_state else (x,)
    rank, states = dt_weight.shape[1], A.shape[1]
    delta, B, C = F.linear(x, x_weight).split([rank, states, states], dim=-1)
    y = ssm_pack(
        x, F.linear(delta, dt_weight), A, B, C, D, z=z, delta_bias=delta_bias, delta_softplus=True, layout=ssm_layout,
        initial_state=ssm_state, return_final_state=return_state, backend=backend,
    )  # fmt: skip
    y, *ssm_final = y if return_state else (y,)
    return (F.linear(y, out_weight), *conv_final, *ssm_final)


def _fused(
    xz: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, x_weight: Tensor, dt_weight: Tensor, out_weight: Tensor,
    A: Tensor, D: Tensor, delta_bias: Tensor, conv_layout: SequenceLayout, ssm_layout: SequenceLayout,
    conv_state: Tensor | None, ssm_state: Tensor | None, return_state: bool, recompute: bool, backend: str | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By the compiled kernels."""
    wide = accumulation_dtype(xz.dtype)
    cuda.note(conv_layout)
    cuda.note(ssm_layout)
    tensors = (xz, conv_weight, conv_bias, x_weight, dt_weight, out_weight, A, D, delta_bias, conv_state, ssm_state)
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    used = (
        None if weight.dtype == xz.dtype else weight.detach().to(xz.dtype)
        for weight in (x_weight, dt_weight, out_weight)
    )
    mixed, conv_final, ssm_final, *_ = torch.ops.packmamba.inner_pack(
        xz, conv_weight.to(wide), None if conv_bias is None else conv_bias.to(wide), x_weight, dt_weight, out_weight, A, D,
        delta_bias, conv_layout.starts, conv_layout.ends, ssm_layout.starts, ssm_layout.ends,
        None if conv_state is None else conv_state.to(wide), ssm_state, *used, return_state, recompute, keep,
    )  # fmt: skip
    if not return_state:
        return (mixed,)
    return mixed, conv_final.to(xz.dtype if conv_state is None else conv_state.dtype), ssm_final


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "reference": _composed,
    "cpu": _fused,
    "cuda": _fused,
    "mamba_ssm": _composed,
}


SCHEMA = (
    "Tensor xz, Tensor conv_weight, Tensor? conv_bias, Tensor x_weight, Tensor dt_weight, "
    "Tensor out_weight, Tensor A, Tensor D, Tensor delta_bias, Tensor conv_starts, Tensor conv_ends, Tensor ssm_starts, "
    "Tensor ssm_ends, Tensor? conv_state, Tensor? ssm_state, Tensor? x_used, Tensor? dt_used, Tensor? out_used, "
    "bool return_state, bool recompute"
)


MAKE_Y = ("cuda",)
"""Devices whose ``ssm_backward`` also writes y if asked to."""


class Arguments(NamedTuple):
    """Of both custom operators: what ``SCHEMA`` says, under its names."""

    xz: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    x_weight: Tensor
    dt_weight: Tensor
    out_weight: Tensor
    A: Tensor
    D: Tensor
    delta_bias: Tensor
    conv_starts: Tensor
    conv_ends: Tensor
    ssm_starts: Tensor
    ssm_ends: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None
    x_used: Tensor | None
    dt_used: Tensor | None
    out_used: Tensor | None
    return_state: bool
    recompute: bool

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """x_weight, dt_weight and out_weight in xz's dtype: those given as used, or themselves."""
        pairs = zip((self.x_used, self.dt_used, self.out_used), self[3:6])
        return tuple(weight if used is None else used for used, weight in pairs)

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What has a gradient besides xz, in the order of the backward's outputs."""
        return (*self[1:9], self.conv_state, self.ssm_state)

    @property
    def documents(self) -> tuple[Tensor, Tensor]:
        return self.conv_starts, self.conv_ends

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Views of (B, L, R + 2 N): (B, L, R), (B, L, N), (B, L, N)."""
        rank, states = self.dt_weight.shape[1], self.A.shape[1]
        return projected.split((rank, states, states), dim=2)


def _split(arguments: tuple) -> tuple[Arguments, tuple]:
    count = len(Arguments._fields)
    return Arguments._make(arguments[:count]), arguments[count:]


# Launching must not take longer than the GPU's work on a small model, so views are made once and nothing is looked up twice.
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    a, (keep,) = _split(arguments)
    y, conv_final, ssm_final, kept = _results(a, keep)
    kernels = KERNELS[y.device.type]
    x_in, z = a.xz.chunk(2, dim=2)
    conv_weight, conv_bias, A, D, bias = dense(a.conv_weight, a.conv_bias, a.A, a.D, a.delta_bias)
    conv_state, ssm_state = dense(a.conv_state, a.ssm_state)
    x = torch.empty_like(y)
    finals = (conv_final, ssm_final) if a.return_state else (None, None)
    kernels["conv1d_forward"](x_in, conv_weight, conv_bias, *a.documents, conv_state, True, x, finals[0])
    x_weight, dt_weight, out_weight = a.weights
    projected = _linear(x, x_weight)
    low, B, C = a.parts(projected)
    delta = _linear(low, dt_weight)
    kernels["ssm_forward"](
        x, delta, A, B, C, D, z, bias, True, a.ssm_starts, a.ssm_ends, ssm_state, y, finals[1], kept if keep else None
    )
    return _linear(y, out_weight), conv_final, ssm_final, kept, *_kept(a, keep, (projected, x, delta, y))


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    a, (keep,) = _split(arguments)
    y, *others = _results(a, keep)
    mixed, projected = (y.new_empty(*y.shape[:2], weight.shape[0]) for weight in (a.out_weight, a.x_weight))
    return mixed, *others, *_kept(a, keep, (projected, torch.empty_like(y), torch.empty_like(y), y))


def _results(a: Arguments, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for y, both final states and the states that the scan keeps; absent ones are empty."""
    channels, width = a.conv_weight.shape
    final = (a.conv_starts.shape[0], channels, width - 1) if a.return_state else (0,)
    y, ssm_final, kept = scan_outputs(a.xz[..., :channels], a.A, a.ssm_starts, a.return_state, keep)
    return y, a.conv_weight.new_empty(final), ssm_final, kept


def _kept(a: Arguments, keep: bool, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of projected, x, delta and y what the backward is to find; the others empty."""
    whole = keep and not a.recompute
    wanted = (keep, whole, whole, whole or (keep and a.xz.device.type not in MAKE_Y))
    return tuple(value if keeps else value.new_empty(0) for value, keeps in zip(values, wanted))


def _backward(
    dmixed: Tensor, dconv_final: Tensor | None, dssm_final: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    a, (kept, projected, x, delta, y) = _split(arguments)
    outputs = _backward_fake(dmixed, dconv_final, dssm_final, *arguments)
    dxz, *gradients = outputs
    dx_weight, ddt_weight, dout_weight = gradients[2:5]
    dweight, dbias, _, _, _, dA, dD, ddelta_bias, dconv, dssm = present(tuple(gradients), a.parameters)
    if dssm is not None:
        dssm.zero_()  # of documents that are absent (training.graphs) nothing writes it
    kernels = KERNELS[dxz.device.type]
    (x_in, z), (dx, dz) = a.xz.chunk(2, dim=2), dxz.chunk(2, dim=2)
    conv_weight, conv_bias, A, D, bias = dense(a.conv_weight, a.conv_bias, a.A, a.D, a.delta_bias)
    conv_state, ssm_state, dconv_final, dssm_final = dense(a.conv_state, a.ssm_state, dconv_final, dssm_final)
    low, B, C = a.parts(projected)
    x_weight, dt_weight, out_weight = a.weights
    if a.recompute:
        x = dxz.new_empty(x_in.shape)
        kernels["conv1d_forward"](x_in, conv_weight, conv_bias, *a.documents, conv_state, True, x, None)
        delta = _linear(low, dt_weight)
    by_slot = dmixed.flatten(0, 1)
    dy = torch.empty_like(x)
    torch.mm(by_slot, out_weight, out=dy.flatten(0, 1))
    make_y = {} if y.numel() else {"y": torch.empty_like(x)}
    du, ddelta, dprojected = torch.empty_like(x), torch.empty_like(x), torch.empty_like(projected)
    dlow, dB, dC = a.parts(dprojected)
    kernels["ssm_backward"](
        dy, dssm_final, x, delta, A, B, C, D, z, bias, True, a.ssm_starts, a.ssm_ends, ssm_state, kept,
        du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dssm, **make_y,
    )  # fmt: skip
    _product(by_slot.t(), make_y.get("y", y).flatten(0, 1), dout_weight)
    by_slot, dprojected_by_slot = ddelta.flatten(0, 1), dprojected.flatten(0, 1)
    torch.mm(by_slot, dt_weight, out=dlow.flatten(0, 1))
    _product(by_slot.t(), low.flatten(0, 1), ddt_weight)
    _product(dprojected_by_slot.t(), x.flatten(0, 1), dx_weight)
    du.flatten(0, 1).addmm_(dprojected_by_slot, x_weight)
    kernels["conv1d_backward"](
        du, dconv_final, x_in, conv_weight, conv_bias, *a.documents, conv_state, True, dx, dweight, dbias, dconv
    )
    return outputs


def _backward_fake(
    dmixed: Tensor, dconv_final: Tensor | None, dssm_final: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    a, _ = _split(arguments)
    return (like(a.xz, a.xz), *(like(parameter, a.xz) for parameter in a.parameters))


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.return_state, ctx.recompute, ctx.keep = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dmixed: Tensor | None, dconv_final: Tensor | None, dssm_final: Tensor | None, *_: Any
) -> tuple:
    if not ctx.keep:
        raise RuntimeError("packmamba::inner_pack: called with keep=False, so it cannot be differentiated")
    *tensors, kept, projected, x, delta, y = ctx.saved_tensors
    a = Arguments._make((*tensors, ctx.return_state, ctx.recompute))
    if dmixed is None:
        dmixed = a.xz.new_zeros(*a.xz.shape[:2], len(a.out_weight))
    finals = (dconv_final, dssm_final) if a.return_state else (None, None)
    gradients = torch.ops.packmamba.inner_pack_backward(dmixed, *finals, *a, kept, projected, x, delta, y)
    dxz, *others = gradients
    *parameters, dconv, dssm = present(tuple(others), a.parameters)
    return (dxz, *parameters, None, None, None, None, dconv, dssm, *[None] * 6)


define("inner_pack", _forward, _forward_fake, f"({SCHEMA}, bool keep) -> ({', '.join(['Tensor'] * 8)})")
define(
    "inner_pack_backward",
    _backward,
    _backward_fake,
    f"(Tensor dmixed, Tensor? dconv_final, Tensor? dssm_final, {SCHEMA}, Tensor kept, Tensor projected, Tensor x, Tensor delta, "
    f"Tensor y) -> ({', '.join(['Tensor'] * 11)})",
)
differentiate("inner_pack", _gradients, _setup)


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
