"""From document lengths to rows of pieces.

A strategy sees lengths only and says which piece goes to which row. Documents longer than a row are dealt with before
(``overlong``), in one way for all strategies but split, so that all schemes see the same pieces.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packmamba.data.packing.strategies import LONGEST, STRATEGIES, Integers, enumerate_parts

OVERLONG = ("error", "truncate", "pieces")


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
    if streams > 1 and not chosen.splits_documents:
        raise ValueError(f"streams (data.streams): only strategy split has streams, got {streams} with '{strategy}'")
    if row_length is not None:
        row_length = _positive(row_length, "row_length (data.row_length)")
    elif chosen.needs_row_length:
        raise ValueError(f"row_length (data.row_length): strategy '{strategy}' needs one, got None")
    checked = _checked_lengths(lengths)

    limit = row_length or LONGEST
    if chosen.cut is not None:
        document, start, length, row = chosen.cut(checked, limit, streams)
    else:
        assert chosen.assign is not None, f"strategy '{strategy}' has neither assign nor cut"
        document, start, length = _fit(checked, limit, overlong)
        length.flags.writeable = False
        row = _checked_rows(chosen.assign(length, limit, buffer), len(length), strategy)
    num_rows = -(-(int(row.max(initial=-1)) + 1) // streams) * streams
    row_offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=row_offsets[1:])
    by_row = np.argsort(row, kind="stable")
    document, start, length = document[by_row], start[by_row], length[by_row]
    filled = np.diff(np.concatenate([[0], np.cumsum(length)])[row_offsets])
    if (filled > limit).any():
        raise RuntimeError(f"strategy '{strategy}' puts {filled.max()} tokens into a row of {limit} slots")
    slots = np.full(num_rows, row_length, np.int64) if chosen.pads and row_length is not None else filled
    return PackingPlan(document, start, length, row_offsets, slots)


def _checked_rows(row: Any, pieces: int, strategy: str) -> Integers:
    """What a strategy returns. Raises ValueError naming it: a document without a row would be lost."""
    if (
        not isinstance(row, np.ndarray)
        or row.dtype.kind not in "iu"
        or row.shape != (pieces,)
        or row.min(initial=0) < 0
    ):
        came = f"{row.dtype} {list(row.shape)}" if isinstance(row, np.ndarray) else type(row).__name__
        least = (
            f", the least {row.min()}" if isinstance(row, np.ndarray) and row.size and row.dtype.kind in "if" else ""
        )
        raise ValueError(
            f"strategy '{strategy}': expected an array of row numbers from 0 on, one for each of {pieces} pieces, "
            f"got {came}{least}"
        )
    return row


def _fit(lengths: Integers, row_length: int, overlong: str) -> tuple[Integers, Integers, Integers]:
    """(document, start, length) of pieces that each fit a row."""
    if overlong == "pieces":
        document, part = enumerate_parts(-(-lengths // row_length))
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
    if not 1 <= number <= LONGEST:
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
    except (TypeError, RuntimeError):  # of a tensor that has no values here
        raise TypeError("lengths: expected a sequence or array of integers, got a tensor without values") from None
    if array.ndim != 1:
        raise ValueError(f"lengths: expected one dimension, got shape {array.shape}")
    if not len(array):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"lengths: expected integers, got {array.dtype}")
    wrong = (array < 1) | (array > LONGEST)
    if wrong.any():
        document = int(wrong.argmax())
        raise ValueError(f"lengths: expected from 1 to 2**31 - 1 tokens, got {array[document]} for document {document}")
    return array.astype(np.int64)
