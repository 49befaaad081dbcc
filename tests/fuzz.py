"""Operators under sanitizers: forward and backward of random shapes, strides and optional
arguments.

python tests/fuzz.py cpu 400 [seed]     # backend, number of calls
"""

from __future__ import annotations

import random
import sys

import torch

from operators import device_of, random_case
from packmamba import SequenceLayout

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
    row_length = draw.choice([1, 2, 5, 16, 17, 63, 64, 65, 129])
    rows = [lengths_of(draw, row_length) for _ in range(draw.choice([1, 2, 3]))]
    case = random_case(
        draw.choice(["conv1d_pack", "ssm_pack"]), SequenceLayout.from_lengths(rows, row_length), draw.choice(DTYPES),
        device_of(backend), channels=draw.choice([1, 3, 8, 16, 33, 64]), d_state=draw.choice([1, 2, 5, 16, 17]),
        width=draw.choice([2, 3, 4]), optional=draw.random() < 0.5, states=draw.random() < 0.5,
    )  # fmt: skip
    for name, tensor in case.tensors.items():
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + draw.choice([0, 1, 8]))
        if name in ("x", "u", "delta", "z", "B", "C"):
            case.tensors[name] = wide[..., : tensor.shape[-1]].copy_(tensor)
    case.run(backend)


if __name__ == "__main__":
    backend, count, *seed = sys.argv[1:]
    draw = random.Random(*map(int, seed or [0]))
    for _ in range(int(count)):
        call(draw, backend)
    print(f"{count} calls of {backend}")
