"""Documents and rows of each optimizer step: a pure function of (corpus, configuration, step)."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.batch import Integers, Rows
from packmamba.data.packing import STRATEGIES, enumerate_parts, plan_rows
from packmamba.data.token_store import Corpus

WINDOW_DOCUMENTS = 1_000_000


@dataclass(frozen=True)
class Pieces:
    """Tokens ``start[i]`` to ``start[i] + length[i]`` of document ``document[i]``, in order; each starts from zero state."""

    document: Integers
    start: Integers
    length: Integers

    @staticmethod
    def of(corpus: Corpus, documents: Integers) -> Pieces:
        """Return these documents, whole."""
        return Pieces(documents, np.zeros(len(documents), np.int64), corpus.lengths[documents].astype(np.int64))

    @staticmethod
    def joined(several: list[Pieces]) -> Pieces:
        return Pieces(*map(np.concatenate, zip(*((one.document, one.start, one.length) for one in several))))

    def __getitem__(self, which: slice | Integers) -> Pieces:
        return Pieces(self.document[which], self.start[which], self.length[which])

    def __len__(self) -> int:
        return len(self.document)

    def cut(self, longest: int | None) -> Pieces:
        """Cut pieces longer than ``longest`` into pieces of that length and a rest."""
        if longest is None:
            return self
        of, part = enumerate_parts(-(-self.length // longest))
        skipped = part * longest
        return Pieces(self.document[of], self.start[of] + skipped, np.minimum(self.length[of] - skipped, longest))

    def between(self, first: int, last: int) -> Pieces:
        """Return the pieces that hold tokens ``first`` to ``last`` of all, in order; the outermost are cut."""
        ends = np.cumsum(self.length)
        here = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1)
        begins = ends[here] - self.length[here]
        skipped = np.maximum(first - begins, 0)
        return Pieces(self.document[here], self.start[here] + skipped, np.minimum(ends[here], last) - begins - skipped)

    def stagger(self, count: int) -> Pieces:
        """Cut the first ``count`` pieces in two, at places that multiples of the golden ratio spread evenly. The second part
        takes the piece's place; the first parts come last of all."""
        shares = np.arange(1, min(count, len(self)) + 1) * ((5**0.5 - 1) / 2) % 1
        cuts = np.zeros(len(self), np.int64)
        cuts[: len(shares)] = shares * self.length[: len(shares)]
        heads = np.flatnonzero(cuts)
        tails = Pieces(self.document, self.start + cuts, self.length - cuts)
        return Pieces.joined([tails, Pieces(self.document[heads], self.start[heads], cuts[heads])])


def arrange(corpus: Corpus, pieces: Pieces, data: DataConfig) -> Rows:
    """Arrange pieces in rows with the configured strategy. Raises ConfigError if one is too long for a row."""
    pieces = pieces.stagger(data.streams) if data.stagger else pieces
    end, row_length = corpus.lengths[pieces.document].astype(np.int64), data.row_length
    try:
        plan = plan_rows(pieces.length, row_length, data.strategy, data.overlong, data.buffer, data.streams)
    except ValueError as error:
        raise ConfigError(f"data.{error}") from None
    if data.overlong == "truncate" and row_length is not None and not STRATEGIES[data.strategy].splits_documents:
        end = np.where(pieces.length > row_length, pieces.start + row_length, end)
    return Rows.of(corpus, pieces.document, pieces.start, end, plan)


def arrange_as_trained(
    corpus: Corpus, documents: Integers, data: DataConfig, carry: bool
) -> tuple[Rows, list[Integers]]:
    """Arrange documents to evaluate as in training; return the rows, and their numbers batch by batch."""
    pieces = Pieces.of(corpus, documents).cut(data.cut_documents)
    streams = data.batch_rows if data.takes_turns else data.streams
    if carry:
        # No more than the tokens fill, as an empty row costs as much as another; two, as a state may come from another row.
        streams = min(streams, max(2, int(pieces.length.sum()) // int(pieces.length.max())))
    data = replace(data, streams=streams, stagger=False)
    rows = arrange(corpus, pieces, data)
    return rows, micro_batches(rows, np.arange(len(rows)), data, carry)


def micro_batches(
    rows: Rows, numbers: Integers, data: DataConfig, carry: bool = False, world_size: int = 1
) -> list[Integers]:
    """Split consecutive rows, given by number, into batches of at most ``data.max_tokens_per_batch`` slots, but at least one row.

    Every row of a batch is as long as its longest, so rows that are never padded are batches of their own. Carrying, a batch is
    one row of each of a rank's streams, unless streams take turns.
    """
    pads = STRATEGIES[data.strategy].pads
    if not pads or (carry and not data.takes_turns):
        rows_per_batch = data.streams // world_size if pads else 1
        return np.split(numbers, range(rows_per_batch, len(numbers), rows_per_batch))
    edges, first, longest = [], 0, 0
    for i, slots in enumerate(rows.slots[numbers].tolist()):
        longest = max(longest, slots)
        if i > first and longest * (i - first + 1) > data.max_tokens_per_batch:
            edges.append(i)
            first, longest = i, slots
    return np.split(numbers, edges)


class Window(NamedTuple):
    """Shuffled pieces, and in stream mode their rows and the rows' order; step i has ``edges[i]`` to ``edges[i + 1]``."""

    edges: list[int]
    pieces: Pieces
    rows: Rows | None = None
    numbers: Integers | None = None


@dataclass
class Schedule:
    """Endless steps: epochs of shuffled windows of documents.

    Matched: a step is the next documents until ``data.tokens_per_step`` real tokens, arranged by the strategy, so that every
    strategy gets the same documents. With ``data.cut_at_steps`` it has exactly as many tokens, or a whole epoch if that has
    fewer: the document at its end is cut, and at a window's end the next window's documents follow. Stream: the strategy fills
    rows from the window's documents, and a step is the next rows until ``data.tokens_per_step`` slots. There, and without the
    cut, the last step of a window may be smaller. Nothing is dropped.

    ``seed`` is of the order of documents. With ``carry`` batches continue each other row by row.
    """

    corpus: Corpus
    data: DataConfig
    seed: int
    carry: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        data = self.data
        longest = min(int(self.corpus.lengths.max()), data.cut_documents or 2**31)
        splits = data.overlong != "error" or STRATEGIES[data.strategy].splits_documents
        if data.row_length is not None and longest > data.row_length and not splits:
            expected = f"at least {longest}, the longest document's tokens"
            raise ConfigError(
                f"data.row_length: expected {expected}, got {data.row_length}; or set data.overlong=split"
            )
        self.exact = data.batching == "matched" and data.cut_at_steps
        self.tokens = int(self.corpus.lengths.sum(dtype=np.int64))
        self.budget = min(data.tokens_per_step, self.tokens)
        self.windows_per_epoch = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        self._first_steps, self._first_tokens = [0], [0]  # of each window
        self._cached: tuple[int, Window] | None = None

    def step(self, step: int) -> tuple[Rows, list[Integers]]:
        """Return the rows of a step, and their numbers batch by batch, of all ranks."""
        if self.exact:
            rows = arrange(self.corpus, self._tokens(step * self.budget, (step + 1) * self.budget), self.data)
            numbers = np.arange(len(rows))
        else:
            number = _locate(step, self._first_steps, lambda number: len(self._window(number).edges) - 1)
            edges, pieces, planned, order = self._window(number)
            first, last = edges[step - self._first_steps[number] :][:2]
            rows = planned or arrange(self.corpus, pieces[first:last], self.data)
            numbers = np.arange(len(rows)) if order is None else order[first:last]
        return rows, micro_batches(rows, numbers, self.data, self.carry, self.world_size)

    def epoch_steps(self) -> int:
        """Count the steps in which all documents come once, in the first epoch."""
        if self.exact:
            return -(-self.tokens // self.budget)
        return sum(len(self._window(number).edges) - 1 for number in range(self.windows_per_epoch))

    def turn(self, numbers: Integers) -> int:
        """Return which of its rank's batches of a round a batch is, given its rows; 0 unless streams take turns."""
        if not (self.carry and self.data.takes_turns):
            return 0
        return int(numbers[0]) % self.data.streams // len(numbers) // self.world_size

    def _tokens(self, first: int, last: int) -> Pieces:
        """Return the pieces that hold these tokens of all windows, in order."""
        found = []
        while first < last:
            number = _locate(
                first, self._first_tokens, lambda n: int(self.corpus.lengths[self._documents(n)[1]].sum(dtype=np.int64))
            )
            begin, end = self._first_tokens[number : number + 2]
            found.append(self._window(number).pieces.between(first - begin, min(last, end) - begin))
            first = end
        return Pieces.joined(found)

    def _documents(self, number: int) -> tuple[list[int], Integers]:
        """Return a window's seed and its documents."""
        epoch, place = divmod(number, self.windows_per_epoch)
        part = int(np.random.default_rng([self.seed, epoch]).permutation(self.windows_per_epoch)[place])
        first = part * WINDOW_DOCUMENTS
        documents = np.arange(first, min(first + WINDOW_DOCUMENTS, self.corpus.num_documents))
        return [self.seed, epoch, part], documents

    def _window(self, number: int) -> Window:
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, self._plan_window(number))
        return self._cached[1]

    def _plan_window(self, number: int) -> Window:
        data, (seed, documents) = self.data, self._documents(number)
        rng = np.random.default_rng(seed)
        pieces = Pieces.of(self.corpus, rng.permutation(documents)).cut(data.cut_documents)
        if data.cut_documents is not None:
            pieces = pieces[rng.permutation(len(pieces))]  # else steps would be full of one long document
        if data.batching == "matched":
            return Window(_edges(pieces.length, data.tokens_per_step), pieces)
        rows = arrange(self.corpus, pieces, data)
        numbers = np.arange(len(rows))
        if not STRATEGIES[data.strategy].keeps_order:
            numbers = rng.permutation(numbers)  # a strategy that sorts by length must not impose a curriculum
        edges = _edges(rows.slots[numbers], data.tokens_per_step)
        if data.shuffle_steps is not None:
            blocks = np.split(numbers, edges[: -1 : data.shuffle_steps][1:])
            numbers = np.concatenate([rng.permutation(block) for block in blocks])
        return Window(edges, pieces, rows, numbers)


def _locate(place: int, firsts: list[int], size: Callable[[int], int]) -> int:
    """Return the window that holds a place, extending ``firsts``, the first place of each window."""
    while firsts[-1] <= place:
        firsts.append(firsts[-1] + size(len(firsts) - 1))
    return bisect.bisect_right(firsts, place) - 1


def _edges(sizes: Integers, budget: int) -> list[int]:
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return [0, *(np.flatnonzero(np.diff(before // budget)) + 1).tolist(), len(sizes)]
