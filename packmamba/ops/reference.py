"""Plain implementations of the packed operators, on documents end to end.

Slow beside kernels, bearable on a CPU without a compiler. Tests hold them,
as every backend, against loops over tokens (tests/loops.py), which are the
specification. Autograd differentiates them, so that backends' gradients are
checked too. Sums and states are float32, or float64 for float64 activations.

Shapes: B rows, L slots, S documents, T tokens of all, D channels, N states, W taps.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments, of_layer
from packmamba.ops.inner import InnerArguments
from packmamba.ops.mamba2_inner import Mamba2Arguments, compose
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import SsdArguments, by_channels, elementwise


def _tokens(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the tokens of (B, L, ...), documents end to end: (T, ...).

    They have the accumulation dtype.
    """
    tokens = tensor.flatten(0, 1).index_select(0, layout.token_slots)
    return tokens.to(accumulation_dtype(tensor.dtype))


def _to_slots(tokens: Tensor, layout: SequenceLayout, like: Tensor) -> Tensor:
    """Write tokens (T, ...) to slots, in like's shape and dtype, zero at padding."""
    zeros = torch.zeros_like(like.flatten(0, 1), dtype=tokens.dtype)
    return zeros.index_copy(0, layout.token_slots, tokens).view(like.shape).to(like.dtype)


def conv1d_pack(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Convolve all tokens at once, tap by tap."""
    layout = a.layout
    channels, width = a.weight.shape
    x = _tokens(a.x, layout)
    states = a.initial_state
    if states is None:
        states = a.x.new_zeros(layout.num_documents, channels, width - 1)
    first = layout.lengths.cumsum(0) - layout.lengths  # documents' places among tokens
    weight = a.weight.to(x.dtype)

    def inputs(document: Tensor, place: Tensor) -> Tensor:
        """Return documents' inputs at places, of which those below 0 are initial."""
        token = x[(first[document] + place).clamp(min=0)]
        # An initial state holds the inputs at places -(W - 1) to -1, the oldest first.
        initial = states.to(x.dtype)[document, :, (place + width - 1).clamp(0, width - 2)]
        return torch.where((place >= 0)[:, None], token, initial)

    # Of each token (T,): its document, and its place there.
    document = torch.repeat_interleave(layout.lengths)
    place = torch.arange(len(x), device=x.device) - first[document]
    y = x * weight[:, -1]
    # Taps from the token itself (the last) to the oldest input.
    for lag in range(1, width):
        y = y + inputs(document, place - lag) * weight[:, -1 - lag]
    if a.bias is not None:
        y = y + a.bias.to(x.dtype)
    if a.activation == "silu":
        y = F.silu(y)
    output = _to_slots(y, layout, a.x)
    # The last W - 1 inputs, initial ones where the document is shorter.
    every = torch.arange(layout.num_documents, device=x.device)
    last = [inputs(every, layout.lengths - width + tap) for tap in range(1, width)]
    return output, torch.stack(last, dim=2).to(states.dtype) if a.return_final_state else None


def ssm_pack(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Step documents through time together, the longest first: those that have ended drop out."""
    layout = a.layout
    x, B, C, size = (_tokens(tensor, layout) for tensor in (a.u, a.B, a.C, a.delta))
    if a.delta_bias is not None:
        size = size + a.delta_bias
    if a.delta_softplus:
        size = elementwise(F.softplus, size)
    lengths, order = layout.lengths.sort(descending=True, stable=True)
    first = (layout.lengths.cumsum(0) - layout.lengths)[order]  # their places among tokens
    state = a.initial_state
    if state is None:
        state = a.A.new_zeros(layout.num_documents, *a.A.shape)
    state = state[order]
    places, outputs, finals = [], [], []
    # One step without documents, too: gradients of zero must reach every argument.
    for t in range(int(lengths.max()) if len(lengths) else 1):
        # Documents with a token t are the first ``longer``; the others' states are final.
        longer = int((lengths > t).sum())
        finals.append(state[longer:])
        token = first[:longer] + t
        added = (size[token] * x[token])[..., None] * B[token, None]
        state = torch.addcmul(added, torch.exp(size[token, :, None] * a.A), state[:longer])
        # Not a matmul: autocast would round the states to 16 bits.
        outputs.append((state * C[token, None]).sum(-1))
        places.append(token)
    # Steps are in order of time; put outputs where their tokens are.
    y = torch.zeros_like(x).index_copy(0, torch.cat(places), torch.cat(outputs))
    if a.D is not None:
        y = y + a.D * x
    if a.z is not None:
        y = y * elementwise(F.silu, _tokens(a.z, layout))
    output = _to_slots(y, layout, a.u)
    # Longest first: states that ran to the end, then those that ended before, latest first.
    final_state = torch.cat([state, *reversed(finals)])[order.argsort()]
    return output, final_state if a.return_final_state else None


def ssd_pack(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by Mamba-1's scan of each channel."""
    return by_channels(a, ssm_pack)


def mamba2_inner(a: Mamba2Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.mamba2_inner`` by the two operators."""
    return compose(a, conv1d_pack, ssd_pack)


def mamba_inner(
    a: InnerArguments, conv1d_pack: Callable = conv1d_pack, ssm_pack: Callable = ssm_pack
) -> tuple[Tensor | None, ...]:
    """Compute ``ops.mamba_inner`` by implementations of the two operators."""
    # The products are in xz's dtype, as those of the compiled operator.
    x_weight, dt_weight, out_weight = (weight.to(a.xz.dtype) for weight in (a.x_weight, a.dt_weight, a.out_weight))
    x, z = a.xz.chunk(2, dim=-1)
    x, conv_final = conv1d_pack(of_layer(a, x))
    low_rank, B, C = a.parts(F.linear(x, x_weight))
    y, ssm_final = ssm_pack(a.scan(x, F.linear(low_rank, dt_weight), B, C, z))
    return F.linear(y, out_weight), conv_final, ssm_final
