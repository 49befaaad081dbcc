"""Call each implementation of the operators on a GPU: T tokens of one row, S documents, D channels,
N states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.operators.arms import GpuArm
from packmamba import SequenceLayout, ops
from packmamba.ops.cuda import schedule
from packmamba.ops.mamba_ssm import _peer as find_peer

# a generator: what precedes its first yield is not timed, each further yield ends a phase
Phases = Iterator[Any]
STATES = 16
# Where the channels lie; None: the tensor has none; the last dimension if not named.
_CHANNEL_DIM = {"A": 0, "D": 0, "delta_bias": 0, "weight": 0, "bias": 0, "initial_state": 1, "B": None, "C": None}


@dataclass
class Call:
    """One call of a public operator: differentiable tensors by argument name, and the gradients of
    its outputs.
    """

    operator: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    grads: list[Tensor]
    layout: SequenceLayout

    def forward(self) -> tuple[Tensor, ...]:
        out = getattr(ops, self.operator)(**self.tensors, **self.options, layout=self.layout)
        return out if isinstance(out, tuple) else (out,)

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, list(self.tensors.values()), self.grads)

    def results(self) -> dict[str, Tensor]:
        outputs = self.forward()
        names = [*(f"output {i}" for i in range(len(outputs))), *(f"grad {name}" for name in self.tensors)]
        return dict(zip(names, [*outputs, *self.backward(outputs)]))

    def within(self, some: Tensor) -> Call:
        """The same, but gradients flow in through some channels alone, so that those of B and C are
        sums over these.
        """
        dims = enumerate(self.grads)
        grads = [torch.zeros_like(g).index_copy(_dim(i), some, g.index_select(_dim(i), some)) for i, g in dims]
        return Call(self.operator, self.tensors, self.options, grads, self.layout)

    def exact(self, some: Tensor) -> Call:
        """Some channels alone, in float64, by the reference."""
        tensors = {name: take(name, t, some).double().requires_grad_() for name, t in self.tensors.items()}
        grads = [g.index_select(_dim(i), some).double() for i, g in enumerate(self.grads)]
        return Call(self.operator, tensors, self.options | {"backend": "reference"}, grads, self.layout)

    def errors(self, some: Tensor) -> dict[str, float]:
        """Compute the errors of every output and gradient, on some channels."""
        found, errors = self.within(some).results(), {}
        for name, value in self.exact(some).results().items():
            kind, _, what = name.partition(" ")
            got = take(what, found[name], some) if kind == "grad" else found[name].index_select(_dim(int(what)), some)
            errors[name] = relative_error(got, value)
        return errors


def _dim(output: int) -> int:
    """Return the channel dimension of an operator's output: the last of y, the second of the final
    state.
    """
    return 1 if output else 2


def take(name: str, tensor: Tensor, some: Tensor) -> Tensor:
    """Some channels of an argument."""
    dim = _CHANNEL_DIM.get(name, -1)
    return tensor.detach() if dim is None else tensor.detach().index_select(dim, some)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """||a - b|| / ||b||"""
    return float((result.detach().double() - expected.detach()).norm() / expected.detach().norm())


@dataclass
class Inputs:
    """As a Mamba block's projections give them: u and z, B and C are slices of wider tensors."""

    scan: dict[str, Tensor]
    conv: dict[str, Tensor]
    dy: Tensor  # (1, T, D)

    @classmethod
    def random(cls, tokens: int, channels: int, seed: int, device: str, activations: torch.dtype) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = activations) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        u, z = normal(1, tokens, 2 * channels).chunk(2, dim=-1)
        rank = max(1, channels // 32)
        _, B, C = normal(1, tokens, rank + 2 * STATES).split([rank, STATES, STATES], dim=-1)
        wide = torch.float32
        scan = {
            "u": u, "delta": normal(1, tokens, channels) / 2,
            "A": -torch.arange(1, STATES + 1, device=device).to(wide).repeat(channels, 1), "B": B, "C": C,
            "D": normal(channels, dtype=wide), "z": z, "delta_bias": normal(channels, dtype=wide) / 2 - 3,
        }  # fmt: skip
        # Float32, as under mixed precision, of values that bfloat16 has too: the peer takes them
        # so.
        conv = {"x": u, "weight": normal(channels, 4).to(wide), "bias": normal(channels).to(wide)}
        scan, conv = ({name: t.detach().requires_grad_() for name, t in each.items()} for each in (scan, conv))
        return cls(scan, conv, normal(1, tokens, channels))

    @property
    def channels(self) -> int:
        return self.dy.shape[2]


# (1, T, some) in float64: what outputs must agree with
Reference = Callable[[SequenceLayout], Tensor]


def references(inputs: Inputs, some: Tensor) -> dict[str, Reference]:
    """By name; an Implementation says which it expects."""

    def by(operator: str, tensors: Mapping[str, Tensor], **options: Any) -> Reference:
        @torch.no_grad()
        def call(layout: SequenceLayout) -> Tensor:
            exact = {name: take(name, tensor, some).double() for name, tensor in tensors.items()}
            return getattr(ops, operator)(**exact, **options, layout=layout, backend="reference")

        return call

    packed = by("ssm_pack", inputs.scan, delta_softplus=True)
    return {
        "scan": packed,
        "scan leaking": lambda layout: packed(layout.flow()),
        "conv": by("conv1d_pack", inputs.conv, activation="silu"),
    }


# Mamba-2's channels that share a step size, and states of each
HEAD_CHANNELS, HEAD_STATES = 64, 128


@dataclass
class Implementation:
    """Hold an arm's calls: ``prepare(layout)``, not timed, ``forward(prepared)``,
    ``backward(outputs, prepared)``.
    """

    forward: Callable[[Any], Any]
    backward: Callable[[Any, Any], Any] | None = None
    prepare: Callable[[SequenceLayout], Any] = lambda layout: layout
    # (1, T, D), of outputs and what was prepared
    output: Callable[[Any, Any], Tensor] | None = None
    expects: str = ""  # which of ``references`` the output must agree with
    # true if ``prepare`` gives a Call, whose gradients are held against float64 too
    gradients: bool = False

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

        def make(layout: SequenceLayout) -> Any:
            stream = torch.cuda.current_stream().cuda_stream
            return schedule(layout.starts.clone(), layout.ends, (1, tokens, channels), True, "forward", stream)

        return Implementation(make)
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


Batch = tuple[Tensor, ...]  # channels first: u, delta, B, C, z, dy; or what the peer returns


def mamba(peer: Any, packing: str, inputs: Inputs, pad_to: int) -> Implementation:
    """Call mamba-ssm's scan at its own binding, on contiguous copies; unpacked, document by
    document, or padded as a batch.
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

    def arguments(u: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor, dy: Tensor) -> Batch:
        return (u, delta, held["A"], B[:, None], C[:, None], held["D"], z, held["delta_bias"])

    def forward(prepared: tuple[list[Batch], SequenceLayout]) -> list[Batch]:
        return [peer.fwd(*arguments(*batch), True) for batch in prepared[0]]

    def backward(outputs: list[Batch], prepared: tuple[list[Batch], SequenceLayout]) -> list[Any]:
        pairs = zip(prepared[0], outputs)
        return [peer.bwd(*arguments(*of), of[-1], kept, out, None, True, False) for of, (out, kept, _) in pairs]

    def output(outputs: list[Batch], prepared: tuple[list[Batch], SequenceLayout]) -> Tensor:
        y, layout = [out[2] for out in outputs], prepared[1]
        if len(y) == 1 and y[0].shape[0] == layout.num_documents > 1:
            y = [row[None, :, :length] for row, length in zip(y[0], layout.lengths.tolist())]
        return torch.cat(y, dim=-1).transpose(1, 2)

    split = {"unpacked": lambda layout: alone(layout.flow()), "by-document": alone, "padded": padded}[packing]
    expects = "scan leaking" if packing == "unpacked" else "scan"
    return Implementation(forward, backward, lambda layout: (split(layout), layout), output, expects)


def ssd(scan: Callable[..., Tensor], inputs: Inputs, some: Tensor, name: str) -> tuple[Implementation, Reference]:
    """Return a Mamba-2 scan, heads of 64 channels and 128 states, and its reference ``name``:
    ssm_pack by channel.
    """
    held = {name: inputs.scan[name].detach() for name in ("u", "delta", "z")}
    tokens, channels = inputs.dy.shape[1:]
    heads, device = channels // HEAD_CHANNELS, inputs.dy.device
    x = held["u"].reshape(1, tokens, heads, HEAD_CHANNELS).contiguous().requires_grad_()
    steps = held["delta"][..., :heads].contiguous().requires_grad_()
    rates = (-torch.rand(heads, device=device) - 1).requires_grad_()
    B, C = (torch.randn(1, tokens, 1, HEAD_STATES, device=device).to(x.dtype).requires_grad_() for _ in range(2))

    def forward(layout: SequenceLayout) -> Tensor:
        return scan(x, steps, rates, B, C, z=held["z"].reshape(x.shape), layout=layout)

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

    return Implementation(forward, backward, output=lambda y, _: y.reshape(1, tokens, channels), expects=name), exact


def causal_conv(convolve: Callable[..., Tensor], inputs: Inputs) -> Implementation:
    """causal-conv1d with seq_idx, which takes token-major rows as they are."""
    x = inputs.conv["x"]
    weight, bias = (inputs.conv[name].detach().to(x.dtype).requires_grad_() for name in ("weight", "bias"))

    def forward(layout: SequenceLayout) -> Tensor:
        return convolve(x.transpose(1, 2), weight, bias, seq_idx=layout.seq_idx, activation="silu")

    def backward(y: Tensor, _: SequenceLayout) -> Any:
        return torch.autograd.grad(y, [x, weight, bias], inputs.dy.transpose(1, 2))

    return Implementation(forward, backward, output=lambda y, _: y.transpose(1, 2), expects="conv")


def _implementation(
    arm: GpuArm, inputs: Inputs, some: Tensor, pad_to: int, references: dict[str, Reference]
) -> Implementation:
    """An arm's implementation, which may add a reference; ImportError or ValueError if a peer is
    not installed.
    """
    if arm.implementation == "packmamba":
        return packmamba(arm, inputs)
    if arm.implementation == "torch":
        return projections(inputs)
    if arm.implementation == "mamba-ssm":
        import selective_scan_cuda

        return mamba(selective_scan_cuda, arm.packing, inputs, pad_to)
    if arm.implementation == "causal-conv1d":
        from causal_conv1d import causal_conv1d_fn

        return causal_conv(causal_conv1d_fn, inputs)
    scan: Callable[..., Tensor] = partial(ops.ssd_pack, delta_softplus=True)
    if arm.implementation == "mamba2-ssd":
        peer = partial(find_peer("mamba_ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined"), chunk_size=256)
        scan = lambda *of, layout, **more: peer(*of, **more, seq_idx=layout.seq_idx, dt_softplus=True)
    made, references[arm.implementation] = ssd(scan, inputs, some, arm.implementation)
    return made


def build(
    arms: Mapping[str, GpuArm], inputs: Inputs, some: Tensor, pad_to: int
) -> tuple[dict[str, Implementation], dict[str, Reference]]:
    """The arms' implementations, and what their outputs must agree with; a peer that is missing is
    named once.
    """
    made: dict[str, Implementation] = {}
    expected, missing = references(inputs, some), {}
    for name, arm in arms.items():
        try:
            made[name] = _implementation(arm, inputs, some, pad_to, expected)
        except (ImportError, ValueError) as error:
            missing[arm.implementation] = error
    for implementation, problem in missing.items():
        print(f"no {implementation}: {problem}", file=sys.stderr)
    return made, expected
