"""Operators under sanitizers: forward and backward of random shapes, strides and optional arguments.

python tests/fuzz.py cpu 400 [seed]     # backend, number of calls
"""

from __future__ import annotations

import random
import sys

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


def call(draw: random.Random, backend: str) -> None:
    """Call one operator on strided inputs, with whatever is optional or without; its gradients too."""
    device = "cuda" if backend == "cuda" else "cpu"
    rows, row_length = draw.choice([1, 2, 3]), draw.choice([1, 2, 5, 16, 17, 63, 64, 65, 129])
    channels, states, width = draw.choice([1, 3, 8, 16, 33, 64]), draw.choice([1, 2, 5, 16, 17]), draw.choice([2, 3, 4])
    dtype = draw.choice(DTYPES)
    layout = SequenceLayout.from_lengths([lengths_of(draw, row_length) for _ in range(rows)], row_length).to(device)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        whole = torch.randn(*shape[:-1], shape[-1] + draw.choice([0, 1, 8]), device=device).to(dtype)
        return whole[..., : shape[-1]].requires_grad_()

    def maybe(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor | None:
        return tensor(*shape, dtype=dtype) if draw.random() < 0.6 else None

    documents, tokens, wide = layout.num_documents, (rows, row_length), torch.float32
    options = {"layout": layout, "return_final_state": draw.random() < 0.5, "backend": backend}
    if draw.random() < 0.5:
        given = {"x": tensor(*tokens, channels), "weight": tensor(channels, width), "bias": maybe(channels)}
        given["initial_state"] = maybe(documents, channels, width - 1)
        out = ops.conv1d_pack(**given, activation=draw.choice([None, "silu"]), **options)
    else:
        given = {name: tensor(*tokens, channels) for name in ("u", "delta")} | {"z": maybe(*tokens, channels)}
        given |= {"A": -tensor(channels, states, dtype=wide).exp().detach()} | {
            n: tensor(*tokens, states) for n in "BC"
        }
        given |= {name: maybe(channels, dtype=wide) for name in ("D", "delta_bias")}
        given["initial_state"] = maybe(documents, channels, states, dtype=wide)
        out = ops.ssm_pack(**given, delta_softplus=True, **options)
    outputs = [part for part in (out if options["return_final_state"] else (out,)) if part.numel()]
    inputs = [value.requires_grad_() for value in given.values() if value is not None and value.numel()]
    torch.autograd.grad(outputs, inputs, [torch.ones_like(part) for part in outputs], allow_unused=True)


if __name__ == "__main__":
    backend, count, *seed = sys.argv[1:]
    draw = random.Random(*map(int, seed or [0]))
    for _ in range(int(count)):
        call(draw, backend)
    print(f"{count} calls of {backend}")
