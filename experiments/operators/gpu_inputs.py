"""Inputs of the operators on a GPU, calls on them, and the float64 reference that they are held against.

Shapes: T tokens of the one row, S documents, D channels, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packmamba import SequenceLayout, ops

STATES = 16
# Where the channels lie; None: the tensor has none; the last dimension if not named.
_CHANNEL_DIM = {"A": 0, "D": 0, "delta_bias": 0, "weight": 0, "bias": 0, "initial_state": 1, "B": None, "C": None}


@dataclass
class Call:
    """One call of a public operator: differentiable tensors by argument name, and the gradients of its outputs."""

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
        """The same, but gradients flow in through some channels alone, so that those of B and C are sums over these."""
        grads = [
            torch.zeros_like(g).index_copy(_dim(i), some, g.index_select(_dim(i), some))
            for i, g in enumerate(self.grads)
        ]
        return Call(self.operator, self.tensors, self.options, grads, self.layout)

    def exact(self, some: Tensor) -> Call:
        """Some channels alone, in float64, by the reference."""
        tensors = {name: take(name, t, some).double().requires_grad_() for name, t in self.tensors.items()}
        grads = [g.index_select(_dim(i), some).double() for i, g in enumerate(self.grads)]
        return Call(self.operator, tensors, self.options | {"backend": "reference"}, grads, self.layout)

    def errors(self, some: Tensor) -> dict[str, float]:
        """Of every output and gradient, on some channels."""
        expected = self.exact(some).results()
        found = self.within(some).results()
        errors = {}
        for name, value in expected.items():
            kind, _, what = name.partition(" ")
            got = take(what, found[name], some) if kind == "grad" else found[name].index_select(_dim(int(what)), some)
            errors[name] = relative_error(got, value)
        return errors


def _dim(output: int) -> int:
    """Where an operator's output has its channels: the last of y, the second of the final state."""
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
    dy: Tensor
    """(1, T, D)"""

    @classmethod
    def random(cls, tokens: int, channels: int, seed: int, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
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
        # Float32, as under mixed precision, of values that bfloat16 has too: the peer takes them so.
        conv = {"x": u, "weight": normal(channels, 4).to(wide), "bias": normal(channels).to(wide)}
        scan, conv = ({name: t.detach().requires_grad_() for name, t in each.items()} for each in (scan, conv))
        return cls(scan, conv, normal(1, tokens, channels))

    @property
    def channels(self) -> int:
        return self.dy.shape[2]


Reference = Callable[[SequenceLayout], Tensor]
"""(1, T, some) in float64: what outputs must agree with."""


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
