"""Boundary schemes: what crosses from one document to the next. B rows, S documents.

Constructors' arguments, all with defaults, are the keys of ``trainer.boundary_options``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as flatten_states
from torch.utils._pytree import tree_map as map_states
from torch.utils._pytree import tree_structure, tree_unflatten

from packmamba.config.load import need
from packmamba.data.batch import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.nn.mixers import State

States = list[State]  # by layer, tensors of documents (S, ...) or rows (B, ...)


class Boundary:
    """Start every document from zero, or from the learned states."""

    continues = False  # rows of a batch continue those of the one before
    as_trained = True  # validate a second time, as in training
    stateful = False
    sharded = True  # works with trainer.strategy=fsdp2
    least_rows = 1
    step = 0  # of the next batches, from 0

    @property
    def name(self) -> str:
        return next(
            (name for name, scheme in BOUNDARIES.items() if type(self) is scheme),
            type(self).__name__,
        )

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Return the layouts of convolutions and of recurrences."""
        return layout, layout

    def hidden(self, model: MambaLM, batch: PackedBatch, **states: Any) -> Any:
        """Compute the head's input (B, L, d_model)."""
        conv, ssm = self.layouts(batch.layout)
        return model(
            batch.tokens,
            layout=batch.layout,
            conv_layout=conv,
            ssm_layout=ssm,
            return_hidden=True,
            **states,
        )

    def logits(self, model: MambaLM, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute logits (1, L, V) of one row."""
        layout = SequenceLayout.from_lengths([list(lengths)], tokens.shape[1]).to(tokens.device)
        return model.lm_head(self.hidden(model, PackedBatch(tokens, tokens, tokens >= 0, layout)))

    def reset(self) -> None:
        """Forget all batches."""

    def measures(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of a checkpoint, on the CPU."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        pass


class Reset(Boundary):
    """Start every document from zero (the paper)."""

    as_trained = False


class Leak(Boundary):
    """Read each row as one document (naive packing)."""

    convolution = recurrence = True

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        return (
            layout.flow() if self.convolution else layout,
            layout.flow() if self.recurrence else layout,
        )


class LeakConv(Leak):
    """Leak in convolutions alone."""

    recurrence = False


class LeakScan(Leak):
    """Leak in recurrences alone."""

    convolution = False


class StatefulBoundary(Boundary):
    """Start documents from detached final states of earlier batches' rows (truncated backpropagation through time).

    CUDA graphs replay ``forward``, which reads ``shape``, ``starts`` and ``offsets`` of a layout alone.
    """

    stateful = True
    sharded = False
    # Return a state for each row (B, ...), detached; from those, for each document (S, ...).
    incoming: Callable[[MambaLM, PackedBatch], States]
    initial_states: Callable[[MambaLM, SequenceLayout, States], States]
    # Take the final state of each row's last document (B, ...), any for an empty row.
    store: Callable[[PackedBatch, States], None]

    def forward(
        self, model: MambaLM, batch: PackedBatch, incoming: States
    ) -> tuple[Tensor, States]:
        states = self.initial_states(model, batch.layout, incoming)
        hidden, final = super().hidden(model, batch, states=states, return_states=True)
        final = map_states(Tensor.detach, final)
        return hidden, index_states(
            final, last_documents(batch.layout)
        ) if batch.layout.num_documents else final

    def hidden(self, model: MambaLM, batch: PackedBatch, **_: Any) -> Tensor:
        hidden, final = self.forward(model, batch, self.incoming(model, batch))
        self.store(batch, final)
        return hidden


class RowStates(NamedTuple):
    states: States
    positions: Tensor  # (B,) int32 on the CPU, where it ended; -1 without a document
    step: int


class Carry(StatefulBoundary):
    """Continue a document that a row cut from its own state."""

    continues = True

    def __init__(self) -> None:
        self.stored: dict[int, RowStates] = {}
        self.age: int | None = None

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        fresh, layout = (
            map_states(Tensor.detach, model.start_states(batch.layout.shape[0])),
            on_host(batch.layout),
        )
        rows, offsets = layout.rows[layout.continues], layout.offsets[layout.continues]
        if not len(rows):
            return fresh
        stored = self.stored.get(batch.turn)
        if (
            stored is None
            or len(stored.positions) != layout.shape[0]
            or (stored.positions[rows] != offsets).any()
        ):
            expected = [] if stored is None else stored.positions.tolist()
            given = dict(zip(rows.tolist(), offsets.tolist()))
            raise ValueError(f"layout: expected documents to continue at {expected}, got {given}")
        self.age = self.step - stored.step
        return self.exchange(stored, fresh)

    def exchange(self, stored: RowStates, fresh: States) -> States:
        """Return what each row's continuing document starts from (B, ...)."""
        return stored.states

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        fresh = model.start_states(layout.num_documents)
        return select_states(
            layout.continues, self.continued(index_states(incoming, row_of(layout)), fresh), fresh
        )

    def continued(self, incoming: States, fresh: States) -> States:
        """Return what continuing documents start from (S, ...)."""
        return incoming

    def store(self, batch: PackedBatch, final: States) -> None:
        self.stored.pop(batch.turn, None)
        layout = on_host(batch.layout)
        if layout.num_documents:
            self.stored[batch.turn] = RowStates(final, end_positions(layout), self.step)

    def measures(self) -> dict[str, float]:
        parts = (part for stored in self.stored.values() for part in flatten_states(stored.states))
        age = {} if self.age is None else {"state_age_steps": self.age}
        return {"state_bytes": sum(part.nbytes for part in parts), **age}

    def reset(self) -> None:
        self.stored.clear()

    def state_dict(self) -> dict[str, Any]:
        stored = {
            turn: (move_states(row.states, "cpu"), *row[1:]) for turn, row in self.stored.items()
        }
        return {"stored": stored, "age": self.age}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.age = state_dict["age"]
        stored = state_dict["stored"].items()
        self.stored = {
            turn: RowStates(move_states(states, device), *rest) for turn, (states, *rest) in stored
        }


class CarryScan(Carry):
    """Continue the state of the recurrence; start the convolution fresh."""

    def continued(self, incoming: States, fresh: States) -> States:
        return [(*new[:-1], old[-1]) for old, new in zip(incoming, fresh)]


class StatePassing(Carry):
    """Start a continuing document from another stream's state (arXiv 2507.02782), in a ring sorted by position."""

    least_rows = 2

    def exchange(self, stored: RowStates, fresh: States) -> States:
        (rows,) = torch.where(stored.positions >= 0)
        if len(rows) < 2:
            return fresh
        rows = rows[stored.positions[rows].argsort(stable=True)]
        ring = torch.cat([rows[::2], rows[1::2].flip(0)])
        return index_states(
            stored.states, torch.arange(len(stored.positions)).index_copy(0, ring, ring.roll(1))
        )


class FittedNoise(Carry):
    """Start a continuing document from noise with the states' mean and variance (arXiv 2507.02782).

    ``memory``: decay of the moments' exponential average.
    """

    generator: torch.Generator | None
    moments: list[Tensor]

    def __init__(self, memory: float = 0.99) -> None:
        super().__init__()
        need(0 <= memory < 1, "memory", "at least 0 and below 1", memory)
        self.memory = memory
        self.reset()

    def exchange(self, stored: RowStates, fresh: States) -> States:
        generator = self._generator(stored.states[0][-1].device)
        debias, drawn = 1 - self.memory**self.batches, []
        parts = flatten_states(stored.states)
        for part, first, second in zip(parts, self.moments, self.moments[len(parts) :]):
            mean, square = first / debias, second / debias
            noise = torch.randn(
                part.shape, dtype=mean.dtype, device=part.device, generator=generator
            )
            drawn.append(
                (mean + (square - mean.square()).clamp(min=0).sqrt() * noise).to(part.dtype)
            )
        return unflatten_states(drawn, stored.states)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self.generator = torch.Generator(device).manual_seed(torch.initial_seed() + rank)
        return self.generator

    def store(self, batch: PackedBatch, final: States) -> None:
        super().store(batch, final)
        if batch.turn not in self.stored:
            return
        parts = flatten_states(
            index_states(final, torch.where(self.stored[batch.turn].positions >= 0)[0])
        )
        parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        moments = [part.mean(0) for part in parts] + [part.square().mean(0) for part in parts]
        self.moments = self.moments or [torch.zeros_like(moment) for moment in moments]
        torch._foreach_lerp_(self.moments, moments, 1 - self.memory)
        self.batches += 1

    def reset(self) -> None:
        super().reset()
        self.batches, self.moments, self.generator = 0, [], None

    def state_dict(self) -> dict[str, Any]:
        moments, half = [moment.cpu() for moment in self.moments], len(self.moments) // 2
        generator = None if self.generator is None else self.generator.get_state()
        saved = {"moments": (self.batches, moments[:half], moments[half:]), "generator": generator}
        return super().state_dict() | saved

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        super().load_state_dict(state_dict, device)
        self.batches, first, second = state_dict["moments"]
        self.moments = [moment.to(device) for moment in first + second]
        if state_dict["generator"] is not None:
            self._generator(device).set_state(state_dict["generator"].cpu())


class StatePassingWithinRow(StatefulBoundary):
    """Start each document but its row's first from a row's final state in the previous batch."""

    stored: States | None = None

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        rows = batch.layout.shape[0]
        if self.stored is None:
            return map_states(Tensor.detach, model.start_states(rows))
        return index_states(self.stored, torch.arange(rows) % len(self.stored[0][-1]))

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        rows, row_length = row_of(layout), layout.shape[1]
        first = torch.searchsorted(layout.starts, rows * row_length)
        place = torch.arange(layout.num_documents, device=layout.device) - first
        passed = index_states(incoming, (rows + place) % layout.shape[0])
        return select_states(place > 0, passed, model.start_states(layout.num_documents))

    def store(self, batch: PackedBatch, final: States) -> None:
        if batch.layout.num_documents:
            self.stored = index_states(
                final, torch.where(end_positions(on_host(batch.layout)) >= 0)[0]
            )

    def reset(self) -> None:
        self.stored = None

    def state_dict(self) -> dict[str, Any]:
        return {"stored": self.stored and move_states(self.stored, "cpu")}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.stored = state_dict["stored"] and move_states(state_dict["stored"], device)


def on_host(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout on the CPU, without waiting if it came from there."""
    while layout.device.type != "cpu":
        layout = layout.origin or layout.to("cpu")
    return layout


def last_documents(layout: SequenceLayout) -> Tensor:
    """Return each row's last document (B,)."""
    rows, row_length = layout.shape
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=layout.device) * row_length
    return (torch.searchsorted(layout.starts, ends) - 1).clamp(min=0)


def end_positions(layout: SequenceLayout) -> Tensor:
    """Return where each row's last document ends (B,), -1 for an empty row."""
    last = last_documents(layout)
    here = layout.rows[last] == torch.arange(layout.shape[0], device=layout.device)
    return torch.where(here, (layout.offsets + layout.lengths)[last], -1).to(torch.int32)


def row_of(layout: SequenceLayout) -> Tensor:
    """Return each document's row (S,)."""
    return (layout.starts // layout.shape[1]).clamp(max=layout.shape[0] - 1)


def index_states(states: States, index: Tensor) -> States:
    return map_states(lambda part: part[index.to(part.device, non_blocking=True)], states)


def move_states(states: States, device: torch.device | str) -> States:
    return map_states(lambda part: part.to(device), states)


def unflatten_states(parts: Iterable[Tensor], like: States) -> States:
    return tree_unflatten(parts, tree_structure(like))


def select_states(documents: Tensor, states: States, others: States) -> States:
    """Select ``states`` where documents (S,) is true, else ``others``."""
    return map_states(
        lambda a, b: torch.where(documents.view(-1, *(1,) * (a.dim() - 1)), a, b), states, others
    )


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
