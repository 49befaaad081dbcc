"""Pack documents into rows, from their lengths alone."""

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
    """Locate a part of a document by its first token."""

    document: int
    start: int
    length: int


class Row(tuple[Piece, ...]):
    """Hold pieces from left to right; the rest of its ``slots`` is padding."""

    slots: int


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Hold pieces; row i is pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``, in ``slots[i]`` slots with padding.

    int64: document, start, length (P,), row_offsets (R + 1,), slots (R,).
    """

    document: Integers
    start: Integers
    length: Integers
    row_offsets: Integers
    slots: Integers

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())

    @property
    def num_slots(self) -> int:
        return int(self.slots.sum())

    @property
    def padding_fraction(self) -> float:
        return 1 - self.num_tokens / self.num_slots if len(self) else 0.0

    def __len__(self) -> int:
        return len(self.slots)

    num_rows = property(__len__)

    def __getitem__(self, index: int) -> Row:
        begin, end = self.row_offsets[range(len(self))[index] :][:2]
        row = Row(
            map(
                Piece,
                *(part[begin:end].tolist() for part in (self.document, self.start, self.length)),
            )
        )
        row.slots = int(self.slots[index])
        return row

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True)
class Strategy:
    """Assign pieces to rows: ``assign(lengths, row_length, buffer)`` -> (P,) row of each, from 0.

    With ``splits_documents``: ``assign(lengths, row_length, streams)`` -> (document, start, length, row), (P,) each.
    """

    assign: Callable[[Integers, int, int], Any] = lambda lengths, *_: np.arange(len(lengths))
    keeps_order: bool = True  # rows (of a stream) hold the documents in their order
    pads: bool = True  # rows have row_length slots; else as many as tokens
    needs_row_length: bool = True  # else a row is as long as its document without one
    splits_documents: bool = False
    drops_tokens: bool = False


def plan_rows(
    lengths: Any,
    row_length: int | None,
    strategy: str,
    overlong: str = "error",
    buffer: int = 4096,
    streams: int = 1,
) -> PackingPlan:
    """Arrange documents in rows (PackMamba, arXiv 2408.03865); return their PackingPlan. Raises TypeError or ValueError.

    Args:
        lengths: (documents,) integers, tokens of each document, at least 1.
        strategy: a key of STRATEGIES.
        row_length: slots of a row; None (single, padded): the length of the row's document.
        overlong: ``error``, ``truncate``, or ``split`` longer documents into pieces of ``row_length`` and a rest.
        buffer: documents (or pieces) that greedy sorts and packs at a time.
        streams: of a strategy that splits documents; row t * streams + b is stream b's row t. Each document goes to the
            stream with the fewest tokens. A stream that ends early gets padding, then empty rows.
    """
    for name, given, known in (
        ("strategy", strategy, STRATEGIES),
        ("overlong", overlong, OVERLONG),
    ):
        if given not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {given!r}")
    chosen = STRATEGIES[strategy]
    limit: Any = LONGEST if row_length is None and not chosen.needs_row_length else row_length
    for name, value in (("row_length", limit), ("buffer", buffer), ("streams", streams)):
        if not hasattr(value, "__index__") or not 1 <= value <= LONGEST:
            raise ValueError(f"{name}: expected an integer from 1 to 2**31 - 1, got {value!r}")
    if streams > 1 and not chosen.splits_documents:
        raise ValueError(
            f"streams: expected 1 with strategy '{strategy}', which splits no documents, got {streams}"
        )
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and len(lengths)):
        raise TypeError(
            f"lengths: expected (documents,) integers, got shape {lengths.shape} of {lengths.dtype}"
        )
    if len(wrong := np.flatnonzero((lengths < 1) | (lengths > LONGEST))):
        raise ValueError(
            f"lengths: expected 1 to 2**31 - 1 tokens, got {lengths[wrong[0]]} for document {wrong[0]}"
        )
    lengths, limit = lengths.astype(np.int64), int(limit)
    if chosen.splits_documents:
        document, start, length, row = chosen.assign(lengths.copy(), limit, streams)
    else:
        if overlong == "error" and len(long := np.flatnonzero(lengths > limit)):
            got = f"{lengths[long[0]]} in document {long[0]}, more in {len(long)} of {len(lengths)}; set overlong=split"
            raise ValueError(f"lengths: expected at most row_length={limit} tokens, got {got}")
        document, start, length = cut(lengths, limit)
        if overlong == "truncate":
            document, start, length = document[start == 0], start[start == 0], length[start == 0]
        row = np.asarray(
            chosen.assign(length.copy(), limit, buffer), None if len(length) else np.int64
        )
        fits = row.shape == length.shape and row.dtype.kind in "iu" and row.min(initial=0) >= 0
        if not (fits and np.bincount(row).all()):
            raise ValueError(
                f"strategy '{strategy}': expected {len(length)} rows from 0, no gaps, got {row!r}"
            )
    num_rows = -(-(int(row.max(initial=-1)) + 1) // streams) * streams
    by_row = np.argsort(row, kind="stable")
    document, start, length = document[by_row], start[by_row], length[by_row]
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    filled = np.diff(np.concatenate([[0], np.cumsum(length)])[row_offsets])
    if filled.max(initial=0) > limit:
        raise ValueError(
            f"strategy '{strategy}': expected at most {limit} tokens in a row, got {filled.max()}"
        )
    slots = (
        np.full(num_rows, row_length, np.int64)
        if chosen.pads and row_length is not None
        else filled
    )
    return PackingPlan(document, start, length, row_offsets, slots)


def cut(lengths: Integers, longest: int) -> tuple[Integers, Integers, Integers]:
    """Cut documents into pieces of ``longest`` tokens and a rest: (document, start, length)."""
    document, part = _enumerate(-(-lengths // longest))
    start = part * longest
    return document, start, np.minimum(lengths[document] - start, longest)


def _enumerate(parts: Integers) -> tuple[Integers, Integers]:
    """Map [2, 1] to ([0, 0, 1], [0, 1, 0])."""
    of = np.repeat(np.arange(len(parts)), parts)
    return of, np.arange(len(of)) - (np.cumsum(parts) - parts)[of]


def _concat_split(
    lengths: Integers, row_length: int, streams: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Concatenate the documents of each stream and split them at the ends of rows."""
    # Keys are tokens * streams + stream: fewest tokens, then the first stream.
    heap = list(range(streams))
    keys = [heapreplace(heap, heap[0] + tokens) for tokens in (lengths * streams).tolist()]
    begins, stream = np.divmod(np.array(keys, np.int64), streams)
    ends, first = begins + lengths, begins // row_length
    of, part = _enumerate((ends - 1) // row_length - first + 1)
    row = first[of] + part
    begin = np.maximum(begins[of], row * row_length)
    end = np.minimum(ends[of], (row + 1) * row_length)
    return of, begin - begins[of], end - begin, row * streams + stream[of]


def _next_fit(lengths: Integers, row_length: int, _: int) -> list[int]:
    """Close a row when the next document does not fit."""
    row_of, row, room = [], -1, 0
    for length in lengths.tolist():
        if length > room:
            row, room = row + 1, row_length
        room -= length
        row_of.append(row)
    return row_of


def _first_fit(lengths: Integers, row_length: int, _: int) -> list[int]:
    """Put each document into the first row that has room."""
    # A binary tree of maxima, node n above 2n and 2n + 1; leaves: rows' free slots.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    rooms = [row_length] * (2 * leaves)
    row_of = []
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node + (rooms[2 * node] < length)
        row_of.append(node - leaves)
        rooms[node] -= length
        while node > 1:
            node //= 2
            room = max(rooms[2 * node], rooms[2 * node + 1])
            if rooms[node] == room:
                break
            rooms[node] = room
    return row_of


def _decreasing(
    lengths: Integers, row_length: int, buffer: int, emptiest: bool = False
) -> Integers:
    """Place each window's longest pieces first, in the fullest or emptiest row with room; of equals the last changed."""
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    for first in range(0, len(lengths), buffer):
        order = first + np.argsort(-lengths[first : first + buffer], kind="stable")
        shortest = lengths[order[-1]]
        rows_with: dict[int, list[int]] = {}
        rooms: list[int] = []  # its keys, sorted: free slots
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
    "single": Strategy(pads=False, needs_row_length=False),
    "padded": Strategy(needs_row_length=False),
    "padded_sorted": Strategy(
        lambda n, *_: np.argsort(np.argsort(n, kind="stable")), False, needs_row_length=False
    ),
    "next_fit": Strategy(_next_fit),
    "greedy": Strategy(_decreasing, keeps_order=False),
    "first_fit": Strategy(_first_fit, keeps_order=False),
    "best_fit_decreasing": Strategy(lambda n, room, _: _decreasing(n, room, LONGEST), False),
    # Shortest-pack-first (arXiv 2107.02027), but equal documents share a new row.
    "spfhp": Strategy(lambda n, room, _: _decreasing(n, room, LONGEST, emptiest=True), False),
    "concat_split": Strategy(_concat_split, splits_documents=True),
}
"""Values of ``data.strategy``; plugins may add to it."""
