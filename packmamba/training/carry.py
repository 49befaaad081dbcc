"""States between batches: kept, detached and routed to the documents that continue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.nn.lm import MambaLM
from packmamba.nn.mixers.mamba1 import State


class StateCarrier:
    """What each row's last document left behind, for the batch whose same row continues it.

    Gradients stop here: backpropagation through time is truncated at batch boundaries.
    """

    def __init__(self) -> None:
        self._states: list[State] | None = None  # per layer, one state per row
        self._positions: Tensor | None = None  # (B,) int32, the place in its document where each row's last one goes on

    def start(self, model: MambaLM, layout: SequenceLayout) -> list[State]:
        """The states that a batch's documents start from: kept ones where they continue, fresh ones elsewhere.

        Raises:
            ValueError: a document continues at another place than its row stopped at.
        """
        fresh = model.start_states(layout.num_documents)
        continues = layout.continues
        if not continues.any():
            return fresh
        rows = layout.rows
        if self._positions is None or self._states is None:
            raise ValueError("layout: a document continues, but no batch came before")
        if len(self._positions) != layout.shape[0] or not torch.equal(
            self._positions[rows[continues]], layout.offsets[continues]
        ):
            raise ValueError(
                f"layout: documents continue at {layout.offsets[continues].tolist()} in rows {rows[continues].tolist()}, "
                f"but the rows before stopped at {self._positions.tolist()}"
            )
        goes_on = continues[:, None, None]
        return [
            (torch.where(goes_on, kept_conv[rows], conv), torch.where(goes_on, kept_ssm[rows], ssm))
            for (kept_conv, kept_ssm), (conv, ssm) in zip(self._states, fresh)
        ]

    def keep(self, layout: SequenceLayout, states: list[State]) -> None:
        """Takes the batch's final states, of the last document of each row."""
        rows = torch.arange(layout.shape[0], dtype=torch.int32, device=layout.device)
        last = torch.searchsorted(layout.rows, rows, right=True) - 1
        # A row without documents has nothing to go on with: its place, -1, is never a continuation's.
        here = (last >= 0) & (layout.rows[last.clamp(min=0)] == rows) if layout.num_documents else last >= 0
        last = last.clamp(min=0)
        if not layout.num_documents:
            self._states, self._positions = None, None
            return
        self._states = [(conv.detach()[last], ssm.detach()[last]) for conv, ssm in states]
        self._positions = torch.where(here, (layout.offsets + layout.lengths)[last], -1)

    def reset(self) -> None:
        """Forgets everything."""
        self._states, self._positions = None, None

    def state_dict(self) -> dict[str, Any]:
        """On the CPU, so that any rank can take it up."""
        states = None if self._states is None else [(conv.cpu(), ssm.cpu()) for conv, ssm in self._states]
        return {"states": states, "positions": None if self._positions is None else self._positions.cpu()}

    def load_state_dict(self, state_dict: dict[str, Any], device: torch.device) -> None:
        positions, states = state_dict["positions"], state_dict["states"]
        self._positions = None if positions is None else positions.to(device)
        self._states = None if states is None else [(conv.to(device), ssm.to(device)) for conv, ssm in states]
