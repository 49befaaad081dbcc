"""The bare loop: forward and backward of each arm's batches, after a gate that compares every
token's loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments import timing
from experiments.common import PeakMemory
from experiments.speedup.model import (
    BARE,
    BREAKDOWN,
    TOLERANCES,
    Arm,
    Feed,
    Model,
    PeerLM,
    by_family,
    feed,
    random_documents,
)
from packmamba.data.batch import PackedBatch
from packmamba.ops.cuda import KernelSchedule, schedules_of
from packmamba.training.boundary import Leak
from packmamba.training.cuda_graphs import BatchGraphs

LEAK_OVER_ERROR = 3
GATE_DOCUMENTS = 8

Loss = Callable[[PackedBatch], tuple[Tensor, ...]]


def measure(model: Model) -> None:
    """Appends a speedup record for each arm of the bare loop, and breakdowns."""
    loop = BareLoop(model)
    loop.gate()
    # Graphs keep memory that other arms may need: they take their turns afterwards.
    for graphs in (False, True):
        loop.measure([case for case in loop.cases if case.arm.graphs == graphs])


@dataclass
class Case:
    """An arm's loss and its batches, few that stand for all; what was found of them."""

    name: str
    arm: Arm
    loss: Loss
    feed: Feed
    batches: list[PackedBatch]
    targets: list[int]
    peak_memory_bytes: int | None = None
    loss_error: float | None = None
    leak_error: float | None = None


class BareLoop:
    """The arms of one model, which share its weights."""

    def __init__(self, model: Model) -> None:
        self.model, self.module = model, model.build()
        self.parameters = list(self.module.parameters())
        self.graphs: BatchGraphs | None = None
        c = model.c
        arms = c.taking_part(BARE) if {BARE, BREAKDOWN} & set(c.parts) else {}
        peers = [name for name, arm in arms.items() if arm.peer]
        try:
            peer = PeerLM(self.module.model) if peers else None
        except (ImportError, ValueError) as error:
            print(f"left out, {', '.join(peers)}: {error}", file=sys.stderr)
            arms, peer = {name: arm for name, arm in arms.items() if not arm.peer}, None
        self.peer_leaks = peer is not None and peer.leaks
        self.cases = []
        for name, arm in arms.items():
            fed = feed(model.documents, arm, c.slots)
            chosen = fed.sample(c.single_batches if arm.strategy == "single" else c.batches)
            targets = [int(batch.loss_mask.sum()) for batch in chosen]
            loss = peer.loss if arm.peer and peer is not None else self.module.loss
            self.cases.append(Case(name, arm, loss, fed, [batch.to(model.device) for batch in chosen], targets))

    def gate(self) -> None:
        """Raise RuntimeError unless every token's loss is that of its document alone, or of the row
        that leaks by our layers.
        """
        c = self.model.c
        few = random_documents(self.model.documents.lengths[:GATE_DOCUMENTS], self.model.vocab_size, c.seed)
        alone = self.token_losses(self.module.loss, feed(few, Arm("single"), c.slots)) if self.cases else torch.empty(0)
        bar = self.model.bar("compares losses")
        for case in tqdm(self.cases, desc=bar, unit="arm", disable=bar is None):
            fed = feed(few, case.arm, c.slots)
            expected = alone
            if case.arm.packs:
                leaking = self.token_losses(lambda batch: self.module.loss(batch, Leak()), fed)
                case.leak_error = _difference(leaking, alone)
                expected = leaking if case.arm.peer and self.peer_leaks else alone
            loss = case.loss
            if case.arm.graphs:
                graphs = BatchGraphs(self.module.loss, self.parameters)
                loss = lambda batch: graphs(batch, 1)  # noqa: B023
            case.loss_error = _difference(self.token_losses(loss, fed), expected)
            what = f"{self.model.name}, {case.name}"
            if not case.loss_error <= TOLERANCES[c.dtype]:
                raise RuntimeError(f"{what}: losses are off by {case.loss_error:.1e}; nothing is timed")
            if case.leak_error is not None and not case.leak_error >= LEAK_OVER_ERROR * case.loss_error:
                raise RuntimeError(f"{what}: a leak would not be seen ({case.leak_error:.1e}); nothing is timed")

    def token_losses(self, loss: Loss, fed: Feed) -> Tensor:
        """The losses of all targets, document after document."""
        parts: dict[int, Tensor] = {}
        # with gradients, so that what is compiled is what is timed
        for batch, documents in fed.all():
            losses = loss(batch.to(self.model.device))[1].detach().cpu()[batch.loss_mask].double()
            parts |= zip(documents, losses.split([int(n) - 1 for n in batch.layout.lengths]))
        return torch.cat([parts[number] for number in sorted(parts)])

    def measure(self, cases: list[Case]) -> None:
        """Times the cases in turns and records them; those that do not fit into memory are left
        out.
        """
        if not cases:
            return
        model, rounds = self.model, self.model.c.rounds
        self.graphs = BatchGraphs(self.module.loss, self.parameters) if cases[0].arm.graphs else None
        times = timing.take_turns(
            {case.name: lambda turn, case=case: self.seconds(case, turn) for case in cases},  # type: ignore[misc]
            rounds,
            left_out=lambda name: print(f"left out, {model.name}, {name}: does not fit into memory", file=sys.stderr),
            bar=model.bar("forward and backward"),
        )
        fitting = [case for case in cases if case.name in times]
        for case in fitting:
            model.record("speedup", case.name, case.arm.fields(), BARE, self.rates(case, times[case.name]))
        for case in fitting:
            if BREAKDOWN in model.c.parts and BREAKDOWN in case.arm.parts:
                found = by_family(lambda: self.forward_backward(case), model.device)  # noqa: B023
                seconds = timing.median(times[case.name]) * len(case.batches)
                model.record_breakdown(case.name, case.arm.fields(), BARE, seconds, found, len(case.batches))
        self.graphs = None

    def seconds(self, case: Case, turn: int) -> float:
        """Time one batch; note the case's peak memory."""
        self.module.zero_grad()
        peak = PeakMemory(self.model.device)
        taken = timing.seconds(lambda: self.forward_backward(case), self.model.device)
        # A graph's memory is taken when it is captured, and kept: what other arms keep is not this
        # one's.
        if (most := peak.bytes()) is not None and turn == (0 if case.arm.graphs else self.model.c.rounds):
            weights = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)
            case.peak_memory_bytes = most - peak.held + weights
        return taken / len(case.batches)

    def rates(self, case: Case, times: list[float]) -> dict[str, Any]:
        """Return the times in a case's record: seconds of a batch, that stand for all batches'
        mean.
        """
        batches, tokens, padding = case.batches, case.feed.tokens_per_batch, case.feed.padding_fraction
        return {
            "peak_memory_bytes": case.peak_memory_bytes,
            "position_bytes": None if case.arm.graphs else sum(map(_position_bytes, batches)) / len(batches),
            "loss_error": case.loss_error,
            "leak_error": case.leak_error,
            "odd_fraction": odd_fraction([tuple(batch.tokens.shape) for batch in batches]),
            "odd_fraction_of_all": odd_fraction(case.feed.shapes),
            **self.model.speed(times, tokens, tokens / timing.median(times), padding),
        }

    def forward_backward(self, case: Case) -> None:
        for batch, targets in zip(case.batches, case.targets):
            self.module.zero_grad()
            if self.graphs is not None:
                self.graphs(batch, targets)
            else:
                (case.loss(batch)[0] / targets).backward()


def _difference(losses: Tensor, expected: Tensor) -> float:
    return float((losses - expected).norm() / (expected - expected.mean()).norm())


def odd_fraction(shapes: Iterable[tuple[int, ...]]) -> float:
    """Return the share of slots of (rows, length) batches that lie in rows of odd length: slow in
    mamba-ssm's products.
    """
    slots = [(rows * length, length % 2) for rows, length in shapes]
    return sum(count * odd for count, odd in slots) / sum(count for count, _ in slots)


def _position_bytes(batch: PackedBatch) -> int:
    """Count the bytes of a batch's starts and ends, and of a GPU's schedule made of them."""
    starts = batch.layout.starts
    made = {schedule for schedule in schedules_of(starts).values() if isinstance(schedule, KernelSchedule)}
    return 8 * starts.numel() + sum(schedule.memory.nbytes for schedule in made)
