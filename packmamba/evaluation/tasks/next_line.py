"""Next line: which of four lines continues this code? Multiple choice on real text, chance 25 %. Bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from packmamba.evaluation.tasks.example import Example, check_integer, draw, make_example
from packmamba.evaluation.tasks.text import check_documents

TRIES = 8
SHORTEST = 12
"""Bytes of a line's text: shorter ones (``else:``) are no question."""

INSIDE = bytes(range(0x80, 0xC0))
"""Bytes that only stand inside a character of UTF-8: no context begins with them."""


class NextLine:
    """About ``context`` bytes of a file, up to a line's end, and four lines of which one follows.

    The wrong ones stand in the same file with the same indentation, are about as long (within a third), do not stand in
    the context and differ from the right one. How long they may be does not depend on the right one's place among them, so that
    lengths alone tell nothing. Ids are bytes; ``tokens`` are the context and the right line but its last
    byte, ``targets`` the right line's, for the loss. ``load`` is the context's length.

    Args:
        context: most bytes before the line.
        num_choices: lines to choose from.
        per_package: most items that one package gives.
        documents: texts, or pairs (package, text); None: the standard library's modules.
        items_seed: draws which lines become items.
    """

    vocab_size = 256
    of_bytes = True

    def __init__(
        self,
        context: int = 2048,
        num_choices: int = 4,
        per_package: int = 20,
        documents: Iterable[str | tuple[str, str]] | None = None,
        items_seed: int = 0,
    ) -> None:
        self.context = check_integer("context", context, 1)
        self.num_choices = check_integer("num_choices", num_choices, 2)
        self.per_package = check_integer("per_package", per_package, 1)
        packages: dict[str, list[bytes]] = {}
        for package, text in check_documents(documents):
            packages.setdefault(package, []).append(text.encode())
        self._items: list[tuple[bytes, bytes, list[bytes]]] = []
        for number, package in enumerate(sorted(packages)):
            rng = draw("next_line", check_integer("items_seed", items_seed, 0), number)
            self._items += self._make_items(packages[package], rng)
        if not self._items:
            raise ValueError(
                f"documents: expected files in which a line has {num_choices - 1} others like it, found none"
            )

    @property
    def chance(self) -> float:
        return 1 / self.num_choices

    @property
    def num_examples(self) -> int:
        return len(self._items)

    def example(self, seed: int, index: int) -> Example:
        """Item ``index`` (modulo their number), its choices in an order that the seed draws."""
        rng = draw("next_line order", seed, index)
        context, right, wrong = self._items[index % len(self._items)]
        answer = int(rng.integers(self.num_choices))
        choices = [wrong[i] for i in rng.permutation(len(wrong))]
        choices.insert(answer, right)
        tokens = np.frombuffer(context + right, dtype=np.uint8)
        answers = {len(context) - 1 + i: token for i, token in enumerate(right)}
        return make_example(
            tokens[:-1], answers, load=len(context), choices=tuple(list(choice) for choice in choices), answer=answer
        )

    def _make_items(self, files: list[bytes], rng: np.random.Generator) -> list[tuple[bytes, bytes, list[bytes]]]:
        items: list[tuple[bytes, bytes, list[bytes]]] = []
        for _ in range(TRIES * self.per_package):
            if len(items) == self.per_package:
                break
            lines = files[int(rng.integers(len(files)))].splitlines(keepends=True)
            if len(lines) < 2:
                continue
            place = int(rng.integers(1, len(lines)))
            right = lines[place]
            if len(right.strip()) < SHORTEST:
                continue
            context = b"".join(lines[:place])[-self.context :].lstrip(INSIDE)
            if right in context or any(item[1] == right and item[0] == context for item in items):
                continue
            stripped, indentation, size = right.strip(), _indentation(right), _size(len(right))
            alike = {
                line
                for line in lines
                if _size(len(line)) == size  # few are: what costs more comes after it
                and line.startswith(indentation)
                and _indentation(line) == indentation
                and line.strip() != stripped
                and line not in context
            }
            if len(alike) >= self.num_choices - 1:
                chosen = rng.choice(len(alike), self.num_choices - 1, replace=False)
                wrong = sorted(alike)
                items.append((context, right, [wrong[i] for i in chosen]))
        return items


@functools.cache
def _size(length: int) -> int:
    """Lines of one size differ by less than a third. Windows around the right line would put it in their middle."""
    return int(math.log(length, 4 / 3))


def _indentation(line: bytes) -> bytes:
    return line[: len(line) - len(line.lstrip())]
