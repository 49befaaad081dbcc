"""Cross-entropy of a linear head without the logits of all tokens.

Logits of a vocabulary of 50 thousand are larger than all other activations of a small model. So
tokens are taken in chunks, and the forward computes a chunk's losses and, while its logits are
there, its share of both gradients, as Liger-Kernel does (arXiv 2410.10989). The backward only
multiplies them. PyTorch's own function (since 2.13) has no losses by token, and does not sum the
weight's gradient in float32 beside narrower activations.

Shapes: B rows, L slots, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packmamba.ops.build import has_c_compiler
from packmamba.ops.checks import accumulation_dtype

# Maximum logits at a time: in bfloat16 about 200 MB. Their gradients take as much again; on a GPU
# they are written over the logits.
CHUNK_LOGITS = 2048 * 50304


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    slots: Tensor | None = None,
    compiled: bool = False,
    shares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum ``cross_entropy(hidden @ weight.T, targets)`` where ``mask``.

    Return also each slot's loss.

    Args:
        hidden: (B, L, d_model).
        weight: (V, d_model), the head's; used in hidden's dtype.
        targets: (B, L) int64; any valid id where there is no target.
        mask: (B, L) bool, where there is a target.
        slots: (T,) int64, places in the flattened B * L slots; all others, where mask must be
            False, are skipped. None: none is skipped.
        compiled: fuse what lies between the matrix products by torch.compile, where no kernel does:
            on a CPU, and in float64.
        shares: (B, L), weights of losses in the sum, in float16 of order 1, since gradients of
            logits are rounded with them: divide the sum by a step's targets; None: 1.

    Returns the sum, differentiable in hidden and weight, and losses (B, L) without factor and
    gradient, zero where there is no target; both float32 (float64 beside float64). Raises
    RuntimeError under transforms of torch.func.
    """
    shares = None if shares is None else shares.flatten()
    flat = (hidden.flatten(0, 1), weight, targets.flatten(), mask.flatten(), shares)
    total, losses = _LinearCrossEntropy.apply(*flat, slots, compiled, torch.is_grad_enabled())
    return total, losses.view(targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute losses and both gradients by chunks in the forward, for a total whose gradient is 1.

    Arguments are ``linear_cross_entropy``'s with B * L flattened, and whether gradients are enabled
    outside (in here they are not). The forward keeps dx (T, d_model) and dhead (V, d_model), the
    latter summed in float32; the backward multiplies them by the total's gradient and places dx at
    its slots.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        shares, slots, compiled, enabled = options
        x = hidden
        if slots is not None:
            x = hidden.index_select(0, slots)
            targets = targets[slots]
            mask = mask[slots]
            shares = None if shares is None else shares[slots]
        # Products take narrow operands; the head's gradient is summed in ``dtype``.
        head = weight.to(hidden.dtype)
        dtype = accumulation_dtype(x.dtype)
        losses = x.new_empty(len(x), dtype=dtype)
        differentiable = enabled and any(ctx.needs_input_grad)
        dx = torch.empty_like(x) if differentiable else None
        dhead = torch.zeros_like(head, dtype=dtype) if differentiable else None
        compute = _compute_on(x, compiled)
        chunk_length = max(1, CHUNK_LOGITS // len(head))
        # A chunk: logits (t, V), losses (t,), and at once
        # its dx (t, d_model) and its addend to dhead.
        for first in range(0, len(x), chunk_length):
            part = slice(first, first + chunk_length)
            # Into a tensor: autocast does not cast operands then.
            logits = torch.mm(x[part], head.t(), out=x.new_empty(len(losses[part]), len(head)))
            share = None if shares is None else shares[part]
            losses[part], dlogits = compute(logits, targets[part], mask[part], share, differentiable)
            del logits  # before the next allocation
            if dx is not None and dhead is not None:
                torch.mm(dlogits, head, out=dx[part])
                _add_product(dhead, dlogits.t(), x[part])
            del dlogits
        ctx.slots = slots
        ctx.shape = hidden.shape
        ctx.dtype = weight.dtype
        ctx.save_for_backward(dx, dhead)
        # Losses at their slots, zero where a slot was skipped.
        placed = losses
        if slots is not None:
            placed = losses.new_zeros(len(hidden)).index_copy_(0, slots, losses)
        ctx.mark_non_differentiable(placed)
        return (losses if shares is None else losses * shares).sum(), placed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple:
        dx, dhead = ctx.saved_tensors
        dx = dx * dtotal
        if ctx.slots is not None:
            dx = dx.new_zeros(ctx.shape).index_copy_(0, ctx.slots, dx)
        return dx, (dhead * dtotal).to(ctx.dtype), None, None, None, None, None, None


def _chunk(
    logits: Tensor, targets: Tensor, mask: Tensor, shares: Tensor | None, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """Return losses (T,) of logits (T, V), and the gradient (T, V) of ``(shares * losses).sum()``.

    The gradient has the logits' dtype.

    Both are zero where mask is False. Not differentiable: the second result is the losses again.
    """
    dtype = accumulation_dtype(logits.dtype)
    log_p = F.log_softmax(logits.to(dtype), dim=1)
    of_target = log_p.gather(1, targets[:, None]).squeeze(1)
    losses = torch.where(mask, -of_target, 0)
    if not differentiable:
        return losses, losses
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    # d loss / d logits = softmax(logits) - one-hot(target).
    gradient = torch.where(mask[:, None], log_p.exp() - is_target.to(dtype), 0)
    if shares is not None:
        gradient = gradient * shares[:, None]
    return losses, gradient.to(logits.dtype)


def _compute_on(x: Tensor, compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``_chunk``, compiled, or the kernel that does the same on a GPU, in the logits' place.

    Triton needs a C compiler at its first call; where there is none, Mamba-1 trains without.
    """
    if x.is_cuda and x.dtype != torch.float64 and has_c_compiler():
        from packmamba.nn import loss_triton  # which imports Triton

        return loss_triton.chunk_losses_and_gradient
    # Compiled once: PyTorch keeps code by function. The last chunk's size varies.
    return torch.compile(_chunk, dynamic=True) if compiled else _chunk


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total, summed in total's dtype where PyTorch can."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b)
