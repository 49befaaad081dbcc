# mypy: ignore-errors
"""Mamba-2's scan on a GPU: what its Triton kernels are launched with.

Forward (``ssd_triton_forward``): step sizes; states where segments of 2048 tokens start, for documents that have several; then
all segments at once. Backward (``ssd_triton_backward``): states and their gradients around chunks of 128 tokens, then one
kernel for each kind of gradient. Nothing is kept in between. Grids have room for what a batch of this shape may hold, so that
the host never waits; programs without work return at once.
"""

import contextvars
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packmamba.ops import cuda
from packmamba.ops import ssd_triton_backward as of_backward
from packmamba.ops import ssd_triton_forward as of_forward
from packmamba.ops.custom_op import dense
from packmamba.ops.ssd_triton_backward import Sums
from packmamba.ops.ssd_triton_forward import Activations, Decays, Rows, Sizes

BLOCK, CHUNK = of_forward.BLOCK.value, of_forward.CHUNK.value
SEGMENT = 2048
"""Tokens of a segment: documents are walked in such pieces at once."""
NEVER = 1 << 30
SUMMED = {"state_parts": 32, "pair_parts": 16, "input_gradients": 8}
"""Maximum heads that one program sums, by kernel."""
STAGES = {"walk": 2, "walk_states": 2, "state_parts": 3, "pair_parts": 3, "input_gradients": 2, "finish": 2}
"""Stages of loops, by kernel: others are up to 1.7 times slower."""


PRODUCTS = {
    torch.bfloat16: {"DTYPE": tl.bfloat16, "PRECISION": "ieee"},
    torch.float16: {"DTYPE": tl.float32, "PRECISION": "bf16x3"},
    torch.float32: {"DTYPE": tl.float32, "PRECISION": "tf32x3"},
}
"""Operands of products by the activations' dtype. Sums in float16 could overflow; three bfloat16 products hold its bits."""


class Pieces(NamedTuple):
    """Hold documents' pieces of a size, in document order; absent ones have no tokens. Each (K,) int64."""

    begin: Tensor  # first slot
    count: Tensor  # tokens
    position: Tensor  # of the first token in its document
    before: Tensor  # number of the boundary before it, if it is not its document's first, else -1
    after: Tensor  # number of the boundary after it, if it is not its document's last, else -1
    document: Tensor


class Plan(NamedTuple):
    """Hold a layout's chunks and segments, as kernels read them: int32."""

    chunks: Tensor  # (K, 5): see ``load_chunk``
    segments: Tensor  # (M, 7): see ``load_segment``
    order: Tensor  # (M,), segments with the most tokens first
    documents: Tensor  # (S, 2): first segment, number of segments
    padding: Tensor  # (slots,), 1 at padding
    boundaries: int  # maximum number of states between chunks
    cuts: int  # maximum number of states between segments


def plan(layout: Any, offsets: Tensor | None, rows: int, row_length: int) -> Plan:
    """Make the plan on the device; cached with the layout."""
    schedules = cuda.schedules_of(layout.starts)
    tensors = [layout.starts, layout.ends, *([] if offsets is None else [offsets])]
    stream = (
        torch.cuda.current_stream(layout.starts.device).cuda_stream if layout.starts.is_cuda else 0
    )
    made_of = (*(tensor.data_ptr() for tensor in tensors), *cuda.versions(*tensors))
    known = schedules.get(("ssd", rows, row_length, stream))
    if known is None or known[0] != made_of:
        made = _plan(layout, offsets, rows * row_length, schedules.get("longest"))
        known = schedules["ssd", rows, row_length, stream] = (made_of, made)
    return known[1]


def _plan(layout: Any, offsets: Tensor | None, slots: int, longest: int | None) -> Plan:
    starts, ends = layout.starts.long(), layout.ends.long()
    positions = torch.zeros_like(starts) if offsets is None else offsets.long()
    documents = len(starts)
    # A document that begins at its token 0 has a boundary for each CHUNK tokens at most, another one more.
    more = 0 if offsets is None else min(documents, slots // 2)
    boundaries = slots // CHUNK + more
    never_cut = longest is not None and longest <= SEGMENT
    segment = NEVER if never_cut else SEGMENT
    cuts = 0 if never_cut else slots // SEGMENT + more
    chunks, first_chunk, _ = _pieces(starts, ends, positions, CHUNK, documents + boundaries)
    segments, first, number = _pieces(starts, ends, positions, segment, documents + cuts)
    start = first_chunk[segments.document]
    chunk = start + segments.position // CHUNK - positions[segments.document] // CHUNK
    slot = torch.arange(slots, device=starts.device)
    at = torch.searchsorted(ends, slot, right=True).clamp(max=documents - 1)
    padding = (slot < starts[at]) | (slot >= ends[at])
    tables = (
        torch.stack(_entry(chunks), 1),
        torch.stack([*_entry(segments), segments.document, chunk], 1),
        torch.argsort(segments.count, descending=True, stable=True),
        torch.stack([first, number], 1),
        padding,
    )
    return Plan(*(table.int() for table in tables), boundaries, cuts)


def _entry(pieces: Pieces) -> list[Tensor]:
    return [pieces.begin, pieces.count, pieces.position % CHUNK, pieces.before, pieces.after]


def _pieces(
    starts: Tensor, ends: Tensor, positions: Tensor, size: int, maximum: int
) -> tuple[Pieces, Tensor, Tensor]:
    """Cut documents at positions that are multiples of a size; return pieces, documents' first and number of pieces."""
    lead = positions % size
    number = torch.where(ends > starts, (lead + ends - starts + size - 1) // size, 0)
    last = number.cumsum(0)
    piece = torch.arange(maximum, device=starts.device)
    document = torch.searchsorted(last, piece, right=True).clamp(max=len(starts) - 1)
    present = piece < last[-1]
    place = piece - (last - number)[document]
    begin = torch.where(place == 0, 0, place * size - lead[document]) + starts[document]
    end = torch.minimum(ends[document], (starts - lead)[document] + (place + 1) * size)
    boundary = piece - (number > 0).cumsum(0)[document]
    pieces = Pieces(
        begin=torch.where(present, begin, 0),
        count=torch.where(present, end - begin, 0),
        position=torch.where(present, positions[document] + begin - starts[document], 0),
        before=torch.where(present & (place > 0), boundary, -1),
        after=torch.where(present & (place < number[document] - 1), boundary + 1, -1),
        document=document,
    )
    return pieces, last - number, number


class Problem:
    """Hold what the kernels are launched with, and launch them."""

    def __init__(self, a: Any) -> None:
        (rows, length, heads, channels), (groups, states) = a.x.shape, a.B.shape[2:]
        self.a, self.heads, self.groups, self.shared = a, heads, groups, heads // groups
        self.plan = plan(a.layout, a.offsets, rows, length)
        self.slots = rows * length
        self.sizes = Sizes(length, self.slots, heads, self.shared)
        self.narrow = a.x.dtype == torch.bfloat16
        self.near = torch.bfloat16 if self.narrow else torch.float32
        wide = max(16, triton.next_power_of_2(states))
        most = 32 if a.x.dtype == torch.float32 and wide > 128 else 64  # which shared memory has room for
        tile = min(most, max(16, triton.next_power_of_2(channels)))
        self.parts = triton.cdiv(channels, tile)
        self.sides = {"P": channels, "N": states, "T": tile, "M": wide}
        self.of_state = (heads, self.parts, wide, tile)
        self.dots = PRODUCTS[a.x.dtype]
        self.skip = 0 if a.D is None else a.D.dim()
        self.by_heads = (len(self.plan.chunks), triton.cdiv(heads, 16))
        low, high = (0.0, 0.0) if a.delta_limit is None else map(float, a.delta_limit)
        self.limits = (low, high, a.delta.stride(0), a.delta.stride(1))
        self.of_steps = {
            "SOFTPLUS": a.delta_softplus,
            "LIMIT": a.delta_limit is not None,
            "num_warps": 4,
        }
        self.decays = Decays(
            a.A.new_empty(heads, self.slots),
            a.A.new_empty(heads, self.slots),
            a.A.new_empty(2 * len(self.plan.chunks), heads),
        )
        of_forward.write_steps[self.by_heads](
            a.delta, a.A, a.delta_bias, self.decays, self.plan.chunks, self.sizes, *self.limits,
            HEADS=16, **self.of_steps,
        )  # fmt: skip

    def inputs(self, z: Tensor | None = None, dy: Tensor | None = None) -> Activations:
        a = self.a
        return Activations(*(None if t is None else Rows(t, *t.stride()[:3]) for t in (a.x, a.B, a.C, z, dy)))

    def described(self, inputs: Activations, exact: bool = True) -> bool:
        """Return whether tensor descriptors may be made: strides and addresses are multiples of 16 bytes, tiles are whole."""
        given = [rows for rows in inputs if rows is not None]
        size = self.a.x.element_size()
        aligned = all(
            rows.pointer.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in rows[1:])
            for rows in given
        )
        capable = not self.a.x.is_cuda or torch.cuda.get_device_capability(self.a.x.device)[0] >= 9
        whole = not exact or (self.sides["P"] % self.sides["T"] == 0)
        return aligned and capable and whole and self.sides["P"] * size % 16 == 0

    def options(self, kernel: str) -> dict[str, int]:
        """Return numbers of warps and stages."""
        if not self.narrow:
            return {"num_warps": 8, "num_stages": 1}
        large = self.sides["M"] * self.sides["T"] > 8192
        return {"num_warps": 8 if large else 4, "num_stages": STAGES[kernel]}

    def sums(self, maximum: int) -> Sums:
        """Split the heads of a group in shares of at most so many."""
        shares = triton.cdiv(self.shared, maximum)
        return Sums(triton.cdiv(self.shared, shares), shares)

    def launch(self, kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
        module = of_forward if hasattr(of_forward, kernel) else of_backward
        options = self.sides | self.dots | constants | self.options(kernel)
        getattr(module, kernel)[(programs,)](*arguments, **options)

    def starts(self, final: Tensor | None, between: Tensor | None = None) -> Tensor | None:
        """Compute states before segments that are not a document's first; write ``final``."""
        return self._between(False, self.inputs(), self.a.initial_state, final)

    def ends(self, dy: Tensor, dfinal: Tensor | None, dinitial: Tensor | None) -> Tensor | None:
        """Compute gradients of states after segments that are not a document's last; write ``dinitial``."""
        return self._between(True, self.inputs(dy=dy), dfinal, dinitial)

    def _between(
        self, reverse: bool, inputs: Activations, outer: Tensor | None, last: Tensor | None
    ) -> Tensor | None:
        if not self.plan.cuts and last is None:
            return None
        a, plan = self.a, self.plan
        between = a.A.new_empty(max(1, self.plan.cuts), *a.state_shape[1:])
        states = (None, between, last, None, None, None, None, None)
        states = states[4:] + states[:4] if reverse else states
        self.launch(
            "walk_states", len(plan.segments) * self.heads * self.parts, inputs, *states, self.decays,
            plan.chunks, plan.segments, plan.order, self.sizes, FORWARD=not reverse, REVERSE=reverse, ENDS=True,
        )  # fmt: skip
        size = between[0, 0].numel()
        of_forward.combine[(len(plan.documents), self.heads, triton.cdiv(size, 1024))](
            outer, between, last, self.decays, plan.segments, plan.documents, self.sizes, size,
            REVERSE=reverse, WIDTH=1024,
        )  # fmt: skip
        return between if self.plan.cuts else None

    def walk(
        self,
        inputs: Activations,
        starts: Tensor | None,
        *outputs: Tensor | None,
    ) -> None:
        """Write outputs: y, dz, the gradient of the output before the gate."""
        plan = self.plan
        self.launch(
            "walk", len(plan.segments) * self.heads * self.parts, inputs, self.a.D, self.a.initial_state, starts,
            *outputs, self.decays, plan.segments, plan.order, self.sizes, SKIP=self.skip, TMA=self.described(inputs, False),
        )  # fmt: skip

    def zero_padding(self, *tensors: Tensor | None) -> None:
        """Zero the padding of contiguous (B, L, ...)."""
        given = tuple(tensor for tensor in tensors if tensor is not None)
        widths = tuple(tensor.numel() // self.slots for tensor in given)
        of_forward.zero_padding[(triton.cdiv(self.slots, 32),)](
            given, widths, self.plan.padding, self.slots, ROWS=32, WIDTH=256
        )


def _dense(a: Any) -> Any:
    names = ("A", "D", "delta_bias", "initial_state")
    return a._replace(**{name: dense(getattr(a, name)) for name in names})


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _with_allocator(function: Any, *arguments: Any) -> Any:
    """Call with memory for tensor descriptors from PyTorch, whatever allocator the user has set in Triton."""

    def call() -> Any:
        triton.set_allocator(_allocate)
        return function(*arguments)

    return contextvars.copy_context().run(call)


def forward(a: Any) -> tuple[Tensor, Tensor | None]:
    """Compute ``ops.ssd_pack``."""
    return _with_allocator(_forward, _dense(a))


def backward(a: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return gradients of x, delta, A, B, C, D, z, delta_bias and the initial state; None where absent."""
    return _with_allocator(_backward, _dense(a), dy, dfinal)


def _forward(a: Any) -> tuple[Tensor, Tensor | None]:
    y = a.x.new_empty(a.x.shape)
    final = a.A.new_zeros(a.state_shape) if a.return_final_state else None
    if not len(a.layout.starts):
        return y.zero_(), final
    problem = Problem(a)
    starts = problem.starts(final)
    problem.walk(problem.inputs(z=a.z), starts, y, None, None)
    problem.zero_padding(y)
    return y, final


def _backward(a: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    problem = Problem(a)
    plan, heads, groups, sizes = problem.plan, problem.heads, problem.groups, problem.sizes
    dy = a.x.new_zeros(a.x.shape) if dy is None else dy.contiguous()
    dfinal = dense(dfinal)
    initial = a.initial_state is not None
    starts = problem.starts(None)
    dz = None
    if a.z is not None:
        dz, ungated = a.x.new_empty(a.x.shape), a.x.new_empty(a.x.shape)
        problem.walk(problem.inputs(a.z, dy), starts, None, dz, ungated)
        dy = ungated
    dinitial = torch.zeros_like(a.initial_state) if initial else None
    ends = problem.ends(dy, dfinal, dinitial)

    # States before chunks, and gradients of states after chunks.
    inputs, tma = problem.inputs(dy=dy), problem.described(problem.inputs(dy=dy))
    stored = {"INITIAL": initial, "FINAL": dfinal is not None}
    counts = (len(plan.chunks) if every else max(1, plan.boundaries) for every in stored.values())
    states, dstates = (a.x.new_empty(n, *problem.of_state, dtype=problem.near) for n in counts)
    problem.launch(
        "walk_states", 2 * len(plan.segments) * heads * problem.parts, inputs, a.initial_state, starts, None, states,
        dfinal, ends, None, dstates, problem.decays, plan.chunks, plan.segments, plan.order, sizes,
        FORWARD=True, REVERSE=True, ENDS=False,
    )  # fmt: skip

    # What states give to dB, dC and step sizes, then what pairs of tokens give.
    sums = {kernel: problem.sums(maximum) for kernel, maximum in SUMMED.items()}
    tables = (problem.decays, plan.chunks, sizes)
    passes, added, pair_passes, of_x, crossing = (torch.empty_like(problem.decays.steps) for _ in range(5))
    through = a.A.new_empty(len(plan.chunks), heads)
    state_shares = a.A.new_empty(2, sums["state_parts"].shares, problem.slots, groups, problem.sides["N"])
    problem.launch(
        "state_parts", 4 * len(plan.chunks) * groups * sums["state_parts"].shares, inputs, states, dstates, passes, added, through,
        state_shares, *tables, sums["state_parts"], TMA=tma, **stored,
    )  # fmt: skip
    pairs = a.A.new_empty(groups * sums["pair_parts"].shares, problem.slots, CHUNK)
    partial_D = None if a.D is None else a.A.new_zeros(2 * len(plan.chunks), *a.D.shape)
    problem.launch(
        "pair_parts", 3 * len(plan.chunks) * groups * sums["pair_parts"].shares, inputs, pairs, pair_passes, of_x, crossing, partial_D,
        *tables, sums["pair_parts"], SKIP=problem.skip, TMA=tma,
    )  # fmt: skip

    dx, ddelta = a.x.new_empty(a.x.shape), a.x.new_empty(a.delta.shape)
    problem.launch(
        "input_gradients", 2 * len(plan.chunks) * groups * sums["input_gradients"].shares, inputs, a.D, dstates, dx, *tables,
        sums["input_gradients"], SKIP=problem.skip, FINAL=stored["FINAL"], TMA=tma,
    )  # fmt: skip
    del dstates, states
    dB, dC = (a.x.new_empty(a.B.shape) for _ in range(2))
    columns = min(64, problem.sides["M"])
    of_backward.finish[(2 * len(plan.chunks) * groups * triton.cdiv(problem.sides["N"], columns),)](
        inputs, state_shares, sums["state_parts"].shares, pairs, sums["pair_parts"].shares, dB, dC, plan.chunks, sizes,
        N=problem.sides["N"], M=columns, **stored, **problem.dots, num_warps=4, num_stages=STAGES["finish"],
    )  # fmt: skip
    partial = a.A.new_empty(2, len(plan.chunks), heads)
    of_backward.step_gradients[(len(plan.chunks), triton.cdiv(heads, 8))](
        a.delta, a.A, a.delta_bias, (passes, added, pair_passes, of_x, crossing), through, ddelta, partial,
        *tables, *problem.limits, HEADS=8, **stored, **problem.of_steps,
    )  # fmt: skip
    problem.zero_padding(dx, ddelta, dz, dB, dC)
    dA, dbias = partial.sum(1)
    dD = None if partial_D is None else partial_D.sum(0)
    return dx, ddelta, dA, dB, dC, dD, dz, None if a.delta_bias is None else dbias, dinitial
