"""Packed forward passes of one batch shape: results do not depend on other documents in the batch."""

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from packmamba.config import DataConfig
from packmamba.data.batch import make_batch
from packmamba.data.packing import STRATEGIES
from packmamba.data.schedule import arrange_as_trained
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

DocumentState = tuple[list[tuple[Tensor, ...]], int]
"""Layers' states of several documents, and the index of one."""
Pass = list[tuple[Any, int, Tensor]]
"""Pieces that a pass read: owner, first position, activations (n, d_model)."""

SLOTS_PER_STATE = 64  # of a pass, for each final state that it keeps
HEAD_ROWS = 512  # of logits at a time, at least
GPU_LOGITS = 1 << 25  # at a time


@dataclass
class Segment:
    """Hold a document's tokens from ``first`` on, read from ``start`` (None: zero); ``finish`` takes the final state."""

    owner: Any
    tokens: Any
    start: DocumentState | None = None
    finish: "Callable[[DocumentState], list[Segment] | None] | None" = None
    first: int = 0

    def length(self, max_slots: int) -> int:
        return min(max_slots, len(self.tokens) - self.first)

    def keeps(self, max_slots: int) -> bool:
        return self.finish is not None or len(self.tokens) - self.first > max_slots


def packed_forward(model: MambaLM, segments: list[Segment], max_slots: int) -> Iterator[Pass]:
    """Compute all segments and those that follow from them, pass by pass.

    Segments with an initial state go first, so that few states are held; then the longest that fit.
    """
    if max_slots < 1:
        raise ValueError(f"max_slots: expected at least 1, got {max_slots}")
    length = functools.partial(Segment.length, max_slots=max_slots)
    waiting = sorted(segments, key=length)
    following: list[Segment] = []
    chosen: list[Segment] = []
    free = states = 0

    def rejects(segment: Segment) -> bool:
        nonlocal free, states
        if length(segment) > free or segment.keeps(max_slots) > states:
            return True
        chosen.append(segment)
        free, states = free - length(segment), states - segment.keeps(max_slots)
        return False

    total = sum(len(segment.tokens) for segment in segments)
    with tqdm(
        total=total, desc="reads", unit="token", unit_scale=True, disable=None, leave=False
    ) as bar:
        while waiting or following:
            chosen.clear()
            free, states = max_slots, max(1, max_slots // SLOTS_PER_STATE)
            following = list(filter(rejects, following))
            while (
                waiting
                and not following
                and (place := bisect.bisect_right(waiting, free, key=length))
            ):
                if rejects(waiting[place - 1]):
                    break
                del waiting[place - 1]
            pieces, more = _one_pass(model, chosen, max_slots)
            following += more
            bar.update(max_slots - free)
            yield pieces


def read_to_the_end(
    model: MambaLM,
    documents: Sequence[Any],
    max_slots: int,
    finals: dict[int, DocumentState] | None = None,
) -> Tensor:
    """Return (documents, d_model), activations of last tokens; ``finals`` receives final states."""
    last: dict[int, Tensor] = {}
    segments = [Segment(i, document) for i, document in enumerate(documents)]
    for i, segment in enumerate(segments):
        segment.finish = None if finals is None else functools.partial(finals.__setitem__, i)
    for pieces in packed_forward(model, segments, max_slots):
        last |= {i: hidden[-1].clone() for i, _, hidden in pieces}
    return torch.stack([last[i] for i in range(len(documents))])


def _one_pass(
    model: MambaLM, segments: list[Segment], max_slots: int
) -> tuple[Pass, list[Segment]]:
    device = next(model.parameters()).device
    lengths = [segment.length(max_slots) for segment in segments]
    layout = to_device(SequenceLayout.from_lengths([lengths], row_length=max_slots), device)
    tokens = torch.zeros(1, max_slots, dtype=torch.int64)
    ids = np.concatenate(
        [s.tokens[s.first : s.first + length] for s, length in zip(segments, lengths)]
    )
    tokens[0, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    starts = [segment.start for segment in segments]
    states = None if all(start is None for start in starts) else InitialStates(model, starts)
    carried = [number for number, segment in enumerate(segments) if segment.keeps(max_slots)]
    options: Any = {"states": states, "return_states": bool(carried), "return_hidden": True}
    with torch.inference_mode():
        out = model(to_device(tokens, device), layout=layout, **options)
        hidden, finals = out if carried else (out, [])
        index = to_device(torch.tensor(carried, dtype=torch.int64), device)
        pool = [tuple(part.index_select(0, index) for part in layer) for layer in finals]
    pieces, following = [], []
    for number, (segment, part) in enumerate(zip(segments, hidden[0, : len(ids)].split(lengths))):
        pieces.append((segment.owner, segment.first, part))
        end = segment.first + len(part)
        if end < len(segment.tokens):
            following.append(replace(segment, start=(pool, carried.index(number)), first=end))
        elif segment.finish:
            following += segment.finish((pool, carried.index(number))) or []
    return pieces, following


def to_device(part: Any, device: torch.device) -> Any:
    return (
        part.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else part.to(device)
    )


class InitialStates(Sequence):
    """Gather documents' initial states by layer."""

    def __init__(self, model: MambaLM, starts: Sequence[DocumentState | None]) -> None:
        self.mixers = [layer.mixer for layer in model.backbone.layers]
        self.documents, self.pools = len(starts), list[Any]()
        for pool in {id(start[0]): start[0] for start in starts if start}.values():
            places = [(start[1], i) for i, start in enumerate(starts) if start and start[0] is pool]
            self.pools.append(
                (pool, *to_device(torch.tensor(places), model.lm_head.weight.device).unbind(1))
            )

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


class TrainingLayoutReader:
    """Read documents in rows of a run's strategy, under its boundary scheme."""

    def __init__(self, documents: Sequence[Any], data: DataConfig, boundary: Any) -> None:
        lengths = np.array([len(document) for document in documents])
        tokens, offsets = np.concatenate(documents), np.cumsum([0, *lengths])
        corpus: Any = SimpleNamespace(tokens=tokens, offsets=offsets, lengths=lengths, targets=None)
        splits = data.overlong == "split" or STRATEGIES[data.strategy].splits_documents
        if not splits and data.row_length is not None:
            data = replace(data, row_length=max(data.row_length, int(lengths.max())))
        self.boundary = boundary
        self.plan = arrange_as_trained(corpus, np.arange(len(lengths)), data, boundary.continues)

    def read(self, model: MambaLM) -> Iterator[Pass]:
        device = next(model.parameters()).device
        plan = self.plan.rows
        self.boundary.reset()
        for rows in self.plan.micro_batches:
            batch = make_batch(self.plan.corpus, plan, rows).to(device)
            with torch.inference_mode():
                hidden = self.boundary.hidden(model, batch)
            pieces: Pass = []
            for row, activations in zip(rows, hidden):
                held = plan.take(plan.row(row))
                lengths = held.length.tolist()
                of_pieces = activations[: sum(lengths)].split(lengths)
                pieces += zip(held.document.tolist(), held.start.tolist(), of_pieces)
            yield pieces


def log_probabilities(model: MambaLM, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield float32 (float64 of float64) log-probabilities (rows, vocabulary) of hidden (T, d_model), some rows at a time.

    The product has one shape and its weights' dtype, under autocast too.
    """
    weight = model.lm_head.weight
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.inference_mode(), torch.autocast(hidden.device.type, enabled=False):
        filling = 1 << (GPU_LOGITS // len(weight)).bit_length() >> 1
        count = min(max(HEAD_ROWS, filling), 16384) if weight.is_cuda else HEAD_ROWS
        for first in range(0, len(hidden), count):
            part = hidden[first : first + count]
            rows = weight.new_zeros(count, hidden.shape[1])
            rows[: len(part)] = part
            logits = torch.nn.functional.linear(rows, weight)[: len(part)]
            yield slice(first, first + len(part)), torch.log_softmax(logits.to(wide), dim=-1)


Predictions = list[tuple[Tensor, Tensor]]
"""By piece of a document: float64 log-probabilities of targets, and most likely ids."""


def predict(model: MambaLM, passes: Iterable[list[tuple[Predictions, Tensor, Any]]]) -> None:
    """Append predictions to each pass's (predictions, activations, targets)."""
    for pieces in filter(None, passes):
        owners, parts, wanted = zip(*pieces)
        hidden = torch.cat(parts)
        targets = to_device(
            torch.from_numpy(np.concatenate(wanted).astype(np.int64)), hidden.device
        )
        values, best = [hidden.new_zeros(0, dtype=torch.float64)], [targets[:0]]
        for rows, log_p in log_probabilities(model, hidden):
            values.append(log_p.gather(1, targets[rows, None]).squeeze(1).double())
            best.append(log_p.argmax(dim=1))
        sizes = list(map(len, wanted))
        for owner, *part in zip(
            owners, torch.cat(values).split(sizes), torch.cat(best).split(sizes)
        ):
            owner.append(tuple(part))


def predict_documents(
    model: MambaLM,
    documents: Sequence[Any],
    targets: Callable,
    max_slots: int,
    passes: Iterable[Pass] | None,
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Return documents' losses in nats and most likely ids, read from a zero state or in ``passes``.

    ``targets(document, start, end)`` -> index of the activations that count, and the ids after them.
    """
    empty = (torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    results: list[Predictions] = [[] for _ in documents]
    alone = [Segment(i, document) for i, document in enumerate(documents) if len(document)]
    passes = passes or packed_forward(model, alone, max_slots)

    def piece(i: int, first: int, hidden: Tensor) -> tuple[Predictions, Tensor, Any]:
        places, wanted = targets(i, first, first + len(hidden))
        return results[i], hidden[places], wanted

    predict(model, ([piece(*one) for one in pieces] for pieces in passes))
    both = [
        [torch.cat(parts).cpu().numpy() for parts in zip(*(some or [empty]))] for some in results
    ]
    return [(-values, best) for values, best in both]
