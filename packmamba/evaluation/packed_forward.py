"""Read documents in packed passes of one batch shape, for scoring and generation.

Every pass has one row of ``max_slots`` slots. A document that is longer, or that others continue
(the context of several answers), is read in segments that start from the final state of the
segment before. One shape means one choice of kernels, so that a document's results do not depend,
by one bit, on the documents beside it; Mamba-3's last bits depend on where its segments begin.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from packmamba.config import DataConfig
from packmamba.data.batch import make_batch
from packmamba.data.corpus import Documents
from packmamba.data.packing import STRATEGIES
from packmamba.data.schedule import arrange_as_trained
from packmamba.errors import expect
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM

# Layers' states of several documents, and the index of one.
DocumentState = tuple[list[tuple[Tensor, ...]], int]
# Pieces that a pass read: owner, position of the first token, activations (n, d_model).
Pass = list[tuple[Any, int, Tensor]]

# Slots of a pass for each final state that it keeps: bounds the memory of states.
SLOTS_PER_STATE = 64
# Minimum rows of logits at a time.
HEAD_ROWS = 512
# Logits at a time on a GPU.
GPU_LOGITS = 1 << 25


@dataclass
class Segment:
    """Hold a document's tokens from ``first`` on.

    Attributes:
        owner: what pieces of a pass name the document by.
        tokens: ids of the whole document.
        start: the state before token ``first``; None: zero.
        finish: takes the final state, and may return segments that start from it.
    """

    owner: Any
    tokens: Any
    start: DocumentState | None = None
    finish: "Callable[[DocumentState], list[Segment] | None] | None" = None
    first: int = 0

    def length(self, max_slots: int) -> int:
        """Count the tokens of the next pass."""
        return min(max_slots, len(self.tokens) - self.first)

    def keeps(self, max_slots: int) -> bool:
        """Tell whether the state after the next pass is needed."""
        return self.finish is not None or len(self.tokens) - self.first > max_slots


def packed_forward(model: MambaLM, segments: list[Segment], max_slots: int) -> Iterator[Pass]:
    """Compute all segments and those that follow from them, pass by pass.

    Segments with an initial state go first, so that few states are held; then the longest that fit.
    Shows a progress bar where there is a terminal.
    """
    expect(max_slots >= 1, "max_slots", "at least 1", max_slots)
    length = partial(Segment.length, max_slots=max_slots)
    waiting = sorted(segments, key=length)
    following: list[Segment] = []
    chosen: list[Segment] = []
    free = states = 0

    def add_if_fits(segment: Segment) -> bool:
        """Add a segment to the pass and return True; False where slots or states do not suffice."""
        nonlocal free, states
        fits = length(segment) <= free and segment.keeps(max_slots) <= states
        if fits:
            chosen.append(segment)
            free -= length(segment)
            states -= segment.keeps(max_slots)
        return fits

    total = sum(len(segment.tokens) for segment in segments)
    with tqdm(total=total, desc="reads", unit="token", unit_scale=True, disable=None, leave=False) as bar:
        while waiting or following:
            chosen.clear()
            free = max_slots
            states = max(1, max_slots // SLOTS_PER_STATE)
            # Those that continue from states first; new ones
            # only when all of these fit: fewer states wait.
            following = [segment for segment in following if not add_if_fits(segment)]
            while waiting and not following:
                longest_fitting = bisect.bisect_right(waiting, free, key=length) - 1
                if longest_fitting < 0 or not add_if_fits(waiting[longest_fitting]):
                    break
                del waiting[longest_fitting]
            pieces, continued = _one_pass(model, chosen, max_slots)
            following += continued
            bar.update(max_slots - free)
            yield pieces


def read_to_the_end(
    model: MambaLM, documents: Sequence[Any], max_slots: int, finals: dict[int, DocumentState]
) -> Tensor:
    """Return activations of documents' last tokens (documents, d_model).

    ``finals`` receives documents' final states by their index.
    """
    last: dict[int, Tensor] = {}
    segments = []
    for i, document in enumerate(documents):
        segments.append(Segment(i, document, finish=partial(finals.__setitem__, i)))
    for pieces in packed_forward(model, segments, max_slots):
        last |= {i: hidden[-1].clone() for i, _, hidden in pieces}
    return torch.stack([last[i] for i in range(len(documents))])


def _one_pass(model: MambaLM, segments: list[Segment], max_slots: int) -> tuple[Pass, list[Segment]]:
    """Compute one pass; return its pieces, and the segments that continue from its final states."""
    device = next(model.parameters()).device
    lengths = [segment.length(max_slots) for segment in segments]
    layout = to_device(SequenceLayout.from_lengths([lengths], row_length=max_slots), device)
    tokens = torch.zeros(1, max_slots, dtype=torch.int64)
    parts = [segment.tokens[segment.first : segment.first + length] for segment, length in zip(segments, lengths)]
    ids = np.concatenate(parts)
    tokens[0, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
    starts = [segment.start for segment in segments]
    states = None if all(start is None for start in starts) else InitialStates(model, starts)
    # Final states that somebody needs: of cut documents, and of those with a ``finish``.
    carried = [number for number, segment in enumerate(segments) if segment.keeps(max_slots)]
    options: Any = {"states": states, "return_states": bool(carried), "return_hidden": True}
    with torch.inference_mode():
        out = model(to_device(tokens, device), layout=layout, **options)
        hidden, finals = out if carried else (out, [])
        # The others' states are freed with ``finals``.
        index = to_device(torch.tensor(carried, dtype=torch.int64), device)
        pool = [tuple(part.index_select(0, index) for part in layer) for layer in finals]
    pieces = []
    following = []
    for number, (segment, part) in enumerate(zip(segments, hidden[0, : len(ids)].split(lengths))):
        pieces.append((segment.owner, segment.first, part))
        end = segment.first + len(part)
        if end < len(segment.tokens):
            following.append(replace(segment, start=(pool, carried.index(number)), first=end))
        elif segment.finish:
            following += segment.finish((pool, carried.index(number))) or []
    return pieces, following


def to_device(part: Any, device: torch.device) -> Any:
    """Copy a tensor or layout to a device, without waiting for a GPU."""
    if device.type == "cuda":
        return part.pin_memory().to(device, non_blocking=True)
    return part.to(device)


class InitialStates(Sequence):
    """Gather documents' initial states by layer."""

    def __init__(self, model: MambaLM, starts: Sequence[DocumentState | None]) -> None:
        self.mixers = [layer.mixer for layer in model.backbone.layers]
        self.documents = len(starts)
        device = model.lm_head.weight.device
        # States of earlier passes, and of each: which of its states go to which documents.
        self.pools: list[tuple[Any, Tensor, Tensor]] = []
        by_pool: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
        for document, start in enumerate(starts):
            if start is not None:
                pool, row = start
                by_pool.setdefault(id(pool), (pool, []))[1].append((row, document))
        for pool, places in by_pool.values():
            rows, documents = to_device(torch.tensor(places), device).unbind(1)
            self.pools.append((pool, rows, documents))

    def __len__(self) -> int:
        return len(self.mixers)

    def __getitem__(self, layer: Any) -> Any:
        # What the mixer starts from, zero for ours; then
        # overwritten by the stored ones, pool by pool.
        states = list(self.mixers[layer].start_state(self.documents))
        for pool, rows, documents in self.pools:
            for place, stored in enumerate(pool[layer]):
                chosen = stored.index_select(0, rows).to(states[place].dtype)
                states[place] = states[place].index_copy(0, documents, chosen)
        return tuple(states)


class TrainingLayoutReader:
    """Read documents in rows of a run's strategy, under its boundary scheme.

    A row is at least as long as the longest document, unless the strategy splits documents.

    Attributes:
        plan: the rows; a task's ``annotate`` reads which document lay before which.
    """

    def __init__(self, documents: Sequence[Any], data: DataConfig, boundary: Any) -> None:
        lengths = np.array([len(document) for document in documents])
        corpus = Documents(np.concatenate(documents), lengths)
        # A strategy that splits no document needs rows for the longest.
        splits = data.overlong == "split" or STRATEGIES[data.strategy].splits_documents
        if not splits and data.row_length is not None:
            data = replace(data, row_length=max(data.row_length, int(lengths.max())))
        self.boundary = boundary
        self._step = arrange_as_trained(corpus, np.arange(len(lengths)), data, boundary.continues)
        self.plan = self._step.rows

    def read(self, model: MambaLM) -> Iterator[Pass]:
        """Yield a pass for each batch; a piece's owner is the document's index."""
        device = next(model.parameters()).device
        self.boundary.reset()
        for rows in self._step.micro_batches:
            batch = make_batch(self._step.corpus, self.plan, rows).to(device)
            with torch.inference_mode():
                hidden = self.boundary.hidden(model, batch)
            pieces: Pass = []
            for row, activations in zip(rows, hidden):
                held = self.plan.take(self.plan.row(row))
                lengths = held.length.tolist()
                # Pieces lie side by side from the row's left; the rest is padding.
                of_pieces = activations[: sum(lengths)].split(lengths)
                pieces += zip(held.document.tolist(), held.start.tolist(), of_pieces)
            yield pieces


def log_probabilities(model: MambaLM, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of hidden (T, d_model) and their log-probabilities (rows, vocabulary).

    In float32 (float64 of float64 weights), some rows at a time. The product always has one shape,
    and its weights' dtype, under autocast too: a row's bits do not depend on the others.
    """
    weight = model.lm_head.weight
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.inference_mode(), torch.autocast(hidden.device.type, enabled=False):
        # Rows for GPU_LOGITS logits, rounded down to a power of two.
        filling = 1 << (GPU_LOGITS // len(weight)).bit_length() >> 1
        count = min(max(HEAD_ROWS, filling), 16384) if weight.is_cuda else HEAD_ROWS
        for first in range(0, len(hidden), count):
            part = hidden[first : first + count]
            # Filled up with zeros to ``count`` rows: one shape, one choice of kernels.
            rows = weight.new_zeros(count, hidden.shape[1])
            rows[: len(part)] = part
            logits = model.lm_head(rows)[: len(part)]
            yield slice(first, first + len(part)), torch.log_softmax(logits.to(wide), dim=-1)


# By piece of a document: float64 log-probabilities of targets, and most likely ids.
Predictions = list[tuple[Tensor, Tensor]]


def predict(model: MambaLM, passes: Iterable[Iterable[tuple[Predictions, Tensor, Any]]]) -> None:
    """Append predictions to each pass's (predictions, activations, targets)."""
    for pieces in filter(None, map(list, passes)):
        # All pieces of the pass go through the head together, and are split by piece afterwards.
        hidden = torch.cat([activations for _, activations, _ in pieces])
        ids = np.concatenate([targets for _, _, targets in pieces]).astype(np.int64)
        targets = to_device(torch.from_numpy(ids), hidden.device)
        values = [hidden.new_zeros(0, dtype=torch.float64)]
        most_likely = [targets[:0]]
        for rows, log_p in log_probabilities(model, hidden):
            values.append(log_p.gather(1, targets[rows, None]).squeeze(1).double())
            most_likely.append(log_p.argmax(dim=1))
        sizes = [len(targets) for _, _, targets in pieces]
        by_piece = zip(torch.cat(values).split(sizes), torch.cat(most_likely).split(sizes))
        for (predictions, _, _), prediction in zip(pieces, by_piece):
            predictions.append(prediction)


def predict_documents(
    model: MambaLM, documents: Sequence[Any], targets: Callable, max_slots: int, passes: Iterable[Pass] | None
) -> list[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Return documents' losses in nats and most likely ids.

    They are read from a zero state, or in ``passes``.

    ``targets(document, start, end)`` -> index of the activations that count, and the ids after
    them.
    """
    results: list[Predictions] = [[] for _ in documents]
    if passes is None:
        alone = [Segment(i, document) for i, document in enumerate(documents) if len(document)]
        passes = packed_forward(model, alone, max_slots)

    def with_targets(pieces: Pass) -> Iterator[tuple[Predictions, Tensor, Any]]:
        for document, first, hidden in pieces:
            places, ids = targets(document, first, first + len(hidden))
            yield results[document], hidden[places], ids

    predict(model, map(with_targets, passes))
    # A document without tokens is in no pass.
    empty = (torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    predicted = []
    for predictions in results:
        values, most_likely = zip(*(predictions or [empty]))
        predicted.append((-torch.cat(values).cpu().numpy(), torch.cat(most_likely).cpu().numpy()))
    return predicted
