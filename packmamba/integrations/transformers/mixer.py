"""Forward of a patched mixer.

Mamba and Mamba-2 are computed by our operators (``mix``); a gated delta or short convolution layer
keeps its own forward, with its convolution and recurrence exchanged (``mix_by_documents``).

Shapes: B rows, L slots, D channels, H heads, K and V channels of a head.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba import ops
from packmamba.integrations.transformers.boundaries import Packing
from packmamba.nn.mixers.mixer import is_plain, is_unchanged
from packmamba.ops.checks import accumulation_dtype, check_layout
from packmamba.ops.inner import layer_arguments
from packmamba.ops.mamba2_inner import mamba2_layer_arguments

# Name of the convolution in transformers' modules.
CONVOLUTION = "causal_conv1d_fn"
# Names of the recurrence there: fla's operator where fla is installed, else PyTorch's.
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
HAS_FLA = importlib.util.find_spec("fla") is not None


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
    # One operator takes the weights, but for Zamba's heads, Jamba's norms
    # and a wrapped projection (adapter, hook, quantisation), which is called.
    is_apart = of_zamba or hasattr(mixer, "dt_layernorm")
    if not is_apart and all(map(is_plain, (mixer.x_proj, mixer.dt_proj, mixer.out_proj))):
        documents = (layout, layout, None, None)
        arguments = layer_arguments(mixer, xz, *_recurrence(mixer, xz.dtype), documents, keeps)
        mixed, _, state = ops.mamba_inner(arguments)
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
    """Return A and D in the dtype in which activations accumulate.

    They are computed in float32, as transformers does.
    """
    wide = accumulation_dtype(dtype)
    return -torch.exp(mixer.A_log.float()).to(wide), mixer.D.float().to(wide)


def _scan(mixer: Any, x: Tensor, z: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Scan convolved x by called projections, as Jamba's with norms; options of ``ssm_pack``.

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
    """Mix by Mamba-2's recurrence; Falcon-H1 may have no norm."""
    layout = packing.layout
    projected = _project(mixer, hidden)
    groups, states, channels = mixer.n_groups, mixer.ssm_state_size, mixer.intermediate_size
    gate, inputs, delta = projected.split((channels, mixer.conv_dim, mixer.num_heads), dim=-1)
    wide = accumulation_dtype(projected.dtype)
    # Decays are computed in float32 and not rounded to the activations' dtype.
    A, D = -torch.exp(mixer.A_log.float()).to(wide), mixer.D.to(wide)
    has_norm = getattr(mixer, "mamba_rms_norm", True)
    keeps = cache is not None
    if has_norm and _norms_groups(mixer.norm, channels // groups):
        layout = check_layout(layout, projected, "hidden")
        documents = (layout, layout, None, None)
        options: Any = {"groups": groups, "epsilon": mixer.norm.variance_epsilon}
        options |= {"delta_limit": mixer.time_step_limit, "return_state": keeps}
        y, _, state = ops.mamba2_inner(mamba2_layer_arguments(mixer, projected, A, D, documents, **options))
    else:
        xbc = ops.conv1d_pack(inputs, *_convolution(mixer), layout=layout, activation="silu")
        x, B, C = xbc.split((channels, groups * states, groups * states), dim=-1)
        by_head, by_group = (-1, mixer.head_dim), (groups, states)
        # The norm takes the gate; without a norm the scan does.
        y = ops.ssd_pack(
            x.unflatten(-1, by_head), delta, A, B.unflatten(-1, by_group), C.unflatten(-1, by_group), D,
            z=None if has_norm else gate.unflatten(-1, by_head), delta_bias=mixer.dt_bias.to(wide),
            delta_softplus=True, delta_limit=mixer.time_step_limit, layout=layout,
            return_final_state=keeps,
        )  # fmt: skip
        y, state = y if keeps else (y, None)
        y = mixer.norm(y.flatten(-2), gate) if has_norm else y.flatten(-2)
    if keeps:
        _keep(mixer, cache, packing, inputs, state)
    return mixer.out_proj(_blank(y, packing).to(hidden.dtype))


def _project(mixer: Any, hidden: Tensor) -> Tensor:
    """Return in_proj's output, whose input and output Falcon-H1 scales."""
    if not hasattr(mixer, "mup_vector"):
        return mixer.in_proj(hidden)
    projected = mixer.in_proj(hidden * mixer.ssm_in_multiplier)
    return (projected * mixer.mup_vector).to(projected.dtype)


def _norms_groups(norm: Any, channels: int) -> bool:
    """Return whether a norm is ``ops.mamba2_inner``'s gated one, of groups of ``channels``."""
    is_gated = type(norm).__name__.endswith("RMSNormGated") and getattr(norm, "group_size", None) == channels
    return is_gated and is_unchanged(norm)


def _keep(mixer: Any, cache: Any, packing: Packing, inputs: Tensor, state: Any) -> None:
    # Padding on the left must not look like inputs when generation goes on.
    inputs = _blank(inputs, packing).transpose(1, 2)
    cache.update_conv_state(inputs, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    cache.update_recurrent_state(state[packing.last], mixer.layer_idx)


def _split(mixer: Any, projected: Tensor) -> tuple[Tensor, ...]:
    return projected.split((mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size), dim=-1)


def _blank(tensor: Tensor, packing: Packing) -> Tensor:
    return tensor if packing.left is None else tensor.masked_fill(packing.left[..., None], 0)


def mix_by_documents(kind: type) -> Callable[..., Tensor]:
    """Make the counterpart of ``mixer.mix`` for a class of transformers' layers.

    It runs the layer's own forward. In that only the convolution and the recurrence read other
    tokens, so both are exchanged for functions that take the layout.
    """
    theirs: Any = kind.forward  # type: ignore[attr-defined]
    own = inspect.unwrap(theirs)
    # The forward finds both functions among its module's names. A copy of these leaves the module,
    # and so unpatched models, as they are.
    names = own.__globals__ | {CONVOLUTION: _convolve}
    # By its name torch.compile would look the functions up in the module, and guard the wrong ones.
    del names["__name__"]
    names |= {name: functools.partial(_recur, names[name]) for name in RULES if name in names}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    # The last argument reaches the convolution: in **kwargs, or of LFM2 up to transformers 5.21 as
    # seq_idx.
    hands_on = list(inspect.signature(own).parameters)[-1].replace("kwargs", "layout")

    def mix(layer: Any, hidden: Tensor, packing: Packing, cache: Any) -> Tensor:
        hidden = _blank(hidden, packing)
        if packing.layout is None or cache is not None:
            # Each row is one document. No layer has biases,
            # so zeros before it leave states at zero.
            return theirs(layer, hidden, cache)
        return forward(layer, hidden, **{hands_on: packing.layout})

    return mix


def _convolve(hidden: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **given: Any) -> Tensor:
    """Convolve each document of hidden (B, D, L), by the arguments of transformers' function.

    SiLU is the one activation that ``patch`` lets pass. The layout comes by its name or as seq_idx.
    """
    options: Any = {"layout": given.get("layout", given.get("seq_idx")), "activation": activation and "silu"}
    return ops.conv1d_pack(hidden.transpose(1, 2), weight, bias, **options).transpose(1, 2)


@torch.compiler.disable  # the number of documents decides how often the rule runs
def _recur(
    rule: Callable, query: Tensor, key: Tensor, value: Tensor, *, layout: Any, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Run ``rule`` over each document of query, key (B, L, H, K) and value (B, L, H, V).

    g and beta begin with B, L.

    fla's operator on a GPU takes all documents in one call. PyTorch's, which pads to chunks of 64
    tokens, takes one document after the other. Returns (B, L, H, V), zero at padding, and no
    state, as the rule does without a cache.
    """
    tensors = [tensor.flatten(0, 1) for tensor in (query, key, value, g, beta)]
    result = torch.zeros_like(tensors[2])
    if _takes_cu_seqlens(query):
        parts = [layout.token_slots] if layout.num_tokens else []
        options["cu_seqlens"] = F.pad(layout.lengths.cumsum(0), (1, 0))
    else:
        rule = inspect.unwrap(rule)  # fla computes on GPUs alone
        parts = layout.token_slots.split(layout.lengths.tolist())
    for slots in parts:
        query, key, value_part, g, beta = (tensor[None, slots] for tensor in tensors)
        mixed, _ = rule(query, key, value_part, g=g, beta=beta, **options)
        result = result.index_copy(0, slots, mixed[0])
    return result.view_as(value), None


def _takes_cu_seqlens(query: Tensor) -> bool:
    """Return whether the recurrence is fla's operator on a GPU. It takes one row of documents."""
    return HAS_FLA and query.is_cuda
