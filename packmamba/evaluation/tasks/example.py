"""What every task gives: examples that are documents with targets, drawn by a pure function of (seed, index)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

Span = int | tuple[int, int]
"""A number, or the smallest and the largest of those that are drawn uniformly."""


@dataclass(frozen=True, eq=False)
class Example:
    """One document of a task. n tokens.

    Attributes:
        tokens: (n,) int64.
        targets: (n,) int64; ``targets[t]`` is to be said after ``tokens[: t + 1]``. Outside of ``mask`` any valid id.
        mask: (n,) bool, where an answer counts.
        load: how much there is to remember: pairs, data tokens, or the distance to what is asked for.
        choices: of multiple choice, lists of ids of which one continues ``tokens``; else empty.
        answer: the place of the right one in ``choices``; else None.
        notes: what a task's own measures need besides.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    mask: NDArray[np.bool_]
    load: int
    choices: tuple[list[int], ...] = ()
    answer: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def context(self) -> NDArray[np.int64]:
        """What is read before the first answer."""
        return self.tokens[: int(self.mask.argmax()) + 1]


def make_example(tokens: Any, answers: dict[int, int], load: int, **others: Any) -> Example:
    """An example whose ``answers`` say which id is to be said after which place."""
    ids = np.asarray(tokens, dtype=np.int64)
    targets, mask = np.zeros_like(ids), np.zeros(len(ids), dtype=bool)
    places = list(answers)
    targets[places], mask[places] = list(answers.values()), True
    return Example(ids, targets, mask, load, **others)


def draw(name: str, seed: int, index: int) -> np.random.Generator:
    """The random numbers of one example: of other tasks, seeds and indices they are others."""
    for argument, value in (("seed", seed), ("index", index)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"{argument}: expected an integer of at least 0, got {value!r}")
    return np.random.default_rng([zlib.crc32(name.encode()), int(seed), int(index)])


MOST = 2**24
"""Of anything that a task counts: an example of more would not fit in memory."""


def check_span(name: str, span: Span, least: int) -> tuple[int, int]:
    """The smallest and largest. Raises ValueError naming the argument."""
    low, high = span if isinstance(span, (tuple, list)) and len(span) == 2 else (span, span)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (low, high)) or not least <= low <= high:
        raise ValueError(
            f"{name}: expected an integer of at least {least}, or the smallest and the largest, got {span!r}"
        )
    if high > MOST:
        raise ValueError(f"{name}: expected at most {MOST}, got {high}")
    return low, high


def check_integer(name: str, value: int, least: int) -> int:
    """The value. Raises ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    if value > MOST:
        raise ValueError(f"{name}: expected at most {MOST}, got {value}")
    return value


def check_number(name: str, value: float, right: Callable[[float], bool], expected: str) -> float:
    """The value. Raises ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, Real) or not right(float(value)):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return float(value)


def within(rng: np.random.Generator, span: tuple[int, int]) -> int:
    return int(rng.integers(span[0], span[1] + 1))
