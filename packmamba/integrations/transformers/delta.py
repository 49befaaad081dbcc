"""Forward of a patched gated delta or short convolution layer.

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
from packmamba.layout import SequenceLayout

# Name of the convolution in transformers' modules.
CONVOLUTION = "causal_conv1d_fn"
# Names of the recurrence there: fla's operator where fla is installed, else PyTorch's.
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
HAS_FLA = importlib.util.find_spec("fla") is not None


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
    names |= {name: functools.partial(_recur, names[name]) for name in RULES if name in names}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__)

    def mix(layer: Any, hidden: Tensor, packing: Packing, cache: Any) -> Tensor:
        if packing.left is not None:
            hidden = hidden.masked_fill(packing.left[..., None], 0)
        if packing.layout is None or cache is not None:
            # Each row is one document. No layer has biases,
            # so zeros before it leave states at zero.
            return theirs(layer, hidden, cache)
        return forward(layer, hidden, layout=packing.layout)

    return mix


def _convolve(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    layout: SequenceLayout,
    **_: Any,
) -> Tensor:
    """Convolve each document of hidden (B, D, L); SiLU is the one activation that ``patch`` lets pass."""
    x = hidden.transpose(1, 2)
    y = ops.conv1d_pack(x, weight, bias, layout=layout, activation=activation and "silu")
    return y.transpose(1, 2)


@torch.compiler.disable  # the number of documents decides how often the rule runs
def _recur(
    rule: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: SequenceLayout,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run ``rule`` over each document of query, key (B, L, H, K) and value (B, L, H, V); g and beta begin with B, L.

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
    """Return whether the recurrence is fla's operator on a GPU, which takes one row of documents."""
    return HAS_FLA and query.is_cuda
