"""What crosses a document boundary, by the name that ``trainer.boundary`` takes.

A scheme is a class here, or a plugin's that adds itself to ``BOUNDARIES``. A run makes one object for training and one for
evaluation as trained; its constructor's arguments, all with defaults, are the keys of ``trainer.boundary_options``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from packmamba.data.batching import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.nn.mixers import State
from packmamba.training.carry import (
    Left,
    Moments,
    StateCarrier,
    detached,
    last_of_rows,
    on_host,
    rows_of,
    stops,
    take,
    where,
)


class Boundary:
    """Nothing crosses. A scheme says what it does otherwise, and before any work what it needs and cannot do."""

    continues = False
    """Row b of a batch goes on where row b of the one before stopped: needs data.strategy=split, in batches of whole streams."""
    as_trained = True
    """Evaluation runs once more as training does, on documents arranged as in training."""
    keeps = False
    """``keep`` is given the states that each batch leaves."""
    sharded = True
    """Works with parameters in shards (trainer.strategy=fsdp2)."""
    graphs = True
    """Can be replayed as a CUDA graph; see ``Keeping``."""
    least_rows = 1
    """Rows that a batch needs."""
    step = 0
    """The optimizer step, from 0, that batches are of."""

    @property
    def name(self) -> str:
        return next((name for name, scheme in BOUNDARIES.items() if type(self) is scheme), type(self).__name__)

    @property
    def crosses_inside_rows(self) -> bool:
        return self.as_trained and not self.continues

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Where documents start for convolutions and for recurrences."""
        return layout, layout

    def start(self, model: MambaLM, batch: PackedBatch) -> list[State] | None:
        """What the documents of these layouts start from, a state per layer; None: the mixers' start."""
        return None

    def keep(self, batch: PackedBatch, states: list[State]) -> None:
        """Takes the states that the batch's documents leave, as ``start`` has them."""

    def hidden(self, model: MambaLM, batch: PackedBatch) -> Tensor:
        """The activations of a batch (B, L, d_model) that the head makes logits from, read with this scheme."""
        conv_layout, ssm_layout = self.layouts(batch.layout)
        found = model(
            batch.tokens, layout=batch.layout, conv_layout=conv_layout, ssm_layout=ssm_layout,
            states=self.start(model, batch), return_states=self.keeps, return_hidden=True,
        )  # fmt: skip
        if not self.keeps:
            return found
        hidden, states = found
        self.keep(batch, states)
        return hidden

    def reset(self) -> None:
        """Forgets all batches, before an evaluation."""

    def measures(self) -> dict[str, float]:
        """Numbers of the scheme that a run logs and records."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this process, on the CPU."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Goes on from a checkpoint."""


class Reset(Boundary):
    """Every piece in a row starts fresh (the paper)."""

    as_trained = False  # it is what every run is evaluated with


class Leak(Boundary):
    """Each row flows as one document (what naive packing does)."""

    convolution = recurrence = True

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        return layout.flow() if self.convolution else layout, layout.flow() if self.recurrence else layout


class LeakConv(Leak):
    """Only convolutions leak."""

    recurrence = False


class LeakScan(Leak):
    """Only recurrences leak."""

    convolution = False


class Keeping(Boundary, ABC):
    """A scheme whose documents start from what the rows of earlier batches left, detached.

    ``offered`` and ``keep_rows`` know batches and look things up. What lies between, ``begin`` and the model, a CUDA graph may
    replay: operations on tensors alone, which of a layout read only ``shape``, ``starts`` and ``offsets``.
    """

    keeps = True
    sharded = False

    @abstractmethod
    def offered(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        """By layer, a state for each row (B, ...), without gradient."""

    @abstractmethod
    def begin(self, model: MambaLM, layout: SequenceLayout, offered: list[State]) -> list[State]:
        """By layer, what each document starts from (S, ...)."""

    @abstractmethod
    def keep_rows(self, batch: PackedBatch, states: list[State]) -> None:
        """Takes, by layer, what the last document of each row leaves, detached; of a row without documents anything."""

    def start(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        return self.begin(model, batch.layout, self.offered(model, batch))

    def keep(self, batch: PackedBatch, states: list[State]) -> None:
        if batch.layout.num_documents:
            states = take(detached(states), last_of_rows(batch.layout))
        self.keep_rows(batch, states)


class Inside(Boundary):
    """The half of a keeping scheme that a CUDA graph replays: from what rows are offered to what they leave."""

    keeps = True

    def __init__(self, scheme: Keeping, offered: list[State]) -> None:
        self.scheme = scheme
        self.offered = offered
        self.left: list[State] = []

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        return self.scheme.layouts(layout)

    def start(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        return self.scheme.begin(model, batch.layout, self.offered)

    def keep(self, batch: PackedBatch, states: list[State]) -> None:
        self.left = take(detached(states), last_of_rows(batch.layout))


class Carry(Keeping):
    """A document cut by a row's end goes on from its own state, detached; other documents start fresh."""

    continues = True

    def __init__(self) -> None:
        self.carrier = StateCarrier()
        self.age: int | None = None

    def offered(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        left = self.carrier.left(batch.layout, batch.turn)
        fresh = detached(model.start_states(batch.layout.shape[0]))
        if left is None:
            return fresh
        self.age = self.step - left.step
        return self.of_rows(left, fresh)

    def of_rows(self, left: Left, fresh: list[State]) -> list[State]:
        """What the rows' first documents start from if they continue, given what their rows left and fresh states (B, ...)."""
        return left.states

    def begin(self, model: MambaLM, layout: SequenceLayout, offered: list[State]) -> list[State]:
        fresh = model.start_states(layout.num_documents)
        return where(layout.continues, self.of_continuing(take(offered, rows_of(layout)), fresh, layout), fresh)

    def of_continuing(self, own: list[State], fresh: list[State], layout: SequenceLayout) -> list[State]:
        """What continuing documents start from, given by layer what their rows left (of others anything) and fresh states."""
        return own

    def keep_rows(self, batch: PackedBatch, states: list[State]) -> None:
        self.carrier.keep(batch.layout, states, batch.turn, self.step)

    def measures(self) -> dict[str, float]:
        states = (part for left in self.carrier.turns.values() for state in left.states for part in state)
        age = {} if self.age is None else {"state_age_steps": self.age}
        return {"state_bytes": sum(part.nbytes for part in states), **age}

    def reset(self) -> None:
        self.carrier.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.carrier.state_dict() | ({} if self.age is None else {"age": self.age})

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.carrier.load_state_dict(state_dict, device)
        self.age = state_dict.get("age")


class CarryScan(Carry):
    """A continuing document goes on from its own recurrence's state; its convolution starts fresh."""

    def of_continuing(self, own: list[State], fresh: list[State], layout: SequenceLayout) -> list[State]:
        return [(*new[:-1], old[-1]) for old, new in zip(own, fresh)]


class Foreign(Carry):
    """A continuing document goes on from the state that another stream left in the batch in which its own left one.

    The states change places among the rows, so that under ``carry`` and here documents start from states of the same kind: each
    row takes that of a row that stopped at nearly the same place in its document, all in one ring, so that none comes back soon.
    Where only one row has left a state, at the documents' end, it starts fresh.
    """

    least_rows = 2

    def of_rows(self, left: Left, fresh: list[State]) -> list[State]:
        (rows,) = torch.where(left.positions >= 0)
        if len(rows) < 2:
            return fresh
        rows = rows[left.positions[rows].argsort(stable=True)]
        ring = torch.cat([rows[::2], rows[1::2].flip(0)])  # up by every other one, and down by those between
        source = torch.arange(len(left.positions)).index_copy(0, ring, ring.roll(1))
        return take(left.states, source.to(left.states[0][-1].device, non_blocking=True))


class Noise(Carry):
    """A continuing document starts from normal noise with the mean and variance of each component of the states that rows left.

    Args:
        memory: how much the moments of all batches so far weigh against those of the next, between 0 and 1.
    """

    def __init__(self, memory: float = 0.99) -> None:
        super().__init__()
        self.moments = Moments(memory)
        self.generator: torch.Generator | None = None

    def of_rows(self, left: Left, fresh: list[State]) -> list[State]:
        return self.moments.draw(left.states, self._generator(left.states[0][-1].device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self.generator = torch.Generator(device).manual_seed(torch.initial_seed() + rank)
        return self.generator

    def keep_rows(self, batch: PackedBatch, states: list[State]) -> None:
        super().keep_rows(batch, states)
        if batch.layout.num_documents:
            (rows,) = torch.where(self.carrier.turns[batch.turn].positions >= 0)
            whole = len(rows) == batch.layout.shape[0]
            self.moments.add(states if whole else take(states, rows.to(batch.layout.device, non_blocking=True)))

    def reset(self) -> None:
        super().reset()
        self.moments = Moments(self.moments.memory)
        self.generator = None

    def state_dict(self) -> dict[str, Any]:
        generator = None if self.generator is None else self.generator.get_state()
        return {**super().state_dict(), "moments": self.moments.state_dict(), "generator": generator}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        super().load_state_dict(state_dict, device)
        self.moments.load_state_dict(state_dict["moments"], device)
        if state_dict["generator"] is not None:
            self._generator(device).set_state(state_dict["generator"].cpu())


class ForeignHeads(Keeping):
    """Documents that follow another in their row start from states that rows of the batch before left: the documents into which
    ``leak`` lets something, but what it is comes from others, without gradient."""

    def __init__(self) -> None:
        self.left: list[State] | None = None

    def offered(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        rows = batch.layout.shape[0]
        if self.left is None:
            return detached(model.start_states(rows))
        left = self.left[0][-1]
        return self.left if len(left) == rows else take(self.left, torch.arange(rows, device=left.device) % len(left))

    def begin(self, model: MambaLM, layout: SequenceLayout, offered: list[State]) -> list[State]:
        rows, row_length = rows_of(layout), layout.shape[1]
        first = torch.searchsorted(layout.starts, rows * row_length)
        place = torch.arange(layout.num_documents, device=layout.device) - first
        source = (rows + place) % layout.shape[0]
        return where(place > 0, take(offered, source), model.start_states(layout.num_documents))

    def keep_rows(self, batch: PackedBatch, states: list[State]) -> None:
        if not batch.layout.num_documents:
            return
        (rows,) = torch.where(stops(on_host(batch.layout)) >= 0)
        whole = len(rows) == batch.layout.shape[0]
        self.left = states if whole else take(states, rows.to(batch.layout.device, non_blocking=True))

    def reset(self) -> None:
        self.left = None

    def state_dict(self) -> dict[str, Any]:
        return {"left": None if self.left is None else [tuple(part.cpu() for part in state) for state in self.left]}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        left = state_dict["left"]
        self.left = None if left is None else [tuple(part.to(device) for part in state) for state in left]


BOUNDARIES: dict[str, type[Boundary]] = {
    "reset": Reset,
    "leak": Leak,
    "leak_conv": LeakConv,
    "leak_scan": LeakScan,
    "carry": Carry,
    "carry_scan": CarryScan,
    "foreign": Foreign,
    "noise": Noise,
    "foreign_heads": ForeignHeads,
}
