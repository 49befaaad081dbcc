"""Losses per target, summed over targets and divided once: never a mean of means."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

POSITION_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
START_TOKENS = 32


class LossByPosition(Metric):
    """Sum losses and targets by the token's position in its document.

    Update with losses (B, L), loss mask (B, L) bool and position indices (B, L). ``compute`` returns the mean loss, the mean over
    the first START_TOKENS positions, and the mean in each bucket [edges[i], edges[i+1]) of POSITION_EDGES.
    """

    full_state_update = False
    sums: Tensor
    counts: Tensor
    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        buckets = len(POSITION_EDGES)
        self.add_state("sums", torch.zeros(buckets, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(buckets, dtype=torch.int64), dist_reduce_fx="sum")
        self.register_buffer("edges", torch.tensor(POSITION_EDGES[1:]), persistent=False)

    def update(self, losses: Tensor, loss_mask: Tensor, position_indices: Tensor) -> None:
        bucket = torch.bucketize(position_indices[loss_mask], self.edges, right=True)
        self.sums.index_add_(0, bucket, losses[loss_mask].to(self.sums.dtype))
        self.counts.index_add_(0, bucket, torch.ones_like(bucket))

    def compute(self) -> dict[str, Tensor]:
        start = POSITION_EDGES.index(START_TOKENS)
        return {
            "loss": self.sums.sum() / self.counts.sum(),
            "loss_start": self.sums[:start].sum() / self.counts[:start].sum(),
            "by_position": self.sums / self.counts,
            "counts": self.counts,
        }
