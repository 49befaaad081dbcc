"""Documents of random token ids, of lengths from a named distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from packmamba.config import DataConfig
from packmamba.data.lengths import draw_lengths
from packmamba.data.sources.source import Document, Source, held_out_count, reads_no_path

CHUNK = 1024


def open_synthetic(data: DataConfig) -> Source:
    """Lengths are ``draw_lengths(data.distribution, data.num_documents, data.corpus_seed)`` exactly, ids uniform below
    ``data.vocab_size``. Held out by document. ``data.tokenizer``, ``data.begin_token`` and ``data.end_token`` do not
    apply: tokens put around the documents would change their lengths.
    """
    reads_no_path(data)
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

    fingerprint = [data.distribution, data.num_documents, data.vocab_size]
    return Source(fingerprint, data.num_documents, " documents", read, vocab_size=data.vocab_size)
