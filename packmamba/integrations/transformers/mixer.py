"""Forward of a patched mixer. Shapes: B rows, L slots, D channels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba import ops
from packmamba.integrations.transformers.boundaries import Packing
from packmamba.layout import SequenceLayout
from packmamba.nn.init import is_plain
from packmamba.ops.checks import accumulation_dtype, check_layout
from packmamba.ops.inner import InnerArguments


def mix(mixer: Any, hidden: Tensor, packing: Packing, cache: Any) -> Tensor:
    """Mix hidden (B, L, hidden_size) by our operators and the mixer's own projections and norms.

    cache: transformers', which gets the states that rows end with, or None.
    """
    if hasattr(mixer, "dt_bias"):
        return mix2(mixer, hidden, packing, cache)
    xz = mixer.in_proj(hidden)
    layout = check_layout(packing.layout, xz, "hidden")
    keeps = cache is not None
    of_zamba = hasattr(mixer, "n_mamba_heads")
    # Zamba's channels of input and gate alternate.
    x, z = map(Tensor.contiguous, xz.unflatten(-1, (-1, 2)).unbind(-1)) if of_zamba else xz.chunk(2, dim=-1)
    # A wrapped projection (adapter, hook, quantisation)
    # is called; else one operator takes the weights.
    if not (of_zamba or hasattr(mixer, "dt_layernorm")) and all(
        map(is_plain, (mixer.x_proj, mixer.dt_proj, mixer.out_proj))
    ):
        mixed, state = _mix_fused(mixer, xz, layout, keeps)
        mixed = _blank(mixed, packing)
        if mixer.out_proj.bias is not None:
            mixed = mixed + mixer.out_proj.bias.to(mixed.dtype)
    else:
        convolved = ops.conv1d_pack(x, *_convolution(mixer), layout=layout, activation="silu")
        scan = _scan_heads if of_zamba else _scan
        options = {"delta_softplus": True, "layout": layout, "return_final_state": keeps}
        y, state = scan(mixer, convolved, z, options)
        mixed = mixer.out_proj(_blank(y, packing))
    if keeps:
        _keep(mixer, cache, packing, x, state)
    return mixed


def _convolution(mixer: Any) -> tuple[Tensor, Tensor | None]:
    """Return the convolution's weight, which Conv1d holds as (D, 1, W), as (D, W), and its bias."""
    return mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias


def _recurrence(mixer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and D, computed in float32 as transformers does, in the dtype in which activations accumulate."""
    wide = accumulation_dtype(dtype)
    return -torch.exp(mixer.A_log.float()).to(wide), mixer.D.float().to(wide)


def _mix_fused(mixer: Any, xz: Tensor, layout: SequenceLayout, keeps: bool) -> tuple[Tensor, Tensor | None]:
    """Compute all but ``in_proj`` and the last bias by one operator; return also final states if ``keeps``."""
    A, D = _recurrence(mixer, xz.dtype)
    conv_weight, conv_bias = _convolution(mixer)
    arguments = InnerArguments(
        xz=xz,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        x_weight=mixer.x_proj.weight,
        dt_weight=mixer.dt_proj.weight,
        out_weight=mixer.out_proj.weight,
        A=A,
        D=D,
        delta_bias=mixer.dt_proj.bias.to(A.dtype),
        conv_state=None,
        ssm_state=None,
        x_used=None,
        dt_used=None,
        out_used=None,
        conv_layout=layout,
        ssm_layout=layout,
        return_state=keeps,
        recompute=False,
    )
    mixed, _, state = ops.mamba_inner(arguments)
    return mixed, state


def _scan(mixer: Any, x: Tensor, z: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Scan convolved x by projections that are called, as Jamba's with norms; options: of ``ssm_pack``.

    Returns y, and final states or None.
    """
    A, D = _recurrence(mixer, x.dtype)
    low, B, C = _split(mixer, mixer.x_proj(x))
    if hasattr(mixer, "dt_layernorm"):
        normed = mixer.dt_layernorm(low), mixer.b_layernorm(B), mixer.c_layernorm(C)
        # Jamba's norms return float32 under autocast.
        low, B, C = (part.to(x.dtype) for part in normed)
    if is_plain(mixer.dt_proj):  # the bias is not rounded
        delta, bias = F.linear(low, mixer.dt_proj.weight), mixer.dt_proj.bias.to(A.dtype)
    else:
        delta, bias = mixer.dt_proj(low), None
    y = ops.ssm_pack(x, delta, A, B, C, D, z=z, delta_bias=bias, **options)
    return y if options["return_final_state"] else (y, None)


def _scan_heads(mixer: Any, x: Tensor, z: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Scan by Zamba's heads, each with projections and a scan of its own for D / heads channels."""
    A, D = _recurrence(mixer, x.dtype)
    outputs = []
    for head, (u, gate) in enumerate(zip(x.chunk(len(A), -1), z.chunk(len(A), -1))):
        low, B, C = _split(mixer, F.linear(u, mixer.x_proj_weight[head]))
        delta = F.linear(low, mixer.dt_proj_weight[head])
        bias = mixer.dt_proj_bias[head].to(A.dtype)
        outputs.append(ops.ssm_pack(u, delta, A[head], B, C, D[head], z=gate, delta_bias=bias, **options))
    if not options["return_final_state"]:
        return torch.cat(outputs, -1), None
    return torch.cat([y for y, _ in outputs], -1), torch.stack([last for _, last in outputs], 1)


def mix2(mixer: Any, hidden: Tensor, packing: Packing, cache: Any) -> Tensor:
    """Mix by Mamba-2's recurrence. Falcon-H1 scales in_proj's input and output, and may have no norm."""
    layout = packing.layout
    if hasattr(mixer, "mup_vector"):
        projected = mixer.in_proj(hidden * mixer.ssm_in_multiplier)
        projected = (projected * mixer.mup_vector).to(projected.dtype)
    else:
        projected = mixer.in_proj(hidden)
    groups, states = mixer.n_groups, mixer.ssm_state_size
    gate, inputs, delta = projected.split((mixer.intermediate_size, mixer.conv_dim, mixer.num_heads), dim=-1)
    xbc = ops.conv1d_pack(inputs, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, layout=layout, activation="silu")
    x, B, C = xbc.split((mixer.intermediate_size, groups * states, groups * states), dim=-1)
    wide = accumulation_dtype(x.dtype)
    # Decays are computed in float32 and not rounded to the activations' dtype.
    A, D = -torch.exp(mixer.A_log.float()).to(wide), mixer.D.to(wide)
    by_head, by_group = (-1, mixer.head_dim), (groups, states)
    # The norm takes the gate; without a norm the scan does.
    normed, keeps = getattr(mixer, "mamba_rms_norm", True), cache is not None
    y = ops.ssd_pack(
        x.unflatten(-1, by_head), delta, A, B.unflatten(-1, by_group), C.unflatten(-1, by_group), D,
        z=None if normed else gate.unflatten(-1, by_head), delta_bias=mixer.dt_bias.to(wide), delta_softplus=True,
        delta_limit=mixer.time_step_limit, layout=layout, return_final_state=keeps,
    )  # fmt: skip
    y, state = y if keeps else (y, None)
    y = mixer.norm(y.flatten(-2), gate) if normed else y.flatten(-2)
    if keeps:
        _keep(mixer, cache, packing, inputs, state)
    return mixer.out_proj(_blank(y, packing).to(hidden.dtype))


def _keep(mixer: Any, cache: Any, packing: Packing, inputs: Tensor, state: Any) -> None:
    # Padding on the left must not look like inputs when generation goes on.
    inputs = _blank(inputs, packing).transpose(1, 2)
    cache.update_conv_state(inputs, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    cache.update_recurrent_state(state[packing.last], mixer.layer_idx)


def _split(mixer: Any, projected: Tensor) -> tuple[Tensor, ...]:
    return projected.split((mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size), dim=-1)


def _blank(tensor: Tensor, packing: Packing) -> Tensor:
    return tensor if packing.left is None else tensor.masked_fill(packing.left[..., None], 0)
