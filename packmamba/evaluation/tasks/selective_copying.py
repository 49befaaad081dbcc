"""Selective copying (Mamba, arXiv 2312.00752; MAD, arXiv 2403.17844): data tokens among noise are repeated in order."""

from __future__ import annotations

import numpy as np

from packmamba.evaluation.tasks.example import Example, Span, check_integer, check_span, draw, make_example, within


class SelectiveCopying:
    """Data tokens stand at random places among noise. Then markers follow, one for each: say the data tokens in order.

    Published settings: Mamba 16 data tokens in 4096, alphabet 16; MAD 16 in 256, vocabulary 16.

    Args:
        num_data: data tokens of a document.
        length: tokens before the markers.
        vocab_size: data tokens, and the two largest ids: noise and marker.
    """

    num_examples = None

    def __init__(self, num_data: Span = 16, length: Span = (128, 256), vocab_size: int = 16) -> None:
        self.data = check_span("num_data", num_data, 1)
        self.length = check_span("length", length, self.data[1])
        self.vocab_size = check_integer("vocab_size", vocab_size, 4)

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def example(self, seed: int, index: int) -> Example:
        rng = draw("selective_copying", seed, index)
        count, length = within(rng, self.data), within(rng, self.length)
        noise, marker = self.vocab_size - 2, self.vocab_size - 1
        data = rng.integers(0, noise, count)
        tokens = np.full(length + count, noise)
        tokens[np.sort(rng.choice(length, count, replace=False))] = data
        tokens[length:] = marker
        return make_example(tokens, {length + i: int(value) for i, value in enumerate(data)}, load=count)
