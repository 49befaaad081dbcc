"""The Mamba block after its first projection as one operator (mamba-ssm's ``mamba_inner_fn``), packed.

Shapes: B rows, L slots, S documents, D channels, N states, W taps, R rank.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.custom_op import KERNELS, dense, empty_grad_like, register
from packmamba.ops.scan import allocate_scan


def mamba_inner(
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
    """Compute a Mamba block after its first projection.

    ``x, z = xz; x = conv1d_pack(x); delta, B, C = x @ x_weight.T``, then
    ``ssm_pack(x, delta @ dt_weight.T, A, B, C, D, z) @ out_weight.T``.

    Args:
        xz: (B, L, 2 D), the convolution's input and the gate.
        x_weight, dt_weight, out_weight: (R + 2 N, D), (D, R) and (d_model, D), used in xz's dtype; gradients of wider ones
            are not rounded to it by compiled kernels.
        conv_weight, conv_bias, A, D, delta_bias: the operators'.
        conv_layout, ssm_layout: documents of the convolution and of the scan; None: each row is one.
        conv_state, ssm_state: the operators' initial states.
        recompute: in the backward compute the convolution's output and delta again (compiled kernels only), and on a GPU y.

    Returns (B, L, d_model) in xz's dtype, and (final convolution state, final scan state) or None. Raises TypeError, ValueError.
    """
    checks.check_activations(xz, "xz")
    expect(xz.shape[2] % 2 == 0, "xz", "shape (B, L, 2 D)", tuple(xz.shape))
    conv_layout = checks.check_layout(conv_layout, xz, "xz", "conv_layout")
    ssm_layout = checks.check_layout(ssm_layout, xz, "xz", "ssm_layout")
    channels = xz.shape[2] // 2
    width = checks.check_columns(conv_weight, "conv_weight", channels, 2, 4)
    rank = checks.check_columns(dt_weight, "dt_weight", channels, 1, 2**31)
    states = checks.check_columns(A, "A", channels, 1, 256)
    checks.check_is_tensor(out_weight, "out_weight")
    checks.check_tensors(
        xz, "xz", (xz.dtype, torch.float32), conv_weight=(conv_weight, (channels, width)), conv_bias=(conv_bias, (channels,)),
        conv_state=(conv_state, (conv_layout.num_documents, channels, width - 1)),
    )  # fmt: skip
    checks.check_tensors(
        xz, "xz", checks.ACTIVATION_DTYPES, x_weight=(x_weight, (rank + 2 * states, channels)),
        dt_weight=(dt_weight, (channels, rank)), out_weight=(out_weight, (*out_weight.shape[:1], channels)),
    )  # fmt: skip
    checks.check_tensors(
        xz, "xz", (checks.accumulation_dtype(xz.dtype),), A=(A, (channels, states)), D=(D, (channels,)),
        delta_bias=(delta_bias, (channels,)), ssm_state=(ssm_state, (ssm_layout.num_documents, channels, states)),
    )  # fmt: skip
    a = InnerArguments(
        xz, conv_weight, conv_bias, x_weight, dt_weight, out_weight, A, D, delta_bias, conv_state, ssm_state, None, None, None,
        conv_layout, ssm_layout, return_state, recompute,
    )  # fmt: skip
    mixed, *state = choose(backend, xz.device, "mamba_inner")(a)
    return mixed, (state[0], state[1]) if return_state else None


class InnerArguments(NamedTuple):
    """Arguments of every implementation; x_used, dt_used, out_used: weights of another dtype in xz's."""

    xz: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    x_weight: Tensor
    dt_weight: Tensor
    out_weight: Tensor
    A: Tensor
    D: Tensor
    delta_bias: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None
    x_used: Tensor | None
    dt_used: Tensor | None
    out_used: Tensor | None
    conv_layout: SequenceLayout
    ssm_layout: SequenceLayout
    return_state: bool
    recompute: bool

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """(x_weight, dt_weight, out_weight) in xz's dtype."""
        return tuple(own if used is None else used for own, used in zip(self[3:6], self[11:14]))

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split (B, L, R + 2 N) into views (B, L, R), (B, L, N), (B, L, N)."""
        rank, states = self.dt_weight.shape[1], self.A.shape[1]
        return projected.split((rank, states, states), dim=2)


def compiled(a: InnerArguments) -> tuple[Tensor, ...]:
    wide = checks.accumulation_dtype(a.xz.dtype)
    used = (None if weight.dtype == a.xz.dtype else weight.detach().to(a.xz.dtype) for weight in a[3:6])
    changed: dict[str, Any] = dict(zip(("x_used", "dt_used", "out_used"), used))
    for name in ("conv_weight", "conv_bias", "conv_state"):
        changed[name] = None if getattr(a, name) is None else getattr(a, name).to(wide)
    mixed, conv_final, ssm_final = _registered(a._replace(**changed))
    if a.return_state:
        conv_final = conv_final.to(a.xz.dtype if a.conv_state is None else a.conv_state.dtype)
    return mixed, conv_final, ssm_final


def _forward(a: InnerArguments, keep: bool) -> tuple[Tensor | None, ...]:
    """Return mixed, both final states, and saved for the backward: the scan's states, projected, x, delta, y."""
    x_in, z = a.xz.chunk(2, dim=2)
    y, conv_final, ssm_final, states = _room(a, x_in, keep)
    x = torch.empty_like(y)
    convolve, scan = _kernel_arguments(a)
    kernels = KERNELS[y.device.type]
    kernels["conv1d_forward"](x_in, *convolve, x, conv_final)
    x_weight, dt_weight, out_weight = a.weights
    projected = _linear(x, x_weight)
    low, B, C = a.parts(projected)
    delta = _linear(low, dt_weight)
    A, D, *others = scan
    kernels["ssm_forward"](x, delta, A, B, C, D, z, *others, y, ssm_final, states)
    return (
        _linear(y, out_weight),
        conv_final,
        ssm_final,
        states,
        *_saved(a, keep, (projected, x, delta, y)),
    )


def _fake(a: InnerArguments, keep: bool) -> tuple[Tensor | None, ...]:
    y, *others = _room(a, a.xz.chunk(2, dim=2)[0], keep)
    mixed, projected = (y.new_empty(*y.shape[:2], weight.shape[0]) for weight in (a.out_weight, a.x_weight))
    return (mixed, *others, *_saved(a, keep, (projected, torch.empty_like(y), torch.empty_like(y), y)))


def _room(
    a: InnerArguments, x_in: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    y, ssm_final, states = allocate_scan(x_in, a.A, a.ssm_layout.starts, a.return_state, keep)
    if not a.return_state:
        return y, None, None, states
    channels, width = a.conv_weight.shape
    return (
        y,
        a.conv_weight.new_empty(a.conv_layout.starts.shape[0], channels, width - 1),
        ssm_final,
        states,
    )


def _saved(a: InnerArguments, keep: bool, values: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Select what is saved of projected, x, delta and y; CUDA's ``ssm_backward`` can also write y."""
    whole = keep and not a.recompute
    wanted = (keep, whole, whole, whole or (keep and a.xz.device.type != "cuda"))
    return tuple(value if keeps else None for value, keeps in zip(values, wanted))


def _kernel_arguments(a: InnerArguments) -> tuple[tuple, tuple]:
    """Return the convolution's arguments from weight to silu; the scan's A, D, and those behind z."""
    conv, scan = a.conv_layout, a.ssm_layout
    return (
        (dense(a.conv_weight), dense(a.conv_bias), conv.starts, conv.ends, dense(a.conv_state), True),
        (dense(a.A), dense(a.D), dense(a.delta_bias), True, scan.starts, scan.ends, dense(a.ssm_state)),
    )


def _backward(a: InnerArguments, saved: tuple, grads: tuple) -> tuple[Tensor | None, ...]:
    states, projected, x, delta, y = saved
    dmixed, dconv_final, dssm_final = grads
    gradients: Any = tuple(map(empty_grad_like, a[:11]))
    dxz, dweight, dbias, dx_weight, ddt_weight, dout_weight, dA, dD, ddelta_bias, dconv, dssm = gradients
    if dmixed is None:
        dmixed = a.xz.new_zeros(*a.xz.shape[:2], len(a.out_weight))
    if not a.return_state:
        dconv_final = dssm_final = None
    if dssm is not None:
        dssm.zero_()  # nothing writes absent documents' (training.cuda_graphs)
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
    make_y = {} if y is not None and y.numel() else {"y": (y := torch.empty_like(x))}
    du, ddelta, dprojected = torch.empty_like(x), torch.empty_like(x), torch.empty_like(projected)
    dlow, dB, dC = a.parts(dprojected)
    kernels["ssm_backward"](
        dy, dense(dssm_final), x, delta, A, B, C, D, z, *others, states,
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
    """Multiply x (B, L, K), of any token stride, by a weight (M, K); by ``out=``, which autocast leaves alone."""
    y = x.new_empty(*x.shape[:2], weight.shape[0])
    torch.mm(x.flatten(0, 1), weight.t(), out=y.flatten(0, 1))
    return y


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out = a @ b, rounded only to out's dtype where PyTorch can."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and a.dtype.itemsize == 2:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b, out=a.new_empty(out.shape)))


_registered = register(
    "mamba_inner", InnerArguments, _forward, _fake, _backward, outputs=3, saved=5, gradients=11
)
