"""Decide which documents each optimizer step holds, and in which rows.

A schedule is a pure function of (corpus, configuration, step number): resuming is counting, and
ranks at the same step read the same plan. Documents are shuffled in *windows* of a million, so that
memory stays bounded; an epoch is every window once. Nothing is
dropped, but for what ``overlong="truncate"`` cuts off.

Two values of ``data.batching`` make steps, here of 8 tokens in rows of 8; the first has two
variants:

- ``matched``: the next documents up to ``tokens_per_step`` tokens are *drawn first and then
  arranged*. Every strategy reads the same documents in the same step, so that padded and packed
  runs have the same gradient up to rounding. With ``cut_at_steps``, the default, the last document
  is cut and goes on in the next step: step n is tokens n * 8 to (n + 1) * 8, across windows, and
  ``StepSchedule`` counts tokens. Without, a step ends with a document of its window, and
  ``StepSchedule`` counts steps.

      drawn     aaabbbbb|ccddddee|eeeeff..      steps 0, 1, 2
      step 1    padded: cc......  packed: ccddddee
                        dddd....
                        ee......

- ``stream``: the window's documents are *arranged first*; a step is the next rows up to
  ``tokens_per_step`` slots. Rows are full, streams may continue from step to step, but another
  strategy reads other documents in a step.
"""

import bisect
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from packmamba.config import ConfigError, DataConfig, need
from packmamba.data.corpus import Documents
from packmamba.data.packing import STRATEGIES, Integers, Pieces, RowPlan, join, plan_pieces
from packmamba.layout import MAX_SLOTS, ceil_div

# Documents that are shuffled together; their permutation is held in memory.
WINDOW_DOCUMENTS = 1_000_000


class StepPlan(NamedTuple):
    """Plan a step: its rows, and the row numbers of each micro-batch, of all ranks.

    Micro-batch i belongs to rank i modulo the number of ranks; a plan for evaluation has those of
    its rank alone.
    """

    corpus: Documents
    rows: RowPlan
    micro_batches: list[Integers]


def longest_trained(data: DataConfig) -> int:
    """Return how many tokens of a document are trained on, where longer ones are truncated."""
    # Documents that are cut into pieces first lose nothing.
    cuts = data.cut_documents or STRATEGIES[data.strategy].splits_documents
    truncates = data.overlong == "truncate" and not cuts
    return data.row_length if truncates and data.row_length else MAX_SLOTS


def pieces_of(corpus: Documents, documents: Integers, longest: int | None = None) -> Pieces:
    """Take whole documents in this order; cut those longer than ``longest`` tokens, if given."""
    pieces = Pieces.whole(documents, corpus.lengths[documents])
    return pieces if longest is None else pieces.cut(longest)


def arrange(pieces: Pieces, data: DataConfig) -> RowPlan:
    """Arrange pieces in rows as the configuration says. Raises ConfigError if one is too long."""
    if data.stagger:
        pieces = pieces.stagger(data.streams)
    # The planner's arguments are keys of the section, but for ``lengths``.
    keys = ("row_length", "strategy", "overlong", "buffer", "streams")
    try:
        return plan_pieces(pieces, **{key: getattr(data, key) for key in keys})
    except ValueError as error:
        raise ConfigError(f"data.{error}".replace("data.lengths", "data.row_length")) from None


def arrange_as_trained(corpus: Documents, documents: Integers, data: DataConfig, carry: bool) -> StepPlan:
    """Arrange documents for evaluation in rows and batches like a training step's."""
    pieces = pieces_of(corpus, documents, data.cut_documents)
    streams = data.batch_rows if data.takes_turns else data.streams
    if carry:
        # No more streams than the tokens fill; at least two, as a state may come from another row.
        streams = min(streams, max(2, pieces.num_tokens // int(pieces.length.max())))
    # Evaluation starts each document at its first token.
    data = replace(data, streams=streams, stagger=False)
    rows = arrange(pieces, data)
    return StepPlan(corpus, rows, micro_batches(rows, np.arange(len(rows)), data, carry))


def micro_batches(
    rows: RowPlan, numbers: Integers, data: DataConfig, carry: bool = False, world_size: int = 1
) -> list[Integers]:
    """Split a step's rows into micro-batches, as many for each rank.

    Without ``carry``, or where streams take turns, a micro-batch has at most
    ``data.max_tokens_per_batch`` slots, or is one row. Else it has one row of each of a rank's
    streams, however many slots these are, so that batches continue each other row by row.
    Batches without rows fill the last round of ranks.
    """
    if not STRATEGIES[data.strategy].pads:
        # One row each: a row has exactly its tokens' slots, and batching rows would pad them.
        edges = list(range(1, len(numbers)))
    elif carry and not data.takes_turns:
        # Row b of a micro-batch must continue row b of the last one: one row of each stream.
        rows_per_batch = data.streams // world_size
        edges = list(range(rows_per_batch, len(numbers), rows_per_batch))
    else:
        # Without carried states, split rows among ranks even where one micro-batch could hold all.
        share = len(numbers) if carry else ceil_div(len(numbers), world_size)
        edges = _edges_by_slots(rows.slots[numbers], data.max_tokens_per_batch, share)
    batches = np.split(numbers, edges)
    # Ranks reduce gradients together, so all of them must compute as many micro-batches.
    return batches + [numbers[:0]] * (-len(batches) % world_size)


def _edges_by_slots(widths: Integers, most_slots: int, most_rows: int) -> list[int]:
    """Return where batches of consecutive rows begin, each padded to its widest row."""
    edges = []
    first = 0
    widest = 0
    for index, width in enumerate(widths.tolist()):
        widest = max(widest, width)
        num_rows = index - first
        is_full = num_rows == most_rows or widest * (num_rows + 1) > most_slots
        if num_rows and is_full:
            edges.append(index)
            first = index
            widest = width
    return edges


# Keys that decide the order of documents, by ``data.batching``.
MATCHED = ("batching", "cut_at_steps", "cut_documents", "tokens_per_step")
STREAM = (*MATCHED, "strategy", "row_length", "overlong", "buffer", "streams", "stagger", "shuffle_steps")


class Window(NamedTuple):
    """Hold a window of documents, and where its steps lie in it.

    Attributes:
        pieces: of ``matched`` batching the shuffled documents, of which each step arranges its
            own; of ``stream`` the rows of all of them.
        edges: step i takes the pieces, or the rows in their order, from ``edges[i]`` to
            ``edges[i + 1]``.
        order: of ``stream``, row numbers as they are trained on.
    """

    pieces: Any  # Pieces or a RowPlan
    edges: list[int]
    order: Integers | None = None


@dataclass
class StepSchedule:
    """Plan endless steps: epochs of shuffled windows of documents.

    Args:
        carry: batches continue each other row by row (the boundary scheme passes states on).
        world_size: ranks that share each step's micro-batches.

    Raises ConfigError where a document fits no row.
    """

    corpus: Any  # a Corpus, a Mixture or a StreamedCorpus
    data: DataConfig
    seed: int
    carry: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        self._check_row_length()
        self.exact = self.data.batching == "matched" and self.data.cut_at_steps
        if self.exact and self.corpus.has_answers:
            warnings.warn("data.cut_at_steps: it cuts answers from prompts at steps' ends; set false", stacklevel=2)
        # Steps of exact size cut documents, so truncate comes before: else the ends that it leaves
        # out would begin later steps.
        self.longest = longest_trained(self.data) if self.exact else MAX_SLOTS
        self.budget = self.data.tokens_per_step
        if not self.corpus.is_streamed:
            # A corpus smaller than a step is one step: no step holds a document twice.
            self.budget = min(self.budget, self._count_tokens())
        # First step of each window, or its first token where steps are exact.
        self._firsts = [0]
        # The last window used, by its number. Steps come in order, so one is enough.
        self._planned: dict[int, Window] = {}

    @staticmethod
    def order_of(data: DataConfig) -> dict[str, Any]:
        """Return the keys that decide, beside corpus and seed, which documents a step holds.

        With ``matched`` strategies may be exchanged, since they arrange the same documents; with
        ``stream`` some of these keys decide nothing for some strategies.
        """
        names = STREAM if data.batching == "stream" else MATCHED
        order = {f"data.{name}": getattr(data, name) for name in names}
        if data.batching == "matched" and data.cut_at_steps:
            order["data.row_length"] = longest_trained(data)  # what ``truncate`` leaves out is in no step
        return order

    def _check_row_length(self) -> None:
        data = self.data
        # Of a streamed corpus, whose longest document is not known, the configuration is checked.
        if data.row_length is None or self.corpus.is_streamed:
            return
        longest = min(int(self.corpus.lengths.max()), data.cut_documents or MAX_SLOTS)
        splits = STRATEGIES[data.strategy].splits_documents or data.overlong == "split"
        cuts = splits or data.overlong == "truncate"
        remedy = "set data.overlong=split"
        if self.corpus.has_answers:
            # Split, an answer would be trained without its prompt.
            remedy = "raise it, or set data.overlong=truncate, which cuts answers"
            parts = [part for part in getattr(self.corpus, "parts", [self.corpus]) if part.has_answers]
            cut = sum(int((part.lengths > data.row_length).sum()) for part in parts)
            if cut and cuts:
                how = "train ends of answers without the prompt" if splits else "lose the end of their answers"
                warnings.warn(f"data.overlong: {cut} documents {how}", stacklevel=2)
        got = f"{data.row_length}; {remedy}"
        need(longest <= data.row_length or cuts, "data.row_length", f"at least {longest}, the longest document", got)

    def step(self, step: int) -> StepPlan:
        """Plan optimizer step ``step``, counted from 0 over all epochs."""
        rows, numbers = self._rows(step)
        return StepPlan(self.corpus, rows, micro_batches(rows, numbers, self.data, self.carry, self.world_size))

    def _rows(self, step: int) -> tuple[RowPlan, Integers]:
        """Return a plan, and the numbers of the step's rows in it."""
        if self.exact:
            drawn = self._tokens(step * self.budget, (step + 1) * self.budget)
        else:
            number = self._locate(step)
            window = self._window(number)
            index = step - self._firsts[number]
            part = slice(window.edges[index], window.edges[index + 1])
            if window.order is not None:
                return window.pieces, window.order[part]
            drawn = window.pieces.take(part)
        # Documents were drawn first: all rows of their plan are the step's.
        rows = arrange(drawn, self.data)
        return rows, np.arange(len(rows))

    def epoch_steps(self) -> int:
        """Count the steps of the first epoch; of a streamed corpus wait for its last document."""
        if self.corpus.is_streamed:
            self.corpus.wait()
        if self.exact:
            return ceil_div(self._count_tokens(), self.budget)
        return sum(self._size(window) for window in range(self._windows_per_epoch))

    def passes(self, steps: int) -> float:
        """Return how many epochs so many steps are; of a corpus that is not streamed."""
        if self.exact:
            return steps * self.budget / self._count_tokens()
        return steps / self.epoch_steps()

    @property
    def _windows_per_epoch(self) -> int:
        if self.corpus.is_streamed:
            return len(self.corpus.parts)
        return ceil_div(len(self.corpus), WINDOW_DOCUMENTS)

    def turn(self, numbers: Integers) -> int:
        """Return which group of streams a batch holds, whose carried states are stored under it.

        Where there are more streams than a step has rows, steps read groups of them in turn, and
        row r belongs to stream r modulo the number of streams. Otherwise there is one group, 0.
        """
        if not (self.carry and self.data.takes_turns and len(numbers)):
            return 0
        # A round of micro-batches, one a rank, is one group of len(numbers) * world_size streams; a
        # step may have several rounds, of different groups.
        return int(numbers[0]) % self.data.streams // (len(numbers) * self.world_size)

    def _tokens(self, first: int, last: int) -> Pieces:
        """Take tokens ``first`` to ``last``, counted over all windows."""
        # At a window's end the step takes its remaining tokens from the next window.
        drawn = []
        while first < last:
            window = self._locate(first)
            begin = self._firsts[window]
            end = self._firsts[window + 1]
            drawn.append(self._window(window).pieces.between(first - begin, min(last, end) - begin))
            first = end
        return join(drawn)

    def _locate(self, place: int) -> int:
        """Return the window of a step, or of a token where steps are exact."""
        # Sizes of windows differ, so those of all earlier windows are found first, each once.
        while self._firsts[-1] <= place:
            self._firsts.append(self._firsts[-1] + self._size(len(self._firsts) - 1))
        return bisect.bisect_right(self._firsts, place) - 1

    def _size(self, window: int) -> int:
        """Count the steps of a window, or its tokens where steps are exact."""
        if self.exact:
            return self._count_tokens(self._documents(window)[1])
        return len(self._window(window).edges) - 1

    def _count_tokens(self, documents: Any = slice(None)) -> int:
        """Count the tokens of documents that steps of exact size hold."""
        return int(self.corpus.lengths[documents].clip(max=self.longest).sum(dtype=np.int64))

    def _documents(self, window: int) -> tuple[np.random.Generator, Integers]:
        """Return a window's documents, and what shuffles them."""
        # A mixture or a stream has windows without end; a corpus goes through its windows once an
        # epoch.
        if self.corpus.has_windows:
            size = min(len(self.corpus), WINDOW_DOCUMENTS)
            documents = self.corpus.window(self.seed, window, size)
            return np.random.default_rng([self.seed, window]), documents
        epoch, place = divmod(window, self._windows_per_epoch)
        # Windows come in another order each epoch; documents are shuffled within a window only.
        shuffle_windows = np.random.default_rng([self.seed, epoch])
        part = int(shuffle_windows.permutation(self._windows_per_epoch)[place])
        first = part * WINDOW_DOCUMENTS
        last = min(first + WINDOW_DOCUMENTS, len(self.corpus))
        return np.random.default_rng([self.seed, epoch, part]), np.arange(first, last)

    def _window(self, window: int) -> Window:
        """Plan a window of documents; the last one is kept."""
        if window not in self._planned:
            self._planned = {window: self._plan(window)}
        return self._planned[window]

    def _plan(self, window: int) -> Window:
        """Shuffle a window's documents, cut to ``cut_documents``, and find its steps."""
        generator, documents = self._documents(window)
        longest = self.data.cut_documents
        pieces = pieces_of(self.corpus, generator.permutation(documents), longest)
        if longest is not None:
            # Shuffled again, else the pieces of one long document would fill whole steps.
            pieces = pieces.take(generator.permutation(len(pieces.length)))
        pieces = pieces.truncate(self.longest)
        if self.data.batching == "stream":
            return _stream_window(arrange(pieces, self.data), self.data, generator)
        return Window(pieces, _edges(pieces.length, self.data.tokens_per_step))


def _stream_window(rows: RowPlan, data: DataConfig, generator: np.random.Generator) -> Window:
    """Order the rows of a window, and cut the order into steps."""
    strategy = STRATEGIES[data.strategy]
    order = np.arange(len(rows))
    # Of strategies that keep no order: packed rows are shuffled one by one, sorted rows by step.
    if not strategy.keeps_order and strategy.needs_row_length:
        # A strategy that sorts by length must not impose a curriculum.
        order = generator.permutation(order)
    edges = _edges(rows.slots[order], data.tokens_per_step)
    if not strategy.keeps_order and not strategy.needs_row_length:
        # Rows are padded to a step's longest: whole steps of like lengths are shuffled.
        steps = np.split(order, edges[1:-1])
        steps = [steps[i] for i in generator.permutation(len(steps))]
        order = np.concatenate(steps)
        edges = [0, *np.cumsum([len(step) for step in steps]).tolist()]
    if data.shuffle_steps is not None:
        # Shuffle rows across the steps of a block; the steps' sizes stay.
        blocks = np.split(order, edges[: -1 : data.shuffle_steps][1:])
        order = np.concatenate([generator.permutation(block) for block in blocks])
    return Window(rows, edges, order)


def _edges(sizes: Integers, budget: int) -> list[int]:
    """Return where steps begin: with the first item past each multiple of ``budget``."""
    # Items before each item; a step begins where this passes another multiple of the budget.
    before = np.cumsum(sizes, dtype=np.int64) - sizes
    last_of_steps = np.flatnonzero(np.diff(before // budget))
    return [0, *(last_of_steps + 1).tolist(), len(sizes)]
