"""The residual block, with addition and norm fused.

A block gets the residual stream both as it is and normalised, and hands on both. So the norm of the
next block is computed where the addition is, and what the backward needs is saved once: the
normalised stream and a number a token. The norm's weight is not applied there: it scales the
columns of the mixer's first projection, d_model numbers instead of B L d_model.

Shapes: B rows, L slots.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packmamba.nn.mixers import State
from packmamba.ops.checks import is_transforming

RECOMPUTE = ("none", "inner", "block")  # values of ``MambaLM(recompute=...)``


class Block(nn.Module):
    """Compute ``residual + mixer(norm(residual))``, the residual stream in float32 or wider.

    Args:
        mixer: a module as ``packmamba.nn.mixers`` describes.
        norm_epsilon: of RMSNorm.
        recompute: the backward computes the whole mixer again from its input (activation
            checkpointing).
    """

    def __init__(self, mixer: Any, norm_epsilon: float, recompute: bool = False) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = nn.RMSNorm(mixer.d_model, eps=norm_epsilon)
        self.recompute = recompute

    def forward(
        self, residual: Tensor, normed: Tensor, *layouts_and_state: Any
    ) -> tuple[Tensor, Tensor, State | None]:
        """Return the stream (B, L, d_model) behind the block, the same normalised, and final states or None.

        Args:
            residual, normed: (B, L, d_model), the stream before the block, and the same as
                ``add_norm`` normalises it.
            layouts_and_state: conv_layout, ssm_layout, state, return_state, as of ``Mixer.mix``.
        """
        arguments = (normed, self.norm.weight, *layouts_and_state)
        # A strict torch.export cannot run checkpoint.
        if self.recompute and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            mixed, state = checkpoint(self.mixer.mix, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed, state = self.mixer.mix(*arguments)
        residual, normed = add_norm(residual, mixed, self.norm.eps)
        return residual, normed, state


def add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor]:
    """Return residual + mixed, and the same divided by its root mean square: both (B, L, d_model).

    Args:
        residual: (B, L, d_model), float32 or wider, as is the sum.
        mixed: what broadcasts to residual; its dtype is that of the normalised sum.
        epsilon: is added to the mean square.
    """
    if is_transforming():  # torch.func takes no function with a backward of its own
        residual, normed, _ = _add_norm(residual, mixed, epsilon)
        return residual, normed
    return _AddNorm.apply(residual, mixed, epsilon)


def _add_norm(residual: Tensor, mixed: Tensor, epsilon: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return also the factor by which the sum is multiplied, (B, L, 1)."""
    residual = residual + mixed
    scale = torch.rsqrt(residual.square().mean(-1, keepdim=True) + epsilon)
    normed = residual * scale
    if normed.dtype != mixed.dtype:
        # A ``to`` of the same dtype compiles into an output without a gradient (torch 2.11).
        normed = normed.to(mixed.dtype)
    return residual, normed, scale


class _AddNorm(torch.autograd.Function):
    """Differentiate ``add_norm`` from the normalised sum and its factor alone.

    With r the sum, s the factor and n = r s, a gradient dn of n adds ``s (dn - n mean(dn n))`` to
    that of r.
    """

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
