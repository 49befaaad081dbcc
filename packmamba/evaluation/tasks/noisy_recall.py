"""Noisy in-context recall (MAD, arXiv 2403.17844): pairs of key and value among noise; a key that returns asks for its value."""

from __future__ import annotations

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


class NoisyRecall:
    """Pairs of key and value with replacement, noise tokens between them. A key seen before is to be continued by its value.

    Each document has its own value for each key. Published setting: vocabulary 32, noise 0.2, length 128.

    Args:
        length: tokens of a document.
        vocab_size: a quarter are keys, a quarter values, half noise.
        noise: share of the places for a pair or a noise token that hold noise.
    """

    num_examples = None

    def __init__(self, length: Span = (64, 128), vocab_size: int = 32, noise: float = 0.2) -> None:
        self.length = check_span("length", length, 4)
        self.vocab_size = check_integer("vocab_size", vocab_size, 8)
        check_number("noise", noise, lambda share: 0 <= share < 1, "at least 0 and below 1")
        self.noise = noise
        self.keys = vocab_size // 4

    @property
    def chance(self) -> float:
        return 1 / self.keys

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
