"""Pack documents into rows, from their lengths alone (numpy only)."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

    def __getitem__(self, row: int) -> Row:
        row = range(self.num_rows)[operator.index(row)]
        here = slice(self.row_offsets[row], self.row_offsets[row + 1])
        pieces = zip(self.document[here].tolist(), self.start[here].tolist(), self.length[here].tolist())
        found = Row(map(Piece._make, pieces))
        found.slots = int(self.slots[row])
        return found

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
    lengths: Any,
    row_length: int | None,
    strategy: str,
    overlong: str = "error",
    buffer: int = 4096,
    streams: int = 1,
) -> PackingPlan:
    """Arrange documents in rows, as a function of the arguments alone.

    Pieces of a row keep the order of documents. Strategies that sort give rows of long documents first: shuffle rows.

    Args:
        lengths: (documents,) integers, tokens of each document, at least 1.
        row_length: slots of a row; None for single and padded, whose rows then have their document's length.
        strategy: a key of STRATEGIES.
        overlong: for a document longer than a row: error, truncate, or pieces of row_length tokens, the last the rest.
            Strategies that split documents cut it anyway.
        buffer: documents (pieces, where cut) that greedy sorts and packs at a time.
        streams: B parallel streams of a strategy that splits documents. Row t * B + b is stream b's t-th. Each document goes to
            the stream with the fewest tokens so far. A stream that ends early gets padding, then empty rows.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    chosen = STRATEGIES[_one_of("strategy", strategy, tuple(STRATEGIES))]
    _one_of("overlong", overlong, OVERLONG)
    buffer, streams = _count("buffer", buffer), _count("streams", streams)
    if streams > 1 and not chosen.splits_documents:
        raise ValueError(f"streams: expected 1 with strategy '{strategy}', which splits no documents, got {streams}")
    if row_length is None and chosen.needs_row_length:
        raise ValueError(f"row_length: expected an integer with strategy '{strategy}', got None")
    limit = LONGEST if row_length is None else _count("row_length", row_length)
    lengths = _checked_lengths(lengths)

    if chosen.cut is not None:
        document, start, length, row = chosen.cut(lengths, limit, streams)
    else:
        assert chosen.assign is not None, f"strategy '{strategy}' has neither assign nor cut"
        document, start, length = _fit(lengths, limit, overlong)
        row = chosen.assign(length, limit, buffer)
        if np.shape(row) != length.shape or np.asarray(row).dtype.kind not in "iu" or np.min(row, initial=0) < 0:
            raise ValueError(
                f"strategy '{strategy}': expected an array of {len(length)} row numbers from 0, got {row!r}"
            )
    num_rows = -(-(int(row.max(initial=-1)) + 1) // streams) * streams
    row_offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=row_offsets[1:])
    by_row = np.argsort(row, kind="stable")
    document, start, length = document[by_row], start[by_row], length[by_row]
    filled = np.diff(np.concatenate([[0], np.cumsum(length)])[row_offsets])
    if (filled > limit).any():
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
            f"{len(long)} of {len(lengths)}; set data.overlong to truncate or pieces, raise data.row_length, or use "
            "data.strategy=concat_split"
        )
    return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.minimum(lengths, row_length)


def enumerate_parts(parts: Integers) -> tuple[Integers, Integers]:
    """Map [2, 1] to ([0, 0, 1], [0, 1, 0]): of each part, what it is of and its number."""
    of = np.repeat(np.arange(len(parts)), parts)
    return of, np.arange(len(of)) - (np.cumsum(parts) - parts)[of]


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(known)}, got {type(value).__name__}")
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got '{value}'")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not 1 <= operator.index(value) <= LONGEST:
        raise ValueError(f"{name}: expected an integer from 1 to 2**31 - 1, got {value}")
    return operator.index(value)


def _checked_lengths(lengths: Any) -> Integers:
    if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__len__"):
        raise TypeError(f"lengths: expected a sequence or array of integers, got {type(lengths).__name__}")
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
    of, part = enumerate_parts((ends - 1) // row_length - first + 1)
    row = first[of] + part
    begin = np.maximum(begins[of], row * row_length)
    end = np.minimum(ends[of], (row + 1) * row_length)
    return documents[of], begin - begins[of], end - begin, row * streams + stream[of]


def _balance(lengths: Integers, streams: int) -> Integers:
    """Return the stream of each document: the one with the fewest tokens so far, of equals the first."""
    if streams == 1:
        return np.zeros(len(lengths), np.int64)
    heap = list(range(streams))  # tokens * streams + stream: ordered by tokens, then stream
    keys = [heapreplace(heap, heap[0] + tokens) for tokens in (lengths * streams).tolist()]
    return np.array(keys, np.int64) % streams


def _next_fit(lengths: Integers, row_length: int, buffer: int) -> Integers:
    """Close a row when the next document does not fit."""
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
    """Put each document, in order, into the first row that has room."""
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


def _decreasing(lengths: Integers, row_length: int, buffer: int, emptiest: bool = False) -> Integers:
    """Place pieces from the longest to the shortest, each into the fullest row that has room, or the emptiest.

    Each window of ``buffer`` pieces is packed by itself. Pieces of equal length are placed together, in their order.
    """
    key = np.arange(len(lengths)) // buffer * row_length + (row_length - lengths)
    order = np.argsort(key, kind="stable")
    key = key[order]
    runs = np.flatnonzero(np.diff(key, prepend=-1))
    run_lengths = lengths[order[runs]].tolist()
    run_counts = np.diff(runs, append=len(key)).tolist()
    edges = np.searchsorted(runs, np.arange(0, len(lengths) + buffer, buffer)).tolist()
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
    """Append to ``out`` the row of each of ``counts[i]`` pieces of ``lengths[i]`` tokens, lengths falling.

    New rows count from num_rows; returns their end. The result is that of placing pieces one by one (of rows with equal room,
    into the one that changed last): the fullest row stays the fullest until it has no room, so it takes all it can at once, and
    of the emptiest rows each takes one before any takes a second.
    """
    rows_with: dict[int, list[int]] = {}
    rooms: list[int] = []  # its keys, sorted: free slots of open rows, where any later piece could fit
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


def _whole(lengths: Integers, row_length: int, emptiest: bool = False) -> Integers:
    return _decreasing(lengths, row_length, max(len(lengths), 1), emptiest)


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
    "best_fit_decreasing": Strategy(lambda lengths, row_length, _: _whole(lengths, row_length), keeps_order=False),
    # Shortest-pack-first histogram packing (arXiv 2107.02027). The published listing opens a row for each document that fits no
    # open row, even where equal ones could share it; here they do, as if placed one by one.
    "spfhp": Strategy(lambda lengths, row_length, _: _whole(lengths, row_length, emptiest=True), keeps_order=False),
    "concat_split": Strategy(cut=_concat_split),
}
"""Strategies by the name that ``data.strategy`` takes; plugins may add to it."""
