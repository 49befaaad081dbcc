# mypy: ignore-errors
"""Mamba-3's angles on a GPU, in Triton: the sum of a document's turns up to each token.

A program walks a head's angles of one document, in tiles of tokens. Turns are integers, parts of a
turn, whose sums are exact; gradients are summed in float32 from the document's end. So a document's
bits are the same whatever stands beside it.

As PyTorch's operators integers of 8 bytes are written and read five times, and the gradient costs a
scan of Mamba-1 in both directions: 5.0 ms for 16,384 tokens of 64 heads with 32 angles, where these
kernels take 0.4 (one H200).

Letters: H heads, n angles, W of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Parts of a turn in which turns are counted.
PARTS = tl.constexpr(2.0**48)
TURN = tl.constexpr(6.283185307179586)  # 2 pi, in radians
# Tokens that are summed at once.
TOKENS = tl.constexpr(128)


@triton.jit
def tile_of(slot, inside, heads, head, angles, W: tl.constexpr):
    """Return where (TOKENS, W) lies in a tensor (slots, heads, angles), and which of it is there."""
    place = (slot * heads + head)[:, None] * angles + tl.arange(0, W)[None, :]
    return place, inside[:, None] & (tl.arange(0, W) < angles)[None, :]


@triton.jit
def write_angles(rate, dt, theta, starts, ends, angles, W: tl.constexpr):
    """Write angles from -pi to pi, theta (slots, H, n)."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    end = tl.load(ends + tl.program_id(0)).to(tl.int64)
    total = tl.zeros((W,), tl.int64)
    for first in range(tl.load(starts + tl.program_id(0)).to(tl.int64), end, TOKENS):
        slot = first + tl.arange(0, TOKENS)
        place, inside = tile_of(slot, slot < end, 1, 0, angles, W)
        size = tl.load(dt + slot * heads + head, slot < end, 0.0)
        turns = tl.load(rate + place, inside, 0.0) * size[:, None]
        parts = (turns * PARTS).to(tl.int64)
        through = total[None, :] + tl.cumsum(parts, 0)
        total += tl.sum(parts, 0)
        place, inside = tile_of(slot, slot < end, heads, head, angles, W)
        # Modulo a turn, and signed. No integer is NaN: the token's angle is, if its turn is.
        signed = ((through << 16) >> 16).to(tl.float32) * (TURN / PARTS)
        tl.store(theta + place, signed + 0.0 * turns, inside)


@triton.jit
def turn_back(rate, dt, dtheta, drate, ddt, starts, ends, angles, W: tl.constexpr):
    """Write gradients of dt (slots, H), and of rate by head (slots, H, n).

    A token's turn is in the angles of the document's tokens from it on.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    begin = tl.load(starts + tl.program_id(0)).to(tl.int64)
    last = tl.load(ends + tl.program_id(0)) - 1
    total = tl.zeros((W,), tl.float32)
    for behind in range(0, last + 1 - begin, TOKENS):
        # Backwards.
        slot = last - behind - tl.arange(0, TOKENS)
        place, inside = tile_of(slot, slot >= begin, heads, head, angles, W)
        value = tl.load(dtheta + place, inside, 0.0)
        dturn = TURN * (total[None, :] + tl.cumsum(value, 0))
        total += tl.sum(value, 0)
        size = tl.load(dt + slot * heads + head, slot >= begin, 0.0)
        tl.store(drate + place, dturn * size[:, None], inside)
        place, inside = tile_of(slot, slot >= begin, 1, 0, angles, W)
        of_dt = tl.sum(dturn * tl.load(rate + place, inside, 0.0), 1)
        tl.store(ddt + slot * heads + head, of_dt, slot >= begin)


@torch.library.custom_op("packmamba::angles", mutates_args=())
def sum_angles(rate: Tensor, dt: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return angles (B, L, H, n) in radians, from -pi to pi; 0 at padding.

    rate: (B, L, n), turns for a step size of 1; dt: (B, L, H), step sizes; contiguous, in float32.
    starts, ends: of a layout.
    """
    theta = dt.new_zeros(*dt.shape, rate.shape[2])
    _launch(write_angles, theta, starts, rate, dt, theta, starts, ends)
    return theta


@torch.library.custom_op("packmamba::angles_backward", mutates_args=())
def _backward(dtheta: Tensor, rate: Tensor, dt: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    by_head = torch.zeros_like(dtheta)
    ddt = torch.zeros_like(dt)
    _launch(turn_back, dtheta, starts, rate, dt, dtheta, by_head, ddt, starts, ends)
    return by_head.sum(2), ddt


def _launch(kernel, theta: Tensor, starts: Tensor, *tensors: Tensor) -> None:
    """Launch a program for each document and head of theta (B, L, H, n), or of its gradient."""
    *_, heads, angles = theta.shape
    kernel[(len(starts), heads)](*tensors, angles, W=triton.next_power_of_2(angles))


sum_angles.register_fake(lambda rate, dt, *_: dt.new_empty(*dt.shape, rate.shape[2]))
_backward.register_fake(lambda dtheta, rate, dt, *_: (torch.empty_like(rate), torch.empty_like(dt)))
sum_angles.register_autograd(
    lambda ctx, dtheta: (*_backward(dtheta.contiguous(), *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
