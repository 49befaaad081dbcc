"""Requests of random ids, with lengths like those of multiple-choice tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packmamba.config import ConfigError

Request = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Workload:
    """Contexts with ``continuations`` continuations each. Lengths in tokens are log-normal around their medians."""

    contexts: int
    context: int
    continuations: int
    continuation: int
    sigma: float = 0.5

    @classmethod
    def of(cls, name: str, fields: dict[str, Any]) -> Workload:
        """Raises ConfigError naming the key."""
        try:
            made = cls(**fields)
        except TypeError as error:
            raise ConfigError(f"workloads.{name}: {str(error).partition(')')[2].strip()}") from None
        for key, value in vars(made).items():
            if not value > 0:
                raise ConfigError(f"workloads.{name}.{key}: expected above 0, got {value}")
        return made

    def draw(self, vocab_size: int, seed: int) -> list[Request]:
        """The requests, those of one context next to each other; lengths within a quarter and four times the median."""
        rng = np.random.Generator(np.random.PCG64(seed))

        def ids(median: int) -> list[int]:
            length = np.clip(rng.lognormal(np.log(median), self.sigma), max(1, median / 4), 4 * median)
            return rng.integers(vocab_size, size=int(length)).tolist()

        contexts = [ids(self.context) for _ in range(self.contexts)]
        return [(context, ids(self.continuation)) for context in contexts for _ in range(self.continuations)]
