"""Plain implementations of the packed operators, over all tokens (convolution) or all chunks of documents at once (scans).

Slow beside kernels, bearable on a CPU without a compiler. Tests hold them, as every backend, against
loops over tokens (tests/loops.py), which are the specification. Autograd differentiates them, so that
backends' gradients are checked too. Sums and states are float32, or float64 for float64 activations.

Shapes: B rows, L slots, S documents, K chunks, D channels, N states, W taps.
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
from packmamba.ops.ssd import SsdArguments, by_channels


def conv1d_pack(a: ConvArguments) -> tuple[Tensor, Tensor | None]:
    """Convolve all tokens at once, tap by tap.

    ``inputs`` holds the documents end to end, without padding, each behind its W - 1 initial
    inputs: a tap is a shift.
    """
    layout = a.layout
    device = a.x.device
    dtype = accumulation_dtype(a.x.dtype)
    channels, width = a.weight.shape
    before = width - 1
    states = a.initial_state
    if states is None:
        states = a.x.new_zeros(layout.num_documents, channels, before)
    slots = a.x.flatten(0, 1).to(dtype)
    weight = a.weight.to(dtype)
    token_slots = layout.token_slots
    tokens = torch.arange(len(token_slots), device=device)
    lags = torch.arange(before, device=device)
    # In inputs: where each document's initial inputs begin, and where each token lies.
    document_place = layout.lengths.cumsum(0) - layout.lengths
    document_place = document_place + torch.arange(len(states), device=device) * before
    token_place = tokens + (layout.documents.flatten()[token_slots] + 1) * before

    inputs = slots.new_zeros(len(token_slots) + len(states) * before, channels)
    inputs = inputs.index_copy(0, token_place, slots.index_select(0, token_slots))
    initial_place = (document_place[:, None] + lags).flatten()
    initial_inputs = states.to(dtype).transpose(1, 2).flatten(0, 1)
    inputs = inputs.index_copy(0, initial_place, initial_inputs)

    y = inputs.index_select(0, token_place) * weight[:, -1]
    for lag in range(1, width):
        y = y + inputs.index_select(0, token_place - lag) * weight[:, -1 - lag]
    if a.bias is not None:
        y = y + a.bias.to(dtype)
    if a.activation == "silu":
        y = F.silu(y)
    output = torch.zeros_like(slots).index_copy(0, token_slots, y)
    output = output.view(a.x.shape).to(a.x.dtype)
    if not a.return_final_state:
        return output, None
    last = inputs[(document_place + layout.lengths)[:, None] + lags].transpose(1, 2)
    return output, last.to(states.dtype).contiguous()


CHUNK = 64
"""A chunk ends where a document's position is a multiple of this."""


class Chunks:
    """Cut a layout's documents in chunks, in document order.

    Attributes:
        count, first, last: (S,), a document's number of chunks, its first and last one.
        slot, inside: (time, K), slots of chunks' tokens, and whether there is a token.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        starts, ends = layout.starts.long(), layout.ends.long()
        before = layout.offsets.long() % CHUNK
        self.count = (before + ends - starts + CHUNK - 1) // CHUNK
        self.last = self.count.cumsum(0) - 1
        self.first = self.last + 1 - self.count
        document = torch.repeat_interleave(self.count)
        index = torch.arange(document.numel(), device=starts.device) - self.first[document]
        chunk_end = (starts - before)[document] + (index + 1) * CHUNK
        start = torch.maximum(starts[document], chunk_end - CHUNK)
        end = torch.minimum(ends[document], chunk_end)
        longest = int((end - start).max()) if len(start) else 1
        time = torch.arange(longest, device=starts.device)[:, None]
        self.inside = start + time < end
        self.slot = torch.minimum(start + time, end - 1)


def ssm_pack(a: ScanArguments) -> tuple[Tensor, Tensor | None]:
    """Scan all chunks at once: from zero for their end states, then from their start states."""
    dtype = accumulation_dtype(a.u.dtype)
    chunks = Chunks(a.layout)
    slot, inside = chunks.slot, chunks.inside[..., None]

    def by_step(tensor: Tensor) -> Tensor:
        """Gather (B, L, ...) to (time, K, ...)."""
        tokens = tensor.flatten(0, 1).index_select(0, slot.flatten())
        return tokens.unflatten(0, slot.shape).to(dtype)

    x, B, C = by_step(a.u), by_step(a.B), by_step(a.C)
    size = torch.where(inside, _step_size(by_step(a.delta), a.delta_bias, a.delta_softplus), 0)
    drive = torch.where(inside, size * x, 0)
    starts, final_state = _chunk_states(a, chunks, size, drive, B)
    y, _ = _scan_steps(size, drive, B, C, a.A, starts)
    assert y is not None
    if a.D is not None:
        y = y + a.D * x
    if a.z is not None:
        y = y * F.silu(by_step(a.z))
    inside = inside.flatten()
    output = torch.zeros_like(a.u.flatten(0, 1), dtype=dtype)
    output = output.index_copy(0, slot.flatten()[inside], y.flatten(0, 1)[inside])
    return output.view(a.u.shape).to(a.u.dtype), final_state if a.return_final_state else None


def _chunk_states(a: ScanArguments, chunks: Chunks, size: Tensor, drive: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Compute states at chunks' starts, (K, D, N), and final ones, from what chunks add and the decay over each."""
    state = a.initial_state
    if state is None:
        state = a.A.new_zeros(a.layout.num_documents, *a.A.shape)
    _, added = _scan_steps(size, drive, B, None, a.A, a.A.new_zeros(size.shape[1], *a.A.shape))
    decays = torch.exp(size.sum(0)[..., None] * a.A)
    documents = torch.arange(len(chunks.count), device=size.device)
    states, places = [state], [chunks.first]
    for number in range(1, int(chunks.count.max()) if len(documents) else 1):
        longer = chunks.count[documents] > number
        documents = documents[longer]
        before = chunks.first[documents] + number - 1
        state = torch.addcmul(added[before], decays[before], state[longer])
        states.append(state)
        places.append(before + 1)
    starts = torch.cat(states)[torch.cat(places).argsort()]
    last = chunks.last
    return starts, torch.addcmul(added[last], decays[last], starts[last])


def _step_size(delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool) -> Tensor:
    if delta_bias is not None:
        delta = delta + delta_bias
    return F.softplus(delta) if delta_softplus else delta


def _scan_steps(
    size: Tensor, drive: Tensor, B: Tensor, C: Tensor | None, A: Tensor, h: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Step chunks through time; return y (time, K, D), None without C, and the states after it.

    size, drive: (time, K, D); B, C: (time, K, N); h: (K, D, N), before.
    """
    y = []
    for t in range(size.shape[0]):
        h = torch.addcmul(drive[t, :, :, None] * B[t, :, None, :], torch.exp(size[t, :, :, None] * A), h)
        if C is not None:
            # Not a matmul: autocast would round the states to 16 bits.
            y.append((h * C[t, :, None, :]).sum(-1))
    return (torch.stack(y) if y else None), h


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
