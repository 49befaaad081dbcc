"""Fuzzy in-context recall (MAD, arXiv 2403.17844): keys and values are motifs of several tokens."""

from __future__ import annotations

import numpy as np

from packmamba.evaluation.tasks.example import Example, Span, check_integer, check_span, draw, make_example, within


class FuzzyRecall:
    """Pairs of motifs with replacement: a key of one to ``motif`` tokens, then its value. A key seen before asks for its value.

    Keys and values have tokens of their own. A key's first token belongs to no other key of the document, so that it says which
    key this is and how long. Each document has its own motifs.
    Published setting: vocabulary 16, motifs up to 3, length 128.

    Args:
        length: tokens of a document.
        vocab_size: half are tokens of keys, half of values.
        motif: most tokens of a key and of a value.
        num_keys: keys of a document, at most the tokens of keys.
    """

    num_examples = None

    def __init__(self, length: Span = (64, 128), vocab_size: int = 16, motif: int = 3, num_keys: int = 8) -> None:
        self.motif = check_integer("motif", motif, 1)
        self.length = check_span("length", length, 4 * motif)
        self.vocab_size = check_integer("vocab_size", vocab_size, 4)
        half = vocab_size // 2
        self.num_keys = check_integer("num_keys", num_keys, 1)
        if num_keys > half:
            raise ValueError(f"num_keys: expected at most the {half} tokens of keys, got {num_keys}")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("fuzzy_recall", seed, index)
        length, half = within(rng, self.length), self.vocab_size // 2
        pairs = [
            ([int(first), *self._draw_motif(rng, 0, half)[1:]], self._draw_motif(rng, half, self.vocab_size))
            for first in rng.choice(half, self.num_keys, replace=False)
        ]
        tokens: list[int] = []
        answers: dict[int, int] = {}
        seen: set[int] = set()
        while len(tokens) < length - 2 * self.motif:
            which = int(rng.integers(len(pairs)))
            key, value = pairs[which]
            tokens += key
            if which in seen:
                answers |= {len(tokens) - 1 + i: token for i, token in enumerate(value)}
            tokens += value
            seen.add(which)
        return make_example(tokens, answers, load=len(seen))

    def _draw_motif(self, rng: np.random.Generator, low: int, high: int) -> list[int]:
        return rng.integers(low, high, int(rng.integers(1, self.motif + 1))).tolist()
