"""Packing: from document lengths to rows of pieces, by one of eight strategies.

A strategy sees lengths only and says which piece goes to which row. Documents longer than a row are dealt with before
(``overlong``), in one way for all strategies but split, so that all schemes see the same pieces.
"""

from __future__ import annotations

import difflib
import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

OVERLONG = ("error", "truncate", "pieces")
_LONGEST = 2**31 - 1


class Piece(NamedTuple):
    """Tokens ``start`` to ``start + length`` of a document."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Row:
    """Iterates over its pieces, which lie in it from the left in this order; the rest of its ``slots`` is padding."""

    slots: int
    pieces: tuple[Piece, ...]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Rows of pieces as flat arrays: row i holds pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``.

    ``len(plan)`` is the number of rows; ``plan[i]`` and iteration give a ``Row``. P pieces, R rows.

    Attributes:
        document: (P,) int64, index of the piece's document.
        start: (P,) int64, place in the document of the piece's first token.
        length: (P,) int64, tokens of the piece, at least 1.
        row_offsets: (R + 1,) int64.
        slots: (R,) int64, what the row costs: the row length, or the document's own where there is none to pad to.
    """

    document: Integers
    start: Integers
    length: Integers
    row_offsets: Integers
    slots: Integers

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.length.sum())

    @property
    def num_slots(self) -> int:
        """Slots of all rows."""
        return int(self.slots.sum())

    @property
    def padding_fraction(self) -> float:
        """Share of slots that hold no token; 0 without rows."""
        return 1 - self.num_tokens / self.num_slots if self.num_rows else 0.0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Row:
        row = range(self.num_rows)[operator.index(row)]
        here = slice(self.row_offsets[row], self.row_offsets[row + 1])
        pieces = zip(self.document[here].tolist(), self.start[here].tolist(), self.length[here].tolist())
        return Row(int(self.slots[row]), tuple(map(Piece._make, pieces)))

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(self.num_rows))


@dataclass(frozen=True)
class Strategy:
    """What a strategy does to documents that fit a row, and how it assigns them.

    Attributes:
        splits_documents: a document may be cut at a row's end.
        drops_tokens: a token may be in no row. No strategy does; ``overlong="truncate"`` drops tails for them all.
        pads: a row may have slots without a token. split pads only where a stream ends.
        keeps_order: rows hold the documents as they came (split: inside each stream).
        needs_row_length: ``row_length=None`` is refused; without it a row has its document's length.
        assign: (lengths, row_length, buffer) -> (P,) the row of each piece, counted from 0. None for split, which makes
            its own pieces.
    """

    splits_documents: bool
    drops_tokens: bool
    pads: bool
    keeps_order: bool
    needs_row_length: bool
    assign: Callable[[Integers, int, int], Integers] | None


def plan_rows(
    lengths: Any,
    row_length: int | None,
    strategy: str,
    overlong: str = "error",
    buffer: int = 4096,
    streams: int = 1,
) -> PackingPlan:
    """Arranges documents in rows: a function of its arguments alone.

    In a row pieces keep the order of documents. Strategies that sort give rows of long documents first: shuffle rows.

    Args:
        lengths: (documents,) integers, tokens of each document, at least 1; a sequence or array, memory-mapped or not.
        row_length: slots of a row; None for single (no limit) and padded (to the longest of a batch, when batching).
        strategy: a key of STRATEGIES.
        overlong: what a document longer than a row does: error, truncate (its tail is dropped) or pieces (of row_length
            tokens, the last the rest). split cuts at row ends anyway.
        buffer: documents (pieces, where cut) that greedy sorts and packs at a time.
        streams: B parallel streams of split. Row t * B + b is stream b's t-th and goes on where its row before ended. A
            document lies in one stream, each next one in the stream with the fewest tokens so far. A stream that ends
            early has padding, then empty rows, so that the number of rows is a multiple of B.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    chosen = STRATEGIES[_one_of(strategy, STRATEGIES, "strategy (data.strategy)")]
    _one_of(overlong, OVERLONG, "overlong (data.overlong)")
    buffer = _positive(buffer, "buffer (data.buffer)")
    streams = _positive(streams, "streams (data.streams)")
    if streams > 1 and strategy != "split":
        raise ValueError(f"streams (data.streams): only strategy split has streams, got {streams} with '{strategy}'")
    if row_length is not None:
        row_length = _positive(row_length, "row_length (data.row_length)")
    elif chosen.needs_row_length:
        raise ValueError(f"row_length (data.row_length): strategy '{strategy}' needs one, got None")
    checked = _checked_lengths(lengths)

    limit = row_length or _LONGEST
    if chosen.assign is None:
        document, start, length, row = _split(checked, limit, streams)
    else:
        document, start, length = _fit(checked, limit, overlong)
        row = chosen.assign(length, limit, buffer)
    num_rows = -(-(int(row.max(initial=-1)) + 1) // streams) * streams
    row_offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=row_offsets[1:])
    by_row = np.argsort(row, kind="stable")
    document, start, length = document[by_row], start[by_row], length[by_row]
    slots = np.full(num_rows, row_length, np.int64) if chosen.pads and row_length is not None else length
    return PackingPlan(document, start, length, row_offsets, slots)


def _fit(lengths: Integers, row_length: int, overlong: str) -> tuple[Integers, Integers, Integers]:
    """(document, start, length) of pieces that each fit a row."""
    if overlong == "pieces":
        document, part = _enumerate_parts(-(-lengths // row_length))
        start = part * row_length
        return document, start, np.minimum(lengths[document] - start, row_length)
    long = np.flatnonzero(lengths > row_length)
    if overlong == "error" and len(long):
        raise ValueError(
            f"data.overlong is 'error' and document {long[0]} has {lengths[long[0]]} tokens, more than the "
            f"data.row_length={row_length} slots of a row ({len(long)} of {len(lengths)} documents are longer); set "
            "data.overlong to truncate or pieces, raise data.row_length, or set data.strategy to split"
        )
    return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.minimum(lengths, row_length)


def _split(lengths: Integers, row_length: int, streams: int) -> tuple[Integers, Integers, Integers, Integers]:
    """(document, start, length, row) of the pieces of documents cut at row ends."""
    stream = _balance(lengths, streams)
    documents = np.argsort(stream, kind="stable")
    stream, lengths = stream[documents], lengths[documents]
    ends = np.cumsum(lengths)
    # Places in the stream, not over all streams.
    stream_tokens = np.zeros(streams, np.int64)
    np.add.at(stream_tokens, stream, lengths)
    ends -= (np.cumsum(stream_tokens) - stream_tokens)[stream]
    begins = ends - lengths
    first = begins // row_length
    of, part = _enumerate_parts((ends - 1) // row_length - first + 1)
    row = first[of] + part
    begin = np.maximum(begins[of], row * row_length)
    end = np.minimum(ends[of], (row + 1) * row_length)
    return documents[of], begin - begins[of], end - begin, row * streams + stream[of]


def _balance(lengths: Integers, streams: int) -> Integers:
    """The stream of each document: the one with the fewest tokens when it comes, of equals the first."""
    if streams == 1:
        return np.zeros(len(lengths), np.int64)
    heap = list(range(streams))  # tokens * streams + stream: ordered by tokens, then stream
    keys = [heapreplace(heap, heap[0] + tokens) for tokens in (lengths * streams).tolist()]
    return np.array(keys, np.int64) % streams


def _enumerate_parts(parts: Integers) -> tuple[Integers, Integers]:
    """[2, 1] -> ([0, 0, 1], [0, 1, 0]): whose part, and which of its parts."""
    of = np.repeat(np.arange(len(parts)), parts)
    return of, np.arange(len(of)) - (np.cumsum(parts) - parts)[of]


def _one_each(lengths: Integers, row_length: int, buffer: int) -> Integers:
    return np.arange(len(lengths))


def _in_order(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Seals a row when the next document does not fit."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    # The piece that opens the next row, for every piece that might open one.
    following = (np.searchsorted(ends, ends[:-1] + row_length, side="right") - 1).tolist()
    opens_row = np.zeros(len(lengths), np.int64)
    opening, piece = [], 0
    while piece < len(lengths):
        opening.append(piece)
        piece = following[piece]
    opens_row[opening] = 1
    return np.cumsum(opens_row) - 1


def _first_fit(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Each document, as it comes, goes to the first row that has room."""
    shortest = int(lengths.min(initial=row_length))
    leaves = 1024
    # A binary tree of maxima, node n above 2n and 2n + 1. Its leaves are rows, those not yet opened included, so that
    # opening a row is no case of its own.
    rooms = [row_length] * (2 * leaves)
    names = list(range(leaves))
    row_of = []
    for length in lengths.tolist():
        if rooms[1] < length:
            # Rows too full for anything leave the tree, and at least as many new ones as stay come in.
            open_rows = [(room, name) for room, name in zip(rooms[leaves:], names) if room >= shortest]
            unopened = names[-1] + 1
            while leaves < 2 * len(open_rows):
                leaves *= 2
            names = [name for _, name in open_rows]
            names += range(unopened, unopened + leaves - len(open_rows))
            rooms = [0] * leaves + [room for room, _ in open_rows] + [row_length] * (leaves - len(open_rows))
            for node in range(leaves - 1, 0, -1):
                rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
        node = 1
        while node < leaves:
            node += node
            if rooms[node] < length:
                node += 1
        row_of.append(names[node - leaves])
        room = rooms[node] - length
        rooms[node] = room
        while node > 1:
            sibling = rooms[node ^ 1]
            if sibling > room:
                room = sibling
            node >>= 1
            if rooms[node] == room:
                break
            rooms[node] = room
    return np.array(row_of, np.int64)


def _greedy(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Best-fit decreasing inside each window of ``buffer`` pieces: no row holds pieces of two windows."""
    return _decreasing(lengths, row_length, buffer)


def _best_fit(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Best-fit decreasing: longest first, each to the fullest row that has room."""
    return _decreasing(lengths, row_length, len(lengths))


def _histogram(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Shortest-pack-first histogram packing (Krell et al., arXiv 2107.02027): longest first, to the emptiest open row.

    The published listing opens a row for each document that fits no open row, even where equal ones could share it;
    here they do, as if placed one by one.
    """
    return _decreasing(lengths, row_length, len(lengths), emptiest=True)


def _decreasing(lengths: Integers, row_length: int, window: int, emptiest: bool = False) -> Integers:
    """Sorts each window by falling length, equal ones as they came, and places whole counts of equal lengths."""
    window = max(window, 1)
    key = np.arange(len(lengths)) // window * row_length + (row_length - lengths)
    order = np.argsort(key, kind="stable")
    key = key[order]
    runs = np.flatnonzero(np.diff(key, prepend=-1))
    run_lengths = lengths[order[runs]].tolist()
    run_counts = np.diff(runs, append=len(key)).tolist()
    edges = np.searchsorted(runs, np.arange(0, len(lengths) + window, window)).tolist()
    rows: list[int] = []
    num_rows = 0
    for begin, end in zip(edges, edges[1:]):
        num_rows = _place(run_lengths[begin:end], run_counts[begin:end], row_length, emptiest, num_rows, rows)
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = rows
    return row_of


def _place(
    lengths: list[int], counts: list[int], row_length: int, emptiest: bool, num_rows: int, out: list[int]
) -> int:
    """Appends to ``out`` the row of each of ``counts[i]`` pieces of ``lengths[i]`` tokens, lengths falling.

    New rows count from num_rows on; returns their end. The result is that of placing the pieces one by one (among rows
    of equal room in the one that changed last): the fullest row stays it until it has no room, so it takes all it can
    at once, and of the emptiest rows each takes one before any takes a second.
    """
    rows_with: dict[int, list[int]] = {}
    rooms: list[int] = []  # its keys, sorted: the free slots of open rows, where anything left could fit
    shortest = lengths[-1]
    for length, count in zip(lengths, counts):
        while count:
            if rooms and rooms[-1] >= length:
                at = len(rooms) - 1 if emptiest else bisect_left(rooms, length)
                room = rooms[at]
                each = 1 if emptiest else min(room // length, count)
                rows = rows_with[room]
                taken = rows[: -1 - count // each : -1]
                del rows[-len(taken) :]
                if not rows:
                    del rooms[at], rows_with[room]
            else:
                room = row_length
                each = min(room // length, count)
                taken = list(range(num_rows, num_rows + count // each))
                num_rows += len(taken)
            out += taken if each == 1 else [row for row in taken for _ in range(each)]
            count -= each * len(taken)
            room -= each * length
            if room in rows_with:
                rows_with[room] += taken
            elif room >= shortest:
                rows_with[room] = taken
                insort(rooms, room)
    return num_rows


#                      splits, drops, pads, keeps order, needs a row length
STRATEGIES = {
    "single": Strategy(False, False, False, True, False, _one_each),
    "padded": Strategy(False, False, True, True, False, _one_each),
    "in_order": Strategy(False, False, True, True, True, _in_order),
    "greedy": Strategy(False, False, True, False, True, _greedy),
    "first_fit": Strategy(False, False, True, False, True, _first_fit),
    "best_fit": Strategy(False, False, True, False, True, _best_fit),
    "histogram": Strategy(False, False, True, False, True, _histogram),
    "split": Strategy(True, False, True, True, True, None),
}


def _one_of(value: Any, known: Iterable[str], name: str) -> str:
    known = list(known)
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(known)}, got {type(value).__name__}")
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"{name}: '{value}' is unknown; {hint}known: {', '.join(known)}")
    return value


def _positive(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not 1 <= number <= _LONGEST:
        raise ValueError(f"{name}: expected an integer from 1 to 2**31 - 1, got {number}")
    return number


def _checked_lengths(lengths: Any) -> Integers:
    if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__len__"):
        raise TypeError(f"lengths: expected a sequence or array of integers, got {type(lengths).__name__}")
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError(
            "lengths: expected one integer for each document, got sequences of different lengths"
        ) from None
    if array.ndim != 1:
        raise ValueError(f"lengths: expected one dimension, got shape {array.shape}")
    if not len(array):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths: expected integers, got {array.dtype}")
    wrong = (array < 1) | (array > _LONGEST)
    if wrong.any():
        document = int(wrong.argmax())
        raise ValueError(f"lengths: expected from 1 to 2**31 - 1 tokens, got {array[document]} for document {document}")
    return array.astype(np.int64)
