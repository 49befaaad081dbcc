"""Parity of bits: a negative control. Mamba's positive eigenvalues cannot learn it (arXiv 2411.12537)."""

from __future__ import annotations

from packmamba.evaluation.tasks.example import Example, Span, check_span, draw, make_example, within


class Parity:
    """Bits, then a question: is their sum odd? On inputs longer than in training a Mamba must stay at chance.

    Args:
        length: bits of a document.
    """

    vocab_size = 3
    chance = 0.5
    num_examples = None
    QUESTION = 2

    def __init__(self, length: Span = (8, 40)) -> None:
        self.length = check_span("length", length, 1)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("parity", seed, index)
        bits = rng.integers(0, 2, within(rng, self.length))
        return make_example([*bits, self.QUESTION], {len(bits): int(bits.sum() % 2)}, load=len(bits))
