"""Tasks on text, whose ids are bytes."""

import math
from collections.abc import Iterable

import numpy as np

from packmamba.data.sources.builtin import standard_library
from packmamba.data.tasks.base import Example, complete, draw, integer
from packmamba.errors import expect

# Pairs (package, text); None: the standard library's modules.
Documents = Iterable[tuple[str, str]] | None
Item = tuple[bytes, bytes, list[bytes]]  # context, right line, wrong ones


class NextLine:
    """Make multiple choices on real code.

    Which of four lines follows about ``context`` bytes of a file?

    Wrong lines are of the same file, indentation, and nearly the same length, and not in the
    context, whose length is ``load``. A package has at most ``per_package`` items.
    """

    vocab_size, of_bytes = 256, True
    DRAWS_PER_ITEM = 8
    MIN_LINE = 12  # bytes: shorter ones (``else:``) make no question
    INSIDE_CHARACTER = bytes(range(0x80, 0xC0))  # UTF-8 continuation bytes, which begin no context

    def __init__(
        self, context: int = 2048, num_choices: int = 4, per_package: int = 20, documents: Documents = None
    ) -> None:
        self.context, self.num_choices = (integer("context", context, 1), integer("num_choices", num_choices, 2))
        self.per_package, self.chance = integer("per_package", per_package, 1), 1 / num_choices
        packages: dict[str, list[bytes]] = {}
        for package, text in documents or standard_library():
            packages.setdefault(package, []).append(text.encode())
        self.items: list[Item] = []
        for number, package in enumerate(sorted(packages)):
            self.items += self._make_items(packages[package], draw("next_line", 0, number))
        self.num_examples = len(self.items)
        expect(self.items, "documents", f"lines with {num_choices - 1} others like them", "none")

    def example(self, seed: int, index: int) -> Example:
        """Return item ``index`` (modulo their number), choices in an order of the seed."""
        rng = draw("next_line order", seed, index)
        context, right, wrong = self.items[index % len(self.items)]
        answer = int(rng.integers(self.num_choices))
        choices = [list(wrong[i]) for i in rng.permutation(len(wrong))]
        choices.insert(answer, list(right))
        return complete(context, right, len(context), choices=tuple(choices), answer=answer)

    def _make_items(self, files: list[bytes], rng: np.random.Generator) -> list[Item]:
        items: list[Item] = []
        # A draw may find no usable line: give up after a fixed number of them.
        for _ in range(self.DRAWS_PER_ITEM * self.per_package):
            if len(items) == self.per_package:
                break
            lines = files[int(rng.integers(len(files)))].splitlines(keepends=True)
            if len(lines) < 2:
                continue
            place = int(rng.integers(1, len(lines)))
            right = lines[place]
            if len(right.strip()) < self.MIN_LINE:
                continue
            # The last ``context`` bytes may begin inside a character.
            context = b"".join(lines[:place])[-self.context :].lstrip(self.INSIDE_CHARACTER)
            if right in context or any(item[:2] == (context, right) for item in items):
                continue
            kind = _kind(right)
            # Length and indentation must not give the right line away.
            alike = {line for line in lines if _kind(line) == kind and line.strip() != right.strip()}
            wrong = sorted(line for line in alike if line not in context)
            if len(wrong) >= self.num_choices - 1:
                chosen = rng.choice(len(wrong), self.num_choices - 1, replace=False)
                items.append((context, right, [wrong[i] for i in chosen]))
        return items


def _kind(line: bytes) -> tuple[int, bytes]:
    """Return a class of lengths that differ by less than a third, and the indentation."""
    return int(math.log(len(line), 4 / 3)), line[: len(line) - len(line.lstrip())]
