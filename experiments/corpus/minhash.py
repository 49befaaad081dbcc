"""Near-duplicates among many texts: MinHash signatures, and clusters of texts with a high estimated
Jaccard similarity.

A text is the set of its runs of five tokens; a token is a word or a sign, and white space is
nothing. A signature holds the least value of that set under each of 256 hash functions; the share
of equal entries of two signatures estimates the Jaccard similarity of their sets with a standard
deviation of at most 0.03 (Broder 1997).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHINGLE = 5
FUNCTIONS = 256
# columns that two signatures must share to be compared: of the 64 bands 98 % of pairs at 0.5 share
# one
BAND = 4
ROUNDS = 64  # maximum texts of a bucket that the others in it are compared with

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
    """Hash the text's runs of five tokens, each once, sorted; a shorter text is one run, a text
    without tokens has none.
    """
    characters = np.frombuffer(text, np.uint8)
    kind = _KIND[characters]
    edges = np.diff((kind == 1).astype(np.int8), prepend=np.int8(0), append=np.int8(0))
    signs = np.flatnonzero(kind == 2)
    starts = np.concatenate([np.flatnonzero(edges == 1), signs])
    ends = np.concatenate([np.flatnonzero(edges == -1), signs + 1])
    order = np.argsort(starts, kind="stable")
    tokens = _mixed(_substrings(characters, starts[order], ends[order]), 0)
    if not len(tokens):
        return np.empty(0, np.uint32)
    width = min(SHINGLE, len(tokens))
    runs = np.zeros(len(tokens) - width + 1, np.uint64)
    for i in range(width):
        runs += tokens[i : len(runs) + i] * _MIX[2 + i]
    return np.unique((_mixed(runs, 1) >> np.uint64(32)).astype(np.uint32))


def signature(text: bytes) -> NDArray[np.uint32]:
    """Compute a MinHash signature, (256,); the signatures of all texts without a token are equal."""
    least = np.full(FUNCTIONS, 2**32 - 1, np.uint32)
    hashes = shingles(text)[:, None]
    for first in range(0, len(hashes), 4096):
        np.minimum(least, (hashes[first : first + 4096] * _MULTIPLY + _ADD).min(axis=0), out=least)
    return least


def clusters(signatures: NDArray[np.uint32], threshold: float = 0.5) -> NDArray[np.int64]:
    """Cluster (n, 256) signatures: (n,), each text's cluster as the smallest number of a text in
    it.

    Two texts whose estimated similarity is at least ``threshold`` are in one cluster, and so are
    all that such pairs link.
    """
    count = len(signatures)
    weights = np.random.default_rng(6).integers(0, 2**63, FUNCTIONS, dtype=np.uint64) | np.uint64(1)
    parts = np.array_split(signatures, count // 2**16 + 1)
    fingerprints = np.concatenate([part.astype(np.uint64) @ weights for part in parts])
    _, unique, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
    distinct = signatures[unique]
    parent = np.arange(len(distinct))
    for first in range(0, FUNCTIONS, BAND):
        keys = np.zeros(len(distinct), np.uint64)
        for i in range(BAND):
            keys += distinct[:, first + i].astype(np.uint64) * _MIX[2 + i]
        _link(parent, keys, distinct, threshold)
    smallest = np.full(len(distinct), count)
    np.minimum.at(smallest, parent[inverse], np.arange(count))
    return smallest[parent[inverse]]


def _link(parent: NDArray[np.int64], keys: NDArray[np.uint64], signatures: NDArray, threshold: float) -> None:
    """Join the clusters of similar texts with equal keys; ``parent`` is each text's root before and
    after.
    """
    # One text of each cluster in a bucket: the others meet elsewhere.
    _, buckets = np.unique(keys, return_inverse=True)
    _, members = np.unique(buckets.astype(np.int64) * len(parent) + parent, return_index=True)
    for _ in range(ROUNDS):
        begins = np.flatnonzero(np.diff(buckets[members], prepend=-1))
        first = np.repeat(members[begins], np.diff(begins, append=len(members)))
        others = members != first
        first, members = first[others], members[others]
        if not len(members):
            break
        pieces = [np.array_split(side, len(members) // 2**15 + 1) for side in (first, members)]
        similar = np.concatenate([(signatures[a] == signatures[b]).mean(axis=1) >= threshold for a, b in zip(*pieces)])
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


def _substrings(characters: NDArray[np.uint8], starts: NDArray, ends: NDArray) -> NDArray[np.uint64]:
    """Hash characters[start:end] for each pair, by polynomials of prefixes."""
    powers = np.full(len(characters) + 1, _BASE, np.uint64)
    inverses = np.full(len(characters) + 1, _INVERSE, np.uint64)
    powers[0] = inverses[0] = 1
    np.multiply.accumulate(powers, out=powers)
    np.multiply.accumulate(inverses, out=inverses)
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum((characters.astype(np.uint64) + np.uint64(1)) * powers[:-1], out=sums[1:])
    return (sums[ends] - sums[starts]) * inverses[starts]


def _mixed(values: NDArray[np.uint64], which: int) -> NDArray[np.uint64]:
    """Mix bits as splitmix64 finishes: each high bit depends on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * _MIX[which]
    return values ^ (values >> np.uint64(31))
