"""Share rows over ranks along their length: context parallelism for the convolution and the scans.

Rank r of R holds columns r L / R to (r + 1) L / R of every row. A document that crosses an edge
needs two things of the ranks before: the convolution's last inputs, which the neighbour has, and
the recurrence's state, which depends on all of them. The recurrence is linear in its state. So each
rank first scans the documents that leave it, and them alone, from zero. It hands on their states,
and the decays of what enters over their columns there; every rank combines what it was
handed in the order of ranks. Then it runs the operator on its columns, with what entered as initial
states. No rank waits for another's scan. A document that leaves is scanned twice there; documents
that cross no edge cost nothing.

What is exchanged is of a state's size, a row and layer: (R, B, H, P, N) of Mamba-2.

Shapes: B rows, L slots of a rank, S documents on a rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packmamba.errors import expect
from packmamba.layout import SequenceLayout, ceil_div
from packmamba.ops.backends import choose

# A rank has at least this many columns, so that a convolution of four taps reaches one rank back.
LEAST_COLUMNS = 4


class ContextParallel:
    """Split batches over the ranks of a process group, along the rows' length.

    All ranks hold the same batch; each takes its columns of every tensor and of the layout. A model
    of Mamba-1, 2 or 3 then runs as it is, on ``columns(tokens)`` with ``layout=shard(layout)``;
    every rank of the group must take part in each forward and backward.

    Args:
        group: a process group; None: all ranks.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def width(self, row_length: int) -> int:
        """Return how many columns a rank holds of rows of so many slots.

        The last ranks' may be padding.
        """
        return max(ceil_div(row_length, self.size), LEAST_COLUMNS)

    def columns(self, tensor: Tensor) -> Tensor:
        """Return this rank's columns of (B, row_length, ...), zero behind the row's end."""
        width = self.width(tensor.shape[1])
        padded = F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, width * self.size - tensor.shape[1]))
        return padded[:, self.rank * width : (self.rank + 1) * width].contiguous()

    def shard(self, layout: SequenceLayout) -> SequenceLayout:
        """Return the layout of this rank's columns, on the CPU.

        ``crossing`` says what enters and what leaves.

        Of merged documents it is ``shard(layout.flow())``: a rank's columns know of no others.
        """
        rows, row_length = layout.shape
        width = self.width(row_length)
        starts, ends, offsets = (tensor.cpu().long() for tensor in (layout.starts, layout.ends, layout.offsets))
        row = starts // row_length
        # Slots of this rank's first column, and after its last one, in the row of each document.
        low = row * row_length + self.rank * width
        high = low + width
        is_here = (starts < high) & (ends > low)
        # From the row's slots to those of the rank's columns.
        moved = row * width - low
        first = (torch.maximum(starts, low) + moved)[is_here]
        last = (torch.minimum(ends, high) + moved)[is_here]
        offset = (offsets + (low - starts).clamp(min=0))[is_here]
        enters = (starts < low)[is_here]
        leaves = (ends > high)[is_here]
        # Whether a document crosses an edge anywhere: on all ranks the same.
        columns_before = (starts - row * row_length) // width
        any_crosses = bool((columns_before != (ends - 1 - row * row_length) // width).any())
        sharded = SequenceLayout._checked((rows, width), first, last, offset)
        if any_crosses:
            leaving_rows = row[is_here][leaves]
            leaving = torch.full((rows,), len(first))
            leaving[leaving_rows] = leaves.nonzero().flatten()
            spans = torch.zeros(rows, dtype=torch.bool)
            spans[row[is_here][enters & leaves]] = True
            columns = (last - first)[leaves].tolist()
            tail = SequenceLayout.from_lengths([columns], max(1, sum(columns)), offsets=[offset[leaves].tolist()])
            sharded.crossing = Crossing(
                context=self,
                entering=enters.nonzero().flatten(),
                leaving=leaving,
                leaving_rows=leaving_rows,
                spans=spans,
                places=[*zip(leaving_rows.tolist(), columns)],
                tail=tail,
            )
        return sharded


@dataclass
class Crossing:
    """Say which documents of a rank's columns began on the rank before, or go on on the next one.

    Attributes:
        context: the ranks.
        entering: the documents that began on an earlier rank, at most one a row.
        leaving: (B,) the document of each row that goes on on the next rank; S: none.
        leaving_rows: (T,) the rows of the T documents that leave.
        spans: (B,) bool, whether one document fills all columns and does both.
        places: the row of each leaving document, and how many of its last columns it fills.
        tail: the layout of the leaving documents alone, side by side in one row.
    """

    context: ContextParallel
    entering: Tensor
    leaving: Tensor
    leaving_rows: Tensor
    spans: Tensor
    places: list[tuple[int, int]]
    tail: SequenceLayout

    def take(self, tensor: Tensor) -> Tensor:
        """Return leaving documents' slots of (B, L, ...), as ``tail`` has them: (1, slots, ...)."""
        # Unbound, since each tensor[row] would have a gradient of the whole tensor's size.
        rows = tensor.unbind()
        # Without such documents a slot of padding, which is never read.
        taken = [rows[row][-columns:] for row, columns in self.places or [(0, 1)]]
        return (taken[0] if len(taken) == 1 else torch.cat(taken))[None]


class _Gather(torch.autograd.Function):
    """Gather a tensor of all ranks; its gradient is the sum of all ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[torch.distributed.get_rank(ctx.group)], None


def run(operator: str, a: Any, backend: str | None) -> Any:
    """Compute an operator by the backend's implementation, with the ranks that share the rows.

    Args:
        operator: "conv1d_pack", "ssm_pack" or "ssd_pack".
        a: its arguments, checked.

    Returns y, with final states where they are asked for. Raises ValueError for states in or out of
    shared rows.
    """
    implementation = choose(backend, a[0].device, operator)
    crossing = a.layout.crossing
    if crossing is not None:
        expect_no_state(a.return_final_state, a.initial_state)
        if operator == "conv1d_pack":
            entering = entering_inputs(a)
        else:
            activations = {name: crossing.take(getattr(a, name)) for name in (a._fields[0], "delta", "B", "C")}
            of_tail = a._replace(layout=crossing.tail, **activations)
            entering = entering_states(a.layout, of_tail, implementation)
        a = a._replace(initial_state=entering)
    y, final_state = implementation(a)
    return (y, final_state) if a.return_final_state else y


def expect_no_state(is_returned: bool, *given: Any) -> None:
    """Raise ValueError for states in or out of shared rows."""
    fits = not is_returned and all(state is None for state in given)
    expect(fits, "state", "None where ranks share rows", "some")


def entering_inputs(a: Any) -> Tensor:
    """Return a convolution's initial states (S, D, W-1), 0 for documents that begin here.

    Of a document that enters they are its last inputs on the rank before.
    """
    crossing: Crossing = a.layout.crossing
    before = a.weight.shape[1] - 1
    leaves = a.layout.documents[:, -before:] == crossing.leaving[:, None]
    last_inputs = torch.where(leaves[..., None], a.x[:, -before:], 0).transpose(1, 2)
    # Into rank 0 nothing enters, so that it may read any rank's.
    of_rank_before = _Gather.apply(last_inputs, crossing.context.group)[crossing.context.rank - 1]
    return _of_documents(of_rank_before, a.layout)


def entering_states(layout: SequenceLayout, of_tail: Any, implementation: Callable) -> Tensor:
    """Return a scan's initial states (S, ...), 0 for documents that begin here.

    Of a document that enters it is the state in which it left the ranks before.

    Args:
        layout: of the rank's columns.
        of_tail: the scan's arguments for the documents that leave, whose layout is
            ``crossing.tail``.
        implementation: of the scan.
    """
    crossing: Crossing = layout.crossing
    of_states: dict[str, Any] = {"D": None, "z": None, "return_final_state": True}
    if "offsets" in of_tail._fields:
        of_states["offsets"] = of_tail.layout.offsets
    _, states = implementation(of_tail._replace(**of_states))
    # What a row hands on: its leaving document's state, started from zero here, and the decay of
    # what enters over that document's columns here, if it fills them all.
    nothing = states.new_zeros(len(crossing.leaving), *states.shape[1:])
    added = nothing.index_copy(0, crossing.leaving_rows, states)
    decays = _total_decays(of_tail, crossing).expand_as(states)
    remains = torch.where(_spread(crossing.spans, added), nothing.index_copy(0, crossing.leaving_rows, decays), 0)
    return _of_documents(_combine(added, remains, crossing), layout)


def _total_decays(a: Any, crossing: Crossing) -> Tensor:
    """Compute the decay of a state over all tokens here of each document that leaves.

    a: the scan's arguments for these documents. Returns (T, D, N), or (T, H, 1, 1) of Mamba-2.
    """
    columns = [columns for _, columns in crossing.places]
    # Where none leaves, one slot of padding, which may hold NaN, is left out.
    step = a.delta[0, : sum(columns)].to(a.A.dtype)
    if a.delta_bias is not None:
        step = step + a.delta_bias
    if a.delta_softplus:
        step = F.softplus(step)
    limit = getattr(a, "delta_limit", None)
    step = step if limit is None else step.clamp(*limit)
    total = torch.stack([part.sum(0) for part in step.split(columns)]) if columns else step
    return torch.exp(total[..., None] * a.A if a.A.dim() == 2 else (total * a.A)[..., None, None])


def _of_documents(of_rows: Tensor, layout: SequenceLayout) -> Tensor:
    """Give documents that enter what entered their row (B, ...), others 0: (S, ...)."""
    entering = layout.crossing.entering
    entered = of_rows.index_select(0, layout.rows[entering])
    return of_rows.new_zeros(len(layout.starts), *of_rows.shape[1:]).index_copy(0, entering, entered)


def _combine(added: Tensor, remains: Tensor, crossing: Crossing) -> Tensor:
    """Return what enters rows (B, ...): of earlier ranks, ``added + remains * entered``."""
    handed = _Gather.apply(torch.stack([added, remains]), crossing.context.group)
    # Ranks from this one on add 0 to 1 times what is there. They stay in the sum, so that in the
    # backward, too, all ranks gather.
    is_earlier = torch.arange(len(handed), device=added.device) < crossing.context.rank
    nothing = torch.arange(2, device=added.device).view(2, *(1,) * added.dim())
    entered = torch.zeros_like(added)
    for state, factor in torch.where(_spread(is_earlier, handed), handed, nothing):
        # What another document left is not multiplied by 0, which NaN survives.
        entered = state + factor * torch.where(factor == 0, 0, entered)
    return entered


def sum_before(numbers: Tensor, layout: SequenceLayout) -> Tensor:
    """Sum numbers (B, L, ...) of each document on earlier ranks: (S, ...), 0 if it begins here."""
    crossing: Crossing = layout.crossing
    leaves = _spread(layout.documents == crossing.leaving[:, None], numbers)
    added = torch.where(leaves, numbers, 0).sum(1)
    spans = _spread(crossing.spans, added).to(added.dtype).expand_as(added)
    return _of_documents(_combine(added, spans, crossing), layout)


def first_after(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the next rank's first column of (B, L, ...): (B, 1, ...), 0 if another document's."""
    context = layout.crossing.context
    # Out of the last rank nothing leaves, so that it may read any rank's.
    of_rank_after = _Gather.apply(tensor[:, :1], context.group)[(context.rank + 1) % context.size]
    leaves = layout.documents[:, -1:] == layout.crossing.leaving[:, None]
    return torch.where(_spread(leaves, tensor), of_rank_after, 0)


def _spread(flags: Tensor, like: Tensor) -> Tensor:
    """Return flags (B,) or (B, L) in a shape that broadcasts with (B, ...) or (B, L, ...)."""
    return flags.view(*flags.shape, *(1,) * (like.dim() - flags.dim()))


# Not traced, as by torch.compiler.disable, which imports the compiler: seconds.
for function in (entering_inputs, entering_states, sum_before, first_after):
    vars(function)["_torchdynamo_disable"] = True
