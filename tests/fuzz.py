"""Operators under sanitizers: forward and backward of random shapes, strides and optional arguments.

python tests/fuzz.py cpu 400 [seed]     # backend, number of calls
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from packmamba import SequenceLayout, ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lengths_of(draw: random.Random, row_length: int) -> list[int]:
    """A row: documents of one token, long ones, padding at its end or none."""
    left, found = row_length - draw.choice([0, 0, 1, draw.randrange(row_length + 1)]), []
    while left > 0:
        found.append(min(left, draw.choice([1, 1, 2, 3, 7, 8, 9, draw.randrange(1, row_length + 1)])))
        left -= found[-1]
    return found


def right_call(draw: random.Random, backend: str) -> None:
    """One operator on strided inputs, with whatever is optional or without; its gradients too."""
    device = "cuda" if backend == "cuda" else "cpu"
    rows, row_length = draw.choice([1, 2, 3]), draw.choice([1, 2, 5, 16, 17, 63, 64, 65, 129])
    channels, states, width = draw.choice([1, 3, 8, 16, 33, 64]), draw.choice([1, 2, 5, 16, 17]), draw.choice([2, 3, 4])
    dtype = draw.choice(DTYPES)
    layout = SequenceLayout.from_lengths([lengths_of(draw, row_length) for _ in range(rows)], row_length).to(device)
    wide = torch.float32

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        whole = torch.randn(*shape[:-1], shape[-1] + draw.choice([0, 1, 8]), device=device).to(dtype)
        return whole[..., : shape[-1]].requires_grad_()

    def maybe(make: Any) -> Any:
        return make() if draw.random() < 0.6 else None

    documents = layout.num_documents
    final = draw.random() < 0.5
    if draw.random() < 0.5:
        given = {
            "x": tensor(rows, row_length, channels),
            "weight": tensor(channels, width),
            "bias": maybe(lambda: tensor(channels)),
            "initial_state": maybe(lambda: tensor(documents, channels, width - 1)),
        }
        out = ops.conv1d_pack(
            **given, activation=draw.choice([None, "silu"]), layout=layout, return_final_state=final, backend=backend
        )
    else:
        near = {name: tensor(rows, row_length, channels) for name in ("u", "delta")}
        given = dict(
            near,
            A=-tensor(channels, states, dtype=wide).exp().detach().requires_grad_(),
            B=tensor(rows, row_length, states),
            C=tensor(rows, row_length, states),
            D=maybe(lambda: tensor(channels, dtype=wide)),
            z=maybe(lambda: tensor(rows, row_length, channels)),
            delta_bias=maybe(lambda: tensor(channels, dtype=wide)),
            initial_state=maybe(lambda: tensor(documents, channels, states, dtype=wide)),
        )
        out = ops.ssm_pack(**given, delta_softplus=True, layout=layout, return_final_state=final, backend=backend)
    outputs = [part for part in (out if final else (out,)) if part.numel()]
    inputs = [value for value in given.values() if value is not None and value.numel()]
    torch.autograd.grad(outputs, inputs, [torch.ones_like(part) for part in outputs], allow_unused=True)


if __name__ == "__main__":
    backend, count, *seed = sys.argv[1:]
    draw = random.Random(*map(int, seed or [0]))
    for _ in range(int(count)):
        right_call(draw, backend)
    print(f"{count} calls of {backend}")
