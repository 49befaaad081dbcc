"""The Mamba-2 block between its projections as one operator: convolution, scan, gated norm.

One operator instead of a composition, because its explicit backward writes dx, dB and dC into one
buffer, which the convolution's backward reads, and dz, dxBC and ddelta into one buffer, which
``in_proj``'s backward reads. Autograd would copy both (at 1.3B 7 of 330 ms a step) and save the
norm's intermediates.

Shapes: B rows, L slots, S documents, D d_inner, H heads, P headdim, G ngroups, N d_state, W taps.
The skip's parameter is called D, too, as in ``ssd_pack``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops import checks, context_parallel, conv, ssd
from packmamba.ops.backends import choose
from packmamba.ops.custom_op import BlockOutputs, Outputs, PackedOperator, to_dtype
from packmamba.ops.scan import ScanSaved
from packmamba.ops.ssd import SsdArguments


class Mamba2Arguments(NamedTuple):
    """Arguments of ``mamba2_inner``.

    Attributes:
        projected: in_proj's output (B, L, 2 D + 2 G N + H), finite at padding: the gate z (D), xBC
            (D + 2 G N) and delta (H).
        conv_weight, conv_bias: (D + 2 G N, W) and (D + 2 G N,) or None, of the convolution, whose
            activation is SiLU.
        A, D, delta_bias, delta_limit: as of ``ssd_pack``; D is (H,) or (H, P).
        norm_weight: (D,), of the gated norm, in the accumulation dtype.
        conv_state, ssm_state: the operators' initial states, by the documents of their layouts;
            None: zeros.
        offsets: of ssm_layout; None: zeros.
        conv_layout, ssm_layout: documents of the convolution and of the scan.
        groups: G, of B and C, and of the norm, which normalises each group by itself.
        epsilon: is added to the norm's mean square.
        return_state: also return final states.
    """

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor
    delta_bias: Tensor
    norm_weight: Tensor
    conv_state: Tensor | None
    ssm_state: Tensor | None
    offsets: Tensor | None
    conv_layout: SequenceLayout
    ssm_layout: SequenceLayout
    groups: int
    epsilon: float
    delta_limit: tuple[float, float] | None
    return_state: bool

    def parts(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split projected, or its gradient, into views of z, xBC (B, L, D + 2 G N) and delta."""
        return projected.split((len(self.norm_weight), len(self.conv_weight), len(self.A)), dim=2)

    def parts_of_scan(self, xBC: Tensor) -> tuple[Tensor, ...]:
        """Split xBC, or its gradient, into views: x (B, L, H, P), B and C (B, L, G, N)."""
        channels = len(self.norm_weight)
        width_of_B = (len(self.conv_weight) - channels) // 2
        x, B, C = xBC.split((channels, width_of_B, width_of_B), dim=2)
        by_group = (self.groups, width_of_B // self.groups)
        heads = len(self.A)
        return x.unflatten(2, (heads, channels // heads)), B.unflatten(2, by_group), C.unflatten(2, by_group)

    def scan(self, convolved: Tensor, delta: Tensor) -> SsdArguments:
        """Return the scan's arguments.

        convolved is the convolution's output, delta projected's part.
        """
        x, B, C = self.parts_of_scan(convolved)
        return SsdArguments(
            x=x,
            delta=delta,
            A=self.A,
            B=B,
            C=C,
            D=self.D,
            z=None,
            delta_bias=self.delta_bias,
            initial_state=self.ssm_state,
            offsets=self.offsets,
            layout=self.ssm_layout,
            delta_softplus=True,
            delta_limit=self.delta_limit,
            return_final_state=self.return_state,
        )


def mamba2_layer_arguments(
    layer: Any, projected: Tensor, A: Tensor, D: Tensor, documents: tuple, **options: Any
) -> Mamba2Arguments:
    """Return arguments of a layer with Mamba-2's convolution and norm, ours or transformers'.

    documents: conv_layout, ssm_layout, conv_state and ssm_state.
    options: groups, epsilon, delta_limit and return_state.
    """
    conv_layout, ssm_layout, conv_state, ssm_state = documents
    return Mamba2Arguments(
        projected=projected,
        conv_weight=layer.conv1d.weight.squeeze(1),
        conv_bias=layer.conv1d.bias,
        A=A,
        D=D,
        delta_bias=layer.dt_bias.to(A.dtype),
        norm_weight=layer.norm.weight.to(A.dtype),
        conv_state=conv_state,
        ssm_state=ssm_state,
        offsets=ssm_layout.offsets,
        conv_layout=conv_layout,
        ssm_layout=ssm_layout,
        **options,
    )


class Mamba2Saved(NamedTuple):
    """Saved for the backward: outputs of convolution and scan, and what the scan saved.

    Of the convolution (B, L, D + 2 G N), of the scan (B, L, D).
    """

    convolved: Tensor | None
    y: Tensor | None
    states: Tensor | None


def mamba2_inner(a: Mamba2Arguments, backend: str | None = None) -> BlockOutputs:
    """Compute a Mamba-2 block between its projections.

    ``z, xBC, delta = projected; x, B, C = silu(conv(xBC))``, then, with delta as softplus and limit
    make it, ``rms_norm(ssd_pack(x, delta, A, B, C, D) * silu(z)) * norm_weight``: (B, L, D) in
    projected's dtype, with final states, or None for them.

    Arguments are a layer's, which has checked what its caller brought. The backward on a GPU
    computes the norm again; it keeps the convolution's and the scan's output.
    """
    if a.conv_layout.crossing or a.ssm_layout.crossing:
        a = _start_from_ranks_before(a, backend)
    return BlockOutputs(*choose(backend, a.projected.device, "mamba2_inner")(a))


def _start_from_ranks_before(a: Mamba2Arguments, backend: str | None) -> Mamba2Arguments:
    """Return the arguments with initial states of documents that began on the ranks before."""
    context_parallel.expect_no_state(a.return_state, a.conv_state, a.ssm_state)
    _, xBC, delta = a.parts(a.projected)
    if a.conv_layout.crossing:
        a = a._replace(conv_state=context_parallel.entering_inputs(conv.of_layer(a, xBC)))
    if crossing := a.ssm_layout.crossing:
        inputs = conv.of_layer(a, xBC)
        one_layout = a.conv_layout is a.ssm_layout
        if one_layout:
            # Only the documents that leave are convolved.
            state = None if a.conv_state is None else a.conv_state[crossing.leaving[crossing.leaving_rows]]
            inputs = inputs._replace(x=crossing.take(xBC), layout=crossing.tail, initial_state=state)
        convolved, _ = choose(backend, a.projected.device, "conv1d_pack")(inputs)
        convolved = convolved if one_layout else crossing.take(convolved)
        scan = a._replace(ssm_layout=crossing.tail).scan(convolved, crossing.take(delta))
        ssd_pack = choose(backend, a.projected.device, "ssd_pack")
        a = a._replace(ssm_state=context_parallel.entering_states(a.ssm_layout, scan, ssd_pack))
    return a


vars(_start_from_ranks_before)["_torchdynamo_disable"] = True


def compose(
    a: Mamba2Arguments, conv1d_pack: Callable, ssd_pack: Callable
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.mamba2_inner`` by implementations of the two operators."""
    z, xBC, delta = a.parts(a.projected)
    convolved, conv_state = conv1d_pack(conv.of_layer(a, xBC))
    y, ssm_state = ssd_pack(a.scan(convolved, delta))
    normed = gated_rms_norm(y.flatten(2), z, a.norm_weight, a.groups, a.epsilon)
    return normed, conv_state, ssm_state


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, epsilon: float) -> Tensor:
    """Return ``rms_norm(y * silu(z)) * weight`` of (..., D) by groups of channels, in y's dtype.

    The gate comes before the norm, as in state-spaces' ``RMSNormGated(norm_before_gate=False)``
    (mamba_ssm/ops/triton/layernorm_gated.py) and transformers' ``MambaRMSNormGated``. Computed in
    float32 or wider.
    """
    dtype = checks.accumulation_dtype(y.dtype)
    gated = y.to(dtype) * torch.nn.functional.silu(z.to(dtype))
    by_group = gated.unflatten(-1, (groups, -1))
    normed = torch.nn.functional.rms_norm(by_group, by_group.shape[-1:], eps=epsilon).flatten(-2)
    return (normed * weight).to(y.dtype)


def compiled(a: Mamba2Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.mamba2_inner`` by compiled kernels.

    A GPU's take the convolution's parameters in float32.
    """
    if a.projected.device.type == "cpu":
        return compose(a, conv.compiled, ssd.on_cpu)
    wide = checks.accumulation_dtype(a.projected.dtype)
    used = {name: to_dtype(getattr(a, name), wide) for name in ("conv_weight", "conv_bias", "conv_state")}
    # Kernels take one stride for all tokens, which slices of a contiguous tensor have.
    normed, conv_final, ssm_final = _operator(a._replace(projected=a.projected.contiguous(), **used))
    # A convolution state is returned in the dtype in which it was given.
    state_dtype = a.projected.dtype if a.conv_state is None else a.conv_state.dtype
    return normed, to_dtype(conv_final, state_dtype), ssm_final


def _forward(a: Mamba2Arguments, needs_backward: bool) -> tuple[BlockOutputs, Mamba2Saved]:
    """Compute the block by a GPU's kernels."""
    return _walk(a, needs_backward, conv._forward, ssd._forward, ssd._kernels(a.projected).gated_norm.forward)


def _fake(a: Mamba2Arguments, needs_backward: bool) -> tuple[BlockOutputs, Mamba2Saved]:
    """Allocate what ``_forward`` returns."""
    return _walk(a, needs_backward, conv._allocate, ssd._fake, lambda y, *_: torch.empty_like(y))


def _walk(
    a: Mamba2Arguments, needs_backward: bool, convolve: Callable, scan: Callable, norm: Callable
) -> tuple[BlockOutputs, Mamba2Saved]:
    """Compute the block by the forward of two packed operators and of the norm."""
    z, xBC, delta = a.parts(a.projected)
    convolved, _ = convolve(conv.of_layer(a, xBC), needs_backward)
    scanned, of_scan = scan(a.scan(convolved.y, delta), needs_backward)
    y = scanned.y.flatten(2)
    normed = norm(y, z, a.norm_weight, a.groups, a.epsilon)
    saved = Mamba2Saved(convolved.y, y, of_scan.states) if needs_backward else Mamba2Saved(None, None, None)
    return BlockOutputs(normed, convolved.final_state, scanned.final_state), saved


def _backward(a: Mamba2Arguments, saved: Mamba2Saved, grads: BlockOutputs) -> dict[str, Tensor | None]:
    """Walk the block back: norm, scan and convolution, each into parts of the gradients."""
    assert saved.y is not None and saved.convolved is not None
    gradients = _operator.signature.allocate_gradients(a)
    if a.ssm_layout.starts.numel() == 0:  # all padding: no kernel has work
        return {name: None if gradient is None else gradient.zero_() for name, gradient in gradients.items()}
    z, xBC, delta = a.parts(a.projected)
    dz, dxBC, ddelta = a.parts(gradients["dprojected"])
    dnormed = torch.zeros_like(saved.y) if grads.output is None else grads.output.contiguous()
    dy, gradients["dnorm_weight"] = ssd._kernels(z).gated_norm.backward(
        dnormed, saved.y, z, a.norm_weight, a.groups, a.epsilon, dz
    )
    # Views of one buffer, in xBC's order. The norm gave padding dz = 0, since y is 0 there; the
    # other kernels write zeros there.
    dconvolved = torch.empty_like(saved.convolved)
    dx, dB, dC = a.parts_of_scan(dconvolved)
    scan = a.scan(saved.convolved, delta)
    scan_grads = Outputs(y=dy.view(scan.x.shape), final_state=grads.ssm_state)
    scan_gradients = ssd._backward(scan, ScanSaved(saved.states), scan_grads, (dx, ddelta, dB, dC))
    gradients |= {name: scan_gradients[name] for name in ("dA", "dD", "ddelta_bias")}
    gradients["dssm_state"] = scan_gradients["dinitial_state"]
    conv.backward_of_layer(a, xBC, dxBC, dy=dconvolved, dfinal=grads.conv_state, gradients=gradients)
    return gradients


_operator: PackedOperator[Mamba2Arguments] = PackedOperator(
    "mamba2_inner",
    arguments=Mamba2Arguments,
    outputs=BlockOutputs,
    saved=Mamba2Saved,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    constants=("offsets",),
    saved_if_eager=("states",),
)
