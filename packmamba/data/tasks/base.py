"""Examples of tasks: documents with targets."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packmamba.errors import expect

# A number, or minimum and maximum of a uniform draw.
Span = int | tuple[int, int]


@dataclass(frozen=True, eq=False)
class Example:
    """Hold a document of n tokens.

    Attributes:
        tokens, targets, mask: (n,); ``targets[t]`` is the
            answer after ``tokens[: t + 1]`` where ``mask[t]``.
        load: how much there is to remember, or the distance to the answer.
        choices: continuations of ``context``; ``answer``: index of the right one.
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
        """Return the tokens before the first answer."""
        return self.tokens[: int(self.mask.argmax()) + 1]


def make_example(tokens: Any, answers: dict[int, int], load: int, **others: Any) -> Example:
    """Make an example from ``answers``: position -> id of the answer after it."""
    ids = np.asarray(tokens, dtype=np.int64)
    targets, mask = np.zeros_like(ids), np.zeros(len(ids), dtype=bool)
    places = list(answers)
    targets[places], mask[places] = list(answers.values()), True
    return Example(ids, targets, mask, load, **others)


def complete(prompt: Any, right: Any, load: int, **others: Any) -> Example:
    """Make an example from the ids of a prompt and of its right answer."""
    answers = {len(prompt) - 1 + i: token for i, token in enumerate(right)}
    return make_example([*prompt, *right[:-1]], answers, load, **others)


def draw(name: str, seed: int, index: int) -> np.random.Generator:
    """Make an example's generator: a function of the task, the seed and the index alone."""
    # crc32, since Python's hash of a text differs from process to process.
    return np.random.default_rng([zlib.crc32(name.encode()), seed, index])


def within(rng: np.random.Generator, span: tuple[int, int]) -> int:
    """Draw uniformly from a span, both ends included."""
    return int(rng.integers(*span, endpoint=True))


def span(name: str, value: Span, minimum: int) -> tuple[int, int]:
    """Return the minimum and maximum. Raises ValueError."""
    low, high = value if isinstance(value, (tuple, list)) else (value, value)
    holds = isinstance(low, int) and minimum <= low <= high
    expect(holds, name, f"at least {minimum}, or a minimum and maximum", value)
    return low, high


def integer(name: str, value: int, minimum: int) -> int:
    """Check an integer of at least ``minimum`` and return it. Raises ValueError."""
    expect(isinstance(value, int) and value >= minimum, name, f"an integer of at least {minimum}", value)
    return value
