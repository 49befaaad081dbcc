"""Recall and copying of random symbols, and parity."""

import numpy as np

from packmamba.data.tasks.base import Example, Span, draw, integer, make_example, span, within

Pairs = list[tuple[list[int], list[int]]]


class MultiQueryRecall:
    """Make MQAR (zoology, arXiv 2312.04927): pairs of key and value; later each key returns once and asks for its value.

    Gaps follow a power law: most keys return early. The lower half of the ids are keys. Published: ``vocab_size=8192``, (length,
    num_pairs) (64, 4), (128, 8), (256, 16).
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
    """Make induction heads (Mamba, arXiv 2312.00752): a second mark at the document's end asks for the first one's successor.

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


class FuzzyRecall:
    """Make fuzzy in-context recall (MAD, arXiv 2403.17844): keys and values are motifs of up to three tokens.

    A key seen before asks for its value, and no other has its first token. Half the ids are keys'. Published: vocabulary 16,
    length 128.
    """

    KEYS, MOTIF = 8, 3

    def __init__(self, length: Span = (64, 128), vocab_size: int = 16) -> None:
        self.length, self.vocab_size = (span("length", length, 4 * self.MOTIF), integer("vocab_size", vocab_size, 16))
        self.chance = 1 / (vocab_size - vocab_size // 2)

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("fuzzy_recall", seed, index)
        length, half = within(rng, self.length), self.vocab_size // 2

        def motif(low: int, high: int) -> list[int]:
            return rng.integers(low, high, int(rng.integers(1, self.MOTIF + 1))).tolist()

        # A key's first token is unique, so that it tells the key after one token.
        firsts = rng.choice(half, self.KEYS, replace=False)
        # A pair has at most 2 * MOTIF tokens, so the last one ends within the length.
        pairs = [([int(first), *motif(0, half)[1:]], motif(half, self.vocab_size)) for first in firsts]
        return _recall(rng, pairs, length - 2 * self.MOTIF)


class NoisyRecall:
    """Make noisy in-context recall (MAD, arXiv 2403.17844): pairs among noise; a key seen before asks for its value.

    A quarter of the ids are keys, a quarter values. Published: vocabulary 32, noise 0.2, length 128.
    """

    NOISE = 0.2

    def __init__(self, length: Span = (64, 128), vocab_size: int = 32) -> None:
        self.length, self.vocab_size = (span("length", length, 4), integer("vocab_size", vocab_size, 8))
        self.keys = vocab_size // 4
        self.chance = 1 / self.keys

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: tokens, targets, and the mask of answers."""
        rng = draw("noisy_recall", seed, index)
        length, keys = within(rng, self.length), self.keys
        pairs = [([key], [value]) for key, value in enumerate(rng.integers(keys, 2 * keys, keys).tolist())]
        return _recall(rng, pairs, length - 1, self.NOISE, (2 * keys, self.vocab_size))


def _recall(
    rng: np.random.Generator, pairs: Pairs, length: int, noise: float = 0, others: tuple[int, int] = (0, 0)
) -> Example:
    tokens: list[int] = []
    answers: dict[int, int] = {}
    seen: set[int] = set()
    while len(tokens) < length:
        if noise and rng.random() < noise:
            tokens.append(int(rng.integers(*others)))
            continue
        which = int(rng.integers(len(pairs)))
        key, value = pairs[which]
        if which in seen:
            # The last token of the key predicts the value's
            # first, the value's first its second, ...
            answers |= {len(tokens) + len(key) - 1 + i: token for i, token in enumerate(value)}
        tokens += key + value
        seen.add(which)
    return make_example(tokens, answers, load=len(seen))


class SelectiveCopying:
    """Make selective copying (Mamba, arXiv 2312.00752; MAD, arXiv 2403.17844): repeat ``num_data`` tokens among noise in order.

    ``length`` excludes the markers that ask for them. Published: 16 data tokens in 4096 (Mamba) or 256 (MAD), vocabulary 16.
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
