"""Documents read as a run's training reads them: in rows that its strategy fills, with what its boundary scheme lets cross."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from packmamba.config import DataConfig
from packmamba.data.packing import STRATEGIES
from packmamba.data.schedule import arrange_as_trained
from packmamba.evaluation.passes import See
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM


class AsTrained:
    """Some documents in a run's rows.

    Where training refuses or cuts off documents that are longer than a row, rows are as long as the longest here.

    Args:
        documents: token ids, each of at least one token.
        data: the run's section: strategy, row_length, overlong, streams, slots_per_batch.
        boundary: of the run, for this reading alone.

    Attributes:
        before: of each document the one before it in its row, None at a row's start.
    """

    def __init__(self, documents: Sequence[Any], data: DataConfig, boundary: Any) -> None:
        self.boundary = boundary
        held = _Held(documents)
        keeps_whole = data.overlong != "pieces" and not STRATEGIES[data.strategy].splits_documents
        if keeps_whole and data.row_length is not None:
            data = replace(data, row_length=max(data.row_length, int(held.lengths.max())))
        self.arrangement, self.batches = arrange_as_trained(held, np.arange(len(documents)), data, boundary.continues)  # type: ignore[arg-type]
        plan = self.arrangement.plan
        begins: Any = self.arrangement.begins
        self.documents, self.starts = self.arrangement.documents[plan.document], plan.start + begins[plan.document]
        self.before: list[int | None] = [None] * len(documents)
        first_of_row = np.zeros(len(plan.document), dtype=bool)
        first_of_row[plan.row_offsets[:-1][np.diff(plan.row_offsets) > 0]] = True
        for piece in np.flatnonzero((self.starts == 0) & ~first_of_row):
            self.before[int(self.documents[piece])] = int(self.documents[piece - 1])

    def rows(self) -> list[list[int]]:
        """The documents of each row whose head is in it, from the left."""
        plan = self.arrangement.plan
        edges = zip(plan.row_offsets[:-1].tolist(), plan.row_offsets[1:].tolist())
        return [[int(self.documents[p]) for p in range(*edge) if self.starts[p] == 0] for edge in edges]

    @property
    def whole(self) -> bool:
        """Whether no document is cut."""
        return not self.starts.any()

    @property
    def flows(self) -> bool:
        """Whether a convolution or a recurrence reads across boundaries."""
        two = SequenceLayout.from_lengths([[1, 1]], row_length=2)
        return any(layout.num_documents < 2 for layout in self.boundary.layouts(two))

    def read(self, model: MambaLM, see: See) -> Iterator[int]:
        """Reads all of them, batch by batch; yields the tokens of each."""
        device, plan = next(model.parameters()).device, self.arrangement.plan
        self.boundary.reset()
        for rows in self.batches:
            batch = self.arrangement.batch(rows).to(device)
            with torch.inference_mode():
                hidden = self.boundary.hidden(model, batch)
            for row, activations in zip(rows, hidden):
                slot = 0
                for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
                    end = slot + int(plan.length[piece])
                    see(int(self.documents[piece]), int(self.starts[piece]), activations[slot:end])
                    slot = end
            yield batch.layout.num_tokens


class _Held:
    """Documents in memory, as an arrangement takes them from a corpus."""

    targets = None

    def __init__(self, documents: Sequence[Any]) -> None:
        self.documents = [np.asarray(document) for document in documents]
        self.lengths = np.array([len(document) for document in self.documents])

    def document(self, index: int) -> np.ndarray:
        return self.documents[index]
