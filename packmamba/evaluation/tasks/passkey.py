"""Passkey: digits that stand somewhere in code are to be said at its end. Bytes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from packmamba.evaluation.tasks.example import (
    Example,
    Span,
    check_integer,
    check_number,
    check_span,
    draw,
    make_example,
    within,
)
from packmamba.evaluation.tasks.text import check_documents

DEPTHS = (0.1, 0.5, 0.9)


class Passkey:
    """Code holds a line ``KEY_abc = 12345`` at a depth of its length and other keys elsewhere. At its end stands
    ``print(KEY_abc) # ``, to be continued by the digits.

    Ids are bytes. ``load`` is the distance in bytes from the key's line to the end of the question. ``control`` asks for
    another key, which the code does not hold: what the digits' loss saves against it is what the model read there.

    Args:
        length: bytes of a document, key and question included.
        depth: where the key's line stands, as a share of the length; None: one of 0.1, 0.5, 0.9.
        digits: digits of a key.
        others: other keys in the document.
        documents: texts, or pairs (package, text), that the code is taken from; None: the standard library's modules.
    """

    vocab_size = 256
    of_bytes = True
    chance = 0.1
    num_examples = None

    def __init__(
        self,
        length: Span = (1024, 2048),
        depth: float | None = None,
        digits: int = 5,
        others: int = 2,
        documents: Iterable[str | tuple[str, str]] | None = None,
    ) -> None:
        self.digits = check_integer("digits", digits, 1)
        self.others = check_integer("others", others, 0)
        self.length = check_span("length", length, 32 * (others + 2) + digits * (others + 2))
        if depth is not None:
            check_number("depth", depth, lambda share: 0 <= share <= 1, "0 to 1 or None")
        self.depth = depth
        self.code = b"\n".join(text.encode() for _, text in check_documents(documents))
        if len(self.code) < 2 * self.length[1]:
            raise ValueError(f"documents: expected at least {2 * self.length[1]} bytes of text, got {len(self.code)}")

    def example(self, seed: int, index: int) -> Example:
        return self._make(seed, index, ask_another=False)

    def control(self, seed: int, index: int) -> Example:
        """The same code, and the question for a key that it does not hold; the same digits count."""
        return self._make(seed, index, ask_another=True)

    def _make(self, seed: int, index: int, ask_another: bool) -> Example:
        rng = draw("passkey", seed, index)
        length = within(rng, self.length)
        depth = self.depth if self.depth is not None else DEPTHS[int(rng.integers(len(DEPTHS)))]
        names = self._draw_names(rng, self.others + 2)
        values = ["".join(map(str, rng.integers(0, 10, self.digits))) for _ in names[1:]]
        asked = names[0] if ask_another else names[1]
        question = f"print(KEY_{asked}) # ".encode()
        lines = [f"KEY_{name} = {value}\n".encode() for name, value in zip(names[1:], values)]
        room = length - len(question) - self.digits - sum(map(len, lines))
        start = int(rng.integers(len(self.code) - room))
        code = self.code[start : start + room]
        places = [int(depth * room), *rng.integers(0, room + 1, self.others).tolist()]
        parts, key_end, before = [], 0, 0
        for place, number in sorted((self._line_start(code, place), number) for number, place in enumerate(places)):
            parts += [code[before:place], lines[number]]
            before = place
            if number == 0:
                key_end = sum(map(len, parts))
        prompt = b"".join([*parts, code[before:], question])
        tokens = np.frombuffer(prompt + values[0].encode(), dtype=np.uint8)
        answers = {len(prompt) - 1 + i: int(tokens[len(prompt) + i]) for i in range(self.digits)}
        return make_example(tokens[:-1], answers, load=len(prompt) - key_end, notes={"depth": depth})

    @staticmethod
    def _line_start(code: bytes, place: int) -> int:
        return code.rfind(b"\n", 0, place) + 1

    @staticmethod
    def _draw_names(rng: np.random.Generator, count: int) -> list[str]:
        numbers = rng.choice(26**3, count, replace=False)
        return ["".join(chr(97 + int(n) // 26**i % 26) for i in range(3)) for n in numbers]
