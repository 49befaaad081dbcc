"""Forward passes over many documents, always of one shape: a document's bits do not depend on its company.

Packing isolates documents, but a matrix product may sum in another order when it has other rows. So every pass has
the same number of slots, whatever is in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

States = list[tuple[Tensor, ...]]
"""For each layer the tensors that documents start from or end with, indexed by document."""
Start = tuple[States, int]
"""The states of some documents, and which of them is meant."""
See = Callable[[int, int, Tensor], None]
"""Given a document's number, the place of a piece's first token in it, and the piece's activations (n, d_model)."""
Reader = Callable[[See], Iterator[int]]
"""Reads some documents of its own; before it yields the tokens of a pass, ``See`` got the pieces in it."""

KEPT_SLOTS = 64
"""A pass keeps the final states of one document for so many of its slots: a state is as large as some tens of tokens."""
HEAD_ROWS = 512
"""Logits are made for at least so many slots at a time."""
LOGITS = 1 << 25
"""On a GPU so many at a time: with a small vocabulary, launches take longer than products."""


@dataclass
class Segment:
    """A document, or a piece of one: tokens, what it starts from, and what is asked of it.

    Attributes:
        tokens: ids, a sequence or an array, at least one.
        done: called with its hidden activations (n, d_model) and its final state (or None); returns segments that come next.
        start: where it starts, or None for a fresh document.
        keep: whether its final state is wanted.
    """

    tokens: Any
    done: Callable[[Tensor, Start | None], list[Segment]]
    start: Start | None = None
    keep: bool = False


def run_passes(model: MambaLM, segments: list[Segment], max_slots: int) -> Iterator[int]:
    """Computes all segments and those that follow from them; yields the tokens of each pass.

    Segments that start from states go first, so that few states are held; then the longest that fit.
    """
    device = next(model.parameters()).device
    waiting = sorted(segments, key=lambda segment: len(segment.tokens))
    lengths = [len(segment.tokens) for segment in waiting]
    following: list[Segment] = []
    most = max(1, max_slots // KEPT_SLOTS)
    while waiting or following:
        chosen: list[Segment] = []
        rest: list[Segment] = []
        room, kept = max_slots, 0
        for segment in following:
            fits = len(segment.tokens) <= room and kept + segment.keep <= most
            (chosen if fits else rest).append(segment)
            if fits:
                room -= len(segment.tokens)
                kept += segment.keep
        following = rest
        while waiting and not following and (place := bisect.bisect_right(lengths, room)):
            segment = waiting[place - 1]
            if segment.keep and kept == most:
                break
            del waiting[place - 1], lengths[place - 1]
            chosen.append(segment)
            room -= len(segment.tokens)
            kept += segment.keep
        following += _one_pass(model, chosen, max_slots, device)
        yield max_slots - room


def read(
    model: MambaLM,
    documents: Sequence[Any],
    max_slots: int,
    see: See,
    finals: dict[int, Start] | None = None,
) -> Iterator[int]:
    """Reads documents from fresh states, those longer than a pass piece by piece; yields the tokens of each pass.

    Before a pass is yielded, ``see(i, first, hidden)`` got the activations (n, d_model) of each piece in it: of document i from
    token ``first`` on. ``finals`` is filled with each document's final state, where it is given.
    """

    def piece(i: int, first: int, start: Start | None) -> Segment:
        end = min(first + max_slots, len(documents[i]))
        whole = end == len(documents[i])

        def done(hidden: Tensor, final: Start | None) -> list[Segment]:
            see(i, first, hidden)
            if not whole:
                return [piece(i, end, final)]
            if finals is not None and final is not None:
                finals[i] = final
            return []

        return Segment(np.asarray(documents[i][first:end], np.int64), done, start, keep=not whole or finals is not None)

    segments = [piece(i, 0, None) for i in range(len(documents)) if len(documents[i])]
    with tqdm(
        total=sum(map(len, documents)), desc="reads", unit="token", unit_scale=True, disable=None, leave=False
    ) as bar:
        for tokens in run_passes(model, segments, max_slots):
            bar.update(tokens)
            yield tokens


def _one_pass(model: MambaLM, segments: list[Segment], max_slots: int, device: torch.device) -> list[Segment]:
    lengths = [len(segment.tokens) for segment in segments]
    layout = sent(SequenceLayout.from_lengths([lengths], row_length=max_slots), device)
    tokens = torch.zeros(1, max_slots, dtype=torch.int64)
    # Arrays all the way: a Python integer for each token takes longer than a small model takes to read it.
    tokens[0, : sum(lengths)] = torch.from_numpy(np.concatenate([np.asarray(s.tokens, np.int64) for s in segments]))
    starts = [segment.start for segment in segments]
    states = None if all(start is None for start in starts) else Starts(model, starts)
    kept = [number for number, segment in enumerate(segments) if segment.keep]
    pool: States = []
    with torch.inference_mode():
        out = model(sent(tokens, device), layout=layout, states=states, return_states=bool(kept), return_hidden=True)
        hidden, finals = out if kept else (out, [])
        if kept:
            index = sent(torch.tensor(kept), device)
            pool = [tuple(part.index_select(0, index) for part in layer) for layer in finals]
    places = {number: row for row, number in enumerate(kept)}
    following, begin = [], 0
    for number, (segment, length) in enumerate(zip(segments, lengths)):
        final = (pool, places[number]) if segment.keep else None
        following += segment.done(hidden[0, begin : begin + length], final)
        begin += length
    return following


def sent(part: Any, device: torch.device) -> Any:
    """A tensor or a layout on a device; where that is a GPU, from page-locked memory, so that what it still does is not waited
    for."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)


class Starts(Sequence):
    """What documents start from, layer by layer, gathered when it is asked for: one layer's copies at a time are held."""

    def __init__(self, model: MambaLM, starts: Sequence[Start | None]) -> None:
        self.mixers = [layer.mixer for layer in model.backbone.layers]
        self.documents = len(starts)
        pools: dict[int, tuple[States, list[int], list[int]]] = {}
        for number, start in enumerate(starts):
            if start is not None:
                _, rows, places = pools.setdefault(id(start[0]), (start[0], [], []))
                rows.append(start[1])
                places.append(number)
        device = model.lm_head.weight.device
        self.pools = [
            (pool, sent(torch.tensor(rows), device), sent(torch.tensor(places), device))
            for pool, rows, places in pools.values()
        ]

    def __len__(self) -> int:
        return len(self.mixers)

    def __getitem__(self, layer: Any) -> Any:
        parts = list(self.mixers[layer].start_state(self.documents))
        for pool, rows, places in self.pools:
            parts = [
                part.index_copy(0, places, held.index_select(0, rows).to(part.dtype))
                for part, held in zip(parts, pool[layer])
            ]
        return tuple(parts)


def head_rows(vocab_size: int, on_gpu: bool) -> int:
    """Slots whose logits are made at a time: always as many for one model, so that the head's products have one shape too."""
    return min(max(HEAD_ROWS, 1 << (LOGITS // vocab_size).bit_length() >> 1), 16384) if on_gpu else HEAD_ROWS


def log_probabilities(model: MambaLM, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(T, d_model) -> float32 (float64 of float64) log-probabilities (rows, vocabulary), so many rows at a time.

    The head computes in the dtype of its weights, under autocast too.
    """
    weight = model.lm_head.weight
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.inference_mode(), torch.autocast(hidden.device.type, enabled=False):
        most = head_rows(len(weight), weight.is_cuda)
        for first in range(0, len(hidden), most):
            part = hidden[first : first + most]
            rows = weight.new_zeros(most, hidden.shape[1])
            rows[: len(part)] = part
            logits = torch.nn.functional.linear(rows, weight)[: len(part)]
            yield slice(first, first + len(part)), torch.log_softmax(logits.to(wide), dim=-1)
