"""Plain implementations of the packed operators: documents side by side, (S, T).

Slow beside kernels, bearable on a CPU without a compiler. Tests hold them, as every backend, against
loops over tokens (tests/loops.py), which are the specification. Autograd differentiates them, so that
backends' gradients are checked too. Sums and states are float32, or float64 for float64 activations.

Shapes: B rows, L slots, S documents, T tokens of the longest, D channels, N states, W taps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.ops.checks import accumulation_dtype
from packmamba.ops.conv import ConvArguments
from packmamba.ops.inner import InnerArguments
from packmamba.ops.scan import ScanArguments
from packmamba.ops.ssd import SsdArguments, by_channels, elementwise


def _slots(layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """Return documents' slots side by side, (S, T), and which hold a token: T is the longest one's length."""
    lengths = layout.lengths
    longest = int(lengths.max()) if len(lengths) else 1
    place = torch.arange(longest, device=layout.device)
    inside = place < lengths[:, None]
    slot = torch.where(inside, layout.starts[:, None] + place, 0)
    return slot.long(), inside


def _gather(tensor: Tensor, slots: tuple[Tensor, Tensor]) -> Tensor:
    """Gather (B, L, ...) to (S, T, ...) in the accumulation dtype, zero where there is no token."""
    slot, inside = slots
    tokens = tensor.flatten(0, 1)[slot].to(accumulation_dtype(tensor.dtype))
    return torch.where(inside[..., None], tokens, 0)


def _scatter(tokens: Tensor, slots: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """Write (S, T, ...) to slots, in like's shape and dtype, zero at padding."""
    slot, inside = slots
    output = torch.zeros_like(like.flatten(0, 1), dtype=tokens.dtype)
    return output.index_copy(0, slot[inside], tokens[inside]).view(like.shape).to(like.dtype)


def conv1d_pack(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Convolve documents, each behind its W - 1 initial inputs, tap by tap."""
    layout = a.layout
    channels, width = a.weight.shape
    states = a.initial_state
    if states is None:
        states = a.x.new_zeros(layout.num_documents, channels, width - 1)
    slots = _slots(layout)
    x = _gather(a.x, slots)
    inputs = torch.cat([states.to(x.dtype).transpose(1, 2), x], dim=1)
    weight = a.weight.to(x.dtype)
    # The token's own tap first.
    y = x * weight[:, -1]
    for tap in reversed(range(width - 1)):
        y = y + inputs[:, tap : tap + x.shape[1]] * weight[:, tap]
    if a.bias is not None:
        y = y + a.bias.to(x.dtype)
    if a.activation == "silu":
        y = F.silu(y)
    output = _scatter(y, slots, a.x)
    if not a.return_final_state:
        return output, None
    last = layout.lengths[:, None].long() + torch.arange(width - 1, device=x.device)
    final = inputs.gather(1, last[..., None].expand(-1, -1, channels)).transpose(1, 2)
    return output, final.to(states.dtype).contiguous()


def ssm_pack(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Step all documents through time; one that has ended keeps its state."""
    slots = _slots(a.layout)
    x, B, C = _gather(a.u, slots), _gather(a.B, slots), _gather(a.C, slots)
    size = _gather(a.delta, slots)
    if a.delta_bias is not None:
        size = size + a.delta_bias
    if a.delta_softplus:
        size = elementwise(F.softplus, size)
    size = torch.where(slots[1][..., None], size, 0)
    state = a.initial_state
    if state is None:
        state = a.A.new_zeros(a.layout.num_documents, *a.A.shape)
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        added = (size[:, t] * x[:, t])[..., None] * B[:, t, None]
        state = torch.addcmul(added, torch.exp(size[:, t, :, None] * a.A), state)
        # Not a matmul: autocast would round the states to 16 bits.
        outputs.append((state * C[:, t, None]).sum(-1)[:, None])
    y = torch.cat(outputs, dim=1)
    if a.D is not None:
        y = y + a.D * x
    if a.z is not None:
        y = y * elementwise(F.silu, _gather(a.z, slots))
    return _scatter(y, slots, a.u), state.clone() if a.return_final_state else None


def ssd_pack(a: SsdArguments) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack`` by Mamba-1's scan of each channel."""
    return by_channels(a, ssm_pack)


def mamba_inner(
    a: InnerArguments, conv1d_pack: Callable = conv1d_pack, ssm_pack: Callable = ssm_pack
) -> tuple[Tensor | None, ...]:
    """Compute ``ops.mamba_inner`` by implementations of the two operators."""
    x_weight, dt_weight, out_weight = (weight.to(a.xz.dtype) for weight in (a.x_weight, a.dt_weight, a.out_weight))
    x, z = a.xz.chunk(2, dim=-1)
    x, conv_final = conv1d_pack(
        ConvArguments(
            x=x,
            weight=a.conv_weight,
            bias=a.conv_bias,
            initial_state=a.conv_state,
            layout=a.conv_layout,
            activation="silu",
            return_final_state=a.return_state,
        )
    )
    low_rank, B, C = a.parts(F.linear(x, x_weight))
    y, ssm_final = ssm_pack(
        ScanArguments(
            u=x,
            delta=F.linear(low_rank, dt_weight),
            A=a.A,
            B=B,
            C=C,
            D=a.D,
            z=z,
            delta_bias=a.delta_bias,
            initial_state=a.ssm_state,
            layout=a.ssm_layout,
            delta_softplus=True,
            return_final_state=a.return_state,
        )
    )
    return F.linear(y, out_weight), conv_final, ssm_final
