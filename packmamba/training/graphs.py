"""A batch's forward and backward as one CUDA graph: a GPU computes a small model's kernels faster than a host launches them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from packmamba.data.batching import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.ops.cuda import one_capture

ROW_MULTIPLE = 128
"""Rows are filled up with padding to a multiple of this: fewer shapes, each of which is captured once."""
MOST_GRAPHS = 64
"""Rows and lengths beyond these are not captured but computed as they come."""
ABSENT = 2**31 - 1
"""Where documents that are not there start and end."""

Loss = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    """What a graph is captured for: its batch's slots, and room for documents and for the longest of them, in powers of four.

    gathers: whether gradients are added to those that are there, or take their place.
    """

    rows: int
    row_length: int
    documents: int
    longest: int
    gathers: bool

    @classmethod
    def of(cls, batch: PackedBatch, gathers: bool) -> Shape:
        rows, row_length = batch.layout.shape
        row_length = -(-row_length // ROW_MULTIPLE) * ROW_MULTIPLE
        longest = min(_power_of_four(batch.layout.longest or row_length), row_length)
        return cls(rows, row_length, _power_of_four(batch.layout.num_documents), longest, gathers)

    @property
    def slots(self) -> tuple[int, int, bool]:
        """What one graph is kept for: the one with the most room that was needed so far."""
        return self.rows, self.row_length, self.gathers

    def with_room_for(self, other: Shape) -> Shape:
        documents, longest = max(self.documents, other.documents), max(self.longest, other.longest)
        return replace(self, documents=documents, longest=longest)


class Static:
    """A batch at fixed addresses, which every batch of a shape is written to."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        slots = (shape.rows, shape.row_length)
        starts, ends, offsets = (torch.zeros(shape.documents, dtype=torch.int32, device=device) for _ in range(3))
        # All slots are computed: how many hold tokens is not the shape's.
        layout = SequenceLayout(slots, starts, ends, offsets, shape.rows * shape.row_length, shape.longest)
        # One that leaks runs through padding too, which nothing reads: what a layout merges of itself, its host would wait for.
        layout.flowing = SequenceLayout.from_rows(*slots, device=device)
        tokens, targets = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.batch = PackedBatch(tokens, targets, torch.zeros(slots, dtype=torch.bool, device=device), layout)
        self.num_targets = torch.ones((), device=device)

    def fill(self, batch: PackedBatch, num_targets: int) -> None:
        """Copies a batch, rows filled up, documents behind each other as in its own rows; none is waited for."""
        mine, row_length = self.batch, batch.layout.shape[1]
        for to, of in ((mine.tokens, batch.tokens), (mine.targets, batch.targets), (mine.loss_mask, batch.loss_mask)):
            to[:, row_length:] = 0
            to[:, :row_length].copy_(of)
        more = mine.layout.shape[1] - row_length
        for to, of in ((mine.layout.starts, batch.layout.starts), (mine.layout.ends, batch.layout.ends)):
            to[len(of) :] = ABSENT
            to[: len(of)].copy_(of + batch.layout.rows * more if more else of)
        mine.layout.offsets[len(batch.layout.offsets) :] = 0
        mine.layout.offsets[: len(batch.layout.offsets)].copy_(batch.layout.offsets)
        self.num_targets.fill_(num_targets)


class Captured(NamedTuple):
    """A graph, what it reads, its results, and each parameter's gradient."""

    shape: Shape
    graph: torch.cuda.CUDAGraph
    static: Static
    inputs: list[Tensor]
    results: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class BatchGraphs:
    """Runs forward and backward of batches as CUDA graphs: captured at a shape's first batch, replayed at the next ones.

    Gradients are those of ``loss(batch)[0] / num_targets``. A graph of one-batch steps has gradients of its own, as large as the
    parameters; graphs that add theirs share one set. Between replays the memory of a graph's activations is
    the other graphs'. Where a shape is captured, nothing may hold a loss of earlier batches with its autograd graph.

    Args:
        loss: of a batch, and perhaps of further tensors: the sum over its targets, (B, L) that of each slot, and perhaps further
            tensors without gradient.
        parameters: whose gradients are wanted; they must stay where they are.
    """

    def __init__(self, loss: Loss, parameters: list[nn.Parameter]) -> None:
        self.loss = loss
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.captured: dict[tuple[int, int, bool], Captured] = {}
        self.sums: list[Tensor] = []
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        batch: PackedBatch,
        num_targets: int,
        first: bool = True,
        last: bool = True,
        inputs: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Leaves gradients in the parameters' ``grad``; returns the loss over ``num_targets``, (B, L) that of each slot, and what
        else ``loss`` does.

        Args:
            batch: on the GPU.
            num_targets: of the step.
            first, last: of the step's batches. A step's only one writes its gradients; several add theirs.
            inputs: the further tensors, for batches of as many rows always of the same shapes.

        The results are overwritten by later calls.
        """
        shape = Shape.of(batch, gathers=not (first and last))
        if shape.gathers:
            self.sums = self.sums or [torch.zeros_like(parameter) for parameter in self.parameters]
            if first:
                torch._foreach_zero_(self.sums)
        self._set_gradients(self.sums if shape.gathers else None)
        captured = self.captured.get(shape.slots)
        if captured is None and len(self.captured) == MOST_GRAPHS:
            return self._run(batch, num_targets, *inputs)
        if captured is None or captured.shape.with_room_for(shape) != captured.shape:
            shape = shape if captured is None else captured.shape.with_room_for(shape)
            captured = self.captured[shape.slots] = self._capture(shape, batch, num_targets, inputs)
        captured.static.fill(batch, num_targets)
        if inputs:
            torch._foreach_copy_(captured.inputs, list(inputs))
        captured.graph.replay()
        self._set_gradients(captured.gradients)
        total, losses, *others = captured.results
        return total, losses[:, : batch.layout.shape[1]], *others

    def _run(self, batch: PackedBatch, num_targets: int | Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        total, losses, *others = self.loss(batch, *inputs)
        total = total / num_targets
        total.backward()
        return total.detach(), losses, *others

    def _capture(self, shape: Shape, batch: PackedBatch, num_targets: int, given: Sequence[Tensor]) -> Captured:
        static = Static(shape, batch.tokens.device)
        static.fill(batch, num_targets)
        inputs = [part.clone() for part in given]
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and lets libraries make what they keep
                self._set_gradients(None)
                self._run(static.batch, static.num_targets, *inputs)
        current.wait_stream(stream)
        self._set_gradients(self.sums if shape.gathers else None)
        torch.clear_autocast_cache()  # a weight that was cast before would be the graph's forever
        gc.collect()  # autograd's leftovers belong to other streams
        graph = torch.cuda.CUDAGraph()
        # Other threads pin the next batches' memory meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"), one_capture():
            results = self._run(static.batch, static.num_targets, *inputs)
        torch.clear_autocast_cache()
        return Captured(shape, graph, static, inputs, results, [parameter.grad for parameter in self.parameters])

    def _set_gradients(self, gradients: Sequence[Tensor | None] | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters)):
            parameter.grad = gradient


def _power_of_four(n: int) -> int:
    """The first at least ``n``."""
    return 4 ** -(-max(0, n - 1).bit_length() // 2)
