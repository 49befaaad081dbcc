"""Length distributions of synthetic documents."""

from typing import NamedTuple

import numpy as np


class LengthDistribution(NamedTuple):
    """Hold parameters of a log-normal distribution of lengths.

    Draws exp(normal(mu, sigma)) are clipped to [shortest, longest] and rounded down.
    """

    mu: float
    sigma: float
    shortest: int
    longest: int

    def __str__(self) -> str:
        clipped = f"clipped to [{self.shortest}, {self.longest}]"
        return f"log-normal, mu {self.mu}, sigma {self.sigma}, {clipped}, rounded down"


LENGTH_DISTRIBUTIONS = {
    "documents-2k": LengthDistribution(6.153, 0.9, 57, 2048),
    "short": LengthDistribution(4.372, 0.7, 8, 256),
    "heavy": LengthDistribution(6.787, 1.3, 57, 65536),
}


def draw_lengths(name: str, num_documents: int, seed: int) -> np.ndarray:
    """Draw document lengths, (num_documents,) int32, the same on every machine."""
    d = LENGTH_DISTRIBUTIONS[name]
    drawn = np.random.Generator(np.random.PCG64(seed)).lognormal(d.mu, d.sigma, num_documents)
    return np.floor(np.clip(drawn, d.shortest, d.longest)).astype(np.int32)
