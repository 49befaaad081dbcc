"""Document boundaries in the rows of a batch. Shapes: B rows, L slots of a row, S documents."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from packmamba.errors import expect

_INT_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_MAX_SLOTS = 2**31 - 1


class Schedules(dict):
    """Hold a layout's kernel schedules, as an attribute of its ``starts``: graphs hand operators tensors alone."""

    def __reduce__(self) -> tuple:
        # Without schedules, whose tensors lie elsewhere, and as a type that torch.load knows.
        return OrderedDict, ([(name, self.get(name)) for name in ("longest", "offsets")],)


class SequenceLayout:
    """Hold the documents of a batch, in row order, then position order; padding is a row's tail.

    The ``from_*`` constructors check their arguments on the host; each raises TypeError or ValueError that names what is wrong.

    Attributes:
        shape: (B, L).
        starts, ends: (S,) int32, each document's span in the flattened B * L slots, at least one token.
        offsets: (S,) int32, each first token's position in its document; above 0 for a continuation.
        num_tokens: slots that hold a token.
        longest: maximum document length, offsets included; None if unknown.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        starts: Tensor,
        ends: Tensor,
        offsets: Tensor,
        num_tokens: int | None = None,
        longest: int | None = None,
    ) -> None:
        """Trust the arguments, and count tokens if ``num_tokens`` is None (torch.export cannot)."""
        if num_tokens is None and not torch.compiler.is_exporting():
            num_tokens = int((ends - starts).sum())
        self.shape = shape
        self.starts = starts
        self.ends = ends
        self.offsets = offsets
        self.num_tokens: Any = num_tokens
        self.longest = longest
        if not torch.compiler.is_compiling() and not hasattr(starts, "schedules"):
            starts.schedules = Schedules(longest=longest, offsets=offsets)  # type: ignore[attr-defined]
        self.flowing: SequenceLayout | None = None  # result of ``flow``, in a CUDA graph
        self.origin: SequenceLayout | None = None  # the layout that this is a copy of

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[Sequence[int]],
        row_length: int,
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> SequenceLayout:
        """Build from each row's document lengths, from the left; the rest of a row is padding.

        ``offsets``: for each length the position in its document of the first token here; None: zeros.
        """
        row_length = _integer(row_length, "row_length", minimum=1)
        rows = _integers(lengths, "lengths", minimum=1)
        places = (
            [[0] * len(row) for row in rows]
            if offsets is None
            else _integers(offsets, "offsets", minimum=0)
        )
        expect(rows, "lengths", "at least one row", "none")
        expect([*map(len, places)] == [*map(len, rows)], "offsets", "one for each length", "others")
        starts: list[int] = []
        for b, row in enumerate(rows):
            if sum(row) > row_length:
                raise ValueError(
                    f"lengths[{b}]: expected at most row_length={row_length} tokens, got {sum(row)}"
                )
            starts += [*accumulate(row, initial=b * row_length)][:-1]
        first, tokens, place = (
            torch.tensor(of, dtype=torch.int64) for of in (starts, [*chain(*rows)], [*chain(*places)])
        )
        return cls._checked((len(rows), row_length), first, first + tokens, place)

    @classmethod
    def from_rows(
        cls, num_rows: int, row_length: int, device: torch.device | str | None = None
    ) -> SequenceLayout:
        """Build a layout of one document per row: the operators' default."""
        shape = _shape(num_rows, row_length)
        starts = torch.arange(num_rows, dtype=torch.int32, device=device) * row_length
        return cls(
            shape, starts, starts + row_length, torch.zeros_like(starts), num_rows * row_length, row_length
        )

    @classmethod
    def from_position_indices(
        cls, position_indices: Tensor, name: str = "position_indices"
    ) -> SequenceLayout:
        """Build from each token's position in its document, (B, L) integer; -1 is padding, at a row's tail.

        A row's first document may begin above 0 (a continuation). ``name``: the argument's, in errors.
        """
        pos = _index_matrix(position_indices, name)
        starts_here = pos == 0
        starts_here[:, 0] |= pos[:, 0] > 0
        right = (pos == -1) | starts_here
        right[:, 1:] |= pos[:, 1:] == pos[:, :-1] + 1
        expected = "0 (a document starts) or one more than before; only a row's first may begin above 0"
        check_all(right, name, expected, pos)
        return cls._from_starts(pos, starts_here, pos)

    @classmethod
    def from_seq_idx(cls, seq_idx: Tensor, name: str = "seq_idx") -> SequenceLayout:
        """Build from each token's document id, (B, L) integer, as causal-conv1d and Mamba-2 take it, with offsets 0.

        Equal neighbours are one document; -1 is padding, at a row's tail. An id never returns in a row.
        """
        idx = _index_matrix(seq_idx, name)
        starts_here = idx >= 0
        starts_here[:, 1:] &= idx[:, 1:] != idx[:, :-1]
        for b, ids in enumerate(row[here] for row, here in zip(idx, starts_here)):
            values, counts = ids.unique(return_counts=True)
            if (again := values[counts > 1]).numel():
                raise ValueError(
                    f"{name}[{b}]: expected an id's slots side by side, got id {int(again[0])} again"
                )
        return cls._from_starts(idx, starts_here, torch.zeros_like(idx))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, rows: int = 1, row_length: int | None = None, name: str = "cu_seqlens"
    ) -> SequenceLayout:
        """Build from cumulative lengths over all rows, (S + 1,) integer, as flash-attention takes them, with offsets 0.

        They increase strictly from 0 to B * L and hold every row's start: nothing is padding. ``row_length`` None: their end by
        rows.
        """
        if torch.compiler.is_exporting():
            return cls._from_traced_cu_seqlens(cu_seqlens, rows, row_length, name)
        cu = integer_tensor(cu_seqlens, name)
        expect(cu.dim() == 1 and cu.numel() > 1, name, "shape (S + 1,) with S at least 1", tuple(cu.shape))
        last = int(cu[-1])
        rows, row_length = shape = _shape(rows, last // rows if row_length is None else row_length)
        slots = rows * row_length
        if cu[0] != 0 or last != slots:
            fix = "; make a padded tail a document of its own" if 0 < last < slots else ""
            raise ValueError(
                f"{name}: expected to run from 0 to B * L = {slots}, got {int(cu[0])} to {last}{fix}"
            )
        if len(equal := (cu.diff() <= 0).nonzero().flatten()):
            raise ValueError(
                f"{name}: expected to increase strictly, got {cu[equal[0] :][:2].tolist()}; drop empty documents"
            )
        row_starts = torch.arange(0, slots, row_length)
        if len(missing := row_starts[~torch.isin(row_starts, cu)]):
            raise ValueError(
                f"{name}: expected a document to start at each row's start, got none at {missing[0]}"
            )
        return cls._checked(shape, cu[:-1], cu[1:], torch.zeros_like(cu[:-1]))

    @classmethod
    def _from_traced_cu_seqlens(
        cls, cu_seqlens: Tensor, rows: int, row_length: int | None, name: str
    ) -> SequenceLayout:
        """Build in torch.export, where values cannot be read: the exported program checks them."""
        if row_length is None:
            raise ValueError("row_length: expected a number in torch.export, got None")
        slots = rows * row_length
        row_starts = torch.arange(rows, device=cu_seqlens.device) * row_length
        right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == slots)
        right &= (cu_seqlens.diff() > 0).all()
        right &= torch.isin(row_starts, cu_seqlens).all()
        expected = f"{name}: expected to increase strictly from 0 to B * L, through each row's start"
        torch._assert_async(right, expected)
        cu = cu_seqlens.to(torch.int32)
        return cls((rows, row_length), cu[:-1], cu[1:], torch.zeros_like(cu[:-1]), slots)

    @classmethod
    def _from_starts(cls, values: Tensor, starts_here: Tensor, offsets: Tensor) -> SequenceLayout:
        """Build from (B, L) marks of documents' first tokens; a row's last document ends where ``values`` become -1."""
        rows, row_length = values.shape
        starts = starts_here.flatten().nonzero().flatten()
        row = starts // row_length
        ends = ((values >= 0).sum(1) + torch.arange(rows) * row_length)[row]
        ends[:-1] = torch.where(row[1:] == row[:-1], starts[1:], ends[:-1])
        return cls._checked((rows, row_length), starts, ends, offsets.flatten()[starts])

    @classmethod
    def _checked(
        cls, shape: tuple[int, int], starts: Tensor, ends: Tensor, offsets: Tensor
    ) -> SequenceLayout:
        longest = int((offsets + ends - starts).max()) if ends.numel() else 0
        expect(longest <= _MAX_SLOTS, "offsets", "positions below 2**31", longest)
        first, last, place = (part.to(torch.int32) for part in (starts, ends, offsets))
        return cls(_shape(*shape), first, last, place, int((ends - starts).sum()), longest)

    @property
    def device(self) -> torch.device:
        return self.starts.device

    @property
    def num_documents(self) -> int:
        """Return S."""
        return self.starts.numel()

    @property
    def num_slots(self) -> int:
        """Return B * L."""
        return self.shape[0] * self.shape[1]

    @property
    def has_padding(self) -> bool:
        """Whether a slot holds no token, or may hold none in torch.export."""
        return self.num_tokens is None or self.num_tokens < self.num_slots

    @cached_property
    def lengths(self) -> Tensor:
        """(S,) int32, tokens of each document here."""
        return self.ends - self.starts

    @cached_property
    def rows(self) -> Tensor:
        """(S,) int32, the row of each document."""
        return self.starts // self.shape[1]

    @cached_property
    def packed(self) -> bool:
        """True if any row holds several documents. Synchronises with a GPU, once."""
        return bool((self.starts % self.shape[1]).any())

    @property
    def continues(self) -> Tensor:
        """(S,) bool, offsets above 0: the document began in an earlier batch or piece."""
        return self.offsets > 0

    @cached_property
    def documents(self) -> Tensor:
        """(B, L) int32, each slot's document, counted over the batch; padding -1."""
        return self.slot_documents()

    def slot_documents(self) -> Tensor:
        """Compute ``documents`` without cached_property, whose lock breaks graphs in Python 3.11."""
        slot = torch.arange(self.num_slots, dtype=torch.int32, device=self.device)
        owner = torch.searchsorted(self.starts, slot, right=True, out_int32=True) - 1
        return torch.where(slot < _and_zero(self.ends)[owner], owner, -1).view(self.shape)

    @cached_property
    def token_slots(self) -> Tensor:
        """(num_tokens,) int64, the slots that hold a token, in order."""
        token = torch.arange(self.num_tokens, device=self.device)
        ends = self.lengths.cumsum(0)
        document = torch.searchsorted(ends, token, right=True)
        return token + (self.ends - ends)[document]

    @cached_property
    def seq_idx(self) -> Tensor:
        """(B, L) int32, the document of each slot, counted from 0 in each row; padding -1."""
        first_slots = torch.arange(self.shape[0], dtype=torch.int32, device=self.device) * self.shape[1]
        first_document = torch.searchsorted(self.starts, first_slots, out_int32=True)
        return torch.where(self.documents >= 0, self.documents - first_document[:, None], -1)

    @cached_property
    def position_indices(self) -> Tensor:
        """(B, L) int32, each slot's position in its document, offsets included; padding -1."""
        slot = torch.arange(self.num_slots, dtype=torch.int32, device=self.device).view(self.shape)
        first_position = _and_zero(self.offsets - self.starts)[self.documents]
        return torch.where(self.documents >= 0, slot + first_position, -1)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(S + 1,) int32. Raises ValueError if any row is padded."""
        padded = self.num_slots - self.num_tokens
        expect(not padded, "cu_seqlens", "no padding", f"{padded} padded slots")
        return torch.cat([self.starts, self.ends[-1:]])

    def flow(self) -> SequenceLayout:
        """Merge each row's documents into one, with the offset of the first: each leaks into the next."""
        if self.flowing is not None:
            return self.flowing
        new_row = torch.ones_like(self.starts, dtype=torch.bool)
        new_row[1:] = self.rows[1:] != self.rows[:-1]
        starts, ends, offsets = (self.starts[new_row], self.ends[new_row.roll(-1)], self.offsets[new_row])
        return SequenceLayout(self.shape, starts, ends, offsets, self.num_tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceLayout:
        """Copy to another device."""
        return self._moved(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceLayout:
        """Copy to page-locked memory, for asynchronous copies to a GPU."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> SequenceLayout:
        starts, ends, offsets = map(move, (self.starts, self.ends, self.offsets))
        moved = SequenceLayout(self.shape, starts, ends, offsets, self.num_tokens, self.longest)
        moved.origin = self
        return moved

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceLayout):
            return NotImplemented
        return self.shape == other.shape and all(
            torch.equal(getattr(self, name), getattr(other, name)) for name in ("starts", "ends", "offsets")
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts = f"documents={self.num_documents}, tokens={self.num_tokens}"
        return f"SequenceLayout(shape={self.shape}, {counts}, device='{self.device}')"


def _and_zero(tensor: Tensor) -> Tensor:
    """Append a zero, for the index -1 of slots without a document."""
    return torch.cat([tensor, tensor.new_zeros(1)])


def _integers(rows: Sequence[Sequence[int]], name: str, minimum: int) -> list[list[int]]:
    listed = []
    for b, row in enumerate(rows):
        expect(
            hasattr(row, "__iter__"),
            f"{name}[{b}]",
            "a sequence of integers",
            type(row).__name__,
            TypeError,
        )
        listed.append([_integer(n, f"{name}[{b}][{s}]", minimum) for s, n in enumerate(row)])
    return listed


def _integer(value: int, name: str, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {number}")
    return number


def _shape(rows: int, row_length: int) -> tuple[int, int]:
    if torch.compiler.is_compiling():
        return rows, row_length  # a check would fix a traced tensor's sizes
    shape = _integer(rows, "rows", 1), _integer(row_length, "row_length", 1)
    fits = shape[0] * shape[1] <= _MAX_SLOTS
    expect(fits, "row_length", "at most 2**31 - 1 slots", f"{rows} rows of {row_length}")
    return shape


def integer_tensor(tensor: Tensor, name: str) -> Tensor:
    """Check an integer tensor; copy it to the host."""
    if torch.compiler.is_exporting():
        expected = "starts and ends, or cu_seqlens, in torch.export"
        raise TypeError(f"{name}: expected {expected}, got values that decide a shape")
    dtype = getattr(tensor, "dtype", type(tensor).__name__)
    fits = dtype in _INT_DTYPES and isinstance(tensor, Tensor) and not tensor.is_meta
    expect(fits, name, "an integer tensor of values", dtype, TypeError)
    return tensor.to("cpu", torch.int64)


def _index_matrix(tensor: Tensor, name: str) -> Tensor:
    matrix = integer_tensor(tensor, name)
    holds = matrix.dim() == 2 and 0 not in matrix.shape
    expect(holds, name, "shape (B, L) with at least one slot", tuple(matrix.shape))
    check_all(matrix >= -1, name, "-1 (padding) or at least 0", matrix)
    right = torch.ones_like(matrix, dtype=torch.bool)
    right[:, 1:] = (matrix[:, :-1] >= 0) | (matrix[:, 1:] < 0)
    check_all(right, name, "padding (-1) only at a row's tail", matrix)
    return matrix


def check_all(right: Tensor, name: str, expected: str, values: Tensor) -> None:
    """Raise ValueError naming the first row and position of ``values`` that are not ``right``."""
    if not right.all():
        b, t = (~right).nonzero()[0].tolist()
        raise ValueError(f"{name}[{b}, {t}]: expected {expected}, got {int(values[b, t])}")
