"""Read documents as training does: in rows of the run's packing strategy, under its boundary scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from packmamba.config import DataConfig
from packmamba.data.packing import STRATEGIES
from packmamba.data.schedule import arrange_as_trained
from packmamba.evaluation.packed_forward import Visit
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM


class TrainingLayoutReader:
    """Documents arranged in a run's rows.

    Where training refuses or truncates documents longer than a row, rows are as long as the longest document.

    Args:
        documents: token ids, at least one each.
        data: the run's configuration of documents and rows.
        boundary: the run's boundary scheme, of this reader alone.

    Attributes:
        before: for each document the document before it in its row; None at a row's start.
    """

    def __init__(self, documents: Sequence[Any], data: DataConfig, boundary: Any) -> None:
        self.boundary = boundary
        corpus = _InMemory(documents)
        splits = data.overlong == "split" or STRATEGIES[data.strategy].splits_documents
        if not splits and data.row_length is not None:
            data = replace(data, row_length=max(data.row_length, int(corpus.lengths.max())))
        numbers = np.arange(len(documents))
        plan, self.batches = arrange_as_trained(corpus, numbers, data, boundary.continues)  # type: ignore[arg-type]
        self.plan, self.documents, self.starts = plan, plan.document, plan.start
        self.before: list[int | None] = [None] * len(documents)
        first_of_row = np.zeros(len(plan.document), dtype=bool)
        first_of_row[plan.row_offsets[:-1][np.diff(plan.row_offsets) > 0]] = True
        for piece in np.flatnonzero((self.starts == 0) & ~first_of_row):
            self.before[int(self.documents[piece])] = int(self.documents[piece - 1])

    def rows(self) -> list[list[int]]:
        """Return the documents that begin in each row, left to right."""
        edges = self.plan.row_offsets.tolist()
        pieces = [range(*edge) for edge in zip(edges, edges[1:])]
        return [[int(self.documents[piece]) for piece in row if self.starts[piece] == 0] for row in pieces]

    @property
    def leaks_between_whole_documents(self) -> bool:
        """True if no document is cut and a convolution or a recurrence crosses document boundaries."""
        two = SequenceLayout.from_lengths([[1, 1]], row_length=2)
        return not self.starts.any() and any(layout.num_documents < 2 for layout in self.boundary.layouts(two))

    def read(self, model: MambaLM, visit: Visit) -> Iterator[int]:
        """Read all documents batch by batch; yield the number of tokens of each batch."""
        device, plan = next(model.parameters()).device, self.plan
        self.boundary.reset()
        for rows in self.batches:
            batch = plan.batch(rows).to(device)
            with torch.inference_mode():
                hidden = self.boundary.hidden(model, batch)
            for row, activations in zip(rows, hidden):
                slot = 0
                for piece in range(plan.row_offsets[row], plan.row_offsets[row + 1]):
                    end = slot + int(plan.length[piece])
                    visit(int(self.documents[piece]), int(self.starts[piece]), activations[slot:end])
                    slot = end
            yield batch.layout.num_tokens


class _InMemory:
    """Documents in memory with the interface of a corpus."""

    targets = None

    def __init__(self, documents: Sequence[Any]) -> None:
        self.documents = [np.asarray(document) for document in documents]
        self.lengths = np.array([len(document) for document in self.documents])

    def document(self, index: int) -> np.ndarray:
        return self.documents[index]
