"""Forward of a patched mixer. Shapes: B rows, L slots, D channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packmamba import ops
from packmamba.integrations.transformers.boundaries import Packing
from packmamba.ops.checks import accumulation_dtype


def mix(mixer: Any, hidden: Tensor, packing: Packing | None, cache: Any) -> Tensor:
    """Mix hidden (B, L, hidden_size) by our operators and the mixer's own projections and norms.

    A wrapped projection (adapter, hook, quantisation) is called; without any, and without norms, one operator takes the weights.

    Args:
        packing: where documents lie; None: each row is one.
        cache: transformers' cache, which gets the states that rows end with; None: they are not kept.
    """
    layout = None if packing is None else packing.layout
    xz = mixer.in_proj(hidden)
    wide = accumulation_dtype(xz.dtype)
    conv = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    A, D = -torch.exp(mixer.A_log.float()).to(wide), mixer.D.float().to(wide)  # in float32 as there, beside float64 too
    dt_proj, out_proj = mixer.dt_proj, mixer.out_proj
    keeps, normed = cache is not None, hasattr(mixer, "dt_layernorm")
    if not normed and all(map(_plain, (mixer.x_proj, dt_proj, out_proj))):
        mixed, states = ops.inner_pack(
            xz, *conv, mixer.x_proj.weight, dt_proj.weight, A, D, dt_proj.bias.to(wide), out_proj.weight,
            conv_layout=layout, ssm_layout=layout, return_state=keeps,
        )  # fmt: skip
        state: Any = None if states is None else states[1]
        mixed = _blank(mixed, packing)
        if out_proj.bias is not None:
            mixed = mixed + out_proj.bias.to(mixed.dtype)
    else:
        x, z = xz.chunk(2, dim=-1)
        x = ops.conv1d_pack(x, *conv, layout=layout, activation="silu")
        parts = mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size
        low, B, C = mixer.x_proj(x).split(parts, dim=-1)
        if normed:
            low, B, C = mixer.dt_layernorm(low), mixer.b_layernorm(B), mixer.c_layernorm(C)
        if _plain(dt_proj):  # the bias is not rounded to the activations' dtype
            delta, bias = F.linear(low, dt_proj.weight), dt_proj.bias.to(wide)
        else:
            delta, bias = dt_proj(low), None
        y = ops.ssm_pack(
            x, delta, A, B, C, D, z=z, delta_bias=bias, delta_softplus=True, layout=layout, return_final_state=keeps
        )
        y, state = y if keeps else (y, None)
        mixed = out_proj(_blank(y, packing))
    if keeps:
        x = _blank(xz.chunk(2, dim=-1)[0], packing)
        cache.update_conv_state(x.transpose(1, 2), mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
        rows: Any = slice(None) if packing is None else packing.last
        cache.update_recurrent_state(state[rows], mixer.layer_idx)
    return mixed


def _plain(linear: nn.Module) -> bool:
    """Return whether a projection is its weight and bias alone."""
    return (
        type(linear) is nn.Linear
        and "forward" not in vars(linear)
        and not (
            linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
        )
    )


def _blank(tensor: Tensor, packing: Packing | None) -> Tensor:
    """Zero padding before a row's first token, as the operators do behind its last."""
    return tensor if packing is None or packing.left is None else tensor.masked_fill(packing.left[..., None], 0)
