"""The Mamba block after its first projection as one operator, packed.

In mamba-ssm this is ``mamba_inner_fn``.

One operator instead of a composition, because its explicit backward writes gradients into parts of
wider tensors without copies (dx and dz into dxz; ddelta's low rank, dB and dC into what is
multiplied by x_weight), and may keep less than autograd: with ``recompute`` a layer saves the
scan's states and (B, L, R + 2 N) numbers, and two activations less.

Shapes: B rows, L slots, S documents, D channels, N states, W taps, R rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks, conv, scan
from packmamba.ops.backends import choose
from packmamba.ops.custom_op import BlockOutputs, PackedOperator, to_dtype
from packmamba.ops.scan import ScanArguments

# Arguments of ``mamba_inner`` that only ``compiled`` gives.
USED = ("x_used", "dt_used", "out_used")


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
    def weights(self) -> tuple[Tensor, ...]:
        """(x_weight, dt_weight, out_weight) in xz's dtype."""
        weights = (self.x_weight, self.dt_weight, self.out_weight)
        copies = (self.x_used, self.dt_used, self.out_used)
        return tuple(weight if copy is None else copy for weight, copy in zip(weights, copies))

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split (B, L, R + 2 N) into views: delta at low rank (B, L, R), B and C (B, L, N)."""
        rank = self.dt_weight.shape[1]
        states = self.A.shape[1]
        return projected.split((rank, states, states), dim=2)

    def scan(self, x: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor) -> ScanArguments:
        """Return the scan's arguments; x is the convolution's output."""
        return ScanArguments(
            u=x,
            delta=delta,
            A=self.A,
            B=B,
            C=C,
            D=self.D,
            z=z,
            delta_bias=self.delta_bias,
            initial_state=self.ssm_state,
            layout=self.ssm_layout,
            delta_softplus=True,
            return_final_state=self.return_state,
        )


def layer_arguments(
    layer: Any, xz: Tensor, A: Tensor, D: Tensor, documents: tuple, return_state: bool, recompute: bool = False
) -> InnerArguments:
    """Return arguments of a layer with Mamba's convolution and projections, ours or transformers'.

    documents: conv_layout, ssm_layout, conv_state and ssm_state.
    """
    convolution = (layer.conv1d.weight.squeeze(1), layer.conv1d.bias)
    projections = (layer.x_proj.weight, layer.dt_proj.weight, layer.out_proj.weight)
    recurrence = (A, D, layer.dt_proj.bias.to(A.dtype))
    used = (None, None, None)
    conv_layout, ssm_layout, conv_state, ssm_state = documents
    tensors = (xz, *convolution, *projections, *recurrence, conv_state, ssm_state, *used)
    return InnerArguments(*tensors, conv_layout, ssm_layout, return_state, recompute)


class InnerSaved(NamedTuple):
    """Saved for the backward.

    None (empty, in a graph) where computed again, or where no backward follows.
    """

    states: Tensor | None  # the scan's, see ``allocate_scan``
    projected: Tensor | None  # (B, L, R + 2 N)
    x: Tensor | None  # (B, L, D), the convolution's output, as delta and y
    delta: Tensor | None
    y: Tensor | None


def mamba_inner(a: InnerArguments, backend: str | None = None) -> BlockOutputs:
    """Compute a Mamba block after its first projection.

    ``x, z = xz; x = conv1d_pack(x); delta, B, C = x @ x_weight.T``, then
    ``ssm_pack(x, delta @ dt_weight.T, A, B, C, D, z) @ out_weight.T``, (B, L, d_model) in xz's
    dtype, with final states, or None for them.

    Arguments are a layer's, which has checked what its caller brought.
    """
    return BlockOutputs(*choose(backend, a.xz.device, "mamba_inner")(a))


def compiled(a: InnerArguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.mamba_inner`` by compiled kernels.

    They take the convolution's parameters and state in
    the accumulation dtype, and the weights in xz's.
    """
    activations = a.xz.dtype
    wide = checks.accumulation_dtype(activations)
    of_conv = ("conv_weight", "conv_bias", "conv_state")
    used: dict[str, Any] = {name: to_dtype(getattr(a, name), wide) for name in of_conv}
    for name, weight in zip(USED, (a.x_weight, a.dt_weight, a.out_weight)):
        used[name] = None if weight.dtype == activations else weight.detach().to(activations)
    mixed, conv_final, ssm_final = _operator(a._replace(**used))
    # A convolution state is returned in the dtype in which it was given.
    state_dtype = activations if a.conv_state is None else a.conv_state.dtype
    return mixed, to_dtype(conv_final, state_dtype), ssm_final


def _forward(a: InnerArguments, needs_backward: bool) -> tuple[BlockOutputs, InnerSaved]:
    """Compute the block by compiled kernels."""
    return _walk(a, needs_backward, conv._forward, scan._forward)


def _fake(a: InnerArguments, needs_backward: bool) -> tuple[BlockOutputs, InnerSaved]:
    """Allocate what ``_forward`` returns."""
    return _walk(a, needs_backward, conv._allocate, scan.allocate_scan)


def _walk(
    a: InnerArguments, needs_backward: bool, convolve: Callable, recur: Callable
) -> tuple[BlockOutputs, InnerSaved]:
    """Compute the block by the forward of two packed operators."""
    # x_in and z (B, L, D) are views: the kernels take any row stride.
    x_in, z = a.xz.chunk(2, dim=2)
    convolved, _ = convolve(conv.of_layer(a, x_in), needs_backward)
    x = convolved.y
    # Projections of x: delta's low rank, B and C; then delta (B, L, D).
    x_weight, dt_weight, out_weight = a.weights
    projected = _linear(x, x_weight)
    low_rank, B, C = a.parts(projected)
    delta = _linear(low_rank, dt_weight)
    scanned, saved = recur(a.scan(x, delta, B, C, z), needs_backward)
    outputs = BlockOutputs(_linear(scanned.y, out_weight), convolved.final_state, scanned.final_state)
    if not needs_backward:
        return outputs, InnerSaved(None, None, None, None, None)
    kept = InnerSaved(saved.states, projected, x, delta, scanned.y)
    if a.recompute:
        # CUDA's ``ssm_backward`` can also write y, so that none is kept there.
        kept = kept._replace(x=None, delta=None, y=None if a.xz.device.type == "cuda" else kept.y)
    return outputs, kept


def _backward(a: InnerArguments, saved: InnerSaved, grads: BlockOutputs) -> dict[str, Tensor | None]:
    """Walk the block back.

    Every gradient is written where it belongs, in parts of wider tensors too.

    With y before the last product: ``dy = dmixed W_out``, ``dW_out = dmixed.T y``; the scan's
    backward gives du, ddelta, dB, dC, dz; ``dlow = ddelta W_dt``, ``dW_dt = ddelta.T low``;
    ``dx = du + dprojected W_x``, ``dW_x = dprojected.T x``; the convolution's backward takes dx.
    Products are over slots, in xz's dtype.
    """
    assert saved.projected is not None
    gradients = _operator.signature.allocate_gradients(a)
    if gradients["dssm_state"] is not None:
        gradients["dssm_state"].zero_()  # nothing writes absent documents' (training.cuda_graphs)
    # Inputs: views of what the forward had, and x and delta, saved or computed again.
    x_in, z = a.xz.chunk(2, dim=2)
    dx_in, dz = gradients["dxz"].chunk(2, dim=2)
    x_weight, dt_weight, out_weight = a.weights
    low_rank, B, C = a.parts(saved.projected)
    x: Any = saved.x
    delta: Any = saved.delta
    if a.recompute:
        convolved, _ = conv._forward(conv.of_layer(a, x_in)._replace(return_final_state=False), False)
        x = convolved.y
        delta = _linear(low_rank, dt_weight)
    dmixed = grads.output
    if dmixed is None:
        dmixed = a.xz.new_zeros(*a.xz.shape[:2], len(a.out_weight))
    dmixed = dmixed.flatten(0, 1)

    # dy = dmixed W_out, then the gate's and the scan's backward: du (as dx), ddelta, dB and dC.
    dy = torch.empty_like(x)
    torch.mm(dmixed, out_weight, out=dy.flatten(0, 1))
    dx = torch.empty_like(x)
    ddelta = torch.empty_like(x)
    dprojected = torch.empty_like(saved.projected)
    dlow_rank, dB, dC = a.parts(dprojected)
    written = {"du": dx, "ddelta": ddelta, "dB": dB, "dC": dC, "dz": dz}
    written |= {name: gradients[name] for name in ("dA", "dD", "ddelta_bias")}
    y = saved.y
    # Not saved under ``recompute`` (an empty tensor
    # in a graph): the scan's backward writes y again.
    if y is None or not y.numel():
        written["y"] = y = torch.empty_like(x)
    states = {"dfinal": grads.ssm_state, "dinitial_state": gradients["dssm_state"]}
    scan.backward_into(a.scan(x, delta, B, C, z), saved.states, dy=dy, **states, **written)
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
    # From dx to dx_in, a part of dxz.
    conv.backward_of_layer(a, x_in, dx_in, dy=dx, dfinal=grads.conv_state, gradients=gradients)
    return gradients


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
    "mamba_inner", InnerArguments, InnerSaved, _forward, _fake, _backward, outputs=BlockOutputs, constants=USED
)
