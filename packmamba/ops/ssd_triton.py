# mypy: ignore-errors
"""Mamba-2's scan on a GPU: what its Triton kernels are launched with.

Forward (``ssd_triton_forward``): step sizes; states where segments of 2048 tokens start, for
documents that have several; then all segments at once. Backward (``ssd_triton_backward``): states
and their gradients around chunks of 128 tokens, then one kernel for each kind of gradient. Nothing
is kept in between. Grids have room for what a batch of this shape may hold, so that the host never
waits; programs without work return at once. No sum has an order that depends on the batch.
"""

import contextvars
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from packmamba.ops import gated_norm_triton as gated_norm  # noqa: F401  ``ops.mamba2_inner`` takes it from here
from packmamba.ops import ssd_triton_backward as of_backward
from packmamba.ops import ssd_triton_forward as of_forward
from packmamba.ops.custom_op import dense
from packmamba.ops.ssd_triton_backward import ByRow, Sums
from packmamba.ops.ssd_triton_forward import Activations, Decays, Role, Rows, Sizes, Steps, Tile
from packmamba.ops.ssd_triton_plan import BLOCK, CHUNK, plan

# Maximum heads that one program sums, by kernel.
SUMMED = {"state_parts": 32, "pair_parts": 32, "input_gradients": 8}
# Stages of loops, by kernel: others are up to 1.7 times slower.
STAGES = {"walk": 2, "walk_states": 2, "state_parts": 3, "pair_parts": 3, "input_gradients": 2, "finish": 2}
# Operands of products. In float16 a state above 65,504 becomes infinite, as in mamba-ssm.
OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def rows_of(tensor: Tensor) -> Rows:
    """Return activations (B, L, heads or groups[, width]) with their strides."""
    return Rows(tensor, *tensor.stride()[:3])


def slots_of(tensor: Tensor) -> Rows:
    """Return a slice of contiguous (B, L, ...) to write to, whose slots all have one stride."""
    # Not ``stride(1)``, which for rows of one slot may be anything.
    return Rows(tensor, 0, tensor.flatten(0, 1).stride(0), tensor.stride(2))


class Problem:
    """Hold what the kernels are launched with, and launch them."""

    def __init__(self, a: Any, before_first: bool = False, after_last: bool = False) -> None:
        """before_first, after_last: keep states before first chunks, gradients after last ones."""
        # B rows, L slots, H heads, P channels of a head; G groups of ``shared`` heads, N states.
        (rows, length, heads, channels), (groups, states) = a.x.shape, a.B.shape[2:]
        self.a, self.slots = a, rows * length
        self.heads, self.groups, self.shared = heads, groups, heads // groups
        self.plan = plan(a.layout, a.offsets, rows, length)
        self.chunks = len(self.plan.chunks)
        # Columns of ``Plan.chunks``: boundaries inside
        # documents (2, 3), or chunks, edges included (4).
        columns = {"before": 4 if before_first else 2, "after": 4 if after_last else 3}
        self.sizes = Sizes(length, heads, self.shared, self.chunks * CHUNK.value, **columns)
        # A tile is T channels by M states, powers of two; Triton's products need 16 or more.
        self.M = max(16, triton.next_power_of_2(states))
        # Which shared memory has room for.
        most = 32 if a.x.dtype == torch.float32 and self.M > 128 else 64
        self.T = min(most, max(16, triton.next_power_of_2(channels)))
        self.parts = triton.cdiv(channels, self.T)
        numbers = map(tl.constexpr, (channels, states, self.T, self.M, self.parts, 0 if a.D is None else a.D.dim()))
        # In float32 an operand is a sum of two bfloat16 ones, and a product three of theirs:
        # outputs are off by 6e-6, by 1e-3 with one TF32 product, which takes as long. Other tiles,
        # for which Triton 3.6 computes wrong products of pairs or reads past its memory, take three
        # of TF32, which keep all bits in 2.5 times the time, or one where PyTorch is told to.
        in_pairs = self.T == 64 and 64 <= self.M <= 128
        tf32 = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        self.precision = "ieee" if a.x.dtype != torch.float32 else "bf16x3" if in_pairs else tf32
        self.tile = Tile(*numbers, described=False, dtype=OPERANDS[a.x.dtype], precision=self.precision)
        # Step sizes, and logarithms of decays, of all chunks: every other kernel reads them.
        low, high = (0.0, 0.0) if a.delta_limit is None else map(float, a.delta_limit)
        self.steps = Steps(a.delta, a.delta_bias, low, high, *a.delta.stride()[:2])
        self.of_steps = {"SOFTPLUS": a.delta_softplus, "LIMIT": a.delta_limit is not None}
        self.decays = Decays(self.by_row(), self.by_row())
        grid = (self.chunks, triton.cdiv(heads, 16))
        tables = (self.decays, self.plan.chunks, self.sizes)
        of_forward.write_steps[grid](self.steps, a.A, *tables, HEADS=16, **self.of_steps)

    def by_row(self) -> Tensor:
        """Allocate a number for each head and row of chunks."""
        return self.a.A.new_empty(self.heads, self.sizes.rows)

    def inputs(self, z: Tensor | None = None, dy: Tensor | None = None) -> Activations:
        """Return the activations with their strides; z and dy where a kernel reads them."""
        a = self.a
        return Activations(*(None if t is None else rows_of(t) for t in (a.x, a.B, a.C, z, dy)))

    def described(self, inputs: Activations, whole: bool) -> Tile:
        """Return inputs' tile; descriptors if strides and addresses are multiples of 16 bytes.

        whole: only if each tile is whole.
        """
        size, channels = self.a.x.element_size(), self.a.x.shape[3]
        # TMA: addresses and strides are multiples of 16 bytes, coordinates are 32-bit integers.
        aligned = channels * size % 16 == 0 and not (whole and channels % self.T)
        for rows in (inputs.x, inputs.B, inputs.C, inputs.dy):
            if rows is not None:
                aligned &= rows.pointer.data_ptr() % 16 == 0 and rows.head * self.heads < 2**31
                aligned &= all(stride * size % 16 == 0 for stride in rows[1:])
        capable = not self.a.x.is_cuda or torch.cuda.get_device_capability(self.a.x.device)[0] >= 9
        return self.tile._replace(described=aligned and capable)

    def options(self, kernel: str) -> dict[str, int]:
        """Return numbers of warps and stages."""
        if self.a.x.dtype == torch.float32:
            # Pairs take up to twice as long with eight warps, but in ``walk_states``. With small
            # tiles these read past shared memory (Triton 3.6).
            many = self.T * self.M > 4096 and (kernel == "walk_states" or self.precision != "bf16x3")
            return {"num_warps": 8 if many else 4, "num_stages": 1}
        large = self.T * self.M > 8192
        most = 3 - large - (self.parts > 1)  # which shared memory has room for
        return {"num_warps": 8 if large else 4, "num_stages": min(most, STAGES[kernel])}

    def sums(self, kernel: str) -> Sums:
        """Split the heads of a group in shares of at most ``SUMMED``."""
        shares = triton.cdiv(self.shared, SUMMED[kernel])
        return Sums(triton.cdiv(self.shared, shares), shares)

    def launch(self, kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch so many programs of a kernel, with the tile and its warps and stages."""
        # The kernels' names are unique over the two modules.
        module = of_forward if hasattr(of_forward, kernel) else of_backward
        getattr(module, kernel)[(programs,)](*arguments, **{"tile": self.tile} | constants, **self.options(kernel))

    def walk(self, inputs: Activations, starts: Tensor | None, y: Tensor) -> None:
        """Write y; without z before the gate."""
        programs = len(self.plan.segments) * self.heads * self.parts
        arguments = (inputs, self.a.D, self.a.initial_state, starts, y, self.decays)
        tables = (self.plan.segments, self.plan.order, self.sizes)
        self.launch("walk", programs, *arguments, *tables, tile=self.described(inputs, whole=False))

    def walk_states(self, inputs: Activations, forward: Role, reverse: Role, **roles: bool) -> None:
        """Walk all segments in the roles that are True (FORWARD, REVERSE): see the kernel."""
        # A program for each segment, head, part of its channels, and role.
        programs = len(self.plan.segments) * self.heads * self.parts * sum(roles.values())
        tables = (self.decays, self.plan.chunks, self.plan.segments, self.plan.order, self.sizes)
        self.launch("walk_states", programs, inputs, forward, reverse, *tables, **roles)

    def between(self, outer: Tensor | None, last: Tensor | None, dy: Tensor | None = None) -> Tensor | None:
        """Compute states before segments (no document's first), and ``last``, after documents.

        With dy the gradients of states after segments that
        are not a document's last; ``last``: before documents.
        """
        plan, reverse = self.plan, dy is not None
        # No document can have two segments, and nobody asks for final states.
        if not plan.cuts and last is None:
            return None
        # First each segment's state from zero, all at once; then, in order, what came before it.
        between = self.a.A.new_empty(max(1, plan.cuts), *self.a.state_shape[1:])
        role = Role(outer, between, last, None)
        self.walk_states(self.inputs(dy=dy), role, role, FORWARD=not reverse, REVERSE=reverse)
        size, documents = between[0, 0].numel(), plan.totals.shape[1]
        grid = (documents, self.heads, triton.cdiv(size, 1024))
        tables = (self.decays, plan.segments, plan.totals, documents, self.sizes, size)
        of_forward.combine[grid](outer, between, last, *tables, REVERSE=reverse, WIDTH=1024)
        return between if plan.cuts else None

    def zero_padding(self, *tensors: Tensor | None) -> None:
        """Zero the padding of slices of contiguous (B, L, ...)."""
        outputs = tuple(slots_of(tensor) for tensor in tensors if tensor is not None)
        widths = tuple(output.pointer.numel() // self.slots for output in outputs)
        grid = (triton.cdiv(self.slots, 32),)
        of_forward.zero_padding[grid](outputs, widths, self.plan.padding, self.slots, ROWS=32, WIDTH=256)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream for kernels beside the current stream's; one, whose memory is used again."""
    return torch.cuda.Stream(device)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate what Triton asks for: memory for the descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _run(function: Any, a: Any, *gradients: Any) -> Any:
    """Call with PyTorch's memory for tensor descriptors, whatever allocator Triton has been set."""
    a = a._replace(**{name: dense(getattr(a, name)) for name in ("A", "D", "delta_bias", "initial_state")})
    context = contextvars.copy_context()
    context.run(triton.set_allocator, _allocate)
    return context.run(function, a, *gradients)


def forward(a: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute ``ops.ssd_pack``; return states where segments start, too, or None."""
    return _run(_forward, a)


def backward(
    a: Any, starts: Tensor | None, dy: Tensor | None, dfinal: Tensor | None, into: tuple[Tensor, ...] | None = None
) -> tuple[Tensor | None, ...]:
    """Return gradients of x, delta, A, B, C, D, z, delta_bias and the initial state.

    None where absent.

    starts: states where segments start, of ``forward``; None: they are computed again.
    into: tensors for the gradients of x, delta, B and C,
    slices of contiguous (B, L, ...); None: they are allocated.
    """
    return _run(_backward, a, starts, dy, dfinal, into)


def _forward(a: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    y = a.x.new_empty(a.x.shape)
    final = a.A.new_zeros(a.state_shape) if a.return_final_state else None
    if not len(a.layout.starts):
        return y.zero_(), final, None
    problem = Problem(a)
    starts = problem.between(a.initial_state, final)
    problem.walk(problem.inputs(z=a.z), starts, y)
    problem.zero_padding(y)
    return y, final, starts


def _backward(
    a: Any, starts: Tensor | None, dy: Tensor | None, dfinal: Tensor | None, into: tuple[Tensor, ...] | None
) -> tuple[Tensor | None, ...]:
    dx, ddelta, dB, dC = into or [tensor.new_empty(tensor.shape) for tensor in (a.x, a.delta, a.B, a.C)]
    # Boundaries at documents' edges matter where states come from outside, or gradients do.
    problem = Problem(a, a.initial_state is not None, dfinal is not None)
    plan, groups, sizes = problem.plan, problem.groups, problem.sizes
    channels, states_of_group = a.x.shape[3], a.B.shape[3]
    dy = a.x.new_zeros(a.x.shape) if dy is None else dy.contiguous()
    dfinal, dinitial = dense(dfinal), None if a.initial_state is None else torch.zeros_like(a.initial_state)
    if starts is None:
        starts = problem.between(a.initial_state, None)
    # Gate. ``dz`` holds y before the gate at first; ``gate_gradients`` replaces it.
    dz = None
    if a.z is not None:
        dz, ungated = a.x.new_empty(a.x.shape), a.x.new_empty(a.x.shape)
        problem.walk(problem.inputs(), starts, dz)
        grid = (triton.cdiv(problem.slots, 32), problem.heads)
        arguments = (problem.inputs(a.z, dy), dz, ungated, plan.padding, sizes, problem.slots)
        widths = {"P": channels, "T": triton.next_power_of_2(channels)}
        of_backward.gate_gradients[grid](*arguments, **widths, ROWS=32)
        dy = ungated
    inputs = problem.inputs(dy=dy)
    described = problem.described(inputs, whole=True)
    sums = {kernel: problem.sums(kernel) for kernel in SUMMED}
    programs = {kernel: problem.chunks * groups * of.shares for kernel, of in sums.items()}
    tables = (problem.decays, plan.chunks, sizes)
    # By row of chunks and head, for ``step_gradients``.
    found = ByRow(*(problem.by_row() for _ in ByRow._fields))

    # dC and dB of pairs of tokens: three products of blocks for each chunk and share. They need no
    # states, so they are computed beside them. What the second stream reads and writes is held here
    # until the first one has waited for it.
    pairs = a.A.new_empty(programs["pair_parts"], 3, BLOCK.value, BLOCK.value)
    partial_D = None if a.D is None else a.A.new_zeros(2 * problem.chunks, *a.D.shape)
    first, second = torch.cuda.current_stream(a.x.device), _second_stream(a.x.device)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        arguments = (inputs, pairs, found, partial_D, *tables, sums["pair_parts"])
        problem.launch("pair_parts", 3 * programs["pair_parts"], *arguments, tile=described)

    # Gradients of states after segments; ``dinitial`` those before documents.
    ends = problem.between(dfinal, dinitial, dy)
    # States before chunks, and gradients of states after chunks. Stored in the activations'
    # dtype, a whole tile (M, T) for each part of a head's channels.
    tile = (problem.heads, problem.parts, problem.M, problem.T)
    inner = max(1, plan.boundaries)
    states = a.x.new_empty(inner if a.initial_state is None else problem.chunks, *tile)
    dstates = a.x.new_empty(inner if dfinal is None else problem.chunks, *tile)
    forward, reverse = Role(a.initial_state, starts, None, states), Role(dfinal, ends, None, dstates)
    problem.walk_states(inputs, forward, reverse, FORWARD=True, REVERSE=True)

    # dC and dB by share of a group's heads; None: one share, which is finished where it is summed.
    number = sums["state_parts"].shares
    shares = None if number == 1 else a.A.new_empty(2, number, groups, sizes.rows, states_of_group)
    if shares is None:
        first.wait_stream(second)
    # dx, from gradients of states and from later tokens of the chunk.
    second.wait_stream(first)
    with torch.cuda.stream(second):
        arguments = (inputs, a.D, dstates, slots_of(dx), *tables, sums["input_gradients"])
        problem.launch("input_gradients", 2 * programs["input_gradients"], *arguments)
    # What states give to dB, dC and step sizes; ``through`` by chunk and head.
    through = a.A.new_empty(problem.chunks, problem.heads)
    of_pairs = (pairs, sums["pair_parts"].shares, slots_of(dC), slots_of(dB))
    arguments = (inputs, states, dstates, found, through, shares, *of_pairs, *tables, sums["state_parts"])
    problem.launch("state_parts", 4 * programs["state_parts"], *arguments, tile=described)
    first.wait_stream(second)
    if shares is not None:
        columns = min(64, problem.M)
        tiles = problem.chunks * groups * triton.cdiv(states_of_group, columns)
        arguments = (inputs, shares, number, *of_pairs, plan.chunks, sizes)
        problem.launch("finish", 4 * tiles, *arguments, COLUMNS=columns)
    # Gradients of delta, of the rates A and of the bias, by chunk and head.
    partial = a.A.new_empty(2, problem.chunks, problem.heads)
    grid = (problem.chunks, triton.cdiv(problem.heads, 8))
    arguments = (problem.steps, a.A, found, through, slots_of(ddelta), partial, *tables)
    of_backward.step_gradients[grid](*arguments, HEADS=8, **problem.of_steps)
    problem.zero_padding(dx, ddelta, dz, dB, dC)
    # Two tensors, and not two views of one: compiled graphs
    # assume that results lie at multiples of 16 bytes.
    dA, dbias = (part.sum(0) for part in partial)
    dD = None if partial_D is None else partial_D.sum(0)
    return dx, ddelta, dA, dB, dC, dD, dz, None if a.delta_bias is None else dbias, dinitial
