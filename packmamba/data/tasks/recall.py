"""Recall and copying of random symbols, and parity."""

import numpy as np

from packmamba.data.tasks.base import Example, Span, draw, integer, make_example, span, within


class MultiQueryRecall:
    """Make multi-query associative recall, MQAR (zoology, arXiv 2312.04927).

    Pairs of key and value come first; later each key returns once and asks for its value.

    Gaps follow a power law: most keys return early. The lower half of the ids are keys. Published:
    ``vocab_size=8192``, (length, num_pairs) (64, 4), (128, 8), (256, 16).
    """

    POWER = 0.01

    def __init__(self, num_pairs: Span = 8, length: Span = (64, 128), vocab_size: int = 8192) -> None:
        self.pairs = span("num_pairs", num_pairs, 1)
        self.length = span("length", length, 4 * self.pairs[1])
        self.vocab_size = integer("vocab_size", vocab_size, 2 * self.pairs[1])
        self.chance = 1 / (vocab_size - vocab_size // 2)

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("mqar", seed, index)
        pairs, length, half = (within(rng, self.pairs), within(rng, self.length), self.vocab_size // 2)
        keys = rng.choice(half, pairs, replace=False)
        values = rng.integers(half, self.vocab_size, pairs)
        # Fill with values: a key occurs only in its pair and as a question.
        tokens = rng.integers(half, self.vocab_size, length)
        tokens[: 2 * pairs] = np.stack([keys, values], axis=1).ravel()
        # Questions lie at even distances behind the pairs, as zoology's, at most one a place.
        gaps = (length - 2 * pairs) // 2
        weights = self.POWER * np.arange(1, gaps + 1) ** (self.POWER - 1)
        places = 2 * pairs + 2 * rng.choice(gaps, pairs, replace=False, p=weights / weights.sum())
        tokens[places] = keys
        return make_example(tokens, dict(zip(places.tolist(), values.tolist())), load=pairs)


class Induction:
    """Make induction heads (Mamba, arXiv 2312.00752).

    A second mark at the document's end asks for the first one's successor.

    The largest id is the mark. Published: length 256, tested to 2**20; vocabulary 16.
    """

    def __init__(self, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.length, self.vocab_size = (span("length", length, 3), integer("vocab_size", vocab_size, 3))
        self.chance = 1 / (vocab_size - 1)

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("induction", seed, index)
        length, mark = within(rng, self.length), self.vocab_size - 1
        tokens = rng.integers(0, mark, length)
        # At most length - 3: the successor of the first mark must not be the second mark.
        place = int(rng.integers(0, length - 2))
        tokens[[place, length - 1]] = mark
        return make_example(tokens, {length - 1: int(tokens[place + 1])}, load=length - 1 - place)


class SelectiveCopying:
    """Make selective copying (Mamba, arXiv 2312.00752; MAD, arXiv 2403.17844).

    ``num_data`` tokens among noise are to be repeated in order.

    ``length`` excludes the markers that ask for them. Published:
    16 data tokens in 4096 (Mamba) or 256 (MAD), vocabulary 16.
    """

    def __init__(self, num_data: Span = 16, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.data = span("num_data", num_data, 1)
        self.length = span("length", length, self.data[1])
        self.vocab_size = integer("vocab_size", vocab_size, 4)
        self.chance = 1 / (vocab_size - 2)

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("selective_copying", seed, index)
        count, length = within(rng, self.data), within(rng, self.length)
        # One id for noise, one for the marker that asks for the next data token.
        noise, marker = self.vocab_size - 2, self.vocab_size - 1
        data = rng.integers(0, noise, count)
        tokens = np.full(length + count, noise)
        tokens[np.sort(rng.choice(length, count, replace=False))] = data
        tokens[length:] = marker
        return make_example(tokens, {length + i: int(value) for i, value in enumerate(data)}, load=count)


class Parity:
    """Make parity of bits, which Mamba's positive eigenvalues cannot learn (arXiv 2411.12537)."""

    vocab_size, chance = 3, 0.5

    def __init__(self, length: Span = (8, 40)) -> None:
        self.length = span("length", length, 1)

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("parity", seed, index)
        bits = rng.integers(0, 2, within(rng, self.length))
        return make_example([*bits, 2], {len(bits): int(bits.sum() % 2)}, load=len(bits))
