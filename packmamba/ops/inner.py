"""The Mamba block after its first projection as one operator (mamba-ssm's ``mamba_inner_fn``), packed.

One operator instead of a composition, because its explicit backward writes gradients into parts of
wider tensors without copies (dx and dz into dxz; ddelta's low rank, dB and dC into what is
multiplied by x_weight), and may keep less than autograd: with ``recompute`` a layer saves the
scan's states and (B, L, R + 2 N) numbers, and two activations less.

Shapes: B rows, L slots, S documents, D channels, N states, W taps, R rank.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks
from packmamba.ops.backends import choose
from packmamba.ops.conv import allocate_conv_state, conv_inputs
from packmamba.ops.custom_op import KERNELS, PackedOperator, dense, to_dtype
from packmamba.ops.scan import allocate_scan, scan_inputs

# Kernels of a fake: tensors are allocated, and nothing writes to them.
WITHOUT_EFFECT: defaultdict[str, Any] = defaultdict(lambda: lambda arguments: None)


class InnerArguments(NamedTuple):
    """Arguments of ``mamba_inner``.

    Attributes:
        xz: (B, L, 2 D), the convolution's input and the gate.
        conv_weight, conv_bias: (D, W) and (D,) or None, of the convolution, whose activation is
            SiLU.
        x_weight, dt_weight, out_weight: (R + 2 N, D), (D, R) and (d_model, D), used in xz's dtype;
            gradients of wider ones are not rounded to it by compiled kernels.
        A, D, delta_bias: (D, N), (D,), (D,), as of ``ssm_pack``.
        conv_state, ssm_state: the operators' initial states, by the documents of their layouts;
            None: zeros.
        conv_layout, ssm_layout: documents of the convolution and of the scan.
        return_state: also return final states.
        recompute: in the backward compute the convolution's output and delta again (compiled
            kernels only), and on a GPU y: from states that are rounded at times, so that its bits
            may differ.
        x_used, dt_used, out_used: the three weights in xz's dtype where their own is another, made
            by ``compiled``; else None. They are constants: gradients go to the weights themselves.
    """

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
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x_weight, dt_weight, out_weight) in xz's dtype."""
        return (
            self.x_weight if self.x_used is None else self.x_used,
            self.dt_weight if self.dt_used is None else self.dt_used,
            self.out_weight if self.out_used is None else self.out_used,
        )

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split (B, L, R + 2 N) into views: delta at low rank (B, L, R), B and C (B, L, N)."""
        rank = self.dt_weight.shape[1]
        states = self.A.shape[1]
        return projected.split((rank, states, states), dim=2)


class InnerOutputs(NamedTuple):
    """The block's output (B, L, d_model), final states of convolution and scan; or gradients of these."""

    mixed: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None


class InnerSaved(NamedTuple):
    """Saved for the backward; None (empty, in a graph) where computed again or where none follows."""

    states: Tensor | None  # the scan's, see ``allocate_scan``
    projected: Tensor | None  # (B, L, R + 2 N)
    x: Tensor | None  # (B, L, D), the convolution's output, as delta and y
    delta: Tensor | None
    y: Tensor | None


def mamba_inner(a: InnerArguments, backend: str | None = None) -> InnerOutputs:
    """Compute a Mamba block after its first projection.

    ``x, z = xz; x = conv1d_pack(x); delta, B, C = x @ x_weight.T``, then
    ``ssm_pack(x, delta @ dt_weight.T, A, B, C, D, z) @ out_weight.T``, (B, L, d_model) in xz's
    dtype, with final states, or None for them.

    Arguments are a layer's, which has checked what its caller brought.
    """
    return InnerOutputs(*choose(backend, a.xz.device, "mamba_inner")(a))


def compiled(a: InnerArguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.mamba_inner`` by compiled kernels.

    They take the convolution's parameters and state in
    the accumulation dtype, and the weights in xz's.
    """
    activations = a.xz.dtype
    wide = checks.accumulation_dtype(activations)
    mixed, conv_final, ssm_final = _operator(
        a._replace(
            conv_weight=a.conv_weight.to(wide),
            conv_bias=to_dtype(a.conv_bias, wide),
            conv_state=to_dtype(a.conv_state, wide),
            x_used=_copy_if_other(a.x_weight, activations),
            dt_used=_copy_if_other(a.dt_weight, activations),
            out_used=_copy_if_other(a.out_weight, activations),
        )
    )
    # A convolution state is returned in the dtype in which it was given.
    state_dtype = activations if a.conv_state is None else a.conv_state.dtype
    return mixed, to_dtype(conv_final, state_dtype), ssm_final


def _copy_if_other(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if weight.dtype == dtype else weight.detach().to(dtype)


def _forward(a: InnerArguments, needs_backward: bool, kernels: Any = None) -> tuple[InnerOutputs, InnerSaved]:
    """Walk the block; ``kernels``: None: those of the tensors' device."""
    if kernels is None:
        kernels = KERNELS[a.xz.device.type]
    # x_in and z (B, L, D) are views: the kernels take any row stride.
    x_in, z = a.xz.chunk(2, dim=2)
    scanned, saved = allocate_scan(x_in, a.A, a.ssm_layout.starts, a.return_state, needs_backward)
    y = scanned.y
    conv_state = allocate_conv_state(a.conv_weight, a.conv_layout) if a.return_state else None
    # Convolution: x (B, L, D).
    x = torch.empty_like(y)
    kernels["conv1d_forward"]({**_conv_inputs(a), "x": x_in, "y": x, "final_state": conv_state})
    # Projections of x: delta's low rank, B and C; then delta (B, L, D).
    x_weight, dt_weight, out_weight = a.weights
    projected = _linear(x, x_weight)
    low_rank, B, C = a.parts(projected)
    delta = _linear(low_rank, dt_weight)
    # Scan and gate: y (B, L, D).
    kernels["ssm_forward"](
        {
            **_scan_inputs(a),
            "u": x,
            "delta": delta,
            "B": B,
            "C": C,
            "z": z,
            "y": y,
            "final_state": scanned.final_state,
            "saved": saved.states,
        }
    )
    # Output projection.
    outputs = InnerOutputs(mixed=_linear(y, out_weight), conv_state=conv_state, ssm_state=scanned.final_state)
    keeps_all = needs_backward and not a.recompute
    # CUDA's ``ssm_backward`` can also write y, so that ``recompute`` keeps none there.
    keeps_y = keeps_all or (needs_backward and a.xz.device.type != "cuda")
    return outputs, InnerSaved(
        states=saved.states,
        projected=projected if needs_backward else None,
        x=x if keeps_all else None,
        delta=delta if keeps_all else None,
        y=y if keeps_y else None,
    )


def _conv_inputs(a: InnerArguments) -> dict[str, Any]:
    return conv_inputs(a.conv_weight, a.conv_bias, a.conv_state, a.conv_layout, silu=True)


def _scan_inputs(a: InnerArguments) -> dict[str, Any]:
    return scan_inputs(a.A, a.D, a.delta_bias, a.ssm_state, a.ssm_layout, delta_softplus=True)


def _backward(a: InnerArguments, saved: InnerSaved, grads: InnerOutputs) -> dict[str, Tensor | None]:
    """Walk the block back; every gradient is written where it belongs, in parts of wider tensors too.

    With y before the last product: ``dy = dmixed W_out``, ``dW_out = dmixed.T y``; the scan's
    backward gives du, ddelta, dB, dC, dz; ``dlow = ddelta W_dt``, ``dW_dt = ddelta.T low``;
    ``dx = du + dprojected W_x``, ``dW_x = dprojected.T x``; the convolution's backward takes dx.
    Products are over slots, in xz's dtype.
    """
    gradients = _operator.signature.allocate_gradients(a)
    if gradients["dssm_state"] is not None:
        gradients["dssm_state"].zero_()  # nothing writes absent documents' (training.cuda_graphs)
    # Inputs: views of what the forward had, and x and delta, saved or computed again.
    x_in, _ = a.xz.chunk(2, dim=2)
    dx_in, _ = gradients["dxz"].chunk(2, dim=2)
    x_weight, dt_weight, _ = a.weights
    low_rank, _, _ = a.parts(saved.projected)  # type: ignore[arg-type]
    x, delta = _recompute(a, saved, x_in, low_rank)
    dmixed = grads.mixed
    if dmixed is None:
        dmixed = a.xz.new_zeros(*a.xz.shape[:2], len(a.out_weight))
    dmixed = dmixed.flatten(0, 1)

    # dy, then the scan's backward: du (as dx), ddelta, dB and dC.
    y, dx, ddelta, dprojected = _scan_backward(a, saved, grads, gradients, x, delta, dmixed)
    dlow_rank, _, _ = a.parts(dprojected)
    # dW_out; then ddelta's low rank and dW_dt. Slots are flattened: products are over B L.
    _product(dmixed.t(), y.flatten(0, 1), gradients["dout_weight"])
    ddelta = ddelta.flatten(0, 1)
    dprojected = dprojected.flatten(0, 1)
    # Columns of dprojected, by a view: with dB and dC beside them it is whole now.
    torch.mm(ddelta, dt_weight, out=dlow_rank.flatten(0, 1))
    _product(ddelta.t(), low_rank.flatten(0, 1), gradients["ddt_weight"])
    # dW_x, and what x gets through its projections beside du.
    _product(dprojected.t(), x.flatten(0, 1), gradients["dx_weight"])
    dx.flatten(0, 1).addmm_(dprojected, x_weight)
    # The convolution's backward, from dx to dx_in, a part of dxz.
    KERNELS[dx.device.type]["conv1d_backward"](
        {
            **_conv_inputs(a),
            "dy": dx,
            "dfinal": dense(grads.conv_state) if a.return_state else None,
            "x": x_in,
            "dx": dx_in,
            "dweight": gradients["dconv_weight"],
            "dbias": gradients["dconv_bias"],
            "dinitial_state": gradients["dconv_state"],
        }
    )
    return gradients


def _scan_backward(
    a: InnerArguments,
    saved: InnerSaved,
    grads: InnerOutputs,
    gradients: dict[str, Any],
    x: Tensor,
    delta: Tensor,
    dmixed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk the last product and the scan back, into ``gradients`` where they are whole.

    Takes the scan's input x and delta (B, L, D), and dmixed (B L, d_model). Returns y, du and
    ddelta (B, L, D), and a tensor (B, L, R + 2 N) whose dB and dC are written, while its first R
    columns wait for ddelta's product.
    """
    _, z = a.xz.chunk(2, dim=2)
    _, dz = gradients["dxz"].chunk(2, dim=2)
    _, B, C = a.parts(saved.projected)  # type: ignore[arg-type]
    _, _, out_weight = a.weights
    dy = torch.empty_like(x)
    # dy = dmixed W_out, before the gate's and the scan's backward.
    torch.mm(dmixed, out_weight, out=dy.flatten(0, 1))
    du = torch.empty_like(x)
    ddelta = torch.empty_like(x)
    dprojected = torch.empty_like(saved.projected)  # type: ignore[arg-type]
    _, dB, dC = a.parts(dprojected)
    arguments = {
        **_scan_inputs(a),
        "dy": dy,
        "dfinal": dense(grads.ssm_state) if a.return_state else None,
        "u": x,
        "delta": delta,
        "B": B,
        "C": C,
        "z": z,
        "saved": saved.states,
        "du": du,
        "ddelta": ddelta,
        "dA": gradients["dA"],
        "dB": dB,
        "dC": dC,
        "dD": gradients["dD"],
        "dz": dz,
        "ddelta_bias": gradients["ddelta_bias"],
        "dinitial_state": gradients["dssm_state"],
    }
    # Not saved under ``recompute`` (an empty tensor
    # in a graph): the scan's backward writes y again.
    y = saved.y
    if y is None or not y.numel():
        y = torch.empty_like(x)
        arguments["y"] = y
    KERNELS[x.device.type]["ssm_backward"](arguments)
    return y, du, ddelta, dprojected


def _recompute(a: InnerArguments, saved: InnerSaved, x_in: Tensor, low_rank: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolution's output and delta, saved or computed again, (B, L, D) each."""
    if not a.recompute:
        return saved.x, saved.delta  # type: ignore[return-value]
    x = torch.empty_like(x_in, memory_format=torch.contiguous_format)
    KERNELS[x.device.type]["conv1d_forward"]({**_conv_inputs(a), "x": x_in, "y": x, "final_state": None})
    _, dt_weight, _ = a.weights
    return x, _linear(low_rank, dt_weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (B, L, K), of any token stride, by a weight (M, K).

    By ``out=``, which autocast leaves alone.
    """
    y = x.new_empty(*x.shape[:2], weight.shape[0])
    torch.mm(x.flatten(0, 1), weight.t(), out=y.flatten(0, 1))
    return y


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute out = left @ right, rounded only to out's dtype where PyTorch can."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and left.dtype.itemsize == 2:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(left, right, out=left.new_empty(out.shape)))


_operator: PackedOperator[InnerArguments] = PackedOperator(
    "mamba_inner",
    arguments=InnerArguments,
    outputs=InnerOutputs,
    saved=InnerSaved,
    forward=_forward,
    fake=functools.partial(_forward, kernels=WITHOUT_EFFECT),
    backward=_backward,
    constants=("x_used", "dt_used", "out_used"),
)
