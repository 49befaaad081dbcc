"""States between batches: kept, detached and routed to the documents that continue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.nn.mixers import State


class StateCarrier:
    """What each row's last document left behind, for the batch whose same row continues it.

    Gradients stop here: backpropagation through time is truncated at batch boundaries.
    """

    def __init__(self) -> None:
        self._states: list[State] | None = None  # per layer, one state per row
        self._positions: Tensor | None = None  # (B,) int32, the place in its document where each row's last one goes on

    def states(self, layout: SequenceLayout) -> list[State]:
        """By layer, for each document what its row's last one left.

        Raises:
            ValueError: a document continues at another place than its row stopped at.
        """
        rows, continues = layout.rows, layout.continues
        if self._positions is None or self._states is None:
            raise ValueError("layout: a document continues, but no batch came before")
        if len(self._positions) != layout.shape[0] or not torch.equal(
            self._positions[rows[continues]], layout.offsets[continues]
        ):
            raise ValueError(
                f"layout: documents continue at {layout.offsets[continues].tolist()} in rows {rows[continues].tolist()}, "
                f"but the rows before stopped at {self._positions.tolist()}"
            )
        return [tuple(part[rows] for part in state) for state in self._states]

    def keep(self, layout: SequenceLayout, states: list[State]) -> None:
        """Takes the batch's final states, of the last document of each row."""
        if not layout.num_documents:
            self.reset()
            return
        rows = torch.arange(layout.shape[0], dtype=torch.int32, device=layout.device)
        last = torch.searchsorted(layout.rows, rows, right=True) - 1
        # A row without documents has nothing to go on with: its place, -1, is never a continuation's.
        last = last.clamp(min=0)
        here = layout.rows[last] == rows
        self._states = [tuple(part.detach()[last] for part in state) for state in states]
        self._positions = torch.where(here, (layout.offsets + layout.lengths)[last], -1)

    def reset(self) -> None:
        """Forgets everything."""
        self._states, self._positions = None, None

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, so that any rank can take it up."""
        return {"states": _to(self._states, "cpu"), "positions": _to(self._positions, "cpu")}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        self._states, self._positions = _to(state_dict["states"], device), _to(state_dict["positions"], device)


def where(documents: Tensor, states: list[State], others: list[State]) -> list[State]:
    """By layer, the first states of the documents (S,) bool that are marked, the second ones of the others."""
    return [
        tuple(torch.where(documents.view(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(*of_layer))
        for of_layer in zip(states, others)
    ]


def _to(value: Any, device: torch.device | str) -> Any:
    """Tensors in lists and tuples, moved."""
    if isinstance(value, (list, tuple)):
        return type(value)(_to(item, device) for item in value)
    return value if value is None else value.to(device)
