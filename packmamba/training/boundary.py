"""Boundary schemes: what crosses from one document to the next, by the name that ``trainer.boundary`` takes.

A scheme has two means: the layouts that tell convolutions and recurrences where documents start, and the initial states. The
constructor's arguments, all with defaults, are the keys of ``trainer.boundary_options``. Shapes: B rows, S documents.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packmamba.data.batch import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.nn.mixers import State

States = list[State]
"""By layer, a tuple of tensors whose first dimension counts documents (S, ...) or rows (B, ...)."""


class Boundary:
    """Nothing crosses: every document starts from zero, or from the learned states. A scheme overrides what differs."""

    continues = False
    """Row b of a batch continues row b of the one before: needs data.strategy=concat_split, in batches of whole streams."""
    as_trained = True
    """Validate a second time with documents arranged as in training, read with this scheme."""
    stateful = False
    """Documents start from states of earlier batches; see StatefulBoundary."""
    sharded = True
    """Works with sharded parameters (trainer.strategy=fsdp2)."""
    graphs = True
    """Can be replayed as a CUDA graph."""
    least_rows = 1
    """Rows that a batch needs."""
    step = 0
    """The optimizer step, from 0, of the next batches."""

    @property
    def name(self) -> str:
        return next((name for name, scheme in BOUNDARIES.items() if type(self) is scheme), type(self).__name__)

    @property
    def crosses_inside_rows(self) -> bool:
        return self.as_trained and not self.continues

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Return where documents start for convolutions and for recurrences."""
        return layout, layout

    def hidden(self, model: MambaLM, batch: PackedBatch) -> Tensor:
        """Compute the activations (B, L, d_model) from which the head makes logits."""
        conv, ssm = self.layouts(batch.layout)
        return model(batch.tokens, layout=batch.layout, conv_layout=conv, ssm_layout=ssm, return_hidden=True)

    def reset(self) -> None:
        """Forget all batches, before a validation."""

    def measures(self) -> dict[str, float]:
        """Return numbers to log and record."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of a checkpoint, on the CPU."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Resume from a checkpoint."""


class Reset(Boundary):
    """Every document, or piece of one, starts from zero (the paper)."""

    as_trained = False  # every run is validated so


class Leak(Boundary):
    """Each row flows as one document (naive packing)."""

    convolution = recurrence = True

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        return layout.flow() if self.convolution else layout, layout.flow() if self.recurrence else layout


class LeakConv(Leak):
    """Only convolutions leak."""

    recurrence = False


class LeakScan(Leak):
    """Only recurrences leak."""

    convolution = False


class StatefulBoundary(Boundary, ABC):
    """Documents start from detached final states of rows of earlier batches (truncated backpropagation through time).

    Between ``incoming`` and ``store``, ``forward`` may be replayed as a CUDA graph: it and ``initial_states`` do only tensor
    operations, and read of a layout only ``shape``, ``starts`` and ``offsets``.
    """

    stateful = True
    sharded = False

    @abstractmethod
    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        """Return a state for each row (B, ...), without gradient."""

    @abstractmethod
    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        """Return the state that each document starts from (S, ...)."""

    @abstractmethod
    def store(self, batch: PackedBatch, final: States) -> None:
        """Take the final state of each row's last document (B, ...), detached; meaningless for a row without documents."""

    def forward(self, model: MambaLM, batch: PackedBatch, incoming: States) -> tuple[Tensor, States]:
        """Compute ``hidden`` from incoming states; return it and each row's final states."""
        conv, ssm = self.layouts(batch.layout)
        states = self.initial_states(model, batch.layout, incoming)
        layouts = {"layout": batch.layout, "conv_layout": conv, "ssm_layout": ssm}
        hidden, final = model(batch.tokens, **layouts, states=states, return_states=True, return_hidden=True)
        final = detached(final)
        return hidden, index_states(final, last_documents(batch.layout)) if batch.layout.num_documents else final

    def hidden(self, model: MambaLM, batch: PackedBatch) -> Tensor:
        hidden, final = self.forward(model, batch, self.incoming(model, batch))
        self.store(batch, final)
        return hidden


@dataclass
class RowStates:
    """Final states of each row's last document (B, ...); ``positions`` (B,) int32 on the CPU, its tokens so far, -1 for a row
    without documents; the optimizer ``step`` that computed them."""

    states: States
    positions: Tensor
    step: int


class Carry(StatefulBoundary):
    """A document cut at a row's end continues from its own state in the next batch; other documents start from zero."""

    continues = True

    def __init__(self) -> None:
        self.stored: dict[int, RowStates] = {}  # by turn of streams
        self.age: int | None = None

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        fresh = detached(model.start_states(batch.layout.shape[0]))
        layout = on_host(batch.layout)
        continues = layout.continues
        if not continues.any():
            return fresh
        if batch.turn not in self.stored:
            raise ValueError("layout: a document continues, but no batch came before")
        stored = self.stored[batch.turn]
        rows, positions = layout.rows[continues], stored.positions
        if len(positions) != layout.shape[0] or not torch.equal(positions[rows], layout.offsets[continues]):
            expected, given = positions.tolist(), dict(zip(rows.tolist(), layout.offsets[continues].tolist()))
            raise ValueError(f"layout: expected documents to continue at {expected}, by row, got {given}")
        self.age = self.step - stored.step
        return self.exchange(stored, fresh)

    def exchange(self, stored: RowStates, fresh: States) -> States:
        """Return what a document that continues in a row starts from (B, ...). Not part of a CUDA graph."""
        return stored.states

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        fresh = model.start_states(layout.num_documents)
        return select_states(layout.continues, self.continued(index_states(incoming, row_of(layout)), fresh), fresh)

    def continued(self, incoming: States, fresh: States) -> States:
        """Return what continuing documents start from (S, ...), given their row's incoming and fresh states."""
        return incoming

    def store(self, batch: PackedBatch, final: States) -> None:
        layout = on_host(batch.layout)
        if layout.num_documents:
            self.stored[batch.turn] = RowStates(final, end_positions(layout), self.step)
        else:
            self.stored.pop(batch.turn, None)

    def measures(self) -> dict[str, float]:
        parts = (part for stored in self.stored.values() for state in stored.states for part in state)
        age = {} if self.age is None else {"state_age_steps": self.age}
        return {"state_bytes": sum(part.nbytes for part in parts), **age}

    def reset(self) -> None:
        self.stored.clear()

    def state_dict(self) -> dict[str, Any]:
        turns = sorted(self.stored.items())
        age = {} if self.age is None else {"age": self.age}
        if not turns:
            return {"states": None, "positions": None, **age}
        layers = zip(*(stored.states for _, stored in turns))
        return {
            "states": [tuple(torch.cat(parts).cpu() for parts in zip(*states)) for states in layers],
            "positions": torch.cat([stored.positions for _, stored in turns]),
            "turns": [(turn, len(stored.positions), stored.step) for turn, stored in turns],
            **age,
        }

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.stored.clear()
        self.age = state_dict.get("age")
        if state_dict["positions"] is None:
            return
        turns = state_dict.get("turns", [(0, len(state_dict["positions"]), 0)])
        sizes = [rows for _, rows, _ in turns]
        positions = state_dict["positions"].cpu().split(sizes)
        layers = [[part.to(device).split(sizes) for part in state] for state in state_dict["states"]]
        for i, (turn, _, step) in enumerate(turns):
            states: States = [tuple(part[i] for part in layer) for layer in layers]
            self.stored[turn] = RowStates(states, positions[i], step)


class CarryScan(Carry):
    """A continuing document continues the state of its recurrence; its convolution starts fresh."""

    def continued(self, incoming: States, fresh: States) -> States:
        return [(*new[:-1], old[-1]) for old, new in zip(incoming, fresh)]


class StatePassing(Carry):
    """A continuing document starts from another stream's state (arXiv 2507.02782), of the batch that computed its own.

    Each row takes the state of a row that stopped at nearly the same position, all in one ring, so that none returns soon. Where
    only one row has a state, at the end of the documents, it starts fresh.
    """

    least_rows = 2

    def exchange(self, stored: RowStates, fresh: States) -> States:
        (rows,) = torch.where(stored.positions >= 0)
        if len(rows) < 2:
            return fresh
        rows = rows[stored.positions[rows].argsort(stable=True)]
        ring = torch.cat([rows[::2], rows[1::2].flip(0)])  # up by every other row, and down by those between
        source = torch.arange(len(stored.positions)).index_copy(0, ring, ring.roll(1))
        return index_states(stored.states, source.to(stored.states[0][-1].device, non_blocking=True))


class FittedNoise(Carry):
    """A continuing document starts from normal noise with the mean and variance of the states (arXiv 2507.02782).

    Args:
        memory: decay of the moments' exponential average over batches, between 0 and 1.
    """

    first: list[Tensor]
    second: list[Tensor]
    generator: torch.Generator | None

    def __init__(self, memory: float = 0.99) -> None:
        super().__init__()
        self.memory = memory
        self.reset()

    def exchange(self, stored: RowStates, fresh: States) -> States:
        generator = self._generator(stored.states[0][-1].device)
        debias = 1 - self.memory**self.batches
        moments, drawn = iter(zip(self.first, self.second)), []
        for part in flatten_states(stored.states):
            mean, square = (moment / debias for moment in next(moments))
            noise = torch.randn(part.shape, dtype=mean.dtype, device=part.device, generator=generator)
            drawn.append((mean + (square - mean.square()).clamp(min=0).sqrt() * noise).to(part.dtype))
        return unflatten_states(drawn, stored.states)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self.generator = torch.Generator(device).manual_seed(torch.initial_seed() + rank)
        return self.generator

    def store(self, batch: PackedBatch, final: States) -> None:
        super().store(batch, final)
        if not batch.layout.num_documents:
            return
        parts = flatten_states(filled_rows(final, self.stored[batch.turn].positions))
        parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        first, second = [part.mean(0) for part in parts], [part.square().mean(0) for part in parts]
        if not self.batches:
            self.first, self.second = ([torch.zeros_like(part) for part in first] for _ in range(2))
        torch._foreach_lerp_(self.first, first, 1 - self.memory)
        torch._foreach_lerp_(self.second, second, 1 - self.memory)
        self.batches += 1

    def reset(self) -> None:
        super().reset()
        self.batches, self.first, self.second, self.generator = 0, [], [], None

    def state_dict(self) -> dict[str, Any]:
        first, second = ([part.cpu() for part in parts] for parts in (self.first, self.second))
        moments = {"batches": self.batches, "first": first, "second": second}
        generator = None if self.generator is None else self.generator.get_state()
        return {**super().state_dict(), "moments": moments, "generator": generator}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        super().load_state_dict(state_dict, device)
        moments = state_dict["moments"]
        self.batches = moments["batches"]
        self.first, self.second = ([part.to(device) for part in moments[name]] for name in ("first", "second"))
        if state_dict["generator"] is not None:
            self._generator(device).set_state(state_dict["generator"].cpu())


class StatePassingWithinRow(StatefulBoundary):
    """Each document that follows another in its row starts from a row's final state in the previous batch, without gradient.

    These are the documents into which ``leak`` lets their predecessor's state.
    """

    def __init__(self) -> None:
        self.stored: States | None = None

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        rows = batch.layout.shape[0]
        if self.stored is None:
            return detached(model.start_states(rows))
        part = self.stored[0][-1]
        same = len(part) == rows
        return self.stored if same else index_states(self.stored, torch.arange(rows, device=part.device) % len(part))

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        rows, row_length = row_of(layout), layout.shape[1]
        first = torch.searchsorted(layout.starts, rows * row_length)
        place = torch.arange(layout.num_documents, device=layout.device) - first
        passed = index_states(incoming, (rows + place) % layout.shape[0])
        return select_states(place > 0, passed, model.start_states(layout.num_documents))

    def store(self, batch: PackedBatch, final: States) -> None:
        if batch.layout.num_documents:
            self.stored = filled_rows(final, end_positions(on_host(batch.layout)))

    def reset(self) -> None:
        self.stored = None

    def state_dict(self) -> dict[str, Any]:
        stored = self.stored
        return {"left": None if stored is None else [tuple(part.cpu() for part in state) for state in stored]}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        stored = state_dict["left"]
        self.stored = None if stored is None else [tuple(part.to(device) for part in state) for state in stored]


def on_host(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout on the CPU: the one that it was moved from, without a wait for the GPU, or a copy."""
    while layout.device.type != "cpu":
        layout = layout.origin or layout.to("cpu")
    return layout


def last_documents(layout: SequenceLayout) -> Tensor:
    """Return each row's last document (B,), from ``starts`` alone; any document for a row without one."""
    rows, row_length = layout.shape
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=layout.device) * row_length
    return (torch.searchsorted(layout.starts, ends) - 1).clamp(min=0)


def end_positions(layout: SequenceLayout) -> Tensor:
    """Return where in its document each row's last one ends (B,) int32; -1 for a row without documents."""
    last = last_documents(layout)
    here = layout.rows[last] == torch.arange(layout.shape[0], device=layout.device)
    return torch.where(here, (layout.offsets + layout.lengths)[last], -1).to(torch.int32)


def row_of(layout: SequenceLayout) -> Tensor:
    """Return each document's row (S,), from ``starts`` alone; any row for a document that a CUDA graph's layout lacks."""
    rows, row_length = layout.shape
    return (layout.starts // row_length).clamp(max=rows - 1)


def filled_rows(states: States, positions: Tensor) -> States:
    """Return the states of rows with documents, given ``end_positions``."""
    (rows,) = torch.where(positions >= 0)
    if len(rows) == len(positions):
        return states
    return index_states(states, rows.to(states[0][-1].device, non_blocking=True))


def index_states(states: States, index: Tensor) -> States:
    return [tuple(part[index] for part in state) for state in states]


def detached(states: States) -> States:
    return [tuple(part.detach() for part in state) for state in states]


def flatten_states(states: States) -> list[Tensor]:
    return [part for state in states for part in state]


def unflatten_states(parts: Iterable[Tensor], like: States) -> States:
    """Group parts, ordered as by ``flatten_states``, by the layers of ``like``."""
    following = iter(parts)
    return [tuple(itertools.islice(following, len(state))) for state in like]


def select_states(documents: Tensor, states: States, others: States) -> States:
    """Select ``states`` where documents (S,) bool is true, else ``others``. Raises ValueError where their shapes differ."""
    given, expected = ([[tuple(part.shape) for part in state] for state in each] for each in (states, others))
    if given != expected:
        raise ValueError(f"states of continuing documents: expected shapes {expected}, by layer, got {given}")
    return [
        tuple(torch.where(documents.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(*of_layer))
        for of_layer in zip(states, others)
    ]


BOUNDARIES: dict[str, type[Boundary]] = {
    "reset": Reset,
    "leak": Leak,
    "leak_conv": LeakConv,
    "leak_scan": LeakScan,
    "carry": Carry,
    "carry_scan": CarryScan,
    "state_passing": StatePassing,
    "fitted_noise": FittedNoise,
    "state_passing_within_row": StatePassingWithinRow,
}
"""Boundary schemes by name; plugins may add to it."""
