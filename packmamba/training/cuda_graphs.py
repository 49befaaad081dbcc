"""Replay a batch's forward and backward pass as a CUDA graph.

For models whose kernels are computed faster than they are launched: a graph is launched as one.
A graph has fixed shapes and addresses, so a batch is copied into a ``StaticBatch`` that is at least
as large: rows are padded to a multiple of 128 slots and absent documents lie behind every slot.
Each shape is captured once (two warm-up passes and the capture, a second or so) and holds its
activations' memory; few shapes therefore pay, and ``Shape`` rounds up coarsely.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packmamba.data.batch import PackedBatch
from packmamba.layout import SequenceLayout, ceil_div, round_up
from packmamba.ops.cuda import one_capture

# Rows are padded to a multiple of this many slots, for fewer shapes.
ROW_MULTIPLE = 128
# Further shapes are computed eagerly.
MAX_GRAPHS = 64
# Start and end of documents that a static batch has room for and a batch does not have.
ABSENT = 2**31 - 1

Loss = Callable[..., tuple[Tensor, ...]]


class Shape(NamedTuple):
    """Say what a graph is captured for.

    Attributes:
        rows, row_length: the static batch's slots.
        documents: maximum number of documents, a power of four: kernels' absent documents return
            at once, so that room for more costs little and another capture costs a second.
        longest: maximum length of a document, offset included, a power of two; ABSENT if it may
            exceed a row.
        accumulates: gradients are added to existing ones.
    """

    rows: int
    row_length: int
    documents: int
    longest: int
    accumulates: bool

    @classmethod
    def of(cls, batch: PackedBatch, accumulates: bool) -> "Shape":
        """Return the shape of a batch, rounded up."""
        rows, row_length = batch.layout.shape
        row_length = round_up(row_length, ROW_MULTIPLE)
        # An unknown length may be any.
        longest = 2 ** ((batch.layout.longest or ABSENT) - 1).bit_length()
        if longest > row_length:
            longest = ABSENT  # that of continued documents grows from batch to batch
        documents = 4 ** ceil_div((batch.layout.num_documents - 1).bit_length(), 2)
        return cls(rows=rows, row_length=row_length, documents=documents, longest=longest, accumulates=accumulates)


class StaticBatch:
    """Hold a batch at fixed addresses, into which every batch of a shape is copied."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        slots = (shape.rows, shape.row_length)
        # All slots are computed: how many hold tokens is not part of the shape.
        num_tokens = shape.rows * shape.row_length
        # A leak flows through padding too, which nothing reads: merging the documents as
        # layout.flow() does would wait for the GPU.
        flow = SequenceLayout.from_rows(*slots, device=device)
        with device:
            starts, ends, offsets = (torch.zeros(shape.documents, dtype=torch.int32) for _ in range(3))
            tokens, targets = (torch.zeros(slots, dtype=torch.int64) for _ in range(2))
            loss_mask = torch.zeros(slots, dtype=torch.bool)
            self.num_targets = torch.ones(())
        layout = SequenceLayout(slots, starts, ends, offsets, num_tokens, shape.longest, flow)
        self.batch = PackedBatch(tokens=tokens, targets=targets, loss_mask=loss_mask, layout=layout)

    def fill(self, batch: PackedBatch, num_targets: int) -> None:
        """Copy a batch, rows padded, without waiting for the GPU."""
        row_length = batch.layout.shape[1]
        for name in ("tokens", "targets", "loss_mask"):
            static = getattr(self.batch, name)
            # Behind this batch's rows lies what an earlier, longer batch left.
            static[:, row_length:] = 0
            static[:, :row_length].copy_(getattr(batch, name))
        layout = self.batch.layout
        # Rows are longer here: documents of row b start b times the difference later.
        shift = batch.layout.rows * (layout.shape[1] - row_length)
        num_documents = batch.layout.num_documents
        for name, absent, moved_by in (("starts", ABSENT, shift), ("ends", ABSENT, shift), ("offsets", 0, 0)):
            static = getattr(layout, name)
            static[num_documents:] = absent
            static[:num_documents].copy_(getattr(batch.layout, name) + moved_by)
        self.num_targets.fill_(num_targets)


class Captured(NamedTuple):
    """Hold a graph, and the tensors at the addresses that it reads and writes."""

    shape: Shape
    graph: torch.cuda.CUDAGraph
    static: StaticBatch
    inputs: list[Tensor]
    results: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class BatchGraphs:
    """Replay forward and backward passes of batches, captured at a shape's first batch.

    While a shape is captured, nothing may hold a loss of an earlier batch with its autograd graph.

    Args:
        loss: a function of a batch and further tensors that returns the sum of losses over the
            batch's targets, each slot's loss (B, L), and further tensors without gradient.
        parameters: what gradients are taken of. Graphs of steps of one batch have gradients of
            their own; graphs of steps of several batches add to one set.
    """

    def __init__(self, loss: Loss, parameters: list[nn.Parameter]) -> None:
        self.loss = loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.captured: dict[tuple[int, int, bool], Captured] = {}
        self.sums: list[Tensor] = []
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, batch: PackedBatch, num_targets: int, *inputs: Tensor, first: bool = True, last: bool = True
    ) -> tuple[Tensor, ...]:
        """Put gradients into the parameters' ``grad``; return ``loss``'s results.

        The loss is divided by ``num_targets``. Later calls overwrite gradients and results.

        Args:
            inputs: ``loss``'s further tensors.
            first, last: the batch is its step's first and last one; a step of several adds up.
        """
        # Gradients of a step of several micro-batches add up in ``sums``, which all graphs share.
        shape = Shape.of(batch, accumulates=not (first and last))
        if shape.accumulates:
            self.sums = self.sums or [torch.zeros_like(parameter) for parameter in self.parameters]
            if first:
                torch._foreach_zero_(self.sums)
        # Without ``sums`` each graph allocates gradients of its own while it is captured.
        self._set_gradients(self.sums if shape.accumulates else None)
        # One graph is kept for each of these, with the largest maxima so far.
        key = (shape.rows, shape.row_length, shape.accumulates)
        captured = self.captured.get(key)
        if captured is None and len(self.captured) == MAX_GRAPHS:
            return self._run(batch, num_targets, *inputs)
        # Of the same slots there is one graph: capture it anew with room for both batches.
        if captured is not None:
            shape = Shape._make(map(max, shape, captured.shape))
        if captured is None or captured.shape != shape:
            captured = self.captured[key] = self._capture(shape, batch, num_targets, inputs)
        captured.static.fill(batch, num_targets)
        if inputs:
            torch._foreach_copy_(captured.inputs, list(inputs))
        # The replay wrote the gradients that its graph was captured with.
        captured.graph.replay()
        self._set_gradients(captured.gradients)
        total, losses, *others = captured.results
        # Rows of the static batch are longer: cut the losses to the batch's.
        return total, losses[:, : batch.layout.shape[1]], *others

    def _run(self, batch: PackedBatch, num_targets: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        total, losses, *others = self.loss(batch, *inputs)
        total = total / num_targets
        total.backward()
        return total.detach(), losses, *others

    def _capture(self, shape: Shape, batch: PackedBatch, num_targets: int, inputs: Sequence[Tensor]) -> Captured:
        """Warm up on a side stream, as PyTorch asks for, then capture."""
        static = StaticBatch(shape, batch.tokens.device)
        static.fill(batch, num_targets)
        static_inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate
                self._set_gradients(None)
                self._run(static.batch, static.num_targets, *static_inputs)
        current.wait_stream(stream)
        self._set_gradients(self.sums if shape.accumulates else None)
        torch.clear_autocast_cache()  # else the graph would read weights that were cast before
        gc.collect()  # autograd's leftovers of other streams
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads pin the next batches' memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"), one_capture():
            results = self._run(static.batch, static.num_targets, *static_inputs)
        # Casts made in the capture lie in the graph's memory, where eager code must not read them.
        torch.clear_autocast_cache()
        gradients = [parameter.grad for parameter in self.parameters]
        return Captured(shape, graph, static, static_inputs, results, gradients)

    def _set_gradients(self, gradients: Sequence[Tensor | None] | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters)):
            parameter.grad = gradient
