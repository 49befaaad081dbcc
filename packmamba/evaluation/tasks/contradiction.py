"""Contradiction: what a key holds in this document, while its neighbours gave the same keys other values.

Ours. A model whose state leaks from the document before says that one's values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packmamba.evaluation.tasks.example import Example, Span, check_integer, check_span, draw, make_example, within

OWN, UNWRITTEN, INTRUDING = 0, 1, 2
"""Kinds of reads: of a key that this document wrote before; of one that nobody wrote; of one that only the predecessor wrote."""


class Contradiction:
    """A document is a list of events: ``write key value`` or ``read key answer``. The answer is the value written last to the key
    in this document, or ``none``.

    Ids: 0 write, 1 read, 2 none, then keys, values and, if there is one, the begin token. Answers are part of the document: a
    model reads them too.

    Args:
        events: events of a document; the last one is a read.
        num_keys, num_values: how many keys and values there are; all documents share them.
        read_fraction: share of the events that read.
        begin: a token of its own begins each document, so that a model can see where one starts.
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
        self.events = check_span("events", events, 1)
        self.num_keys = check_integer("num_keys", num_keys, 1)
        self.num_values = check_integer("num_values", num_values, 1)
        if not 0 < read_fraction < 1:
            raise ValueError(f"read_fraction: expected above 0 and below 1, got {read_fraction!r}")
        if not isinstance(begin, bool):
            raise ValueError(f"begin: expected true or false, got {begin!r}")
        self.read_fraction = read_fraction
        self.begin = begin
        self.vocab_size = 3 + num_keys + num_values + begin

    @property
    def chance(self) -> float:
        """Of a guess among values and none."""
        return 1 / (self.num_values + 1)

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
        """Of each read of ``example``, in order: its kind (OWN, UNWRITTEN or INTRUDING), and the value that the predecessor
        left in its key (-1 if none): what a leaking model says."""
        before = {} if predecessor is None else predecessor.notes["held"]
        places = np.flatnonzero(example.mask)
        left = np.array([before.get(int(example.tokens[place]), -1) for place in places], dtype=np.int64)
        own = example.targets[places] != self.NONE
        return np.where(own, OWN, np.where(left >= 0, INTRUDING, UNWRITTEN)), left
