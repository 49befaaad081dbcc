"""Documents and rows of each optimizer step: a pure function of (corpus, configuration, step)."""

from __future__ import annotations

import bisect
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
        return Pieces(
            *(np.concatenate([getattr(p, name) for p in several]) for name in ("document", "start", "length"))
        )

    def __getitem__(self, which: slice | Integers) -> Pieces:
        return Pieces(self.document[which], self.start[which], self.length[which])

    def __len__(self) -> int:
        return len(self.document)

    def cut(self, longest: int | None) -> Pieces:
        """Cut pieces longer than ``longest`` into pieces of that length and a rest."""
        if longest is None:
            return self
        of, part = enumerate_parts(-(-self.length // longest))
        return Pieces(
            self.document[of], self.start[of] + part * longest, np.minimum(self.length[of] - part * longest, longest)
        )

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
        return Pieces.joined(
            [
                Pieces(self.document, self.start + cuts, self.length - cuts),
                Pieces(self.document[heads], self.start[heads], cuts[heads]),
            ]
        )


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
    rows_per_batch = None
    if not STRATEGIES[data.strategy].pads:
        rows_per_batch = 1
    elif carry and not data.takes_turns:
        rows_per_batch = data.streams // world_size
    if rows_per_batch is not None:
        return np.split(numbers, range(rows_per_batch, len(numbers), rows_per_batch))
    edges, first, longest = [], 0, 0
    for i, slots in enumerate(rows.slots[numbers].tolist()):
        longest = max(longest, slots)
        if i > first and longest * (i - first + 1) > data.max_tokens_per_batch:
            edges.append(i)
            first, longest = i, slots
    return np.split(numbers, edges)


class Window(NamedTuple):
    """Shuffled documents: in matched mode their pieces; in stream mode their rows, and the rows' numbers in order.

    Step i of the window holds those from ``edges[i]`` to ``edges[i + 1]``.
    """

    edges: list[int]
    pieces: Pieces | None = None
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

    Args:
        corpus: training documents.
        data: the configuration's section.
        seed: of the order of documents.
        carry: whether batches continue each other row by row.
        world_size: ranks that share each step.
    """

    corpus: Corpus
    data: DataConfig
    seed: int
    carry: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        data = self.data
        if self.corpus.num_documents == 0:
            raise ConfigError(f"data.source: expected training documents, got none from {data.source}")
        longest = min(int(self.corpus.lengths.max()), data.cut_documents or 2**31)
        splits = data.overlong != "error" or STRATEGIES[data.strategy].splits_documents
        if data.row_length is not None and longest > data.row_length and not splits:
            raise ConfigError(
                f"data.row_length: expected at least {longest}, the tokens of the longest document, got {data.row_length}; raise "
                "it, or set data.overlong to pieces or truncate"
            )
        self.exact = data.batching == "matched" and data.cut_at_steps
        self.budget = min(data.tokens_per_step, int(self.corpus.lengths.sum(dtype=np.int64)))
        self._first_steps, self._first_tokens = [0], [0]  # of each window
        self._cached: tuple[int, Window] | None = None

    def step(self, step: int) -> tuple[Rows, list[Integers]]:
        """Return the rows of a step, and their numbers batch by batch, of all ranks."""
        if self.exact:
            budget = self.budget
            rows = arrange(self.corpus, self._tokens(step * budget, (step + 1) * budget), self.data)
            return rows, micro_batches(rows, np.arange(len(rows)), self.data, self.carry, self.world_size)
        while self._first_steps[-1] <= step:
            steps = len(self._window(len(self._first_steps) - 1).edges) - 1
            self._first_steps.append(self._first_steps[-1] + steps)
        number = bisect.bisect_right(self._first_steps, step) - 1
        window = self._window(number)
        first, last = window.edges[step - self._first_steps[number] :][:2]
        if window.pieces is not None:
            rows = arrange(self.corpus, window.pieces[first:last], self.data)
            numbers = np.arange(len(rows))
        else:
            assert window.rows is not None and window.numbers is not None
            rows, numbers = window.rows, window.numbers[first:last]
        return rows, micro_batches(rows, numbers, self.data, self.carry, self.world_size)

    def epoch_steps(self) -> int:
        """Count the steps in which all documents come once, in the first epoch."""
        if self.exact:
            return -(-int(self.corpus.lengths.sum(dtype=np.int64)) // self.budget)
        windows = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        return sum(len(self._window(number).edges) - 1 for number in range(windows))

    def turn(self, numbers: Integers) -> int:
        """Return which of its rank's batches of a round a batch is, given its rows; 0 unless streams take turns."""
        if not (self.carry and self.data.takes_turns):
            return 0
        return int(numbers[0]) % self.data.streams // len(numbers) // self.world_size

    def _tokens(self, first: int, last: int) -> Pieces:
        """Return the pieces that hold these tokens of all windows, in order."""
        found = []
        while first < last:
            while self._first_tokens[-1] <= first:
                _, documents = self._documents(len(self._first_tokens) - 1)
                tokens = int(self.corpus.lengths[documents].sum(dtype=np.int64))
                self._first_tokens.append(self._first_tokens[-1] + tokens)
            number = bisect.bisect_right(self._first_tokens, first) - 1
            begin, end = self._first_tokens[number : number + 2]
            pieces = self._window(number).pieces
            assert pieces is not None
            found.append(pieces.between(first - begin, min(last, end) - begin))
            first = end
        return Pieces.joined(found)

    def _documents(self, number: int) -> tuple[list[int], slice]:
        """Return a window's seed and its documents."""
        per_epoch = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        epoch, place = divmod(number, per_epoch)
        part = int(np.random.default_rng([self.seed, epoch]).permutation(per_epoch)[place])
        first = part * WINDOW_DOCUMENTS
        return [self.seed, epoch, part], slice(first, min(first + WINDOW_DOCUMENTS, self.corpus.num_documents))

    def _window(self, number: int) -> Window:
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, self._plan_window(number))
        return self._cached[1]

    def _plan_window(self, number: int) -> Window:
        data, (seed, documents) = self.data, self._documents(number)
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(np.arange(documents.start, documents.stop))
        pieces = Pieces.of(self.corpus, shuffled).cut(data.cut_documents)
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
        return Window(edges, rows=rows, numbers=numbers)


def _edges(sizes: Integers, budget: int) -> list[int]:
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return [0, *(np.flatnonzero(np.diff(before // budget)) + 1).tolist(), len(sizes)]
