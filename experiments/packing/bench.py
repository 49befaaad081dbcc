"""Padding and planning time of the packing strategies, against row length and greedy's buffer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import numpy as np
from tqdm import tqdm

from experiments import timing
from experiments.by_name import Bench
from packmamba.config import key
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.packing import OVERLONG, STRATEGIES, RowPlan, plan_rows
from packmamba.lab.records import append_record, make_record, provenance

SOME = ("at least one", bool)


@dataclass
class Config:
    experiment: str = key("packing", "The question, which the records name.")
    distribution: str = key("documents-2k", "Distribution of the documents' lengths.", choices=LENGTH_DISTRIBUTIONS)
    num_documents: int = key(200_000, "Documents of one plan.", low=1, high=2**31 - 1)
    strategies: list[str] = key(list(STRATEGIES), "Strategies to compare.", check=SOME, choices=STRATEGIES)
    row_lengths: list[int] = key([1024, 2048, 4096, 8192, 16384], "Slots of a row.", low=1, check=SOME)
    buffers: list[int] = key([64, 256, 1024, 4096, 16384, 65536], "Documents that greedy sorts at a time.", low=1)
    overlong: str = key("split", "Documents longer than a row: error, truncate or split.", choices=OVERLONG)
    seeds: list[int] = key([0, 1, 2], "Seeds of the draws of lengths.", check=SOME, low=0)
    rounds: int = key(5, "How often each plan is timed.", low=1)

    def arms(self) -> list[Arm]:
        """Return the strategies, greedy with each buffer."""
        buffers = {"greedy": self.buffers}
        return [Arm(name, buffer) for name in self.strategies for buffer in buffers.get(name, [None])]


@dataclass(frozen=True)
class Arm:
    """Hold an arm of the tables; its records hold these fields."""

    strategy: str
    buffer: Optional[int]  # buffer of greedy alone

    def plan(self, lengths: np.ndarray | list[int], row_length: int, overlong: str) -> RowPlan:
        return plan_rows(lengths, row_length, self.strategy, overlong, 1 if self.buffer is None else self.buffer)


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append one record per strategy, row length, buffer and seed; strategies plan in turns.

    RuntimeError if a plan is wrong.
    """
    corpus = f"{c.distribution} ({LENGTH_DISTRIBUTIONS[c.distribution]}), {c.num_documents} documents"
    shared = {key: getattr(c, key) for key in ("distribution", "num_documents", "overlong", "rounds")}
    provenance()  # of the code as it is now, not as it may be after minutes
    cells = [(seed, row_length) for seed in c.seeds for row_length in c.row_lengths]
    plans = len(cells) * len(c.arms()) * (c.rounds + 1)
    with tqdm(total=plans, unit="plan", disable=not progress, mininterval=1) as bar:
        for seed, row_length in cells:
            bar.set_postfix(seed=seed, row_length=row_length)
            lengths = draw_lengths(c.distribution, c.num_documents, seed)
            for arm, plan, seconds in _measure(c, lengths, row_length, bar):
                metrics = {"padding_fraction": plan.padding_fraction, "num_rows": plan.num_rows}
                metrics |= {"planning_seconds": timing.median(seconds), "num_documents": c.num_documents}
                metrics |= {"planning_seconds_spread": max(seconds) - min(seconds)}
                config = {**asdict(arm), "row_length": row_length, **shared}
                record = make_record("packing", c.experiment, arm.strategy, config, seed, corpus, metrics, sum(seconds))
                append_record(records_path, record)


def _measure(c: Config, lengths: np.ndarray, row_length: int, bar: tqdm) -> Iterator[tuple[Arm, RowPlan, list[float]]]:
    """Each arm's plan, checked, and its times, arms in turns."""
    arms = {f"{arm.strategy}, {arm.buffer}": arm for arm in c.arms()}
    plans: dict[str, RowPlan] = {}

    def gate(name: str) -> None:
        arm = arms[name]
        plans[name] = arm.plan(lengths, row_length, c.overlong)
        cut = c.overlong == "truncate" and not STRATEGIES[arm.strategy].splits_documents
        check_plan(plans[name], np.minimum(lengths, row_length) if cut else lengths)
        bar.update()

    def seconds(arm: Arm, turn: int) -> float:
        began = time.process_time()
        arm.plan(lengths, row_length, c.overlong)
        taken = time.process_time() - began
        bar.update()
        return taken

    turns = {name: partial(seconds, arm) for name, arm in arms.items()}
    times = timing.take_turns(turns, c.rounds, warm_up=0, gate=gate)
    for name, arm in arms.items():
        yield arm, plans[name], times[name]


def check_plan(plan: RowPlan, lengths: np.ndarray) -> None:
    """RuntimeError unless every token of documents of these lengths is in one row once and no row
    is overfull.
    """
    by_place = np.lexsort([plan.start, plan.document])
    document, start, end = plan.document[by_place], plan.start[by_place], (plan.start + plan.length)[by_place]
    opens = np.diff(document, prepend=-1) != 0
    closes = np.diff(document, append=len(lengths)) != 0
    pairs = (
        (document[opens], np.arange(len(lengths))),
        (start, np.where(opens, 0, np.roll(end, 1))),
        (end[closes], lengths),
    )
    whole = all(np.array_equal(got, expected) for got, expected in pairs)
    filled = np.diff(np.concatenate([[0], np.cumsum(plan.length)])[plan.row_offsets])
    if not whole or (filled > plan.slots).any():
        raise RuntimeError("a plan loses or repeats tokens or overfills a row; nothing is timed")


BENCHES = {"packing": Bench(Config, run)}
