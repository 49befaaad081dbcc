"""States between batches: kept, detached and routed to the documents that continue."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.nn.mixers import State


@dataclass
class Left:
    """What a batch left behind.

    Attributes:
        states: by layer, of the last document of each row, detached; of a row without documents anything.
        positions: (B,) int32 on the CPU, the place in its document where each row's last one goes on; -1 without documents.
        step: the optimizer step that computed them.
    """

    states: list[State]
    positions: Tensor
    step: int


class StateCarrier:
    """What each row's last document left behind, for the batch whose same row continues it: one batch for each turn of streams.

    Gradients stop here: backpropagation through time is truncated at batch boundaries.
    """

    def __init__(self) -> None:
        self.turns: dict[int, Left] = {}

    def left(self, layout: SequenceLayout, turn: int = 0) -> Left | None:
        """What the batch before of this turn left; None if nothing of it continues.

        Raises:
            ValueError: a document continues at another place than its row stopped at.
        """
        layout = on_host(layout)
        continues = layout.continues
        if not continues.any():
            return None
        if turn not in self.turns:
            raise ValueError("layout: a document continues, but no batch came before")
        rows, positions = layout.rows, self.turns[turn].positions
        if len(positions) != layout.shape[0] or not torch.equal(positions[rows[continues]], layout.offsets[continues]):
            raise ValueError(
                f"layout: documents continue at {layout.offsets[continues].tolist()} in rows {rows[continues].tolist()}, "
                f"but the rows before stopped at {positions.tolist()}"
            )
        return self.turns[turn]

    def keep(self, layout: SequenceLayout, states: list[State], turn: int = 0, step: int = 0) -> None:
        """Takes what a batch leaves, a state for each row."""
        layout = on_host(layout)
        if not layout.num_documents:
            self.turns.pop(turn, None)
            return
        self.turns[turn] = Left(states, stops(layout), step)

    def reset(self) -> None:
        """Forgets everything."""
        self.turns.clear()

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, so that any rank can take it up; of several turns, what the rows of all left."""
        turns = [self.turns[turn] for turn in sorted(self.turns)]
        if not turns:
            return {"states": None, "positions": None}
        layers = zip(*(left.states for left in turns))
        return {
            "states": [tuple(torch.cat(parts).cpu() for parts in zip(*states)) for states in layers],
            "positions": torch.cat([left.positions for left in turns]),
            "turns": [(turn, len(left.positions), left.step) for turn, left in sorted(self.turns.items())],
        }

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.turns.clear()
        if state_dict["positions"] is None:
            return
        turns = state_dict.get("turns", [(0, len(state_dict["positions"]), 0)])
        sizes = [rows for _, rows, _ in turns]
        positions = state_dict["positions"].cpu().split(sizes)
        layers = [[part.to(device).split(sizes) for part in state] for state in state_dict["states"]]
        for i, (turn, _, step) in enumerate(turns):
            states: list[State] = [tuple(part[i] for part in layer) for layer in layers]
            self.turns[turn] = Left(states, positions[i], step)


class Moments:
    """Mean and variance of each component of states over the rows of all batches, each weighing ``memory`` times the next."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.batches = 0
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []

    def add(self, states: list[State]) -> None:
        """Takes the states of a batch's rows, by layer (B, ...)."""
        parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for state in states for part in state]
        first, second = [part.mean(0) for part in parts], [part.square().mean(0) for part in parts]
        if not self.batches:
            self.first, self.second = ([torch.zeros_like(part) for part in first] for _ in range(2))
        torch._foreach_lerp_(self.first, first, 1 - self.memory)
        torch._foreach_lerp_(self.second, second, 1 - self.memory)
        self.batches += 1

    def draw(self, like: list[State], generator: torch.Generator) -> list[State]:
        """Independent normal noise of these moments in the shapes of ``like``."""
        seen = 1 - self.memory**self.batches
        moments = iter(zip(self.first, self.second))
        drawn: list[State] = []
        for state in like:
            parts = []
            for part in state:
                mean, square = (moment / seen for moment in next(moments))
                noise = torch.randn(part.shape, dtype=mean.dtype, device=part.device, generator=generator)
                parts.append((mean + (square - mean.square()).clamp(min=0).sqrt() * noise).to(part.dtype))
            drawn.append(tuple(parts))
        return drawn

    def state_dict(self) -> dict[str, Any]:
        first, second = ([part.cpu() for part in parts] for parts in (self.first, self.second))
        return {"batches": self.batches, "first": first, "second": second}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self.batches = state_dict["batches"]
        self.first, self.second = ([part.to(device) for part in state_dict[name]] for name in ("first", "second"))


def last_of_rows(layout: SequenceLayout) -> Tensor:
    """(B,) the last document of each row; of one without documents any. From ``starts`` alone: a CUDA graph computes it anew."""
    rows, row_length = layout.shape
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=layout.device) * row_length
    return (torch.searchsorted(layout.starts, ends) - 1).clamp(min=0)


def on_host(layout: SequenceLayout) -> SequenceLayout:
    """The layout on the CPU: what it was moved from, which takes no wait for a GPU, or a copy."""
    while layout.device.type != "cpu":
        layout = layout.origin or layout.to("cpu")
    return layout


def stops(layout: SequenceLayout) -> Tensor:
    """(B,) int32, where in its document each row's last one stops; -1 without documents. Of at least one document."""
    last = last_of_rows(layout)
    here = layout.rows[last] == torch.arange(layout.shape[0], device=layout.device)
    return torch.where(here, (layout.offsets + layout.lengths)[last], -1).to(torch.int32)


def rows_of(layout: SequenceLayout) -> Tensor:
    """(S,) the row of each document; of one that is absent from a CUDA graph's layout any. As ``last_of_rows``."""
    rows, row_length = layout.shape
    return (layout.starts // row_length).clamp(max=rows - 1)


def take(states: list[State], index: Tensor) -> list[State]:
    """By layer, the states of these documents or rows."""
    return [tuple(part[index] for part in state) for state in states]


def detached(states: list[State]) -> list[State]:
    return [tuple(part.detach() for part in state) for state in states]


def flat(states: list[State]) -> list[Tensor]:
    return [part for state in states for part in state]


def like(states: list[State], parts: Iterable[Tensor]) -> list[State]:
    """The parts, ordered as in ``flat``, in layers as those of ``states``."""
    following = iter(parts)
    return [tuple(itertools.islice(following, len(state))) for state in states]


def where(documents: Tensor, states: list[State], others: list[State]) -> list[State]:
    """By layer, the first states of the documents (S,) bool that are marked, the second ones of the others.

    Raises:
        ValueError: they differ in layers or shapes; PyTorch would repeat a smaller one.
    """
    given, expected = ([[tuple(part.shape) for part in state] for state in each] for each in (states, others))
    if given != expected:
        raise ValueError(f"states of continuing documents: expected shapes {expected}, by layer, got {given}")
    return [
        tuple(torch.where(documents.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(*of_layer))
        for of_layer in zip(states, others)
    ]
