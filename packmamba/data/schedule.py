"""Which documents and rows each optimizer step consumes: a pure function of (corpus, configuration, step)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.batching import Arrangement
from packmamba.data.packing import STRATEGIES, plan_rows
from packmamba.data.parts import Parts
from packmamba.data.token_store import Corpus

WINDOW_DOCUMENTS = 1_000_000


def arrange(corpus: Corpus, documents: np.ndarray | Parts, data: DataConfig) -> Arrangement:
    """Whole documents, or parts of them, in rows, as the configuration's strategy says.

    Raises ConfigError if one is too long for a row.
    """
    parts = documents if isinstance(documents, Parts) else Parts.whole(documents, corpus.lengths)
    parts = parts.stagger(data.streams) if data.stagger else parts
    documents, begins, lengths = parts.documents, parts.begins, parts.lengths
    ends = corpus.lengths[documents].astype(np.int64)
    try:
        plan = plan_rows(
            lengths,
            row_length=data.row_length,
            strategy=data.strategy,
            overlong=data.overlong,
            buffer=data.buffer,
            streams=data.streams,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if data.overlong == "truncate" and data.row_length is not None and not STRATEGIES[data.strategy].splits_documents:
        ends = np.where(lengths > data.row_length, begins + data.row_length, ends)
    return Arrangement(corpus, documents, ends, plan, begins)


def parts_of(corpus: Corpus, documents: np.ndarray, data: DataConfig) -> Parts:
    """The documents, cut as ``data.cut_documents`` says."""
    parts = Parts.whole(documents, corpus.lengths)
    return parts if data.cut_documents is None else parts.cut(data.cut_documents)


def arrange_as_trained(
    corpus: Corpus, documents: np.ndarray, data: DataConfig, carry: bool
) -> tuple[Arrangement, list[np.ndarray]]:
    """Documents to evaluate, arranged as in training, and their rows as batches."""
    parts = parts_of(corpus, documents, data)
    streams = data.batch_rows if data.takes_turns else data.streams
    if carry:  # no more than they fill: a row without tokens costs as much as another. One start from another's state takes two
        streams = min(streams, max(2, int(parts.lengths.sum()) // int(parts.lengths.max())))
    data = replace(data, streams=streams, stagger=False)
    arrangement = arrange(corpus, parts, data)
    return arrangement, group(arrangement, np.arange(arrangement.plan.num_rows), data, carry)


@dataclass
class Schedule:
    """Steps without end: epochs of shuffled windows of about a million documents, each planned by itself.

    Matched: a step is the next documents until ``data.tokens_per_step`` real tokens, arranged by the strategy, so that
    every strategy gets the same documents. With ``data.cut_at_steps`` it is exactly as many tokens: the document at its end is
    cut, and at a window's end the next window's documents follow. Without, and in stream, where the strategy fills rows from the
    window's documents and a step is the next rows until ``data.tokens_per_step`` slots, the last step of a window may be
    smaller; nothing is dropped. Documents may be cut first (``data.cut_documents``).

    Args:
        corpus: training documents.
        data: the configuration's section.
        seed: of the order of documents.
        carry: whether batches must continue each other row by row.
        world_size: ranks that share each step.
    """

    corpus: Corpus
    data: DataConfig
    seed: int
    carry: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.corpus.num_documents == 0:
            raise ConfigError(f"data.source={self.data.source} gives no training documents")
        longest = min(int(self.corpus.lengths.max()), self.data.cut_documents or 2**31)
        row_length = self.data.row_length
        splits = STRATEGIES[self.data.strategy].splits_documents
        if self.data.overlong == "error" and row_length is not None and longest > row_length and not splits:
            raise ConfigError(
                f"data.row_length={row_length} is shorter than the longest document ({longest} tokens): raise it, or choose "
                "data.overlong=pieces or truncate"
            )
        self._first_steps = [0]
        self._first_tokens = [0]
        self._cached: tuple[int, _Window] | None = None

    def step(self, step: int) -> tuple[Arrangement, list[np.ndarray]]:
        """The step's arrangement, and its rows grouped into batches, those of all ranks."""
        if self.exact:
            budget = self.data.tokens_per_step
            arrangement = arrange(self.corpus, self._tokens(step * budget, (step + 1) * budget), self.data)
            rows = np.arange(arrangement.plan.num_rows)
            return arrangement, group(arrangement, rows, self.data, self.carry, self.world_size)
        while self._first_steps[-1] <= step:
            steps = len(self._window(len(self._first_steps) - 1).edges) - 1
            self._first_steps.append(self._first_steps[-1] + steps)
        number = bisect.bisect_right(self._first_steps, step) - 1
        window = self._window(number)
        first, last = window.edges[step - self._first_steps[number] :][:2]
        if window.arrangement is None:
            arrangement = arrange(self.corpus, window.order[first:last], self.data)
            rows = np.arange(arrangement.plan.num_rows)
        else:
            arrangement, rows = window.arrangement, np.asarray(window.order[first:last])
        return arrangement, group(arrangement, rows, self.data, self.carry, self.world_size)

    @property
    def exact(self) -> bool:
        """Whether every step has exactly ``data.tokens_per_step`` tokens."""
        return self.data.mode == "matched" and self.data.cut_at_steps

    def epoch_steps(self) -> int:
        """Return in how many steps all documents come once, in the first epoch."""
        if self.exact:
            return -(-int(self.corpus.lengths.sum(dtype=np.int64)) // self.data.tokens_per_step)
        windows = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        return sum(len(self._window(number).edges) - 1 for number in range(windows))

    def _tokens(self, first: int, last: int) -> Parts:
        """Return the parts of documents that hold these tokens of all windows, one after another."""
        found = []
        while first < last:
            while self._first_tokens[-1] <= first:
                begin, end = self._documents(len(self._first_tokens) - 1)[1]
                tokens = int(self.corpus.lengths[begin:end].sum(dtype=np.int64))
                self._first_tokens.append(self._first_tokens[-1] + tokens)
            number = bisect.bisect_right(self._first_tokens, first) - 1
            begins, ends = self._first_tokens[number : number + 2]
            parts = self._window(number).order
            assert isinstance(parts, Parts)
            found.append(parts.between(first - begins, min(last, ends) - begins))
            first = ends
        return found[0] if len(found) == 1 else Parts.joined(found)

    def _documents(self, number: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Return a window's seed, and where its documents begin and end."""
        per_epoch = -(-self.corpus.num_documents // WINDOW_DOCUMENTS)
        epoch, place = divmod(number, per_epoch)
        part = int(np.random.default_rng([self.seed, epoch]).permutation(per_epoch)[place])
        end = min((part + 1) * WINDOW_DOCUMENTS, self.corpus.num_documents)
        return (self.seed, epoch, part), (part * WINDOW_DOCUMENTS, end)

    def _window(self, number: int) -> _Window:
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, self._plan_window(number))
        return self._cached[1]

    def _plan_window(self, number: int) -> _Window:
        seed, (begin, end) = self._documents(number)
        documents, rng = np.arange(begin, end), np.random.default_rng(seed)
        parts = parts_of(self.corpus, rng.permutation(documents), self.data)
        if self.data.cut_documents is not None:
            parts = parts[rng.permutation(len(parts))]  # else steps would be full of one long document
        if self.data.mode == "matched":
            return _Window(parts, _edges(parts.lengths, self.data.tokens_per_step), None)
        arrangement = arrange(self.corpus, parts, self.data)
        rows = np.arange(arrangement.plan.num_rows)
        if not STRATEGIES[self.data.strategy].keeps_order:
            # A packer that sorts by length must not impose a curriculum.
            rows = rng.permutation(rows)
        edges = _edges(arrangement.plan.slots[rows], self.data.tokens_per_step)
        if self.data.shuffle_steps is not None:
            blocks = np.split(rows, edges[: -1 : self.data.shuffle_steps][1:])
            rows = np.concatenate([rng.permutation(block) for block in blocks])
        return _Window(rows, edges, arrangement)

    def turn(self, rows: np.ndarray) -> int:
        """Of a batch of these rows: which it is among its rank's batches of a round, where rows go on."""
        if not (self.carry and self.data.takes_turns):
            return 0
        return int(rows[0]) % self.data.streams // len(rows) // self.world_size


@dataclass
class _Window:
    order: Parts | np.ndarray  # documents (matched) or rows of the arrangement (stream), as they come
    edges: list[int]  # step i holds order[edges[i]:edges[i + 1]]
    arrangement: Arrangement | None


def _edges(sizes: np.ndarray, budget: int) -> list[int]:
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    return [0, *(np.flatnonzero(np.diff(before // budget)) + 1).tolist(), len(sizes)]


def group(
    arrangement: Arrangement, rows: np.ndarray, data: DataConfig, carry: bool, world_size: int = 1
) -> list[np.ndarray]:
    """The rows as batches. A row that is never padded is a batch of its own. Carrying, a batch is one row of each stream,
    with several ranks of each of a rank's streams, unless streams take turns."""
    rows_per_batch = None
    if not STRATEGIES[data.strategy].pads:
        rows_per_batch = 1
    elif carry and not data.takes_turns:
        rows_per_batch = data.streams // world_size
    return arrangement.group_rows(rows, data.slots_per_batch, rows_per_batch)
