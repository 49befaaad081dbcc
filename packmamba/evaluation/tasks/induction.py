"""Induction heads (Mamba, arXiv 2312.00752): what followed the mark is to be said when the mark comes again."""

from __future__ import annotations

from packmamba.evaluation.tasks.example import Example, Span, check_integer, check_span, draw, make_example, within


class Induction:
    """Random tokens hold one mark; the document ends with a second one, after which the first one's follower is to be said.

    Published setting: length 256 in training, tested to 2**20; vocabulary 16.

    Args:
        length: tokens of a document, both marks included.
        vocab_size: ordinary tokens, and the largest id: the mark.
    """

    num_examples = None

    def __init__(self, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.length = check_span("length", length, 3)
        self.vocab_size = check_integer("vocab_size", vocab_size, 3)

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("induction", seed, index)
        length, mark = within(rng, self.length), self.vocab_size - 1
        tokens = rng.integers(0, mark, length)
        place = int(rng.integers(0, length - 2))
        tokens[[place, length - 1]] = mark
        return make_example(tokens, {length - 1: int(tokens[place + 1])}, load=length - 1 - place)
