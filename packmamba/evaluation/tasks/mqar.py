"""Multi-query associative recall (zoology, arXiv 2312.04927): pairs of key and value, then keys; say the values."""

from __future__ import annotations

import numpy as np

from packmamba.evaluation.tasks.example import (
    Example,
    Span,
    check_integer,
    check_number,
    check_span,
    draw,
    make_example,
    within,
)


class MultiQueryRecall:
    """A document lists pairs of key and value. Later each key comes once more, and its value is to be said.

    Gaps between the pairs and the keys' return follow a power law, as in zoology. Tokens between are values, so that only a key
    asks. Published settings: ``vocab_size=8192``, (length, num_pairs) (64, 4), (128, 8), (256, 16), ``power_a=0.01``.

    Args:
        num_pairs: pairs of a document.
        length: tokens of a document; at least 4 for each pair.
        vocab_size: the lower half are keys, the upper half values.
        power_a: exponent of the gaps' power law; small: most keys return early.
    """

    num_examples = None

    def __init__(
        self, num_pairs: Span = 8, length: Span = (64, 128), vocab_size: int = 8192, power_a: float = 0.01
    ) -> None:
        self.pairs = check_span("num_pairs", num_pairs, 1)
        self.length = check_span("length", length, 4 * self.pairs[1])
        self.vocab_size = check_integer("vocab_size", vocab_size, 2 * self.pairs[1])
        self.power_a = check_number("power_a", power_a, lambda a: a > 0, "a number above 0")
        if power_a > 10:
            raise ValueError(f"power_a: expected at most 10, got {power_a}")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("mqar", seed, index)
        pairs, length, half = within(rng, self.pairs), within(rng, self.length), self.vocab_size // 2
        keys = rng.choice(half, pairs, replace=False)
        values = rng.integers(half, self.vocab_size, pairs)
        tokens = rng.integers(half, self.vocab_size, length)
        tokens[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
        room = (length - 2 * pairs) // 2
        weights = self.power_a * np.arange(1, room + 1) ** (self.power_a - 1)
        places = 2 * pairs + 2 * rng.choice(room, pairs, replace=False, p=weights / weights.sum())
        tokens[places] = keys
        return make_example(tokens, dict(zip(places.tolist(), values.tolist())), load=pairs)
