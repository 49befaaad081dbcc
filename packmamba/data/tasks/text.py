"""Tasks on text, whose ids are bytes."""

import math
from collections.abc import Iterable

import numpy as np

from packmamba.data.tasks.base import Example, Span, complete, draw, integer, span, within
from packmamba.errors import expect

Documents = Iterable[tuple[str, str]] | None
"""Pairs (package, text); None: the standard library's modules."""
Item = tuple[bytes, bytes, list[bytes]]  # context, right line, wrong ones


def standard_library() -> Iterable[tuple[str, str]]:
    """Read the standard library's modules, as pairs (package, text)."""
    # Here, since the built-in sources import the tasks.
    from packmamba.data.sources import builtin

    return builtin.standard_library()


class Passkey:
    """Test passkey retrieval: code holds a line ``KEY_abc = 12345`` and other keys, and ends with ``print(KEY_abc) # ``.

    ``length`` is in bytes; the key of ``digits`` digits stands at a share ``depth`` of it (None: 0.1, 0.5 or 0.9). ``load`` is
    the distance from the key's line to the end of the question.
    """

    vocab_size, of_bytes, chance = 256, True, 0.1
    DEPTHS, OTHERS = (0.1, 0.5, 0.9), 2

    def __init__(
        self, length: Span = (1024, 2048), depth: float | None = None, digits: int = 5, documents: Documents = None
    ) -> None:
        self.digits, self.depth = integer("digits", digits, 1), depth
        self.length = span("length", length, (32 + digits) * (self.OTHERS + 2))
        expect(depth is None or 0 <= depth <= 1, "depth", "0 to 1 or None", depth)
        self.code = b"\n".join(text.encode() for _, text in documents or standard_library())
        needed = 2 * self.length[1]
        expect(len(self.code) >= needed, "documents", f"at least {needed} bytes of text", len(self.code))

    def example(self, seed: int, index: int) -> Example:
        """Return example ``index`` of a seed: text with a key in it, and the question for the key."""
        rng = draw("passkey", seed, index)
        length = within(rng, self.length)
        depth = self.depth if self.depth is not None else self.DEPTHS[int(rng.integers(len(self.DEPTHS)))]
        # Numbers of three-letter names, all different: the first key is the one asked for.
        numbers = rng.choice(26**3, self.OTHERS + 2, replace=False)[1:]
        names = ["".join(chr(97 + int(n) // 26**i % 26) for i in range(3)) for n in numbers]
        values = ["".join(map(str, rng.integers(0, 10, self.digits))) for _ in names]
        question = f"print(KEY_{names[0]}) # ".encode()
        lines = [f"KEY_{name} = {value}\n".encode() for name, value in zip(names, values)]
        # Bytes of code, so that code, key lines, question and answer have ``length`` in all.
        size = length - len(question) - self.digits - sum(map(len, lines))
        start = int(rng.integers(len(self.code) - size))
        code = self.code[start : start + size]
        # A key's line is put at the start of the line of code at its place.
        places = [int(depth * size), *rng.integers(0, size + 1, self.OTHERS).tolist()]
        line_starts = [code.rfind(b"\n", 0, place) + 1 for place in places]
        prompt, key_end, before = b"", 0, 0
        # In order of places; number 0 is the key that is asked for.
        for place, number in sorted((place, number) for number, place in enumerate(line_starts)):
            prompt += code[before:place] + lines[number]
            before = place
            key_end = key_end if number else len(prompt)
        prompt += code[before:] + question
        return complete(prompt, values[0].encode(), len(prompt) - key_end)


class NextLine:
    """Make multiple choices on real code: which of four lines follows about ``context`` bytes of a file?

    Wrong lines are of the same file, indentation, and nearly the same length, and not in the context, whose length is ``load``.
    A package has at most ``per_package`` items.
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
            if len(wrong := sorted(line for line in alike if line not in context)) >= self.num_choices - 1:
                chosen = rng.choice(len(wrong), self.num_choices - 1, replace=False)
                items.append((context, right, [wrong[i] for i in chosen]))
        return items


def _kind(line: bytes) -> tuple[int, bytes]:
    """Return a class of lengths that differ by less than a third, and the indentation."""
    return int(math.log(len(line), 4 / 3)), line[: len(line) - len(line.lstrip())]
