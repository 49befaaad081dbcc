"""CUDA graphs of forward and backward passes."""

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from packmamba.data.batch import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.ops.cuda import one_capture

ROW_MULTIPLE = 128  # to which rows are padded, for fewer shapes
MAX_GRAPHS = 64  # further shapes are computed eagerly
ABSENT = 2**31 - 1  # start and end of absent documents

Loss = Callable[..., tuple[Tensor, ...]]


class Shape(NamedTuple):
    """Hold slots, maximum number of documents, and their maximum length, offset included."""

    rows: int
    row_length: int
    documents: int
    longest: int
    accumulates: bool  # gradients are added to existing ones

    @classmethod
    def of(cls, batch: PackedBatch, accumulates: bool) -> "Shape":
        rows, row_length = batch.layout.shape
        row_length = -(-row_length // ROW_MULTIPLE) * ROW_MULTIPLE
        longest = 1 << ((batch.layout.longest or ABSENT) - 1).bit_length()
        longest = longest if longest <= row_length else ABSENT  # that of continued documents grows
        documents = 4 ** -(-max(0, batch.layout.num_documents - 1).bit_length() // 2)
        return cls(rows, row_length, documents, longest, accumulates)

    @property
    def slots(self) -> tuple[int, int, bool]:
        return self.rows, self.row_length, self.accumulates


class StaticBatch:
    def __init__(self, shape: Shape, device: torch.device) -> None:
        slots = (shape.rows, shape.row_length)
        starts, ends, offsets = (
            torch.zeros(shape.documents, dtype=torch.int32, device=device) for _ in range(3)
        )
        # All slots are computed, whatever holds tokens.
        layout = SequenceLayout(
            slots, starts, ends, offsets, shape.rows * shape.row_length, shape.longest
        )
        layout.flowing = SequenceLayout.from_rows(*slots, device=device)
        tokens, targets = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.batch = PackedBatch(
            tokens, targets, torch.zeros(slots, dtype=torch.bool, device=device), layout
        )
        self.num_targets = torch.ones((), device=device)

    def fill(self, batch: PackedBatch, num_targets: int) -> None:
        """Copy a batch without waiting for the GPU."""
        static, row_length = self.batch, batch.layout.shape[1]
        for name in ("tokens", "targets", "loss_mask"):
            to, of = getattr(static, name), getattr(batch, name)
            to[:, row_length:] = 0
            to[:, :row_length].copy_(of)
        shift = batch.layout.rows * (static.layout.shape[1] - row_length)
        for name, absent, more in (
            ("starts", ABSENT, shift),
            ("ends", ABSENT, shift),
            ("offsets", 0, 0),
        ):
            to, of = getattr(static.layout, name), getattr(batch.layout, name)
            to[len(of) :] = absent
            to[: len(of)].copy_(of + more)
        self.num_targets.fill_(num_targets)


class Captured(NamedTuple):
    shape: Shape
    graph: torch.cuda.CUDAGraph
    static: StaticBatch
    inputs: list[Tensor]
    results: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class BatchGraphs:
    """Replay forward and backward passes of batches, captured at a shape's first batch.

    Meanwhile nothing may hold a loss of an earlier batch with its graph. ``loss``, of a batch and further tensors, returns the
    sum over its targets, (B, L) that of each slot, and further tensors without gradient.
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
        """Set the parameters' ``grad``, to which a step's batches add from ``first`` to ``last``.

        Return ``loss`` over ``num_targets``; later calls overwrite its results.
        """
        shape = Shape.of(batch, accumulates=not (first and last))
        if shape.accumulates:
            self.sums = self.sums or [torch.zeros_like(parameter) for parameter in self.parameters]
            if first:
                torch._foreach_zero_(self.sums)
        self._set_gradients(self.sums if shape.accumulates else None)
        captured = self.captured.get(shape.slots)
        if captured is None and len(self.captured) == MAX_GRAPHS:
            return self._run(batch, num_targets, *inputs)
        if captured is not None:
            shape = Shape._make(map(max, shape, captured.shape))
        if captured is None or captured.shape != shape:
            captured = self.captured[shape.slots] = self._capture(shape, batch, num_targets, inputs)
        captured.static.fill(batch, num_targets)
        if inputs:
            torch._foreach_copy_(captured.inputs, list(inputs))
        captured.graph.replay()
        self._set_gradients(captured.gradients)
        total, losses, *others = captured.results
        return total, losses[:, : batch.layout.shape[1]], *others

    def _run(self, batch: PackedBatch, num_targets: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        total, losses, *others = self.loss(batch, *inputs)
        total = total / num_targets
        total.backward()
        return total.detach(), losses, *others

    def _capture(
        self, shape: Shape, batch: PackedBatch, num_targets: int, given: Sequence[Tensor]
    ) -> Captured:
        static = StaticBatch(shape, batch.tokens.device)
        static.fill(batch, num_targets)
        inputs = [part.clone() for part in given]
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._set_gradients(None)
                self._run(static.batch, static.num_targets, *inputs)
        current.wait_stream(stream)
        self._set_gradients(self.sums if shape.accumulates else None)
        torch.clear_autocast_cache()  # else weights that were cast before stay
        gc.collect()  # autograd's leftovers of other streams
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            one_capture(),
        ):
            results = self._run(static.batch, static.num_targets, *inputs)
        torch.clear_autocast_cache()
        return Captured(
            shape, graph, static, inputs, results, [parameter.grad for parameter in self.parameters]
        )

    def _set_gradients(self, gradients: Sequence[Tensor | None] | None) -> None:
        for parameter, gradient in zip(self.parameters, gradients or [None] * len(self.parameters)):
            parameter.grad = gradient
