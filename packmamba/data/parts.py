"""Parts of documents: what a document is cut into before it meets rows. Each part starts from zero state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Tokens ``begins[i]`` to ``begins[i] + lengths[i]`` of document ``documents[i]``, in the order in which they come."""

    documents: Integers
    begins: Integers
    lengths: Integers

    @staticmethod
    def whole(documents: Integers, lengths: NDArray[np.integer]) -> Parts:
        """Each of ``documents`` (n,); ``lengths`` are of all documents of the corpus."""
        return Parts(documents, np.zeros(len(documents), np.int64), lengths[documents].astype(np.int64))

    def __getitem__(self, which: slice | Integers) -> Parts:
        return Parts(self.documents[which], self.begins[which], self.lengths[which])

    def __len__(self) -> int:
        return len(self.documents)

    def cut(self, longest: int) -> Parts:
        """Every part longer than ``longest`` in pieces of that length and a rest."""
        return self._cut(np.zeros(len(self), np.int64), longest)

    @staticmethod
    def joined(several: list[Parts]) -> Parts:
        return Parts(
            *(np.concatenate([getattr(p, name) for p in several]) for name in ("documents", "begins", "lengths"))
        )

    def between(self, first: int, last: int) -> Parts:
        """Return the parts that hold these tokens of all, one after another; the outermost are cut."""
        ends = np.cumsum(self.lengths)
        here = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(ends, last, "left")) + 1)
        starts = ends[here] - self.lengths[here]
        skipped = np.maximum(first - starts, 0)
        return Parts(self.documents[here], self.begins[here] + skipped, np.minimum(ends[here], last) - starts - skipped)

    def stagger(self, count: int) -> Parts:
        """The first ``count`` parts are cut in two, at places that multiples of the golden section spread evenly. What follows
        the cut takes the part's place; what precedes it comes last of all."""
        shares = np.arange(1, min(count, len(self)) + 1) * ((5**0.5 - 1) / 2) % 1
        cuts = np.zeros(len(self), np.int64)
        cuts[: len(shares)] = shares * self.lengths[: len(shares)]
        heads = np.flatnonzero(cuts)
        return Parts(
            np.concatenate([self.documents, self.documents[heads]]),
            np.concatenate([self.begins + cuts, self.begins[heads]]),
            np.concatenate([self.lengths - cuts, cuts[heads]]),
        )

    def _cut(self, before: Integers, every: int) -> Parts:
        """Cut where the place in the part plus ``before`` is a multiple of ``every``."""
        count = -(-(before + self.lengths) // every)
        part = np.repeat(np.arange(len(self)), count)
        number = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
        first = np.maximum(number * every - before[part], 0)
        last = np.minimum((number + 1) * every - before[part], self.lengths[part])
        return Parts(self.documents[part], self.begins[part] + first, last - first)
