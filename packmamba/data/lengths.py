"""Length distributions for benchmarks: log-normal, clipped, rounded down; our choice, which every table must state."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthDistribution:
    """exp(normal(mu, sigma)) tokens, clipped to [shortest, longest] and rounded down."""

    mu: float
    sigma: float
    shortest: int
    longest: int

    def __str__(self) -> str:
        return (
            f"log-normal, mu {self.mu}, sigma {self.sigma}, clipped to [{self.shortest}, {self.longest}], rounded down"
        )


LENGTH_DISTRIBUTIONS = {
    "documents-2k": LengthDistribution(6.153, 0.9, 57, 2048),
    "short": LengthDistribution(4.372, 0.7, 8, 256),
    "heavy": LengthDistribution(6.787, 1.3, 57, 65536),
}


def draw_lengths(name: str, num_documents: int, seed: int) -> np.ndarray:
    """Document lengths of a named distribution, the same on every machine.

    Args:
        name: a key of LENGTH_DISTRIBUTIONS.
        num_documents: how many, at least 0.
        seed: seed of ``numpy.random.PCG64``.

    Returns:
        (num_documents,) int32, tokens of each document.

    Raises:
        ValueError: the name is unknown; num_documents or seed is negative.
    """
    if name not in LENGTH_DISTRIBUTIONS:
        close = difflib.get_close_matches(str(name), LENGTH_DISTRIBUTIONS, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"distribution: '{name}' is unknown; {hint}known: {', '.join(LENGTH_DISTRIBUTIONS)}")
    if num_documents < 0 or seed < 0:
        raise ValueError(f"num_documents and seed: expected at least 0, got {num_documents} and {seed}")
    d = LENGTH_DISTRIBUTIONS[name]
    drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(d.mu, d.sigma, num_documents)
    return np.floor(np.clip(drawn, d.shortest, d.longest)).astype(np.int32)
