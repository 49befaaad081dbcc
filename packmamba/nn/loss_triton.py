# mypy: ignore-errors
"""Cross-entropy of a chunk of logits on a GPU, in Triton; the gradient takes the logits' place.

A program reads a token's logits twice: for their maximum and the sum of exponentials, and again,
from the cache, for the gradient. Written as PyTorch's operators, a chunk is read and written about
fifteen times, most of them in float32, which takes longer than the three products of the head
(times: experiments/speedup/head-loss.json).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits that a program reads at once.
BLOCK = 8192


@triton.jit
def chunk_losses(
    logits, targets, mask, shares, losses, vocabulary, is_differentiable: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a token's loss, and the gradient of its logits in their place.

    Both zero where mask is False.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocabulary
    has_target = tl.load(mask + token) != 0
    target = tl.load(targets + token)
    # Of a target outside the vocabulary no memory is read: its loss is NaN. Read before the sums,
    # at whose barriers all warps wait: behind them others write to the row.
    of_target = tl.load(row + target, (target >= 0) & (target < vocabulary), float("nan")).to(tl.float32)
    # Finite, so that logits of -inf add exp(-inf) = 0.
    largest = tl.full((), -3.4e38, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tile = tl.load(row + column, column < vocabulary, float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(tile, 0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(tile - largest), 0)
    log_total = largest + tl.log(total)
    tl.store(losses + token, tl.where(has_target, log_total - of_target, 0.0))
    if is_differentiable:
        share = 1.0 if shares is None else tl.load(shares + token)
        for first in range(0, vocabulary, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tile = tl.load(row + column, column < vocabulary, 0.0).to(tl.float32)
            # d loss / d logits = softmax(logits) - one-hot(target).
            gradient = share * (tl.exp(tile - log_total) - tl.where(column == target, 1.0, 0.0))
            gradient = tl.where(has_target, gradient, 0.0)
            tl.store(row + column, gradient.to(logits.dtype.element_ty), column < vocabulary)


def chunk_losses_and_gradient(
    logits: Tensor, targets: Tensor, mask: Tensor, shares: Tensor | None, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``loss._chunk`` of contiguous logits (T, V); write the gradient in their place."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    of_tokens = (None if tensor is None else tensor.contiguous() for tensor in (targets, mask, shares))
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    options = {"is_differentiable": differentiable, "BLOCK": block, "num_warps": max(1, min(8, block // 256))}
    chunk_losses[(len(logits),)](logits, *of_tokens, losses, logits.shape[1], **options)
    return losses, logits
