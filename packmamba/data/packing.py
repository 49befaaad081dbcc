"""Pack documents into rows, from their lengths alone.

A *strategy* decides which row each document goes to. Five documents of 3, 5, 2, 4 and 6 tokens in
rows of 8 (a letter is a token of a document, a dot is padding):

    padded          next_fit        best_fit_decreasing   concat_split
    aaa.....        aaabbbbb        cceeeeee              aaabbbbb
    bbbbb...        ccdddd..        aaabbbbb              ccddddee
    cc......        eeeeee..        dddd....              eeee....
    dddd....
    eeeeee..

``padded`` keeps documents apart and pays for it in padding; ``next_fit`` keeps their order; the
sorting strategies fill rows best; ``concat_split`` pads the last row alone but cuts documents, so
that a document's state is lost at a row's end unless it is carried. Within a row documents keep
their order. Nothing is ever dropped, but for the tails that ``overlong="truncate"`` drops on
request.

A plan is a function of the lengths alone (and of its arguments): no random numbers, no tokens.
Planning costs microseconds a document, in NumPy or in one pass of Python with a heap or a tree.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packmamba.errors import expect
from packmamba.layout import MAX_SLOTS, ceil_div, round_up

Integers = NDArray[np.int64]

OVERLONG = ("error", "truncate", "split")


class Piece(NamedTuple):
    """Locate a part of a document: ``length`` tokens from its token ``start`` on."""

    document: int
    start: int
    length: int


class Row(tuple[Piece, ...]):
    """Hold a row's pieces from left to right; the rest of its ``slots`` is padding."""

    slots: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Hold parts of documents in an order, (P,) int64 each.

    Attributes:
        document: index of the piece's document.
        start: the piece's first token, counted from the document's first.
        length: tokens of the piece.
        end: tokens of its document that are read at all. A piece that ends there has no target
            for its last token; any other piece's last token predicts the document's next token.
    """

    document: Integers
    start: Integers
    length: Integers
    end: Integers

    @classmethod
    def whole(cls, document: Integers, lengths: Integers) -> Pieces:
        """Take whole documents of these lengths."""
        lengths = np.asarray(lengths, np.int64)
        return cls(document=document, start=np.zeros_like(document), length=lengths, end=lengths)

    @property
    def num_tokens(self) -> int:
        """Count tokens of all pieces."""
        return int(self.length.sum())

    @property
    def ends_document(self) -> NDArray[np.bool_]:
        """Tell of each piece whether nothing that is read of its document follows, (P,)."""
        return self.start + self.length == self.end

    def places(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield what ``Documents.read`` takes of each piece.

        Each is (document, start, length, whether the document ends there).
        """
        columns = (self.document, self.start, self.length, self.ends_document)
        return zip(*(column.tolist() for column in columns))

    def take(self, which: slice | Integers) -> Pieces:
        """Select pieces by slice or index."""
        return Pieces(self.document[which], self.start[which], self.length[which], self.end[which])

    def cut(self, longest: int) -> Pieces:
        """Cut pieces longer than ``longest`` tokens into pieces of that length and a rest."""
        # For each part: the piece it is cut from, and its number among the piece's parts.
        source, part = _enumerate(ceil_div(self.length, longest))
        skipped = part * longest
        length = np.minimum(self.length[source] - skipped, longest)
        return replace(self.take(source), start=self.start[source] + skipped, length=length)

    def truncate(self, longest: int) -> Pieces:
        """Drop what pieces have beyond ``longest`` tokens; a document ends where it is cut."""
        too_long = self.length > longest
        length = np.minimum(self.length, longest)
        return replace(self, length=length, end=np.where(too_long, self.start + length, self.end))

    def between(self, first: int, last: int) -> Pieces:
        """Return what lies in tokens ``first`` to ``last`` of all pieces; cut the outermost two."""
        # Pieces lie end to end: piece i holds tokens ``ends[i] - length[i]`` to ``ends[i]``.
        ends = np.cumsum(self.length)
        first_piece = int(np.searchsorted(ends, first, "right"))
        last_piece = int(np.searchsorted(ends, last, "left"))
        inside = slice(first_piece, last_piece + 1)
        # Only the first of the pieces may begin before ``first``, the last end past ``last``.
        begins = ends[inside] - self.length[inside]
        skipped = np.maximum(first - begins, 0)
        length = np.minimum(ends[inside], last) - begins - skipped
        return replace(self.take(inside), start=self.start[inside] + skipped, length=length)

    def stagger(self, count: int) -> Pieces:
        """Cut the first ``count`` pieces in two, at fractions of the golden ratio.

        First parts come last, so that ``count`` streams begin inside a document, each elsewhere.
        """
        # Multiples of the golden ratio, modulo 1, are spread evenly whatever their number is.
        number = np.arange(1, len(self.length) + 1)
        fraction = number * ((5**0.5 - 1) / 2) % 1
        cut_at = np.where(number <= count, fraction * self.length, 0).astype(np.int64)
        tails = replace(self, start=self.start + cut_at, length=self.length - cut_at)
        # A cut at 0 leaves the piece whole, without a first part.
        return join([tails, replace(self, length=cut_at).take(np.flatnonzero(cut_at))])


def join(several: list[Pieces]) -> Pieces:
    """Concatenate pieces."""
    return Pieces(*map(np.concatenate, zip(*(vars(pieces).values() for pieces in several))))


@dataclass(frozen=True, eq=False)
class RowPlan(Pieces):
    """Hold rows of pieces: the pieces of all rows in row order, and where rows begin.

    Iterate over it for one ``Row`` of ``Piece`` after another.

    Attributes:
        offset: (P,) int64, tokens of the same input piece that lie in earlier rows: above 0 only
            where a row's end cut it (``concat_split``, or overlong ``split``), so that its state
            may be carried into this row. A piece that was cut before, at a step's end or by
            ``cut_documents``, begins at 0.
        row_offsets: (R + 1,) int64; row i is pieces ``row_offsets[i]`` to ``row_offsets[i + 1]``.
        slots: (R,) int64, each row's width, padding included.
    """

    offset: Integers
    row_offsets: Integers
    slots: Integers

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        """Count rows."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Count slots of all rows, padding included."""
        return int(self.slots.sum())

    @property
    def padding_fraction(self) -> float:
        """Return the share of slots that hold no token."""
        return 1 - self.num_tokens / self.num_slots if len(self) else 0.0

    def row(self, index: int) -> slice:
        """Return the slice of pieces that row ``index`` holds."""
        return slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))

    def pieces_of(self, rows: Integers) -> Integers:
        """Return the indices of all pieces of these rows, row by row."""
        row, place = _enumerate(np.diff(self.row_offsets)[rows])
        return self.row_offsets[np.asarray(rows)[row]] + place

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            places = self.take(self.row(index)).places()
            row = Row(Piece(document, start, length) for document, start, length, _ in places)
            row.slots = int(self.slots[index])
            yield row


@dataclass(frozen=True)
class Strategy:
    """Decide the row of each piece, and say what the decision does to documents.

    Attributes:
        assign: one of two signatures, by ``splits_documents``.
            False: ``(lengths, row_length, buffer) -> rows``. Takes (P,) lengths, each at most
            row_length; returns (P,) row numbers from 0 without gaps. In a row, pieces keep their
            order. ``buffer`` is ``data.buffer``, the window of ``greedy``.
            True: ``(lengths, row_length, streams) -> (document, start, length, row)``, (P,) each.
            Default: a row for each piece.
        keeps_order: rows (of a stream) hold the documents in the order they came in.
        pads: rows have ``row_length`` slots; else as many slots as tokens, and a micro-batch is one
            row.
        needs_row_length: False: without ``row_length`` a row is as long as its document.
        splits_documents: a document may go on in the next row.
        drops_tokens: not every token has a place.
    """

    assign: Callable[[Integers, int, int], Any] = lambda lengths, *_: np.arange(len(lengths))
    keeps_order: bool = True
    pads: bool = True
    needs_row_length: bool = True
    splits_documents: bool = False
    drops_tokens: bool = False


def plan_rows(
    lengths: Any, row_length: int | None, strategy: str, overlong: str = "error", buffer: int = 4096, streams: int = 1
) -> RowPlan:
    """Arrange documents in rows (PackMamba, arXiv 2408.03865).

    Args:
        lengths: (documents,) integers, tokens of each document, at least 1.
        row_length: slots of a row; None (single, padded, padded_sorted): the length of the row's
            document.
        strategy: a key of STRATEGIES.
        overlong: ``error``, ``truncate``, or ``split`` longer documents into pieces of
            ``row_length`` and a rest.
        buffer: documents (or pieces) that greedy sorts and packs at a time.
        streams: of a strategy that splits documents; row t * streams + b is stream b's row t. Each
            document goes to the stream with the fewest tokens. A stream that ends early gets
            padding, then empty rows.

    Raises TypeError or ValueError that names the argument.
    """
    lengths = _check_lengths(lengths)
    documents = Pieces.whole(np.arange(len(lengths)), lengths)
    return plan_pieces(documents, row_length, strategy, overlong, buffer, streams)


def plan_pieces(
    pieces: Pieces, row_length: int | None, strategy: str, overlong: str, buffer: int, streams: int
) -> RowPlan:
    """Arrange pieces as ``plan_rows`` arranges documents.

    ``offset`` counts from each piece's own first token: a piece starts from zero state.
    """
    limit = _check_arguments(row_length, strategy, overlong, buffer, streams)
    chosen = STRATEGIES[strategy]
    # From here on (P,): ``placed`` pieces, tokens in earlier rows (``offset``), and ``row``.
    if chosen.splits_documents:
        source, offset, length, row = chosen.assign(pieces.length.copy(), limit, streams)
        placed = replace(pieces.take(source), start=pieces.start[source] + offset, length=length)
    else:
        placed, offset = _fit_to_rows(pieces, limit, overlong)
        assigned = chosen.assign(placed.length.copy(), limit, buffer)
        row = _check_assignment(assigned, strategy, len(placed.length))
    # Each stream has as many rows as the longest one; the last ones may be empty.
    num_rows = round_up(int(row.max(initial=-1)) + 1, streams)
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    # Sort by row. Stable, so that the pieces of a row keep the order in which they came.
    by_row = np.argsort(row, kind="stable")
    placed = placed.take(by_row)
    tokens_before = np.concatenate([[0], np.cumsum(placed.length)])
    filled = np.diff(tokens_before[row_offsets])
    # No strategy of this module overfills a row; a plugin's may.
    most = f"at most {limit} tokens in a row"
    expect(filled.max(initial=0) <= limit, f"strategy '{strategy}'", most, filled.max(initial=0))
    slots = np.full_like(filled, row_length) if chosen.pads and row_length is not None else filled
    return RowPlan(**vars(placed), offset=offset[by_row], row_offsets=row_offsets, slots=slots)


def _check_arguments(row_length: int | None, strategy: str, overlong: str, buffer: int, streams: int) -> int:
    """Check ``plan_rows``' arguments; return the maximum tokens of a row."""
    expect(strategy in STRATEGIES, "strategy", f"one of {', '.join(STRATEGIES)}", repr(strategy))
    expect(overlong in OVERLONG, "overlong", f"one of {', '.join(OVERLONG)}", repr(overlong))
    chosen = STRATEGIES[strategy]
    # Without a row length each row is its document's, as long as the operators' positions reach.
    limit: Any = MAX_SLOTS if row_length is None and not chosen.needs_row_length else row_length
    for name, value in {"row_length": limit, "buffer": buffer, "streams": streams}.items():
        is_size = hasattr(value, "__index__") and 1 <= value <= MAX_SLOTS
        expect(is_size, name, "an integer from 1 to 2**31 - 1", repr(value))
    expected = f"1 with strategy '{strategy}', which splits no documents"
    expect(streams == 1 or chosen.splits_documents, "streams", expected, streams)
    return int(limit)


def _check_lengths(lengths: Any) -> Integers:
    lengths = np.asarray(lengths)
    are_integers = lengths.ndim == 1 and (lengths.dtype.kind in "iu" or not len(lengths))
    got = f"shape {lengths.shape} of {lengths.dtype}"
    expect(are_integers, "lengths", "(documents,) integers", got, TypeError)
    wrong = np.flatnonzero((lengths < 1) | (lengths > MAX_SLOTS))
    if len(wrong):
        got = f"{lengths[wrong[0]]} for document {wrong[0]}"
        raise ValueError(f"lengths: expected 1 to 2**31 - 1 tokens, got {got}")
    return lengths.astype(np.int64)


def _check_assignment(rows: Any, strategy: str, count: int) -> Integers:
    """Check the rows that a strategy returned: one for each piece, from 0, none empty."""
    # Without pieces NumPy would make an empty list float64.
    row = np.asarray(rows, None if count else np.int64)
    is_integers = row.shape == (count,) and row.dtype.kind in "iu"
    holds = is_integers and row.min(initial=0) >= 0 and np.bincount(row).all()
    expect(holds, f"strategy '{strategy}'", f"{count} rows from 0, no gaps", repr(row))
    return row


def _fit_to_rows(pieces: Pieces, limit: int, overlong: str) -> tuple[Pieces, Integers]:
    """Truncate or cut pieces longer than a row; return them, and their tokens in earlier rows."""
    too_long = np.flatnonzero(pieces.length > limit)
    if overlong == "error" and len(too_long):
        first_too_long = f"{pieces.length[too_long[0]]} in document {pieces.document[too_long[0]]}"
        got = f"{first_too_long}, more in {len(too_long)} of {len(pieces.length)}; set overlong=split"
        raise ValueError(f"lengths: expected at most row_length={limit} tokens, got {got}")
    if overlong == "truncate":
        return pieces.truncate(limit), np.zeros_like(pieces.start)
    # With overlong "error" every piece fits here, so each is cut into one part.
    _, part = _enumerate(ceil_div(pieces.length, limit))
    return pieces.cut(limit), part * limit


def _enumerate(counts: Integers) -> tuple[Integers, Integers]:
    """Number the members of groups: sizes [2, 1] to groups [0, 0, 1] and places [0, 1, 0]."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def _concat_split(lengths: Integers, row_length: int, streams: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Concatenate the documents of each stream and split them at the ends of rows."""
    # A heap of tokens * streams + stream: its least has the fewest tokens, then the first stream.
    heap = list(range(streams))
    # heapreplace returns the old key: the tokens that the stream held before this document.
    keys = [heapreplace(heap, heap[0] + tokens) for tokens in (lengths * streams).tolist()]
    begins, stream = np.divmod(np.array(keys, np.int64), streams)
    ends = begins + lengths
    # Rows of the stream that the document touches, from its first token's to its last token's.
    first_row = begins // row_length
    document, part = _enumerate((ends - 1) // row_length - first_row + 1)
    row = first_row[document] + part
    # The part of the document in each of these rows; begin and end are places in the stream.
    begin = np.maximum(begins[document], row * row_length)
    end = np.minimum(ends[document], (row + 1) * row_length)
    return document, begin - begins[document], end - begin, row * streams + stream[document]


def _next_fit(lengths: Integers, row_length: int, _: int) -> list[int]:
    """Close a row when the next document does not fit."""
    row_of = []
    row = -1
    room = 0
    for length in lengths.tolist():
        if length > room:
            row += 1
            room = row_length
        room -= length
        row_of.append(row)
    return row_of


def _first_fit(lengths: Integers, row_length: int, _: int) -> list[int]:
    """Put each document into the first row that has room."""
    # A binary tree of maxima, node n above 2n and 2n + 1; its leaves are rows' free slots.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()  # at most a row for each document
    rooms = [row_length] * (2 * leaves)
    row_of = []
    for length in lengths.tolist():
        # Go down to the leftmost leaf with room: left wherever the left maximum suffices.
        node = 1
        while node < leaves:
            node = 2 * node + (rooms[2 * node] < length)
        row_of.append(node - leaves)
        rooms[node] -= length
        # Lower the maxima above the leaf, up to the first that stays.
        while node > 1:
            node //= 2
            room = max(rooms[2 * node], rooms[2 * node + 1])
            if rooms[node] == room:
                break
            rooms[node] = room
    return row_of


def _decreasing(lengths: Integers, row_length: int, buffer: int, emptiest: bool = False) -> Integers:
    """Place each buffer's longest pieces first, in the fullest or emptiest row with room.

    Of rows with equal room the last changed is taken.
    """
    row_of = np.empty(len(lengths), np.int64)
    num_rows = 0
    # Rows of earlier buffers are closed: a document moves by at most ``buffer`` places.
    for first in range(0, len(lengths), buffer):
        order = first + np.argsort(-lengths[first : first + buffer], kind="stable")
        shortest = lengths[order[-1]]
        rows_with: dict[int, list[int]] = {}  # free slots -> rows
        rooms: list[int] = []  # its keys, sorted
        rows = []
        for length in lengths[order].tolist():
            if rooms and rooms[-1] >= length:
                # The most room, or the least that suffices.
                index = len(rooms) - 1 if emptiest else bisect_left(rooms, length)
                room = rooms[index]
                row = rows_with[room].pop()
                if not rows_with[room]:
                    del rooms[index], rows_with[room]
            else:
                row = num_rows
                room = row_length
                num_rows += 1
            rows.append(row)
            room -= length
            # A row with less room than the buffer's shortest piece can take none: forget it.
            if room in rows_with:
                rows_with[room].append(row)
            elif room >= shortest:
                rows_with[room] = [row]
                insort(rooms, room)
        row_of[order] = rows
    return row_of


def _best_fit_decreasing(lengths: Integers, row_length: int, _: int) -> Integers:
    return _decreasing(lengths, row_length, buffer=MAX_SLOTS)


def _spfhp(lengths: Integers, row_length: int, _: int) -> Integers:
    """Place the longest documents first, each in the emptiest row (SPFHP, arXiv 2107.02027).

    That is worst fit decreasing. Equal documents share a new
    row here, where the paper's histogram opens one for each.
    """
    return _decreasing(lengths, row_length, buffer=MAX_SLOTS, emptiest=True)


def _by_length(lengths: Integers, *_: int) -> Integers:
    """Give each document a row of its own, shortest first."""
    # The second argsort turns an order into ranks.
    return np.argsort(np.argsort(lengths, kind="stable"))


# Values of ``data.strategy``; plugins may add to it.
STRATEGIES = {
    "single": Strategy(pads=False, needs_row_length=False),
    "padded": Strategy(needs_row_length=False),
    "padded_sorted": Strategy(_by_length, keeps_order=False, needs_row_length=False),
    "next_fit": Strategy(_next_fit),
    "greedy": Strategy(_decreasing, keeps_order=False),
    "first_fit": Strategy(_first_fit, keeps_order=False),
    "best_fit_decreasing": Strategy(_best_fit_decreasing, keeps_order=False),
    "spfhp": Strategy(_spfhp, keeps_order=False),
    "concat_split": Strategy(_concat_split, splits_documents=True),
}
