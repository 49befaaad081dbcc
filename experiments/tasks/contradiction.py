"""The task contradiction, a plugin: recall of what a key holds in this document, while others give
it other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packmamba.data.tasks import TASKS, Example
from packmamba.data.tasks.base import Span, draw, make_example, span, within


class Contradiction:
    """A document is a list of events, ``write key value`` or ``read key answer``; the answer is the
    value written last to the key in this document, or ``none``. A model whose state leaks answers
    with the predecessor's values.

    Ids: 0 write, 1 read, 2 none, then keys, values and, with ``begin``, a token at the start of
    each document. With the defaults 56 % of the answers are none. The last event is a read.
    """

    WRITE, READ, NONE = 0, 1, 2

    def __init__(
        self, events: Span = (8, 64), num_keys: int = 16, num_values: int = 16, read_fraction: float = 0.5, begin: bool = False
    ) -> None:  # fmt: skip
        self.events, self.num_keys, self.num_values = span("events", events, 1), num_keys, num_values
        self.read_fraction, self.begin = read_fraction, begin
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

    def annotate(self, examples: Sequence[Example], answers: Sequence[np.ndarray], rows: Any) -> dict[str, float]:
        """Return, of reads of keys that only the document before in the row wrote: accuracy, and
        how often its value is said.
        """
        plan, intruding = rows.plan, []
        for piece in set(range(1, len(plan.document))).difference(plan.row_offsets.tolist()):
            example, left = examples[plan.document[piece]], examples[plan.document[piece - 1]].notes["held"]
            keys, targets = example.tokens[example.mask].tolist(), example.targets[example.mask]
            for key, target, said in zip(keys, targets, answers[plan.document[piece]]):
                if target == self.NONE and key in left and not plan.start[piece]:
                    intruding.append((said == target, said == left[key]))
        names = ("accuracy_intruding", "intrusions")
        return dict(zip(names, np.mean(intruding, axis=0).tolist())) if intruding else {}


TASKS["contradiction"] = Contradiction
