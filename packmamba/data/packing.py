"""Pack documents into rows, from their lengths alone (numpy only)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LONGEST = 2**31 - 1
OVERLONG = ("error", "truncate", "split")


class Piece(NamedTuple):
    """Tokens ``start`` to ``start + length`` of a document."""

    document: int
    start: int
    length: int


class Row(tuple[Piece, ...]):
    """Pieces of a row from left to right; the rest of its ``slots`` is padding."""

    slots: int


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Rows of pieces as flat arrays: row i holds pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``. P pieces, R rows.

    Attributes:
        document: (P,) int64, index of the piece's document.
        start: (P,) int64, place in the document of the piece's first token.
        length: (P,) int64, tokens of the piece, at least 1.
        row_offsets: (R + 1,) int64.
        slots: (R,) int64, slots of the row, padding included.
    """

    document: Integers
    start: Integers
    length: Integers
    row_offsets: Integers
    slots: Integers

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_slots(self) -> int:
        return int(self.slots.sum())

    @property
    def padding_fraction(self) -> float:
        """Fraction of slots without a token; 0 without rows."""
        return 1 - self.num_tokens / self.num_slots if self.num_rows else 0.0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        begin, end = self.row_offsets[range(self.num_rows)[index] :][:2]
        row = Row(map(Piece, *(part[begin:end].tolist() for part in (self.document, self.start, self.length))))
        row.slots = int(self.slots[index])
        return row

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(self.num_rows))


@dataclass(frozen=True)
class Strategy:
    """A packing strategy: it assigns whole pieces to rows, or cuts documents at the ends of rows itself.

    Attributes:
        assign: (lengths, row_length, buffer) -> (P,) row of each piece, from 0. No piece is longer than a row. ``buffer``: how
            many pieces it may look at together.
        cut: (lengths, row_length, streams) -> (document, start, length, row) of pieces, (P,) each. Rows b, b + streams,
            b + 2 * streams, ... are stream b; each continues where the one before ended.
        drops_tokens: a token may be in no row. No strategy here does; ``overlong="truncate"`` drops tails for all.
        pads: a row may have slots without a token. One that does not is as long as its tokens.
        keeps_order: rows hold the documents in their order (in each stream).
        needs_row_length: None is refused; else it stands for the length of a row's document.
    """

    assign: Callable[[Integers, int, int], Integers] | None = None
    cut: Callable[[Integers, int, int], tuple[Integers, Integers, Integers, Integers]] | None = None
    drops_tokens: bool = False
    pads: bool = True
    keeps_order: bool = True
    needs_row_length: bool = True

    @property
    def splits_documents(self) -> bool:
        """Documents are cut at the ends of rows and continue in their stream's next row."""
        return self.cut is not None


def plan_rows(
    lengths: Any, row_length: int | None, strategy: str, overlong: str = "error", buffer: int = 4096, streams: int = 1
) -> PackingPlan:
    """Arrange documents in rows, as a function of the arguments alone.

    Pieces of a row keep the order of documents. Strategies that sort give rows of long documents first: shuffle rows.

    Args:
        lengths: (documents,) integers, tokens of each document, at least 1.
        row_length: slots of a row; None for single and padded, whose rows then have their document's length.
        overlong: for a document longer than a row: error, truncate, or split into pieces of row_length tokens and a rest.
            Strategies that split documents cut it anyway.
        buffer: documents (pieces, where cut) that greedy sorts and packs at a time.
        streams: B parallel streams of a strategy that splits documents. Row t * B + b is stream b's t-th. Each document goes to
            the stream with the fewest tokens so far. A stream that ends early gets padding, then empty rows.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    chosen = STRATEGIES[_one_of("strategy", strategy, tuple(STRATEGIES))]
    _one_of("overlong", overlong, OVERLONG)
    _check_count("buffer", buffer)
    _check_count("streams", streams)
    if streams > 1 and not chosen.splits_documents:
        raise ValueError(f"streams: expected 1 with strategy '{strategy}', which splits no documents, got {streams}")
    if row_length is not None or chosen.needs_row_length:
        _check_count("row_length", row_length)
    limit = LONGEST if row_length is None else int(row_length)
    lengths = _checked_lengths(lengths)

    if chosen.cut is not None:
        document, start, length, row = chosen.cut(lengths, limit, streams)
    else:
        assert chosen.assign is not None, f"strategy '{strategy}' has neither assign nor cut"
        document, start, length = _fit(lengths, limit, overlong)
        row = np.asarray(chosen.assign(length, limit, buffer))
        if row.shape != length.shape or row.dtype.kind not in "iu" or row.min(initial=0) < 0:
            raise ValueError(f"strategy '{strategy}': expected {len(length)} row numbers from 0, got {row!r}")
    num_rows = -(-(int(row.max(initial=-1)) + 1) // streams) * streams
    by_row = np.argsort(row, kind="stable")
    document, start, length = document[by_row], start[by_row], length[by_row]
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    filled = np.diff(np.concatenate([[0], np.cumsum(length)])[row_offsets])
    if filled.max(initial=0) > limit:
        raise ValueError(f"strategy '{strategy}': expected at most {limit} tokens in a row, got {filled.max()}")
    slots = np.full(num_rows, row_length, np.int64) if chosen.pads and row_length is not None else filled
    return PackingPlan(document, start, length, row_offsets, slots)


def _fit(lengths: Integers, row_length: int, overlong: str) -> tuple[Integers, Integers, Integers]:
    """Return (document, start, length) of pieces that each fit a row."""
    if overlong == "split":
        document, part = enumerate_parts(-(-lengths // row_length))
        start = part * row_length
        return document, start, np.minimum(lengths[document] - start, row_length)
    long = np.flatnonzero(lengths > row_length)
    if overlong == "error" and len(long):
        raise ValueError(
            f"lengths: expected at most row_length={row_length} tokens, got {lengths[long[0]]} in document {long[0]} and more in "
            f"{len(long)} of {len(lengths)}; set data.overlong to truncate or split, raise data.row_length, or use "
            "data.strategy=concat_split"
        )
    return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.minimum(lengths, row_length)


def enumerate_parts(parts: Integers) -> tuple[Integers, Integers]:
    """Map [2, 1] to ([0, 0, 1], [0, 1, 0]): of each part, what it is of and its number."""
    of = np.repeat(np.arange(len(parts)), parts)
    return of, np.arange(len(of)) - (np.cumsum(parts) - parts)[of]


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def _check_count(name: str, value: Any) -> None:
    if not hasattr(value, "__index__"):
        raise (ValueError if value is None else TypeError)(f"{name}: expected an integer, got {value!r}")
    if not 1 <= value <= LONGEST:
        raise ValueError(f"{name}: expected an integer from 1 to 2**31 - 1, got {value}")


def _checked_lengths(lengths: Any) -> Integers:
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"lengths: expected one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and len(array):
        raise TypeError(f"lengths: expected integers, got {array.dtype}")
    wrong = (array < 1) | (array > LONGEST)
    if wrong.any():
        document = int(wrong.argmax())
        raise ValueError(f"lengths: expected from 1 to 2**31 - 1 tokens, got {array[document]} for document {document}")
    return array.astype(np.int64)


def _concat_split(lengths: Integers, row_length: int, streams: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Concatenate the documents of each stream and split them at the ends of rows."""
    # Each document goes to the stream with the fewest tokens so far, of equals the first: keys are tokens * streams + stream.
    heap = list(range(streams))
    keys = [heapreplace(heap, heap[0] + tokens) for tokens in (lengths * streams).tolist()]
    stream = np.array(keys, np.int64) % streams
    documents = np.argsort(stream, kind="stable")
    stream, lengths = stream[documents], lengths[documents]
    ends = np.cumsum(lengths)
    # Places in the stream, not over all streams.
    stream_tokens = np.zeros(streams, np.int64)
    np.add.at(stream_tokens, stream, lengths)
    ends -= (np.cumsum(stream_tokens) - stream_tokens)[stream]
    begins = ends - lengths
    first = begins // row_length
    of, part = enumerate_parts((ends - 1) // row_length - first + 1)
    row = first[of] + part
    begin = np.maximum(begins[of], row * row_length)
    end = np.minimum(ends[of], (row + 1) * row_length)
    return documents[of], begin - begins[of], end - begin, row * streams + stream[of]


def _next_fit(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Close a row when the next document does not fit."""
    row_of, row, room = [], -1, 0
    for length in lengths.tolist():
        if length > room:
            row, room = row + 1, row_length
        room -= length
        row_of.append(row)
    return np.array(row_of, np.int64)


def _first_fit(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Put each document, in order, into the first row that has room."""
    # A binary tree of maxima, node n above 2n and 2n + 1. Its leaves are the rooms of as many rows as may be opened.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    rooms = [row_length] * (2 * leaves)
    row_of = []
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node += node
            if rooms[node] < length:
                node += 1
        row_of.append(node - leaves)
        room = rooms[node] = rooms[node] - length
        while node > 1:
            room = max(room, rooms[node ^ 1])
            node >>= 1
            if rooms[node] == room:
                break
            rooms[node] = room
    return np.array(row_of, np.int64)


def _decreasing(
    lengths: Integers, row_length: int, buffer: int, whole: bool = False, emptiest: bool = False
) -> Integers:
    """Place pieces from the longest to the shortest, each into the fullest row that has room, or the emptiest.

    Windows of ``buffer`` pieces are packed by themselves, or all together. Of rows of equal room the last changed is taken.
    """
    buffer = len(lengths) or 1 if whole else buffer
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for first in range(0, len(lengths), buffer):
        order = first + np.argsort(-lengths[first : first + buffer], kind="stable")
        shortest = lengths[order[-1]]
        rows_with: dict[int, list[int]] = {}
        rooms: list[int] = []  # its keys, sorted: free slots of open rows, where any later piece could fit
        rows = []
        for length in lengths[order].tolist():
            if rooms and rooms[-1] >= length:
                at = len(rooms) - 1 if emptiest else bisect_left(rooms, length)
                room = rooms[at]
                row = rows_with[room].pop()
                if not rows_with[room]:
                    del rooms[at], rows_with[room]
            else:
                row, room = num_rows, row_length
                num_rows += 1
            rows.append(row)
            room -= length
            if room in rows_with:
                rows_with[room].append(row)
            elif room >= shortest:
                rows_with[room] = [row]
                insort(rooms, room)
        row_of[order] = rows
    return row_of


STRATEGIES = {
    "single": Strategy(lambda lengths, *_: np.arange(len(lengths)), pads=False, needs_row_length=False),
    "padded": Strategy(lambda lengths, *_: np.arange(len(lengths)), needs_row_length=False),
    # Rows sorted by length: batches of consecutive rows have little padding.
    "padded_sorted": Strategy(
        lambda lengths, *_: np.argsort(np.argsort(lengths, kind="stable")), keeps_order=False, needs_row_length=False
    ),
    "next_fit": Strategy(_next_fit),
    "greedy": Strategy(_decreasing, keeps_order=False),
    "first_fit": Strategy(_first_fit, keeps_order=False),
    "best_fit_decreasing": Strategy(partial(_decreasing, whole=True), keeps_order=False),
    # Shortest-pack-first histogram packing (arXiv 2107.02027). The published listing opens a row for each document that fits no
    # open row, even where equal ones could share it; here they do, as if placed one by one.
    "spfhp": Strategy(partial(_decreasing, whole=True, emptiest=True), keeps_order=False),
    "concat_split": Strategy(cut=_concat_split),
}
"""Strategies by the name that ``data.strategy`` takes; plugins may add to it."""
