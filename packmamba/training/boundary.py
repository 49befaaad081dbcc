"""Boundary schemes: what crosses from one document to the next.

A scheme is two choices, and no kernel knows of it: the layout that each operator is given, and the
state that each document starts from. Documents a and b share a row, b goes on in the next batch:

                     batch 1    batch 2     convolution and recurrence of the second b start from
    reset            aaabbbbb | bbbcccc.    zero: a piece is a document of its own (the paper)
    leak             aaabbbbb | bbbcccc.    zero, but b reads a's end and c reads b's end
    carry            aaabbbbb | bbbcccc.    the state of b's own first part, without gradient
    state_passing    aaabbbbb | bbbcccc.    another stream's state (arXiv 2507.02782)
    fitted_noise     aaabbbbb | bbbcccc.    noise with the mean and variance of such states

``leak_conv``, ``leak_scan`` and ``carry_scan`` do so in one of the two operators alone.
``state_passing_within_row`` starts every document but its row's first from a state of the previous
batch: what a leak brings in, without its being the neighbour's.

States cost memory for each row and layer; only the last batch's are kept (where streams take turns,
of each turn), and no gradient flows into them (truncated backpropagation through time).

A constructor's arguments, all with defaults, are the keys of ``trainer.boundary_options``.
Shapes: B rows, S documents.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves as flatten_states
from torch.utils._pytree import tree_map as map_states
from torch.utils._pytree import tree_map_only, tree_structure, tree_unflatten

from packmamba.config.load import need
from packmamba.data.batch import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.nn.mixers import State

# By layer, a tuple of tensors whose first dimension counts documents (S, ...) or rows (B, ...).
States = list[State]
# Final states of a batch's rows (B, ...); where their last
# documents ended (B,), -1 without one; and at which step.
RowStates = tuple[States, Tensor, int]


class Boundary:
    """Start every document from zero. A scheme overrides what differs.

    Attributes, of the class but for ``step``, since data is planned before there is an instance:
        continues: row b of a batch continues row b of the batch before; needs
            ``data.strategy=concat_split``.
        as_trained: validate a second time, with documents arranged and read as in training.
        stateful: the scheme keeps states between batches; see StatefulBoundary.
        sharded: the scheme works with ``trainer.strategy=fsdp2``.
        least_rows: minimum rows of a batch.
        step: number of the optimizer step, from 0, that the next batches belong to.
    """

    continues = False
    as_trained = True
    stateful = False
    sharded = True
    least_rows = 1
    step = 0

    @property
    def name(self) -> str:
        """Return the scheme's key in BOUNDARIES, or the class's name."""
        names = {scheme: name for name, scheme in BOUNDARIES.items()}
        # The class itself: a subclass of a scheme, as a plugin's, has a name of its own.
        return names.get(type(self), type(self).__name__)

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Return the layouts of convolutions and of recurrences.

        Under ``trainer.cuda_graphs`` the number of documents must not depend on the batch's
        content: return ``layout`` or ``layout.flow()``, which has one prepared there.
        """
        return layout, layout

    def hidden(self, model: MambaLM, batch: PackedBatch, **states: Any) -> Any:
        """Compute the head's input (B, L, d_model)."""
        conv_layout, ssm_layout = self.layouts(batch.layout)
        layouts = {"layout": batch.layout, "conv_layout": conv_layout, "ssm_layout": ssm_layout}
        return model(batch.tokens, **layouts, return_hidden=True, **states)

    def logits(self, model: MambaLM, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute logits (1, L, V) of one row of documents of these lengths."""
        layout = SequenceLayout.from_lengths([list(lengths)], tokens.shape[1]).to(tokens.device)
        # Only hidden states are computed, so targets and mask are not read.
        batch = PackedBatch(tokens=tokens, targets=tokens, loss_mask=tokens >= 0, layout=layout)
        return model.lm_head(self.hidden(model, batch))

    def reset(self) -> None:
        """Forget all batches, before a training or a validation."""

    def measures(self) -> dict[str, float]:
        """Return numbers to log and record."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of a checkpoint, on the CPU."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore ``state_dict``'s result on a device."""


class Reset(Boundary):
    """Start every document, or piece of one, from zero (the paper)."""

    as_trained = False  # every run is validated so


class Leak(Boundary):
    """Read each row as one document (naive packing)."""

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Merge each row's documents."""
        merged = layout.flow()
        return merged, merged


class LeakConv(Boundary):
    """Leak in convolutions alone."""

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Merge each row's documents in the convolution."""
        return layout.flow(), layout


class LeakScan(Boundary):
    """Leak in recurrences alone."""

    def layouts(self, layout: SequenceLayout) -> tuple[SequenceLayout, SequenceLayout]:
        """Merge each row's documents in the recurrence."""
        return layout, layout.flow()


class StatefulBoundary(Boundary):
    """Start documents from detached final states of earlier batches' rows.

    ``layouts`` must hold the documents of the batch's own layout, since each of these starts from a
    state: a scheme cannot both carry states and merge documents.

    CUDA graphs replay ``forward`` between ``incoming`` and ``store``: it and ``initial_states`` do
    tensor operations alone, and read of a layout only ``shape``, ``starts`` and ``offsets``.

    Attributes:
        SAVED: names of the attributes that a checkpoint holds: tensors, plain values, and lists,
            tuples and mappings of them.
    """

    stateful = True
    sharded = False
    SAVED: tuple[str, ...] = ("stored",)

    def __init__(self) -> None:
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes in ``SAVED``, on the CPU."""
        return {name: tree_map_only(Tensor, Tensor.cpu, getattr(self, name)) for name in self.SAVED}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore them on a device, so that a resumed run continues the same documents."""
        for name in self.SAVED:
            setattr(self, name, tree_map_only(Tensor, lambda part: part.to(device), state_dict[name]))

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        """Return a state for each row (B, ...), detached."""
        raise NotImplementedError

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        """Return the state that each document starts from (S, ...)."""
        raise NotImplementedError

    def store(self, batch: PackedBatch, final: States) -> None:
        """Take the final state of each row's last document (B, ...), any for an empty row."""
        raise NotImplementedError

    def forward(self, model: MambaLM, batch: PackedBatch, incoming: States) -> tuple[Tensor, States]:
        """Compute the head's input, and the final state of each row's last document, detached."""
        states = self.initial_states(model, batch.layout, incoming)
        hidden, final = super().hidden(model, batch, states=states, return_states=True)
        final = map_states(Tensor.detach, final)
        # From documents (S, ...) to rows (B, ...).
        if batch.layout.num_documents:
            final = index_states(final, last_documents(batch.layout))
        return hidden, final

    def hidden(self, model: MambaLM, batch: PackedBatch, **_: Any) -> Tensor:
        """Compute the head's input from stored states, and store the final ones."""
        hidden, final = self.forward(model, batch, self.incoming(model, batch))
        self.store(batch, final)
        return hidden


class Carry(StatefulBoundary):
    """Continue a document that a row's end cut from its own state."""

    continues = True
    SAVED: tuple[str, ...] = ("stored", "age")

    def reset(self) -> None:
        """Forget all stored states."""
        self.stored: dict[int, RowStates] = {}  # by turn
        self.age: int | None = None  # steps since the states that were last used ended

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        """Return the stored states, exchanged; fresh ones if no document of the batch continues."""
        fresh = map_states(Tensor.detach, model.start_states(batch.layout.shape[0]))
        layout = on_host(batch.layout)
        continuing = layout.continues
        if not continuing.any():
            return fresh
        # A continuing document must begin where the last one of its row ended, one batch before.
        rows = layout.rows[continuing].tolist()
        offsets = layout.offsets[continuing].tolist()
        nothing_stored: RowStates = (fresh, torch.empty(0), 0)  # refused below: no row has an end
        states, positions, stored_at = self.stored.get(batch.turn, nothing_stored)
        ends = positions.tolist()
        follows = len(ends) == layout.shape[0] and [ends[row] for row in rows] == offsets
        need(follows, "layout", f"documents to continue at {ends}", dict(zip(rows, offsets)))
        self.age = self.step - stored_at
        return self.exchange(states, positions, fresh)

    def exchange(self, states: States, positions: Tensor, fresh: States) -> States:
        """Return what each row's continuing document starts from (B, ...).

        Called outside of CUDA graphs: what needs the
        host, as a look-up in stored batches, goes here.
        """
        return states

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        """Give continuing documents the incoming state of their row, others a fresh one."""
        # A plugin's mixer may learn its start states: fresh ones have gradients, ``incoming`` none.
        fresh = model.start_states(layout.num_documents)
        continued = self.continued(index_states(incoming, row_of(layout)), fresh)
        return select_states(layout.continues, continued, fresh)

    def continued(self, incoming: States, fresh: States) -> States:
        """Return what continuing documents start from (S, ...).

        Part of CUDA graphs, which replay it: tensor operations only.
        """
        return incoming

    def store(self, batch: PackedBatch, final: States) -> None:
        """Store the rows' final states under the batch's turn, in place of those that it used."""
        # A batch without documents leaves its turn nothing to continue.
        self.stored.pop(batch.turn, None)
        layout = on_host(batch.layout)
        if layout.num_documents:
            self.stored[batch.turn] = (final, end_positions(layout), self.step)

    def measures(self) -> dict[str, float]:
        """Return the bytes of stored states, and the steps since the last used ones ended."""
        stored = flatten_states([states for states, *_ in self.stored.values()])
        age = {} if self.age is None else {"state_age_steps": self.age}
        return {"state_bytes": sum(tensor.nbytes for tensor in stored), **age}


class CarryScan(Carry):
    """Continue the state of the recurrence; start the convolution fresh."""

    def continued(self, incoming: States, fresh: States) -> States:
        """Keep of each layer the recurrence's incoming state, its last; take fresh ones for the rest."""
        return [(*fresh_layer[:-1], incoming_layer[-1]) for incoming_layer, fresh_layer in zip(incoming, fresh)]


class StatePassing(Carry):
    """Start a continuing document from another stream's state (arXiv 2507.02782).

    Streams form a ring, sorted by position, so that a state comes from a document of like length.
    """

    least_rows = 2

    def exchange(self, states: States, positions: Tensor, fresh: States) -> States:
        """Hand each row its predecessor's state in the ring, fresh ones if it has no other row."""
        # Rows that held a document, sorted by its position. The ring goes up by every second row
        # and back down by the others: neighbours are at like positions.
        (rows,) = torch.where(positions >= 0)
        if len(rows) < 2:
            return fresh
        rows = rows[positions[rows].argsort(stable=True)]
        ring = torch.cat([rows[::2], rows[1::2].flip(0)])
        # Rows in the ring take their predecessor's state, empty rows keep their own.
        source = torch.arange(len(positions), device=rows.device).index_copy(0, ring, ring.roll(1))
        return index_states(states, source)


class FittedNoise(Carry):
    """Start a continuing document from noise with the states' moments (arXiv 2507.02782).

    Attributes:
        MEMORY: decay of the exponential average of mean and mean square, by batch.
    """

    SAVED = ("stored", "age", "batches", "means", "squares")
    MEMORY = 0.99

    def reset(self) -> None:
        """Forget stored states and moments; the generator is seeded again when first used."""
        super().reset()
        self.batches = 0
        self.means: list[Tensor] = []
        self.squares: list[Tensor] = []
        self.generator: torch.Generator | None = None

    def exchange(self, states: States, positions: Tensor, fresh: States) -> States:
        """Draw each element from a normal with the running mean and variance of stored states."""
        generator = self._generator(states[0][-1].device)
        # As Adam does: averages that begin at zero are too small by this factor.
        debias = 1 - self.MEMORY**self.batches
        drawn = []
        for tensor, mean, square in zip(flatten_states(states), self.means, self.squares):
            mean = mean / debias
            variance = (square / debias - mean.square()).clamp(min=0)
            like_mean = {"dtype": mean.dtype, "device": tensor.device}
            noise = torch.randn(tensor.shape, generator=generator, **like_mean)
            drawn.append((mean + variance.sqrt() * noise).to(tensor.dtype))
        return unflatten_states(drawn, states)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self.generator is None:
            # Ranks draw different noise.
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            self.generator = torch.Generator(device).manual_seed(torch.initial_seed() + rank)
        return self.generator

    def store(self, batch: PackedBatch, final: States) -> None:
        """Store final states, and add their mean and mean square over rows to the averages."""
        super().store(batch, final)
        if batch.turn not in self.stored:
            return
        # Rows that hold a document. Averages are float32 even of 16-bit states.
        _, positions, _ = self.stored[batch.turn]
        (rows,) = torch.where(positions >= 0)
        held = flatten_states(index_states(final, rows))
        states = [state.to(torch.promote_types(state.dtype, torch.float32)) for state in held]
        if not self.means:
            self.means = [torch.zeros_like(state[0]) for state in states]
            self.squares = [torch.zeros_like(state[0]) for state in states]
        weight = 1 - self.MEMORY
        torch._foreach_lerp_(self.means, [state.mean(0) for state in states], weight)
        torch._foreach_lerp_(self.squares, [state.square().mean(0) for state in states], weight)
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Add the generator's state."""
        return super().state_dict() | {"generator": self.generator and self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        """Restore the generator too, so that a resumed run draws the same noise."""
        super().load_state_dict(state_dict, device)
        if state_dict["generator"] is not None:
            self._generator(device).set_state(state_dict["generator"].cpu())


class StatePassingWithinRow(StatefulBoundary):
    """Start each document but its row's first from a row's final state in the previous batch."""

    def reset(self) -> None:
        """Forget the stored states."""
        self.stored: States | None = None  # (rows that held a document, ...)

    def incoming(self, model: MambaLM, batch: PackedBatch) -> States:
        """Return the stored rows' states, repeated to the batch's rows; fresh ones at first."""
        rows = batch.layout.shape[0]
        if self.stored is None:
            return map_states(Tensor.detach, model.start_states(rows))
        # Empty rows were not stored, so the previous
        # batch may have fewer states than this one rows.
        return index_states(self.stored, torch.arange(rows) % len(self.stored[0][-1]))

    def initial_states(self, model: MambaLM, layout: SequenceLayout, incoming: States) -> States:
        """Pass document i of row r the state of row r + i; a row's first document starts fresh."""
        # place: a document's number in its row. At place i it reads the state of row r + i.
        rows = row_of(layout)
        first_document = torch.searchsorted(layout.starts, rows * layout.shape[1])
        place = torch.arange(layout.num_documents, device=layout.device) - first_document
        passed = index_states(incoming, (rows + place) % layout.shape[0])
        return select_states(place > 0, passed, model.start_states(layout.num_documents))

    def store(self, batch: PackedBatch, final: States) -> None:
        """Store the final states of the rows that held a document."""
        if batch.layout.num_documents:
            (rows,) = torch.where(end_positions(on_host(batch.layout)) >= 0)
            self.stored = index_states(final, rows)


def on_host(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout on the CPU, without waiting if it came from there."""
    while layout.device.type != "cpu":
        layout = layout.origin or layout.to("cpu")
    return layout


def last_documents(layout: SequenceLayout) -> Tensor:
    """Return each row's last document (B,)."""
    rows, row_length = layout.shape
    # The last document that starts before a row's end. An empty row gets an earlier row's
    # document, whose state nobody reads.
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=layout.device) * row_length
    return (torch.searchsorted(layout.starts, ends) - 1).clamp(min=0)


def end_positions(layout: SequenceLayout) -> Tensor:
    """Return where each row's last document ends (B,), -1 for an empty row."""
    last = last_documents(layout)
    holds_document = layout.rows[last] == torch.arange(layout.shape[0], device=layout.device)
    return torch.where(holds_document, (layout.offsets + layout.lengths)[last], -1).to(torch.int32)


def row_of(layout: SequenceLayout) -> Tensor:
    """Return each document's row (S,)."""
    # Absent documents of a static batch (cuda_graphs) start behind every row.
    return (layout.starts // layout.shape[1]).clamp(max=layout.shape[0] - 1)


def index_states(states: States, index: Tensor) -> States:
    """Select documents or rows of every tensor; ``index`` may lie on the CPU."""
    return map_states(lambda part: part[index.to(part.device, non_blocking=True)], states)


def unflatten_states(parts: Iterable[Tensor], like: States) -> States:
    """Build states of the structure of ``like`` from ``flatten_states``' tensors."""
    return tree_unflatten(parts, tree_structure(like))


def select_states(documents: Tensor, states: States, others: States) -> States:
    """Select ``states`` where ``documents`` (S,) is True, else ``others``."""

    def select(state: Tensor, other: Tensor) -> Tensor:
        return torch.where(documents.view(-1, *(1,) * (state.dim() - 1)), state, other)

    return map_states(select, states, others)


# Schemes that leak by design are listed in packmamba.lab.report.aggregate.LEAKS, too.
# Values of ``trainer.boundary``; plugins may add to it.
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
