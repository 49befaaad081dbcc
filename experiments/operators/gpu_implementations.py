"""How each implementation of the operators is called on a GPU.

Another one is a function and a line of ``BUILDERS``; arms that use it are in experiments.operators.arms.
Shapes: T tokens of the one row, S documents, P slots of a padded document, D channels, N states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.operators.arms import GpuArm
from experiments.operators.gpu_inputs import STATES, Call, Inputs, Reference, references
from packmamba import SequenceLayout, ops
from packmamba.ops.cuda import schedule
from packmamba.ops.mamba_ssm import _peer as find_peer
from packmamba.timing import Phases

HEAD_CHANNELS, HEAD_STATES = 64, 128
"""Of Mamba-2: channels that share a step size, and states of each."""


@dataclass
class Implementation:
    """How an arm is called: ``prepare(layout)``, not timed, gives what ``forward`` takes; its outputs and that go to
    ``backward``."""

    forward: Callable[[Any], Any]
    backward: Callable[[Any, Any], Any] | None = None
    prepare: Callable[[SequenceLayout], Any] = lambda layout: layout
    output: Callable[[Any, Any], Tensor] | None = None
    """(1, T, D), of outputs and what was prepared."""
    expects: str = ""
    """Which of ``references`` the output must agree with."""
    gradients: bool = False
    """Whether ``prepare`` gives a Call, whose gradients are held against float64 too."""

    def phases(self, layout: SequenceLayout) -> Phases:
        """Forward and backward, for the clock."""
        prepared = self.prepare(layout)
        yield
        outputs = self.forward(prepared)
        yield
        if self.backward is not None:
            self.backward(outputs, prepared)
            yield


def packmamba(arm: GpuArm, inputs: Inputs) -> Implementation:
    """The public operators, with gradients of everything; or what is made once for a batch."""
    tokens, channels = inputs.dy.shape[1:]
    if arm.operator == "schedule":
        return Implementation(
            lambda layout: schedule(layout.starts.clone(), layout.ends, 1, tokens, channels, True, "forward")
        )
    conv = arm.operator == "conv"
    operator, tensors = ("conv1d_pack", inputs.conv) if conv else ("ssm_pack", inputs.scan)
    options: dict[str, Any] = {"activation": "silu"} if conv else {"delta_softplus": True}
    kept: dict[int, Tensor] = {}

    def prepare(layout: SequenceLayout) -> Call:
        if not arm.with_states:
            return Call(operator, tensors, options, [inputs.dy], layout)
        shape = (layout.num_documents, *inputs.scan["A"].shape)
        if layout.num_documents not in kept:
            kept[layout.num_documents] = torch.randn(shape, device=inputs.dy.device)
        state = kept[layout.num_documents]
        leaves = tensors | {"initial_state": state.detach().requires_grad_()}
        return Call(operator, leaves, options | {"return_final_state": True}, [inputs.dy, state], layout)

    return Implementation(
        Call.forward, lambda outputs, call: call.backward(outputs), prepare, lambda outputs, _: outputs[0],
        arm.operator, True,
    )  # fmt: skip


def projections(inputs: Inputs) -> Implementation:
    """The matrix products of the block around the operators, with all gradients, for scale."""
    tokens, channels = inputs.dy.shape[1:]
    d_model, rank = channels // 2, max(1, channels // 32)
    pairs = []
    for n_in, n_out in ((d_model, 2 * channels), (channels, rank + 2 * STATES), (rank, channels), (channels, d_model)):
        sizes = ((tokens, n_in), (n_out, n_in), (tokens, n_out))
        pairs.append([torch.randn(size, device=inputs.dy.device, dtype=inputs.dy.dtype) for size in sizes])
    leaves = [tensor.requires_grad_() for x, weight, _ in pairs for tensor in (x, weight)]
    grads = [gradient for _, _, gradient in pairs]
    return Implementation(
        lambda _: [F.linear(x, weight) for x, weight in zip(leaves[::2], leaves[1::2])],
        lambda outputs, _: torch.autograd.grad(outputs, leaves, grads),
    )


Batch = tuple[Tensor, ...]
"""Channels first: u, delta, B, C, z, dy."""


def mamba(peer: Any, packing: str, inputs: Inputs, pad_to: int) -> Implementation:
    """mamba-ssm's scan at its own binding, on contiguous copies made beforehand: in its favour.

    Unpacked runs the row as one document; by document, each alone; padded, all as one batch of the longest's length, at
    least ``pad_to``.
    """
    held = {name: tensor.detach() for name, tensor in inputs.scan.items()}
    tokens_of = (*(held[name] for name in ("u", "delta", "B", "C", "z")), inputs.dy)

    def alone(layout: SequenceLayout) -> list[Batch]:
        return [
            tuple(t[:, start:end].transpose(1, 2).contiguous() for t in tokens_of)
            for start, end in zip(layout.starts.tolist(), layout.ends.tolist())
        ]

    def padded(layout: SequenceLayout) -> list[Batch]:
        length = max(pad_to, int(layout.lengths.max()))
        place = torch.arange(length, device=layout.device).minimum(layout.lengths[:, None] - 1)
        slots = layout.starts[:, None] + place
        return [tuple(t[0][slots].transpose(1, 2).contiguous() for t in tokens_of)]

    def forward(prepared: tuple[list[Batch], SequenceLayout]) -> list[tuple[Tensor, ...]]:
        return [
            peer.fwd(u, delta, held["A"], B[:, None], C[:, None], held["D"], z, held["delta_bias"], True)
            for u, delta, B, C, z, _ in prepared[0]
        ]

    def backward(outputs: list[tuple[Tensor, ...]], prepared: tuple[list[Batch], SequenceLayout]) -> list[Any]:
        return [
            peer.bwd(
                u, delta, held["A"], B[:, None], C[:, None], held["D"], z, held["delta_bias"], dy, states, out, None,
                True, False,
            )
            for (u, delta, B, C, z, dy), (out, states, _) in zip(prepared[0], outputs)
        ]  # fmt: skip

    def output(outputs: list[tuple[Tensor, ...]], prepared: tuple[list[Batch], SequenceLayout]) -> Tensor:
        y, layout = [out[2] for out in outputs], prepared[1]
        if len(y) == 1 and y[0].shape[0] == layout.num_documents > 1:
            y = [row[None, :, :length] for row, length in zip(y[0], layout.lengths.tolist())]
        return torch.cat(y, dim=-1).transpose(1, 2)

    split = {"unpacked": lambda layout: alone(layout.flow()), "by-document": alone, "padded": padded}[packing]
    expects = "scan leaking" if packing == "unpacked" else "scan"
    return Implementation(forward, backward, lambda layout: (split(layout), layout), output, expects)


def ssd(chunk_scan: Callable[..., Tensor], inputs: Inputs, some: Tensor) -> tuple[Implementation, Reference]:
    """Mamba-2's scan with seq_idx, heads of 64 channels and 128 states; and its reference, which is ours by channel."""
    held = {name: inputs.scan[name].detach() for name in ("u", "delta", "z")}
    tokens, channels = inputs.dy.shape[1:]
    heads, device = channels // HEAD_CHANNELS, inputs.dy.device
    x = held["u"].reshape(1, tokens, heads, HEAD_CHANNELS).contiguous().requires_grad_()
    steps = held["delta"][..., :heads].contiguous().requires_grad_()
    rates = (-torch.rand(heads, device=device) - 1).requires_grad_()
    B, C = (torch.randn(1, tokens, 1, HEAD_STATES, device=device).to(x.dtype).requires_grad_() for _ in range(2))

    def forward(layout: SequenceLayout) -> Tensor:
        return chunk_scan(
            x,
            steps,
            rates,
            B,
            C,
            chunk_size=256,
            seq_idx=layout.seq_idx,
            dt_softplus=True,
            z=held["z"].reshape(x.shape),
        )

    def backward(y: Tensor, _: SequenceLayout) -> Any:
        return torch.autograd.grad(y, [x, steps, rates, B, C], inputs.dy.view(x.shape))

    @torch.no_grad()
    def exact(layout: SequenceLayout) -> Tensor:
        head = some // HEAD_CHANNELS
        A = rates[head].double()[:, None].expand(-1, HEAD_STATES).contiguous()
        return ops.ssm_pack(
            held["u"][..., some].double(), steps[..., head].double(), A, B[:, :, 0].double(), C[:, :, 0].double(),
            z=held["z"][..., some].double(), delta_softplus=True, layout=layout, backend="reference",
        )  # fmt: skip

    return Implementation(forward, backward, output=lambda y, _: y.reshape(1, tokens, channels), expects="ssd"), exact


def causal_conv(convolve: Callable[..., Tensor], inputs: Inputs) -> Implementation:
    """causal-conv1d with seq_idx, which takes token-major rows as they are."""
    x = inputs.conv["x"]
    weight, bias = (inputs.conv[name].detach().to(x.dtype).requires_grad_() for name in ("weight", "bias"))

    def forward(layout: SequenceLayout) -> Tensor:
        return convolve(x.transpose(1, 2), weight, bias, seq_idx=layout.seq_idx, activation="silu")

    def backward(y: Tensor, _: SequenceLayout) -> Any:
        return torch.autograd.grad(y, [x, weight, bias], inputs.dy.transpose(1, 2))

    return Implementation(forward, backward, output=lambda y, _: y.transpose(1, 2), expects="conv")


def _mamba_ssm(
    arm: GpuArm, inputs: Inputs, some: Tensor, pad_to: int, references: dict[str, Reference]
) -> Implementation:
    import selective_scan_cuda

    return mamba(selective_scan_cuda, arm.packing, inputs, pad_to)


def _mamba2_ssd(
    arm: GpuArm, inputs: Inputs, some: Tensor, pad_to: int, references: dict[str, Reference]
) -> Implementation:
    made, references["ssd"] = ssd(
        find_peer("mamba_ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined"), inputs, some
    )
    return made


def _causal_conv1d(
    arm: GpuArm, inputs: Inputs, some: Tensor, pad_to: int, references: dict[str, Reference]
) -> Implementation:
    from causal_conv1d import causal_conv1d_fn

    return causal_conv(causal_conv1d_fn, inputs)


BUILDERS: dict[str, Callable[[GpuArm, Inputs, Tensor, int, dict[str, Reference]], Implementation]] = {
    "packmamba": lambda arm, inputs, *_: packmamba(arm, inputs),
    "torch": lambda arm, inputs, *_: projections(inputs),
    "mamba-ssm": _mamba_ssm,
    "mamba2-ssd": _mamba2_ssd,
    "causal-conv1d": _causal_conv1d,
}
"""What implements an arm. A builder may add a reference of its own; ImportError or ValueError if a peer is not installed."""


def build(
    arms: Mapping[str, GpuArm], inputs: Inputs, some: Tensor, pad_to: int
) -> tuple[dict[str, Implementation], dict[str, Reference]]:
    """The arms' implementations, and what their outputs must agree with; a peer that is missing is named once."""
    made: dict[str, Implementation] = {}
    expected, missing = references(inputs, some), {}
    for name, arm in arms.items():
        try:
            made[name] = BUILDERS[arm.implementation](arm, inputs, some, pad_to, expected)
        except (ImportError, ValueError) as error:
            missing[arm.implementation] = error
    for implementation, problem in missing.items():
        print(f"no {implementation}: {problem}", file=sys.stderr)
    return made, expected
