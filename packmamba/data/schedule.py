"""Documents and rows of each optimizer step: a pure function of (corpus, configuration, step)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.batch import Rows
from packmamba.data.packing import LONGEST, STRATEGIES, Integers, cut, plan_rows
from packmamba.data.token_store import Corpus

WINDOW_DOCUMENTS = 1_000_000


class Pieces(NamedTuple):
    """Hold parts of documents that start from zero state, (P,) each."""

    document: Integers
    start: Integers
    length: Integers

    @classmethod
    def of(cls, corpus: Corpus, documents: Integers) -> Pieces:
        return cls(documents, np.zeros_like(documents), corpus.lengths[documents].astype(np.int64))

    def take(self, which: slice | Integers) -> Pieces:
        return Pieces(*(part[which] for part in self))

    def cut(self, longest: int | None) -> Pieces:
        """Cut pieces longer than ``longest`` into pieces of that length and a rest."""
        of, skipped, length = cut(self.length, longest or LONGEST)
        return Pieces(self.document[of], self.start[of] + skipped, length)

    def between(self, first: int, last: int) -> Pieces:
        """Return the pieces of tokens ``first`` to ``last`` of all; cut the outermost."""
        ends = np.cumsum(self.length)
        here = slice(
            int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1
        )
        begins = ends[here] - self.length[here]
        skipped = np.maximum(first - begins, 0)
        return Pieces(
            self.document[here],
            self.start[here] + skipped,
            np.minimum(ends[here], last) - begins - skipped,
        )

    def stagger(self, count: int) -> Pieces:
        """Cut the first ``count`` pieces in two, spread by the golden ratio; first parts come last."""
        number = np.arange(1, len(self.length) + 1)
        cuts = np.where(number <= count, number * ((5**0.5 - 1) / 2) % 1 * self.length, 0).astype(
            np.int64
        )
        tails = Pieces(self.document, self.start + cuts, self.length - cuts)
        return _join([tails, self._replace(length=cuts).take(np.flatnonzero(cuts))])


def _join(several: Sequence[Pieces]) -> Pieces:
    return Pieces(*map(np.concatenate, zip(*several)))


def arrange(corpus: Corpus, pieces: Pieces, data: DataConfig) -> Rows:
    """Arrange pieces in rows. Raises ConfigError if one is too long."""
    pieces = pieces.stagger(data.streams) if data.stagger else pieces
    end, row_length = corpus.lengths[pieces.document], data.row_length
    try:
        plan = plan_rows(
            pieces.length, row_length, data.strategy, data.overlong, data.buffer, data.streams
        )
    except ValueError as error:
        raise ConfigError(f"data.{error}") from None
    if (
        data.overlong == "truncate"
        and row_length is not None
        and not STRATEGIES[data.strategy].splits_documents
    ):
        end = np.where(pieces.length > row_length, pieces.start + row_length, end)
    of, rows = plan.document, (plan.row_offsets, plan.slots)
    return Rows(
        corpus,
        pieces.document[of],
        pieces.start[of] + plan.start,
        plan.length,
        plan.start,
        end[of],
        *rows,
    )


def arrange_as_trained(
    corpus: Corpus, documents: Integers, data: DataConfig, carry: bool
) -> tuple[Rows, list[Integers]]:
    pieces = Pieces.of(corpus, documents).cut(data.cut_documents)
    streams = data.batch_rows if data.takes_turns else data.streams
    if carry:
        # At most what tokens fill; at least two, as a state may come from another row.
        streams = min(streams, max(2, int(pieces.length.sum()) // int(pieces.length.max())))
    data = replace(data, streams=streams, stagger=False)
    rows = arrange(corpus, pieces, data)
    return rows, micro_batches(rows, np.arange(len(rows)), data, carry)


def micro_batches(
    rows: Rows, numbers: Integers, data: DataConfig, carry: bool = False, world_size: int = 1
) -> list[Integers]:
    """Split rows into batches of at most ``data.max_tokens_per_batch`` slots or one row, as many a rank."""
    pads = STRATEGIES[data.strategy].pads
    if not pads or (
        carry and not data.takes_turns
    ):  # with carry, a row of each of a rank's streams
        rows_per_batch = data.streams // world_size if pads else 1
        edges = list(range(rows_per_batch, len(numbers), rows_per_batch))
    else:
        edges, first, longest = [], 0, 0
        share = len(numbers) if carry else -(-len(numbers) // world_size)
        for i, slots in enumerate(rows.slots[numbers].tolist()):
            longest = max(longest, slots)
            if i > first and (
                i - first == share or longest * (i - first + 1) > data.max_tokens_per_batch
            ):
                edges.append(i)
                first, longest = i, slots
    batches = np.split(numbers, edges)
    return batches + [numbers[:0]] * (-len(batches) % world_size)


@dataclass
class Schedule:
    """Plan endless steps: epochs of shuffled windows of documents. Nothing is dropped.

    Matched: a step is the next documents up to ``data.tokens_per_step`` tokens, then arranged. Stream: documents are arranged by
    window; a step is the next rows up to so many slots. With ``carry`` batches continue each other by row.
    """

    corpus: Corpus
    data: DataConfig
    seed: int
    carry: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        data = self.data
        longest = min(int(self.corpus.lengths.max()), data.cut_documents or 2**31)
        fits = data.overlong != "error" or STRATEGIES[data.strategy].splits_documents
        if longest > (data.row_length or longest) and not fits:
            got = f"{data.row_length}; set data.overlong=split"
            raise ConfigError(
                f"data.row_length: expected at least {longest}, the longest document, got {got}"
            )
        self.exact = data.batching == "matched" and data.cut_at_steps
        self.tokens = int(self.corpus.lengths.sum(dtype=np.int64))
        self.budget = min(data.tokens_per_step, self.tokens)
        self.windows_per_epoch = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        self._firsts = [0]  # first step of each window, or its first token where steps are exact
        self._cached: tuple[int, Any] = -1, None

    def step(self, step: int) -> tuple[Rows, list[Integers]]:
        """Return a step's rows, and their numbers by batch, of all ranks."""
        if self.exact:
            rows = arrange(
                self.corpus, self._tokens(step * self.budget, (step + 1) * self.budget), self.data
            )
            numbers = np.arange(len(rows))
        else:
            number = self._locate(step)
            edges, held, order = self._window(number)
            here = slice(*edges[step - self._firsts[number] :][:2])
            rows = (
                held if isinstance(held, Rows) else arrange(self.corpus, held.take(here), self.data)
            )
            numbers = np.arange(len(rows)) if order is None else order[here]
        return rows, micro_batches(rows, numbers, self.data, self.carry, self.world_size)

    def epoch_steps(self) -> int:
        return (
            -(-self.tokens // self.budget)
            if self.exact
            else sum(map(self._size, range(self.windows_per_epoch)))
        )

    def turn(self, numbers: Integers) -> int:
        """Return a batch's number in its rank's round; 0 unless streams go round-robin."""
        if not (self.carry and self.data.takes_turns and len(numbers)):
            return 0
        return int(numbers[0]) % self.data.streams // len(numbers) // self.world_size

    def _tokens(self, first: int, last: int) -> Pieces:
        pieces = []
        while first < last:
            number = self._locate(first)
            begin, end = self._firsts[number : number + 2]
            pieces.append(self._window(number)[1].between(first - begin, min(last, end) - begin))
            first = end
        return _join(pieces)

    def _locate(self, place: int) -> int:
        """Return the window of a step, or of a token where steps are exact."""
        while self._firsts[-1] <= place:
            self._firsts.append(self._firsts[-1] + self._size(len(self._firsts) - 1))
        return bisect.bisect_right(self._firsts, place) - 1

    def _size(self, number: int) -> int:
        if self.exact:
            return int(self.corpus.lengths[self._documents(number)[1]].sum(dtype=np.int64))
        return len(self._window(number)[0]) - 1

    def _documents(self, number: int) -> tuple[list[int], Integers]:
        epoch, place = divmod(number, self.windows_per_epoch)
        part = int(
            np.random.default_rng([self.seed, epoch]).permutation(self.windows_per_epoch)[place]
        )
        documents = np.arange(
            part * WINDOW_DOCUMENTS, min((part + 1) * WINDOW_DOCUMENTS, self.corpus.num_documents)
        )
        return [self.seed, epoch, part], documents

    def _window(self, number: int) -> tuple[list[int], Any, Integers | None]:
        """Return edges of steps, the pieces or rows between them, and the rows' order."""
        if self._cached[0] != number:
            self._cached = number, self._plan(number)
        return self._cached[1]

    def _plan(self, number: int) -> tuple[list[int], Any, Integers | None]:
        data, (seed, documents) = self.data, self._documents(number)
        rng = np.random.default_rng(seed)
        pieces = Pieces.of(self.corpus, rng.permutation(documents)).cut(data.cut_documents)
        if data.cut_documents is not None:
            pieces = pieces.take(
                rng.permutation(len(pieces.length))
            )  # else one document would fill steps
        if data.batching == "matched":
            return _edges(pieces.length, data.tokens_per_step), pieces, None
        rows = arrange(self.corpus, pieces, data)
        numbers = np.arange(len(rows))
        strategy = STRATEGIES[data.strategy]
        if not strategy.keeps_order and strategy.needs_row_length:
            numbers = rng.permutation(numbers)  # sorting by length must not impose a curriculum
        edges = _edges(rows.slots[numbers], data.tokens_per_step)
        if (
            not strategy.keeps_order and not strategy.needs_row_length
        ):  # a step's rows are padded to its longest
            steps = np.split(numbers, edges[1:-1])
            steps = [steps[i] for i in rng.permutation(len(steps))]
            numbers, edges = (
                np.concatenate(steps),
                [0, *np.cumsum([len(step) for step in steps]).tolist()],
            )
        if data.shuffle_steps is not None:
            blocks = np.split(numbers, edges[: -1 : data.shuffle_steps][1:])
            numbers = np.concatenate([rng.permutation(block) for block in blocks])
        return edges, rows, numbers


def _edges(sizes: Integers, budget: int) -> list[int]:
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return [0, *(np.flatnonzero(np.diff(before // budget)) + 1).tolist(), len(sizes)]
