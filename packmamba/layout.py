"""Say where documents start and end in the rows of a batch: one layout for every operator.

A scheme (single, padded, packed, leaking) is a choice of layout, and never a case in a kernel. A
document lies in one row, a row's documents lie side by side from its left, and what is left of the
row is padding. So two numbers a document, its start and its end, say where it lies, and kernels
take them as two small tensors, whatever the lengths are; a third, its offset, says how much of it
came before. Conversions from other libraries' formats check their arguments once, on
the host, so that operators need not.

A document here is what lies in one row. Where the data layer cut a longer one (its *pieces*,
``packmamba.data.packing``), each piece is a document here.

Shapes: B rows, L slots of a row, S documents, counted in row order, then position order.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from packmamba.errors import expect

INT_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MAX_SLOTS = 2**31 - 1  # B * L, and positions in a document, are int32 in kernels
Integers = TypeVar("Integers", int, np.ndarray)
IntRows = Sequence[Sequence[int]]  # for each row of a batch, a number for each document


def ceil_div(dividend: Integers, divisor: int) -> Integers:
    """Divide, rounding up: how many boxes of ``divisor`` hold ``dividend`` things."""
    return -(-dividend // divisor)


def round_up(number: Integers, multiple: int) -> Integers:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return ceil_div(number, multiple) * multiple


class Schedules(dict):
    """Cache what kernels derive from a layout: work items on a GPU, by kernel and sizes.

    ``ops.cuda`` and ``ops.ssd_triton_plan`` fill it, and all layers of a step share it. It is an
    attribute of the tensor ``starts``, since a traced graph hands operators tensors and no layout.
    Two entries are there from the start, "longest" and "offsets": the layout's own attributes of
    these names, which kernels read from here for the same reason.
    """

    def __reduce__(self) -> tuple:
        # A copy's tensors lie elsewhere, so it starts without schedules. OrderedDict: torch.load
        # knows it.
        return OrderedDict, ([(name, self.get(name)) for name in ("longest", "offsets")],)


@dataclass(eq=False, repr=False)
class SequenceLayout:
    """Hold the documents of a batch, in row order, then position order; padding is a row's tail.

    Build one by a ``from_*`` constructor. Each checks its arguments on the host, and raises
    TypeError or ValueError that names what is wrong, with row and position. ``SequenceLayout(...)``
    trusts its arguments, tensors of one device that describe documents as below.

    Attributes:
        shape: (B, L).
        starts, ends: (S,) int32, each document's span in the flattened B * L slots, at least one
            token; a row may have none.
        offsets: (S,) int32, position in its document of each document's first token here; above 0
            for a continuation.
        num_tokens: slots that hold a token. None: they are counted, which waits for a GPU; in
            torch.export they stay unknown.
        longest: upper bound of the documents' lengths, offsets included; by it kernels decide,
            without waiting for a GPU, whether to cut long documents. None if unknown.
        flowing: what ``flow`` returns instead of computing it, or None. ``training.cuda_graphs``
            sets it, since in a graph the number of documents cannot depend on their values.
        origin: the layout that this is a copy of, by ``to`` or ``pin_memory``, or None: who needs
            the values on the host finds them there without waiting for a GPU.
        crossing: where ranks share rows and documents cross their edges, which ones
            (``ops.context_parallel``); else None.
    """

    shape: tuple[int, int]
    starts: Tensor
    ends: Tensor
    offsets: Tensor
    num_tokens: Any = None
    longest: int | None = None
    flowing: SequenceLayout | None = None
    origin: SequenceLayout | None = None
    crossing: Any = None

    def __post_init__(self) -> None:
        if self.num_tokens is None and not torch.compiler.is_exporting():
            self.num_tokens = int((self.ends - self.starts).sum())
        # Dynamo cannot set attributes of tensors. Layouts that share `starts` share its schedules.
        if not torch.compiler.is_compiling() and not hasattr(self.starts, "schedules"):
            schedules = Schedules(longest=self.longest, offsets=self.offsets)
            self.starts.schedules = schedules  # type: ignore[attr-defined]

    @classmethod
    def from_lengths(cls, lengths: IntRows, row_length: int, offsets: IntRows | None = None) -> SequenceLayout:
        """Build from rows of document lengths, from the left; the rest of a row is padding.

        Args:
            lengths: for each row the lengths of its documents, each at least 1; an empty row is all
                padding.
            row_length: L.
            offsets: for each length the position in its document of the first token here; None:
                zeros.
        """
        row_length = _integer(row_length, "row_length", minimum=1)
        rows = _integers(lengths, "lengths", minimum=1)
        zeros = [[0] * len(row) for row in rows]
        offsets_by_row = zeros if offsets is None else _integers(offsets, "offsets", minimum=0)
        expect(rows, "lengths", "at least one row", "none")
        expect([*map(len, offsets_by_row)] == [*map(len, rows)], "offsets", "one for each length", "others")
        starts: list[int] = []
        for b, row in enumerate(rows):
            tokens = sum(row)
            expect(tokens <= row_length, f"lengths[{b}]", f"at most row_length={row_length} tokens", tokens)
            # Slots of first tokens: sums of the lengths before; the last sum is an end.
            starts += [*accumulate(row, initial=b * row_length)][:-1]
        first = torch.tensor(starts, dtype=torch.int64)
        length = torch.tensor([*chain(*rows)], dtype=torch.int64)
        offset = torch.tensor([*chain(*offsets_by_row)], dtype=torch.int64)
        return cls._checked((len(rows), row_length), first, first + length, offset)

    @classmethod
    def from_rows(cls, num_rows: int, row_length: int, device: torch.device | str | None = None) -> SequenceLayout:
        """Build a layout of one full row per document: the operators' default."""
        shape = _shape(num_rows, row_length)
        starts = torch.arange(num_rows, dtype=torch.int32, device=device) * row_length
        offsets = torch.zeros_like(starts)
        return cls(shape, starts, starts + row_length, offsets, num_rows * row_length, row_length)

    @classmethod
    def from_position_indices(cls, position_indices: Tensor, name: str = "position_indices") -> SequenceLayout:
        """Build from each token's position in its document: (B, L) integer.

        The format of transformers' ``position_ids``.

        0 starts a document, then one more each; -1 is padding, at a row's tail. A row's first
        document may begin above 0 (a continuation). ``name``: the argument's, in errors.
        """
        positions = _index_matrix(position_indices, name)
        # A row may begin inside a document, which an earlier row or batch began.
        is_start = positions == 0
        is_start[:, 0] |= positions[:, 0] > 0
        valid = (positions == -1) | is_start
        # A slot is valid as padding, as a start, or as the successor of its left neighbour.
        valid[:, 1:] |= positions[:, 1:] == positions[:, :-1] + 1
        expected = "0 (a document starts) or one more than before; only a row's first may begin above 0"
        check_all(valid, name, expected, positions)
        return cls._from_starts(positions, is_start, offsets=positions)

    @classmethod
    def from_seq_idx(cls, seq_idx: Tensor, name: str = "seq_idx") -> SequenceLayout:
        """Build from each token's document id: (B, L) integer.

        The format of ``seq_idx`` in causal-conv1d and mamba-ssm.

        Equal neighbours are one document; -1 is padding, at a row's tail. An id never returns in a
        row. Offsets are 0. ``name``: the argument's, in errors.
        """
        ids = _index_matrix(seq_idx, name)
        # A start is a token whose id differs from its left neighbour's.
        is_start = ids >= 0
        is_start[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        # Neighbours alone say nothing of an id that returns later in the row.
        for b in range(len(ids)):
            values, counts = ids[b, is_start[b]].unique(return_counts=True)
            again = values[counts > 1]
            if len(again):
                got = f"id {int(again[0])} again"
                raise ValueError(f"{name}[{b}]: expected an id's slots side by side, got {got}")
        return cls._from_starts(ids, is_start, offsets=torch.zeros_like(ids))

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, rows: int = 1, row_length: int | None = None, name: str = "cu_seqlens"
    ) -> SequenceLayout:
        """Build from cumulative lengths over all rows: (S + 1,) integer.

        The format of ``cu_seqlens`` in flash-attention.

        They increase strictly from 0 to B * L and hold every row's start: nothing is padding, no
        document crosses rows. Offsets are 0.

        Args:
            rows, row_length: B, L; ``row_length`` None: the last cumulative length by rows.
            name: the argument's, in errors.
        """
        cumulative = integer_tensor(cu_seqlens, name)
        fits = cumulative.dim() == 1 and cumulative.numel() > 1
        expect(fits, name, "shape (S + 1,) with S at least 1", tuple(cumulative.shape))
        last = int(cumulative[-1])
        rows, row_length = shape = _shape(rows, last // max(rows, 1) if row_length is None else row_length)
        slots = rows * row_length
        remedy = "; make a padded tail a document of its own" if 0 < last < slots else ""
        runs = cumulative[0] == 0 and last == slots
        expect(runs, name, f"to run from 0 to B * L = {slots}", f"{int(cumulative[0])} to {last}{remedy}")
        not_above = (cumulative.diff() <= 0).nonzero().flatten()
        if len(not_above):
            got = f"{cumulative[not_above[0] :][:2].tolist()}; drop empty documents"
            raise ValueError(f"{name}: expected to increase strictly, got {got}")
        row_starts = torch.arange(0, slots, row_length)
        missing = row_starts[~torch.isin(row_starts, cumulative)].tolist()
        expect(not missing, name, "a document to start at each row's start", f"none at {min(missing, default=0)}")
        # This format has no gaps, so it cannot express padding.
        starts = cumulative[:-1]
        return cls._checked(shape, starts, cumulative[1:], torch.zeros_like(starts))

    @classmethod
    def _from_starts(cls, values: Tensor, is_start: Tensor, offsets: Tensor) -> SequenceLayout:
        """Build from marks of documents' first tokens, (B, L) bool.

        ``values`` (B, L) are below 0 at padding, where a row's last document ends; ``offsets`` (B,
        L) are read at marks.
        """
        rows, row_length = values.shape
        # (S,) slots of first tokens, and (S,) the rows that they lie in.
        starts = is_start.flatten().nonzero().flatten()
        row = starts // row_length
        # (B,) the slot after each row's last token: padding is the row's tail.
        tokens_end = (values >= 0).sum(1) + torch.arange(rows) * row_length
        ends = tokens_end[row]
        # A document that is not its row's last ends where the next one of the row starts.
        ends[:-1] = torch.where(row[1:] == row[:-1], starts[1:], ends[:-1])
        return cls._checked((rows, row_length), starts, ends, offsets.flatten()[starts])

    @classmethod
    def _checked(cls, shape: tuple[int, int], starts: Tensor, ends: Tensor, offsets: Tensor) -> SequenceLayout:
        """Build from int64 tensors on the host whose values are right, but for their range."""
        lengths = ends - starts
        longest = int((offsets + lengths).max()) if len(lengths) else 0
        expect(longest <= MAX_SLOTS, "offsets", "positions below 2**31", longest)
        num_tokens = int(lengths.sum())
        starts, ends, offsets = (tensor.to(torch.int32) for tensor in (starts, ends, offsets))
        return cls(_shape(*shape), starts, ends, offsets, num_tokens, longest)

    @property
    def device(self) -> torch.device:
        """Return the device of the layout's tensors."""
        return self.starts.device

    @property
    def num_documents(self) -> int:
        """Return S, the number of documents."""
        return self.starts.numel()

    @property
    def num_slots(self) -> int:
        """Return B * L, the number of slots, padding included."""
        return self.shape[0] * self.shape[1]

    @property
    def has_padding(self) -> bool:
        """Return whether a slot holds no token; where ``num_tokens`` is unknown, whether it may."""
        return self.num_tokens is None or self.num_tokens < self.num_slots

    @cached_property
    def lengths(self) -> Tensor:
        """Return (S,) int32, number of tokens of each document in this batch."""
        return self.ends - self.starts

    @cached_property
    def rows(self) -> Tensor:
        """Return (S,) int32, the row of each document."""
        return self.starts // self.shape[1]

    @cached_property
    def packed(self) -> bool:
        """Return whether any row holds several documents. Waits for a GPU, once."""
        # Rows are filled from the left: a document that starts elsewhere has a neighbour.
        return bool((self.starts % self.shape[1]).any())

    @property
    def continues(self) -> Tensor:
        """Return (S,) bool, offsets above 0: the document began in an earlier batch or piece."""
        return self.offsets > 0

    @cached_property
    def documents(self) -> Tensor:
        """Return (B, L) int32, each slot's document, counted over the batch; padding -1."""
        return self.slot_documents()

    def slot_documents(self) -> Tensor:
        """Compute ``documents`` without cached_property.

        Its lock breaks graphs in Python 3.11.
        """
        slot = torch.arange(self.num_slots, dtype=torch.int32, device=self.device)
        # The last document that starts at or before the slot; -1 where none does.
        document = torch.searchsorted(self.starts, slot, right=True, out_int32=True) - 1
        is_inside = slot < _append_zero(self.ends)[document]
        return torch.where(is_inside, document, -1).view(self.shape)

    @cached_property
    def token_slots(self) -> Tensor:
        """Return (num_tokens,) int64, the slots that hold a token, in order."""
        token = torch.arange(self.num_tokens, device=self.device)
        # A token's slot is its number among all tokens plus the padding slots before its document.
        tokens_before_end = self.lengths.cumsum(0)
        document = torch.searchsorted(tokens_before_end, token, right=True)
        return token + (self.ends - tokens_before_end)[document]

    @cached_property
    def seq_idx(self) -> Tensor:
        """Return (B, L) int32, each slot's document, counted from 0 in each row; padding -1."""
        rows, row_length = self.shape
        first_slots = torch.arange(rows, dtype=torch.int32, device=self.device) * row_length
        # (B,) documents in earlier rows.
        first_document = torch.searchsorted(self.starts, first_slots, out_int32=True)
        return torch.where(self.documents >= 0, self.documents - first_document[:, None], -1)

    @cached_property
    def position_indices(self) -> Tensor:
        """Return (B, L) int32, each slot's position in its document; padding -1.

        Offsets are included.
        """
        slot = torch.arange(self.num_slots, dtype=torch.int32, device=self.device).view(self.shape)
        # A token's position is its slot minus its document's start, plus the document's offset.
        first_position = _append_zero(self.offsets - self.starts)[self.documents]
        return torch.where(self.documents >= 0, slot + first_position, -1)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return (S + 1,) int32. Raises ValueError if any row is padded."""
        padded = self.num_slots - self.num_tokens
        expect(not padded, "cu_seqlens", "no padding", f"{padded} padded slots")
        return torch.cat([self.starts, self.ends[-1:]])

    def flow(self) -> SequenceLayout:
        """Merge each row's documents into one: each leaks into the next.

        The merged document has the offset of the row's first.
        """
        if self.flowing is not None:
            return self.flowing
        expect(self.crossing is None, "layout.flow", "rows that no ranks share", "shared ones")
        is_first = torch.ones_like(self.starts, dtype=torch.bool)  # of its row's documents
        is_first[1:] = self.rows[1:] != self.rows[:-1]
        starts = self.starts[is_first]
        ends = self.ends[is_first.roll(-1)]  # of its row's last documents
        # ``longest`` stays unknown: finding it would wait for a GPU.
        return SequenceLayout(self.shape, starts, ends, self.offsets[is_first], self.num_tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceLayout:
        """Copy to another device; ``origin`` of the copy is this layout."""
        return self._moved(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> SequenceLayout:
        """Copy to page-locked memory, for asynchronous copies to a GPU."""
        return self._moved(lambda part: part.pin_memory())

    def _moved(self, move: Callable[[Any], Any]) -> SequenceLayout:
        moved: Any = {name: move(getattr(self, name)) for name in ("starts", "ends", "offsets")}
        crossing = self.crossing and move_parts(self.crossing, move)
        return replace(self, **moved, flowing=None, origin=self, crossing=crossing)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceLayout):
            return NotImplemented
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("starts", "ends", "offsets")]
        return self.shape == other.shape and all(torch.equal(*pair) for pair in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts = f"documents={self.num_documents}, tokens={self.num_tokens}"
        return f"SequenceLayout(shape={self.shape}, {counts}, device='{self.device}')"


def move_parts(holder: Any, move: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataclass whose tensors and layouts are moved."""
    parts = vars(holder).items()
    return replace(holder, **{name: move(part) for name, part in parts if isinstance(part, Tensor | SequenceLayout)})


def _append_zero(tensor: Tensor) -> Tensor:
    """Append a zero, for the index -1 of slots without a document."""
    return torch.cat([tensor, tensor.new_zeros(1)])


def _integers(rows: IntRows, name: str, minimum: int) -> list[list[int]]:
    """Check and list rows of integers; errors name the row and the place."""
    listed = []
    for b, row in enumerate(rows):
        expect(hasattr(row, "__iter__"), f"{name}[{b}]", "a sequence of integers", type(row).__name__, TypeError)
        listed.append([_integer(n, f"{name}[{b}][{s}]", minimum) for s, n in enumerate(row)])
    return listed


def _integer(value: int, name: str, minimum: int) -> int:
    """Check an integer, of NumPy or torch too; return Python's."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    expect(number >= minimum, name, f"at least {minimum}", number)
    return number


def _shape(rows: int, row_length: int) -> tuple[int, int]:
    """Check a layout's shape (B, L)."""
    if torch.compiler.is_compiling():
        return rows, row_length  # a check would fix a traced tensor's sizes
    rows = _integer(rows, "rows", minimum=1)
    row_length = _integer(row_length, "row_length", minimum=1)
    expect(rows * row_length <= MAX_SLOTS, "row_length", "at most 2**31 - 1 slots", f"{rows} rows of {row_length}")
    return rows, row_length


def integer_tensor(tensor: Tensor, name: str) -> Tensor:
    """Check that a tensor holds integers; return it as int64 on the host."""
    is_traced = torch.compiler.is_exporting()
    expected = "a layout's starts and ends in torch.export"
    expect(not is_traced, name, expected, "values that decide a shape", TypeError)
    # NumPy's arrays have a dtype, too.
    dtype = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
    expect(dtype in INT_DTYPES and not tensor.is_meta, name, "an integer tensor of values", dtype, TypeError)
    return tensor.to("cpu", torch.int64)


def _index_matrix(tensor: Tensor, name: str) -> Tensor:
    """Check integers (B, L), -1 at padding, which is a row's tail.

    Returns them as int64 on the host, as ``integer_tensor`` does.
    """
    matrix = integer_tensor(tensor, name)
    fits = matrix.dim() == 2 and 0 not in matrix.shape
    expect(fits, name, "shape (B, L) with at least one slot", tuple(matrix.shape))
    check_all(matrix >= -1, name, "-1 (padding) or at least 0", matrix)
    valid = torch.ones_like(matrix, dtype=torch.bool)
    # Padding may follow anything, a token only a token.
    valid[:, 1:] = (matrix[:, :-1] >= 0) | (matrix[:, 1:] < 0)
    check_all(valid, name, "padding (-1) only at a row's tail", matrix)
    return matrix


def check_all(valid: Tensor, name: str, expected: str, values: Tensor) -> None:
    """Raise ValueError that names the first place of values (B, L) which is not valid."""
    if not valid.all():
        b, t = (~valid).nonzero()[0].tolist()
        raise ValueError(f"{name}[{b}, {t}]: expected {expected}, got {int(values[b, t])}")
