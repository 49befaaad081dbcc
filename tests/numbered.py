"""A corpus in memory whose token i is i, so that each token tells its document and its place in it."""

from __future__ import annotations

import numpy as np

from packmamba.config import DataConfig
from packmamba.data.corpus import Documents
from packmamba.data.schedule import StepSchedule
from packmamba.training.datamodule import StepDataset


class Numbered(Documents):
    groups = None

    def __init__(self, lengths):
        super().__init__(np.arange(sum(lengths)), np.array(lengths, np.int32))
        self.vocab_size = len(self.tokens)


def steps_of(lengths, ranks=1, carry=False, seed=0, **keys):
    """The steps of each rank."""
    sizes = {"row_length": 16, "tokens_per_step": 48, "max_tokens_per_batch": 40, "cut_at_steps": False}
    data = DataConfig(**sizes | keys)
    return [StepDataset(StepSchedule(Numbered(lengths), data, seed, carry, ranks), rank) for rank in range(ranks)]


def pieces(step):
    """Each row's pieces (tokens, offset, whether the last token has a target), batch by batch."""
    found = []
    for batch in step.batches:
        layout = batch.layout
        rows = [[] for _ in range(layout.shape[0])]
        for s in range(layout.num_documents):
            here = slice(int(layout.starts[s]), int(layout.ends[s]))
            tokens, mask = batch.tokens.flatten()[here].tolist(), batch.loss_mask.flatten()[here].tolist()
            rows[int(layout.rows[s])].append((tokens, int(layout.offsets[s]), mask[-1]))
        found.append(rows)
    return found
