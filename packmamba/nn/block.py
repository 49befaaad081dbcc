"""The residual block; the mixer's first projection applies the norm's weight. Shapes: B rows, L slots."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packmamba.layout import SequenceLayout
from packmamba.nn.mixers import State
from packmamba.ops.checks import is_transforming

RECOMPUTE = ("none", "inner", "block")


class Block(nn.Module):
    """Add a mixer of the normalised stream to the stream; recompute: activation checkpointing of the whole mixer."""

    def __init__(self, mixer: Any, norm_epsilon: float, recompute: bool = False) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.RMSNorm(mixer.d_model, eps=norm_epsilon)
        self.recompute = recompute

    def forward(
        self, residual: Tensor, normed: Tensor, conv_layout: SequenceLayout, ssm_layout: SequenceLayout,
        state: State | None, return_state: bool,
    ) -> tuple[Tensor, Tensor, State | None]:  # fmt: skip
        """Return the residual stream (B, L, d_model) behind the block, the same normalised, and final states."""
        arguments = (normed, self.norm.weight, conv_layout, ssm_layout, state, return_state)
        if self.recompute and torch.is_grad_enabled():
            mixed, state = checkpoint(
                self.mixer.mix, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed, state = self.mixer.mix(*arguments)
        residual, normed = add_norm(residual, mixed, self.norm.eps)
        return residual, normed, state


def add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor]:
    """Return residual + mixed, and the same divided by its root mean square, in mixed's dtype."""
    if is_transforming():  # torch.func takes no function with a backward of its own
        return _add_norm(residual, mixed, epsilon)[:2]
    return _AddNorm.apply(residual, mixed, epsilon)


def _add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return also the factor of the norm, (B, L, 1)."""
    residual = residual + mixed
    scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + epsilon)
    normed = residual * scale
    if normed.dtype != mixed.dtype:
        # A ``to`` of the same dtype compiles into an output without a gradient (torch 2.11).
        normed = normed.to(mixed.dtype)
    return residual, normed, scale


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor]:
        residual, normed, scale = _add_norm(residual, mixed, epsilon)
        ctx.save_for_backward(normed, scale)
        return residual, normed

    @staticmethod
    def backward(ctx: Any, dresidual: Tensor, dnormed: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale = ctx.saved_tensors
        dnormed = dnormed.to(scale.dtype)
        along = (dnormed * normed).mean(-1, keepdim=True)
        dresidual = dresidual + scale * (dnormed - normed * along)
        return dresidual, dresidual.to(normed.dtype), None
