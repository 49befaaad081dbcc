"""What crosses a document boundary, by the name that ``trainer.boundary`` takes.

A scheme is a class here, or a plugin's that adds itself to ``BOUNDARIES``. A run makes one object for training and one for
evaluation as trained; its constructor's arguments, all with defaults, are the keys of ``trainer.boundary_options``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packmamba.data.batching import PackedBatch
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM
from packmamba.nn.mixers import State
from packmamba.training.carry import StateCarrier, where


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
    """Can be replayed as a CUDA graph: what documents start from does not depend on earlier batches."""

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


class Carry(Boundary):
    """A document cut by a row's end goes on from its own state, detached; other documents start fresh."""

    continues = keeps = True
    sharded = graphs = False

    def __init__(self) -> None:
        self.carrier = StateCarrier()

    def start(self, model: MambaLM, batch: PackedBatch) -> list[State]:
        layout = batch.layout
        fresh = model.start_states(layout.num_documents)
        if not layout.continues.any():
            return fresh
        continuing = self.of_continuing(self.carrier.states(layout), fresh, layout)
        return where(layout.continues, continuing, fresh)

    def of_continuing(self, own: list[State], fresh: list[State], layout: SequenceLayout) -> list[State]:
        """What continuing documents start from, given by layer what their rows left (of others anything) and fresh states."""
        return own

    def keep(self, batch: PackedBatch, states: list[State]) -> None:
        self.carrier.keep(batch.layout, states)

    def reset(self) -> None:
        self.carrier.reset()

    def state_dict(self) -> dict[str, Any]:
        return self.carrier.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.carrier.load_state_dict(state_dict, device)


BOUNDARIES: dict[str, type[Boundary]] = {
    "reset": Reset,
    "leak": Leak,
    "leak_conv": LeakConv,
    "leak_scan": LeakScan,
    "carry": Carry,
}
