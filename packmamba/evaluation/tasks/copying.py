"""Selective copying, and parity as a negative control."""

from __future__ import annotations

import numpy as np

from packmamba.evaluation.tasks.base import Example, Span, draw, integer, make_example, span, within


class SelectiveCopying:
    """Selective copying (Mamba, arXiv 2312.00752; MAD, arXiv 2403.17844): repeat the data tokens among noise in order.

    Published settings: Mamba 16 data tokens in 4096, alphabet 16; MAD 16 in 256, vocabulary 16.

    Args:
        num_data: data tokens of a document.
        length: tokens before the markers that ask for them.
        vocab_size: data tokens, and the two largest ids: noise and marker.
    """

    num_examples = None

    def __init__(self, num_data: Span = 16, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.data = span("num_data", num_data, 1)
        self.length = span("length", length, self.data[1])
        self.vocab_size = integer("vocab_size", vocab_size, 4)
        self.chance = 1 / (vocab_size - 2)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("selective_copying", seed, index)
        count, length = within(rng, self.data), within(rng, self.length)
        noise, marker = self.vocab_size - 2, self.vocab_size - 1
        data = rng.integers(0, noise, count)
        tokens = np.full(length + count, noise)
        tokens[np.sort(rng.choice(length, count, replace=False))] = data
        tokens[length:] = marker
        return make_example(tokens, {length + i: int(value) for i, value in enumerate(data)}, load=count)


class Parity:
    """Parity of ``length`` bits, which Mamba's positive eigenvalues cannot learn (arXiv 2411.12537)."""

    vocab_size = 3
    chance = 0.5
    num_examples = None
    QUESTION = 2

    def __init__(self, length: Span = (8, 40)) -> None:
        self.length = span("length", length, 1)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("parity", seed, index)
        bits = rng.integers(0, 2, within(rng, self.length))
        return make_example([*bits, self.QUESTION], {len(bits): int(bits.sum() % 2)}, load=len(bits))
