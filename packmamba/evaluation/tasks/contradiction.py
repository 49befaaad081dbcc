"""Contradiction: recall of what a key holds in this document, while its neighbours gave the same keys other values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from packmamba.evaluation.tasks.base import Example, Span, draw, integer, make_example, require, span, within

OWN, UNWRITTEN, INTRUDING = 0, 1, 2
"""Kinds of reads: of a key that this document wrote before, that nobody wrote, that only the predecessor wrote."""


class Contradiction:
    """A document is a list of events, ``write key value`` or ``read key answer``; the answer is the value written last to the
    key in this document, or ``none``. A model whose state leaks answers with the predecessor's values.

    Ids: 0 write, 1 read, 2 none, then keys, values and, if there is one, the begin token. With the defaults 56 % of the answers
    are none: a model that always says none has this accuracy, and answers every read of a key that only the predecessor wrote.

    Args:
        events: events of a document; the last one is a read.
        num_keys, num_values: keys and values, shared by all documents.
        read_fraction: share of the events that read.
        begin: put a token of its own at the start of each document, so that a model can see where one starts.
    """

    WRITE, READ, NONE = 0, 1, 2
    num_examples = None

    def __init__(
        self,
        events: Span = (8, 64),
        num_keys: int = 16,
        num_values: int = 16,
        read_fraction: float = 0.5,
        begin: bool = False,
    ) -> None:
        self.events = span("events", events, 1)
        self.num_keys = integer("num_keys", num_keys, 1)
        self.num_values = integer("num_values", num_values, 1)
        require(0 < read_fraction < 1, "read_fraction", "above 0 and below 1", read_fraction)
        require(isinstance(begin, bool), "begin", "true or false", begin)
        self.read_fraction = read_fraction
        self.begin = begin
        self.vocab_size = 3 + num_keys + num_values + begin
        self.chance = 1 / (num_values + 1)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("contradiction", seed, index)
        events = within(rng, self.events)
        reads = rng.random(events) < self.read_fraction
        reads[-1] = True
        held: dict[int, int] = {}
        tokens = [self.vocab_size - 1] if self.begin else []
        answers: dict[int, int] = {}
        for read in reads:
            key = 3 + int(rng.integers(self.num_keys))
            if read:
                answers[len(tokens) + 1] = held.get(key, self.NONE)
                tokens += [self.READ, key, held.get(key, self.NONE)]
            else:
                held[key] = 3 + self.num_keys + int(rng.integers(self.num_values))
                tokens += [self.WRITE, key, held[key]]
        return make_example(tokens, answers, load=events, notes={"held": held})

    def reads(self, example: Example, predecessor: Example | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each read its kind (OWN, UNWRITTEN or INTRUDING) and the predecessor's value of its key (-1 if none)."""
        before = {} if predecessor is None else predecessor.notes["held"]
        places = np.flatnonzero(example.mask)
        left = np.array([before.get(int(example.tokens[place]), -1) for place in places], dtype=np.int64)
        own = example.targets[places] != self.NONE
        return np.where(own, OWN, np.where(left >= 0, INTRUDING, UNWRITTEN)), left

    def best(self, row: Sequence[Example]) -> list[NDArray[np.int64]]:
        """Return the answers of the best reader that reads these examples as one document and does not know where the next
        begins: an upper bound for a model whose state leaks.

        It knows how examples are drawn, but not in which order they were packed, and weighs by Bayes' rule at which event the
        current one began: an answer that contradicts what was written indicates a new document.
        """
        if self.begin:
            return [example.targets[example.mask] for example in row]
        low, high = self.events
        lengths = np.arange(high + 1)
        ends = np.where(lengths >= low, 1 / np.maximum(high - lengths + 1, 1), 0.0)  # at length n, if it is that long
        written: dict[int, tuple[int, int]] = {}  # key -> the event that wrote it last, and what
        weights = {0: 1.0}  # event -> how likely the current document began there
        said: list[list[int]] = [[] for _ in row]
        events = [(i, event) for i, example in enumerate(row) for event in example.tokens.reshape(-1, 3).tolist()]
        for now, (i, (kind, key, value)) in enumerate(events):
            goes_on = {start: (1 - ends[now - start + 1]) for start in weights}
            if kind == self.READ:
                of_kind = {start: goes_on[start] * self.read_fraction + 1 - goes_on[start] for start in weights}
                place, held = written.get(key, (-1, self.NONE))
                before = sum(weights[s] * of_kind[s] for s in weights if s <= place)
                after = sum(weights[s] * of_kind[s] for s in weights if s > place)
                said[i].append(held if before > after else self.NONE)
                weights = {s: w for s, w in weights.items() if (s <= place) == (value != self.NONE)}
                began = sum(w * (1 - goes_on[s]) for s, w in weights.items())
                weights = {s: w * goes_on[s] * self.read_fraction for s, w in weights.items()} | {now + 1: began}
            else:
                written[key] = (now, value)
                weights = {s: w * goes_on[s] * (1 - self.read_fraction) for s, w in weights.items()}
            total = sum(weights.values())
            weights = {s: w / total for s, w in weights.items() if w}
        return [np.array(some, dtype=np.int64) for some in said]
