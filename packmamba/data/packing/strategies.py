"""Packing strategies: each says, from lengths alone, which piece goes to which row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapreplace

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Strategy:
    """How a strategy fills rows, and what it does to documents that fit one.

    A strategy either assigns whole pieces to rows or cuts documents itself.

    Attributes:
        assign: (lengths, row_length, buffer) -> (P,) the row of each piece, counted from 0. Documents longer than a row have
            been dealt with; ``buffer`` is how many pieces it may look at together.
        cut: (lengths, row_length, streams) -> (document, start, length, row) of pieces, (P,) each. Rows b, b + streams,
            b + 2 * streams, ... are stream b and go on where the one before ended.
        drops_tokens: a token may be in no row. No strategy does; ``overlong="truncate"`` drops tails for them all.
        pads: a row may have slots without a token. One that does not has rows as long as what they hold.
        keeps_order: rows hold the documents as they came (in each stream).
        needs_row_length: ``row_length=None`` is refused; without it a row has its document's length.
    """

    assign: Callable[[Integers, int, int], Integers] | None = None
    cut: Callable[[Integers, int, int], tuple[Integers, Integers, Integers, Integers]] | None = None
    drops_tokens: bool = False
    pads: bool = True
    keeps_order: bool = True
    needs_row_length: bool = True

    @property
    def splits_documents(self) -> bool:
        """A document may be cut at a row's end, and goes on in its stream's next row."""
        return self.cut is not None


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
    of, part = enumerate_parts((ends - 1) // row_length - first + 1)
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


def enumerate_parts(parts: Integers) -> tuple[Integers, Integers]:
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


STRATEGIES = {
    "single": Strategy(_one_each, pads=False, needs_row_length=False),
    "padded": Strategy(_one_each, needs_row_length=False),
    "in_order": Strategy(_in_order),
    "greedy": Strategy(_greedy, keeps_order=False),
    "first_fit": Strategy(_first_fit, keeps_order=False),
    "best_fit": Strategy(_best_fit, keeps_order=False),
    "histogram": Strategy(_histogram, keeps_order=False),
    "split": Strategy(cut=_split),
}
"""What ``data.strategy`` may name. Plugins may add to it."""
