"""Cross-entropy of a linear head, in chunks of tokens whose gradients the forward computes, as in Liger-Kernel.

Shapes: B rows, L slots, T tokens, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.ops.checks import accumulation_dtype, is_transforming

CHUNK_LOGITS = 2048 * 50304
"""Maximum logits at a time: in bfloat16 about 200 MB, and their gradients as much."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, slots: Tensor | None = None, compiled: bool = False,
    shares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sum ``cross_entropy(hidden @ weight.T, targets)`` where ``mask``; return also each slot's loss.

    Args:
        hidden, weight: (B, L, d_model); (V, d_model), the head's, used in hidden's dtype.
        targets, mask: (B, L) int64, any valid id where there is no target; (B, L) bool, where there is.
        slots: (T,) int64, places in the flattened B * L slots; all others are skipped. None: none.
        compiled: fuse what lies between the matrix products by torch.compile.
        shares: (B, L), factors of losses in the sum; None: 1.

    Returns the sum, and losses (B, L) without factor and gradient, zero where there is no target; float32 (float64 of float64).
    """
    if is_transforming():
        raise RuntimeError(
            "linear_cross_entropy: expected no transform of torch.func, got one; "
            "take F.cross_entropy of the logits"
        )
    total, losses = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1), weight, targets.flatten(), mask.flatten(), slots, compiled, torch.is_grad_enabled(),
        None if shares is None else shares.flatten(),
    )  # fmt: skip
    return total, losses.view(targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, slots: Tensor | None, compiled: bool,
        differentiable: bool, shares: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = accumulation_dtype(hidden.dtype)
        x = hidden if slots is None else hidden.index_select(0, slots)
        if slots is not None:
            targets, mask, shares = (targets[slots], mask[slots], None if shares is None else shares[slots])
        head = weight.to(hidden.dtype)
        losses = x.new_empty(len(x), dtype=wide)
        chunk = max(1, CHUNK_LOGITS // len(head))
        differentiable = differentiable and any(ctx.needs_input_grad)
        dx = torch.empty_like(x) if differentiable else None
        dhead = torch.zeros_like(head, dtype=wide) if differentiable else None
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            logits = x.new_empty(len(losses[part]), len(head))
            torch.mm(x[part], head.t(), out=logits)
            chunk_of = (logits, targets[part], mask[part])
            if compiled:
                for tensor in chunk_of:  # the last chunk's size varies
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            losses[part], dlogits = (_compiled_chunk() if compiled else _chunk)(*chunk_of, differentiable)
            del logits, chunk_of
            if dx is not None and dhead is not None:
                if shares is not None:
                    dlogits = (dlogits * shares[part, None]).to(dlogits.dtype)
                torch.mm(dlogits, head, out=dx[part])
                _add_product(dhead, dlogits.t(), x[part])
            del dlogits
        ctx.slots, ctx.shape, ctx.dtype = slots, hidden.shape, weight.dtype
        ctx.save_for_backward(dx, dhead)
        placed = losses if slots is None else losses.new_zeros(len(hidden)).index_copy_(0, slots, losses)
        ctx.mark_non_differentiable(placed)
        return (losses if shares is None else losses * shares).sum(), placed

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple:
        dx, dhead = ctx.saved_tensors
        dx = dx * dtotal
        if ctx.slots is not None:
            dx = dx.new_zeros(ctx.shape).index_copy_(0, ctx.slots, dx)
        return dx, (dhead * dtotal).to(ctx.dtype), None, None, None, None, None, None


def _chunk(logits: Tensor, targets: Tensor, mask: Tensor, differentiable: bool) -> tuple[Tensor, Tensor]:
    """Return losses of a chunk and, in the logits' dtype, their gradient; zero where there is no target."""
    wide = accumulation_dtype(logits.dtype)
    log_p = F.log_softmax(logits.to(wide), dim=1)
    losses = torch.where(mask, -log_p.gather(1, targets[:, None]).squeeze(1), 0)
    if not differentiable:
        return losses, losses
    at_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = torch.where(mask[:, None], log_p.exp() - at_target.to(wide), 0)
    return losses, gradient.to(logits.dtype)


@functools.cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_chunk)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b)
