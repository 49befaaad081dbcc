"""Documents of random token ids, of lengths from a named distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS, draw_lengths
from packmamba.data.sources.source import Document, Source, held_out_count

CHUNK = 1024


def open_synthetic(data: DataConfig) -> Source:
    if data.distribution not in LENGTH_DISTRIBUTIONS:
        known = ", ".join(LENGTH_DISTRIBUTIONS)
        raise ConfigError(f"data.distribution '{data.distribution}' is unknown; known: {known}")
    if data.num_documents < 1:
        raise ConfigError(f"data.num_documents must be at least 1, got {data.num_documents}")
    if not 1 <= data.vocab_size <= 2**32:
        raise ConfigError(f"data.vocab_size must be from 1 to 2**32, got {data.vocab_size}")
    count = held_out_count(data.num_documents, "documents", data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        lengths = draw_lengths(data.distribution, data.num_documents, data.corpus_seed)
        held_out = np.zeros(data.num_documents, bool)
        split_rng = np.random.Generator(np.random.PCG64([data.corpus_seed, 1]))
        held_out[split_rng.choice(data.num_documents, count, replace=False)] = True
        token_rng = np.random.Generator(np.random.PCG64([data.corpus_seed, 2]))
        for first in range(0, data.num_documents, CHUNK):
            chunk = lengths[first : first + CHUNK]
            ends = np.cumsum(chunk, dtype=np.int64)
            tokens = token_rng.integers(data.vocab_size, size=int(ends[-1]), dtype=np.uint32)
            for index, document in enumerate(np.split(tokens, ends[:-1]), first):
                yield Document(bool(held_out[index]), document)
            advance(len(chunk))

    return Source([data.distribution, data.num_documents, data.vocab_size], data.num_documents, " documents", read)
