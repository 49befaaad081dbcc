"""What loaders read: steps and evaluations by their number. No Lightning: workers that are not forked import this file."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from torch.utils.data import Dataset, Sampler

from packmamba.config import import_plugins
from packmamba.data.batching import Arrangement, PackedBatch, StepBatch, empty_batch
from packmamba.data.schedule import Schedule


class StepDataset(Dataset):
    """Item i is the StepBatch of optimizer step i for one rank, whichever process asks and whenever."""

    def __init__(self, schedule: Schedule, rank: int = 0) -> None:
        self.schedule = schedule
        self.rank = rank

    def __getitem__(self, step: int) -> StepBatch:
        arrangement, groups = self.schedule.step(step)
        ranks = self.schedule.world_size
        mine = groups[self.rank :: ranks]
        batches = [replace(arrangement.batch(rows), turn=self.schedule.turn(rows)) for rows in mine]
        # Every rank computes as many batches, so that gradients meet.
        missing = -len(groups) % ranks
        batches += [empty_batch()] * (-(-len(groups) // ranks) - len(mine))
        targets, tokens, slots = arrangement.count(groups)
        return StepBatch(batches, targets, tokens, slots + missing, *arrangement.count_behind(groups))


class StepSampler(Sampler[int]):
    """The steps from ``first`` to ``steps``. Its length is ``steps`` wherever it starts: Lightning counts from the first."""

    def __init__(self, first: int, steps: int) -> None:
        self.first = first
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.steps))

    def __len__(self) -> int:
        return self.steps


class EvaluationDataset(Dataset):
    """Batches of whole documents (item i: a PackedBatch), in a fixed order; every rank has as many, the last of some are empty:
    ranks whose parameters are shards meet in each."""

    def __init__(self, arrangement: Arrangement, groups: list[np.ndarray], batches: int) -> None:
        self.arrangement = arrangement
        self.groups = groups
        self.batches = batches

    def __getitem__(self, index: int) -> PackedBatch:
        return self.arrangement.batch(self.groups[index]) if index < len(self.groups) else empty_batch()

    def __len__(self) -> int:
        return self.batches


def start_worker(plugins: list[str], worker: int) -> None:
    for told in (signal.SIGINT, signal.SIGTERM):  # to all of a group: who trains ends its step first
        signal.signal(told, signal.SIG_IGN)
    import_plugins(plugins)  # a worker that is not forked has imported nothing
