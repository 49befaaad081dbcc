"""Recall: multi-query associative recall, induction heads, fuzzy and noisy in-context recall."""

from __future__ import annotations

import numpy as np

from packmamba.evaluation.tasks.base import Example, Span, draw, integer, make_example, require, span, within


class MultiQueryRecall:
    """MQAR (zoology, arXiv 2312.04927): pairs of key and value; later each key returns once and asks for its value.

    Gaps between pairs and queries follow a power law; the tokens between are values, so that only a key asks.
    Published settings: ``vocab_size=8192``, (length, num_pairs) (64, 4), (128, 8), (256, 16), ``power_a=0.01``.

    Args:
        num_pairs: pairs of a document.
        length: tokens of a document, at least 4 for each pair.
        vocab_size: the lower half are keys, the upper half values.
        power_a: exponent of the power law; small: most keys return early.
    """

    num_examples = None

    def __init__(
        self, num_pairs: Span = 8, length: Span = (64, 128), vocab_size: int = 8192, power_a: float = 0.01
    ) -> None:
        self.pairs = span("num_pairs", num_pairs, 1)
        self.length = span("length", length, 4 * self.pairs[1])
        self.vocab_size = integer("vocab_size", vocab_size, 2 * self.pairs[1])
        require(0 < power_a <= 10, "power_a", "a number above 0 and at most 10", power_a)
        self.power_a = float(power_a)
        self.chance = 1 / (vocab_size - vocab_size // 2)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("mqar", seed, index)
        pairs, length, half = within(rng, self.pairs), within(rng, self.length), self.vocab_size // 2
        keys = rng.choice(half, pairs, replace=False)
        values = rng.integers(half, self.vocab_size, pairs)
        tokens = rng.integers(half, self.vocab_size, length)
        tokens[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
        gaps = (length - 2 * pairs) // 2
        weights = self.power_a * np.arange(1, gaps + 1) ** (self.power_a - 1)
        places = 2 * pairs + 2 * rng.choice(gaps, pairs, replace=False, p=weights / weights.sum())
        tokens[places] = keys
        return make_example(tokens, dict(zip(places.tolist(), values.tolist())), load=pairs)


class Induction:
    """Induction heads (Mamba, arXiv 2312.00752): a second mark at the document's end asks for the first one's successor.

    Published setting: length 256 in training, tested to 2**20; vocabulary 16.

    Args:
        length: tokens of a document, both marks included.
        vocab_size: ordinary tokens, and the largest id, the mark.
    """

    num_examples = None

    def __init__(self, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.length = span("length", length, 3)
        self.vocab_size = integer("vocab_size", vocab_size, 3)
        self.chance = 1 / (vocab_size - 1)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("induction", seed, index)
        length, mark = within(rng, self.length), self.vocab_size - 1
        tokens = rng.integers(0, mark, length)
        place = int(rng.integers(0, length - 2))
        tokens[[place, length - 1]] = mark
        return make_example(tokens, {length - 1: int(tokens[place + 1])}, load=length - 1 - place)


class FuzzyRecall:
    """Fuzzy in-context recall (MAD, arXiv 2403.17844): keys and values are motifs of several tokens.

    Pairs are drawn with replacement; a key seen before asks for its value. Each document has its own motifs; a key's first
    token belongs to no other key of the document. Published setting: vocabulary 16, motifs up to 3, length 128.

    Args:
        length: tokens of a document.
        vocab_size: half are tokens of keys, half of values.
        motif: maximum tokens of a key and of a value.
        num_keys: keys of a document, at most the tokens of keys.
    """

    num_examples = None

    def __init__(self, length: Span = (64, 128), vocab_size: int = 16, motif: int = 3, num_keys: int = 8) -> None:
        self.motif = integer("motif", motif, 1)
        self.length = span("length", length, 4 * motif)
        self.vocab_size = integer("vocab_size", vocab_size, 4)
        half = vocab_size // 2
        self.num_keys = integer("num_keys", num_keys, 1)
        require(num_keys <= half, "num_keys", f"at most the {half} tokens of keys", num_keys)
        self.chance = 1 / (vocab_size - half)

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


class NoisyRecall:
    """Noisy in-context recall (MAD, arXiv 2403.17844): pairs of key and value among noise; a key seen before asks for its value.

    Each document has its own value for each key. Published setting: vocabulary 32, noise 0.2, length 128.

    Args:
        length: tokens of a document.
        vocab_size: a quarter are keys, a quarter values, half noise.
        noise: probability of a noise token in place of a pair.
    """

    num_examples = None

    def __init__(self, length: Span = (64, 128), vocab_size: int = 32, noise: float = 0.2) -> None:
        self.length = span("length", length, 4)
        self.vocab_size = integer("vocab_size", vocab_size, 8)
        require(0 <= noise < 1, "noise", "at least 0 and below 1", noise)
        self.noise = noise
        self.keys = vocab_size // 4
        self.chance = 1 / self.keys

    def example(self, seed: int, index: int) -> Example:
        rng = draw("noisy_recall", seed, index)
        length, keys = within(rng, self.length), self.keys
        value_of = rng.integers(keys, 2 * keys, keys)
        tokens: list[int] = []
        answers: dict[int, int] = {}
        seen: set[int] = set()
        while len(tokens) < length - 1:
            if rng.random() < self.noise:
                tokens.append(int(rng.integers(2 * keys, self.vocab_size)))
                continue
            key = int(rng.integers(keys))
            if key in seen:
                answers[len(tokens)] = int(value_of[key])
            seen.add(key)
            tokens += [key, int(value_of[key])]
        return make_example(tokens, answers, load=len(seen))
