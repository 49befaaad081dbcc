"""The task passkey, a plugin: find the number that a key was given, somewhere in code.

No model of 14 million parameters answers it, so it is not among the library's tasks.
"""

from __future__ import annotations

from packmamba.data.tasks import TASKS, Example
from packmamba.data.tasks.base import Span, complete, draw, integer, span, within
from packmamba.data.tasks.text import Documents, standard_library
from packmamba.errors import expect


class Passkey:
    """Test passkey retrieval: code holds a line ``KEY_abc = 12345`` and other keys, and ends with
    ``print(KEY_abc) # ``.

    ``length`` is in bytes; the key of ``digits`` digits stands at a share ``depth`` of it (None:
    0.1, 0.5 or 0.9). ``load`` is the distance from the key's line to the end of the question.
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


TASKS["passkey"] = Passkey
