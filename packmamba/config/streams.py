"""Streams of rows that go on from step to step: whether they take turns, and what keeps them from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional


class Streams:
    """Of the section ``data``."""

    mode: str
    streams: int
    row_length: Optional[int]
    tokens_per_step: int
    slots_per_batch: int

    @property
    def step_rows(self) -> int:
        """Whole rows that a step of mode stream has room for."""
        return self.tokens_per_step // (self.row_length or self.tokens_per_step)

    @property
    def takes_turns(self) -> bool:
        """Whether streams are more than a step's rows."""
        return self.mode == "stream" and self.streams > self.step_rows >= 1

    @property
    def batch_rows(self) -> int:
        """Rows of a forward pass where streams take turns."""
        return min(self.step_rows, max(1, self.slots_per_batch // (self.row_length or 1)))

    def turns(self, devices: int) -> Iterator[str]:
        """A sentence for each reason why states cannot be carried where streams take turns."""
        if self.tokens_per_step % (self.row_length or 1):
            yield (
                f"data.tokens_per_step: expected a multiple of data.row_length={self.row_length}, so that steps hold whole rows, "
                f"got {self.tokens_per_step}"
            )
        elif self.streams % self.step_rows:
            yield f"data.streams: expected a multiple of the {self.step_rows} rows of a step, got {self.streams}"
        elif self.step_rows % (self.batch_rows * devices):
            yield (
                f"data.slots_per_batch: expected forward passes of equally many rows, {self.step_rows} a step on {devices} "
                f"devices, got room for {self.batch_rows}"
            )
