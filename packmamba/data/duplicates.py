"""Near-duplicates among many texts: MinHash signatures, and clusters of texts whose estimated Jaccard similarity is high.

A text is the set of its runs of five tokens, where a token is a word or a sign and white space is nothing. A signature holds
the least value of that set under each of 256 hash functions; the share of equal entries of two signatures estimates the
Jaccard similarity of their sets with a standard deviation of at most 0.03 (Broder 1997).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Signatures = NDArray[np.uint32]

SHINGLE = 5
FUNCTIONS = 256
BAND = 4
"""Columns that two signatures must share to be compared: of 64 such bands one is shared with probability 0.98 at 0.5."""
ROUNDS = 64
"""Texts of one bucket that the others in it are compared with."""

_random = np.random.default_rng(5)
_MULTIPLY, _ADD = _random.integers(0, 2**32, (2, 1, FUNCTIONS), dtype=np.uint32) | np.uint32(1)
_MIX = _random.integers(0, 2**63, 8, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 2**64)
# Of each byte: 0 white space, 1 part of a word, 2 a token of its own.
_KIND = np.array(
    [0 if chr(b).isspace() or b < 32 else 1 if b > 127 or chr(b).isalnum() or b == 95 else 2 for b in range(256)],
    np.uint8,
)


def shingles(text: bytes) -> NDArray[np.uint32]:
    """Hashes of the text's runs of five tokens, each once, sorted; a shorter text is one run; none without a token."""
    characters = np.frombuffer(text, np.uint8)
    kind = _KIND[characters]
    word = kind == 1
    edges = np.diff(word.astype(np.int8), prepend=np.int8(0), append=np.int8(0))
    signs = np.flatnonzero(kind == 2)
    starts = np.concatenate([np.flatnonzero(edges == 1), signs])
    ends = np.concatenate([np.flatnonzero(edges == -1), signs + 1])
    order = np.argsort(starts, kind="stable")
    tokens = _mixed(_between(characters, starts[order], ends[order]), 0)
    if not len(tokens):
        return np.empty(0, np.uint32)
    width = min(SHINGLE, len(tokens))
    runs = np.zeros(len(tokens) - width + 1, np.uint64)
    for i in range(width):
        runs += tokens[i : len(runs) + i] * _MIX[2 + i]
    return np.unique((_mixed(runs, 1) >> np.uint64(32)).astype(np.uint32))


def signature(text: bytes) -> Signatures:
    """(256,); all equal for texts without a token."""
    found = np.full(FUNCTIONS, 2**32 - 1, np.uint32)
    hashes = shingles(text)[:, None]
    for first in range(0, len(hashes), 4096):
        np.minimum(found, (hashes[first : first + 4096] * _MULTIPLY + _ADD).min(axis=0), out=found)
    return found


def clusters(signatures: Signatures, threshold: float = 0.5) -> NDArray[np.int64]:
    """Of each of (n, 256) signatures the smallest number of a text in its cluster: (n,).

    Two texts whose estimated similarity is at least ``threshold`` are in one cluster, and so are all that are linked by such
    pairs. Pairs are looked for among texts that share a band.
    """
    count = len(signatures)
    weights = np.random.default_rng(6).integers(0, 2**63, FUNCTIONS, dtype=np.uint64) | np.uint64(1)
    fingerprints = np.concatenate(
        [part.astype(np.uint64) @ weights for part in np.array_split(signatures, count // 2**16 + 1)]
    )
    _, unique, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
    kept = signatures[unique]
    parent = np.arange(len(kept))
    for first in range(0, FUNCTIONS, BAND):
        keys = np.zeros(len(kept), np.uint64)
        for i in range(BAND):
            keys += kept[:, first + i].astype(np.uint64) * _MIX[2 + i]
        _link(parent, keys, kept, threshold)
    smallest = np.full(len(kept), count)
    np.minimum.at(smallest, parent[inverse], np.arange(count))
    return smallest[parent[inverse]]


def _link(parent: NDArray[np.int64], keys: NDArray[np.uint64], signatures: Signatures, threshold: float) -> None:
    """Joins the clusters of similar texts with equal keys; ``parent`` is each text's root before and after."""
    # Of each cluster one text in a bucket: others of its texts meet elsewhere.
    _, buckets = np.unique(keys, return_inverse=True)
    _, members = np.unique(buckets.astype(np.int64) * len(parent) + parent, return_index=True)
    for _ in range(ROUNDS):
        owner = buckets[members]  # sorted
        begins = np.flatnonzero(np.diff(owner, prepend=-1))
        first = np.repeat(members[begins], np.diff(begins, append=len(members)))
        others = members != first
        first, members = first[others], members[others]
        if not len(members):
            break
        similar = np.concatenate(
            [
                (signatures[a] == signatures[b]).mean(axis=1) >= threshold
                for a, b in zip(*(np.array_split(side, len(members) // 2**15 + 1) for side in (first, members)))
            ]
        )
        for a, b in zip(first[similar].tolist(), members[similar].tolist()):
            a, b = _root(parent, a), _root(parent, b)
            parent[max(a, b)] = min(a, b)
        members = members[~similar]
    while (parent[parent] != parent).any():
        parent[:] = parent[parent]


def _root(parent: NDArray[np.int64], text: int) -> int:
    while parent[text] != text:
        text = int(parent[text])
    return text


def _between(characters: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A polynomial hash of characters[start:end] for each pair, from sums before each place."""
    powers = np.full(len(characters) + 1, _BASE, np.uint64)
    inverses = np.full(len(characters) + 1, _INVERSE, np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum((characters.astype(np.uint64) + np.uint64(1)) * powers[:-1], out=sums[1:])
    return (sums[ends] - sums[starts]) * inverses[starts]


def _mixed(values: NDArray[np.uint64], which: int) -> NDArray[np.uint64]:
    """Each high bit depends on all bits (splitmix64's finish)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * _MIX[which]
    return values ^ (values >> np.uint64(31))
