"""Forward passes over many documents, always of one shape: a document's bits do not depend on its company.

Packing isolates documents, but a matrix product may sum in another order when it has other rows. So every pass has
the same number of slots, whatever is in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

States = list[tuple[Tensor, ...]]
"""For each layer the tensors that documents start from or end with, indexed by document."""

MOST_DOCUMENTS = 64
"""Slots for each document whose state is held: a state is as large as some tens of tokens' activations."""
HEAD_ROWS = 512
"""Logits are made for so many slots at a time, always: the head's products have one shape too."""


@dataclass
class Segment:
    """A document, or a piece of one: tokens, what it starts from, and what is asked of it.

    Attributes:
        tokens: ids, at least one.
        start: the states of one document, or None for a fresh one.
        keep: whether its final state is wanted.
        done: called with its hidden activations (n, d_model) and its final states (or None); returns segments that come next,
            which start from them.
    """

    tokens: Sequence[int]
    done: Callable[[Tensor, States | None], list[Segment]]
    start: States | None = None
    keep: bool = False


def run_passes(model: MambaLM, segments: list[Segment], max_slots: int) -> Iterator[int]:
    """Computes all segments and those that follow from them; yields the tokens of each pass.

    Segments that start from states go first, so that few states are held; then the longest that fit.
    """
    device = next(model.parameters()).device
    waiting = sorted(segments, key=lambda segment: len(segment.tokens))
    lengths = [len(segment.tokens) for segment in waiting]
    following: list[Segment] = []
    most = max(1, max_slots // MOST_DOCUMENTS)
    while waiting or following:
        chosen: list[Segment] = []
        room, holders = max_slots, 0
        rest: list[Segment] = []
        for segment in following:
            if len(segment.tokens) <= room and holders < most:
                chosen.append(segment)
                room -= len(segment.tokens)
                holders += 1
            else:
                rest.append(segment)
        following = rest
        while waiting and (place := bisect.bisect_right(lengths, room)) and not (following and chosen):
            segment = waiting[place - 1]
            if segment.keep and holders >= most:
                break
            del waiting[place - 1], lengths[place - 1]
            chosen.append(segment)
            room -= len(segment.tokens)
            holders += segment.keep
        following += _one_pass(model, chosen, max_slots, device)
        yield max_slots - room


def read(
    model: MambaLM,
    documents: Sequence[Any],
    max_slots: int,
    see: Callable[[int, int, Tensor], None],
    finals: dict[int, States] | None = None,
) -> Iterator[int]:
    """Reads documents from fresh states, those longer than a pass piece by piece; yields the tokens of each pass.

    Before a pass is yielded, ``see(i, first, hidden)`` got the activations (n, d_model) of each piece in it: of document i from
    token ``first`` on. ``finals`` is filled with each document's final state, where it is given.
    """

    def piece(i: int, first: int, start: States | None) -> Segment:
        end = min(first + max_slots, len(documents[i]))
        whole = end == len(documents[i])

        def done(hidden: Tensor, final: States | None) -> list[Segment]:
            see(i, first, hidden)
            if not whole:
                return [piece(i, end, final)]
            if finals is not None and final is not None:
                finals[i] = final
            return []

        return Segment(list(map(int, documents[i][first:end])), done, start, keep=not whole or finals is not None)

    return run_passes(model, [piece(i, 0, None) for i in range(len(documents)) if len(documents[i])], max_slots)


def _one_pass(model: MambaLM, segments: list[Segment], max_slots: int, device: torch.device) -> list[Segment]:
    lengths = [len(segment.tokens) for segment in segments]
    layout = SequenceLayout.from_lengths([lengths], row_length=max_slots).to(device)
    tokens = torch.zeros(1, max_slots, dtype=torch.int64)
    tokens[0, : sum(lengths)] = torch.tensor([token for segment in segments for token in segment.tokens])
    states = _gather(model, segments)
    kept = any(segment.keep for segment in segments)
    finals: States = []
    with torch.inference_mode():
        out = model(tokens.to(device), layout=layout, states=states, return_states=kept, return_hidden=True)
    hidden, finals = out if kept else (out, finals)
    following, start = [], 0
    for number, (segment, length) in enumerate(zip(segments, lengths)):
        final = None
        if segment.keep:
            final = [tuple(part[number : number + 1].clone() for part in layer) for layer in finals]
        following += segment.done(hidden[0, start : start + length], final)
        start += length
    return following


def _gather(model: MambaLM, segments: list[Segment]) -> States | None:
    """What the segments start from; None if all are fresh."""
    if all(segment.start is None for segment in segments):
        return None
    with torch.inference_mode():
        fresh = model.start_states(len(segments))
        places = [number for number, segment in enumerate(segments) if segment.start is not None]
        index = torch.tensor(places, device=fresh[0][0].device)
        starts = [segment.start for segment in segments if segment.start is not None]
        return [
            tuple(
                part.index_copy(0, index, torch.cat([start[number][place] for start in starts]).to(part.dtype))
                for place, part in enumerate(layer)
            )
            for number, layer in enumerate(fresh)
        ]


def log_probabilities(model: MambaLM, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(T, d_model) -> float32 (float64 of float64) log-probabilities (rows, vocabulary), so many rows at a time."""
    weight = model.lm_head.weight
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    with torch.inference_mode():
        for first in range(0, len(hidden), HEAD_ROWS):
            part = hidden[first : first + HEAD_ROWS]
            rows = hidden.new_zeros(HEAD_ROWS, hidden.shape[1])
            rows[: len(part)] = part
            logits = torch.nn.functional.linear(rows, weight.to(rows.dtype))[: len(part)]
            yield slice(first, first + len(part)), torch.log_softmax(logits.to(wide), dim=-1)
