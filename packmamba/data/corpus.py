"""Hold what is trained on: the documents of a tokenized split, and mixtures of several.

Schedule, batches and evaluation read a corpus by a document's number: ``lengths`` says how long it
is, ``read`` gives a piece's tokens and targets. Tokens are memory-mapped, so that a corpus may be
larger than memory and loader workers share it.

A mixture numbers the documents of its parts one after the other. Each part is tokenized once,
alone, so that the same files serve any weights. The schedule takes windows of a mixture, in which a
part has documents in proportion to its weight over their mean length: weights are shares of tokens.
A part's documents come in passes, each once a pass; the schedule shuffles a window, which mixes the
passes that it holds. A window is a function of its number, so resuming a run is counting, as with
one corpus.
"""

import bisect
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packmamba.config import refusing
from packmamba.data.tokenizer import token_dtype

META = "meta.json"
SPLITS = ("train", "validation", "test")


class Documents:
    """Hold n documents of T tokens, end to end.

    Attributes:
        tokens: (T,) ids.
        lengths: (n,), tokens of each document. ``bounds``: (n + 1,) int64, their cumulative sum:
            document i is tokens ``bounds[i]`` to ``bounds[i + 1]``.
        targets: (T,), what each token predicts, -1 for nothing; None: the next token.
    """

    groups: Any = None
    source_names: Sequence[str] = ()  # of a mixture
    # Whether ``window`` draws documents; else the schedule cuts the corpus in windows.
    has_windows = False
    is_streamed = False  # whether there may be more documents than are known

    def __init__(self, tokens: Any, lengths: Any, targets: Any = None) -> None:
        self.tokens = tokens
        self.lengths = lengths
        self.targets = targets
        self.bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def has_answers(self) -> bool:
        """Return whether targets are other than the next tokens."""
        return self.targets is not None

    def document(self, index: int) -> np.ndarray:
        """Return a document's tokens."""
        return self.read(index, start=0, length=int(self.lengths[index]), ends=True)[0]

    def read(self, document: int, start: int, length: int, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets, -1 for none, of a piece: both (length,).

        Args:
            ends: no token follows the piece; its last one predicts nothing.
        """
        first = int(self.bounds[document]) + start
        tokens = self.tokens[first : first + length]
        if self.targets is not None:
            return tokens, self.targets[first : first + length]
        targets = np.full(length, -1, np.int64)
        # ``ends`` counts as 1: then the piece's last token has no next one and keeps -1.
        targets[: length - ends] = self.tokens[first + 1 : first + 1 + length - ends]
        return tokens, targets


class Corpus(Documents):
    """Hold a split's documents, memory-mapped and read-only.

    Attributes:
        tokens: (T,) uint16 or uint32, begin and end tokens included.
        lengths: (n,) int32. ``targets``: (T,) int32 or None.
        groups: (n,) int32 indices into ``group_names``; None: documents have no groups.
        corpus_hash: of training and validation; of the test documents where this is the test split.
    """

    def __init__(self, folder: str | Path, split: str) -> None:
        self.folder = Path(folder).resolve()
        self.split = split
        damaged = f"data.cache_dir: the corpus {self.folder} is damaged ("
        with refusing(OSError, ValueError, KeyError, prefix=damaged, suffix="); delete the folder"):
            meta = json.loads((self.folder / META).read_text())
            # The files have no headers: META tells their sizes, and by the vocabulary their dtype.
            self.vocab_size: int = meta["vocab_size"]
            self.splits: dict[str, Any] = meta["splits"]
            counts = self.splits[split]
            self.corpus_hash: str = counts.get("hash", meta["corpus_hash"])
            self.group_names: list[str] = counts.get("groups", [])
            targets = self._map("targets", "<i4", counts["tokens"]) if "answers" in counts else None
            tokens = self._map("tokens", token_dtype(self.vocab_size), counts["tokens"])
            super().__init__(tokens, self._map("lengths", "<i4", counts["documents"]), targets)
            self.groups = self._map("groups", "<i4", len(self)) if self.group_names else None

    def _map(self, name: str, dtype: Any, size: int) -> np.ndarray:
        # A plain view: slicing a memmap is several times slower.
        return np.memmap(self.folder / f"{self.split}.{name}", dtype, "r", shape=(size,)).view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the place and not the tokens: a loader worker maps the same files.
        return Corpus, (self.folder, self.split)


class Joined(Documents):
    """Number the documents of several corpora one after the other.

    Their tokens stay where they are.

    Attributes:
        parts: the corpora.
        firsts: number of each part's first document, and the number of all documents.
    """

    has_windows = True
    parts: list[Corpus]
    firsts: Any

    @property
    def has_answers(self) -> bool:
        """Tell whether any part has prompts, whose tokens are no targets."""
        return any(part.has_answers for part in self.parts)

    def read(self, document: int, start: int, length: int, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return a piece's tokens and targets, as ``Documents.read``."""
        part = bisect.bisect_right(self.firsts, document) - 1
        return self.parts[part].read(document - self.firsts[part], start, length, ends)


class Mixture(Joined):
    """Hold the same split of several corpora as one, whose groups are the parts.

    Args:
        weights: of the parts, shares of the tokens that are trained on.
        longest: tokens that are trained on of a document, where longer ones are truncated.

    Attributes, as of ``Corpus``: ``lengths`` (n,) of all parts' documents, ``groups`` (n,) their
    parts, ``group_names`` the parts' names, ``vocab_size`` the largest.
    """

    def __init__(self, parts: list[Corpus], names: list[str], weights: list[float], longest: int) -> None:
        super().__init__(tokens=None, lengths=np.concatenate([part.lengths for part in parts]))
        self.parts = parts
        self.group_names = self.source_names = names
        self.weights = weights
        self.longest = longest
        self.split = parts[0].split
        self.vocab_size = max(part.vocab_size for part in parts)
        counts = [len(part) for part in parts]
        self.firsts = np.cumsum([0, *counts])
        self.groups = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
        identity = [[part.corpus_hash for part in parts], weights]
        self.corpus_hash = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
        # Tokens of each part that a pass over it trains on.
        self.tokens_of_pass = np.array([np.minimum(part.lengths, longest).sum() for part in parts])
        # Weights are shares of tokens; windows draw documents, so divide by a part's mean length.
        per_token = np.array(weights) / (self.tokens_of_pass / counts)
        self.document_shares = per_token / per_token.sum()
        # A window may touch two passes of a part.
        self._shuffled = functools.lru_cache(2 * len(parts))(self._shuffle)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixture, (self.parts, self.group_names, self.weights, self.longest)

    def window(self, seed: int, number: int, size: int) -> np.ndarray:
        """Draw the documents of a window of about ``size``.

        Those of each part come in the order of its passes.
        """
        drawn = []
        for part, share in enumerate(self.document_shares):
            # Documents of the part drawn before this window and up to its end, over all passes.
            first, last = (int(edge * size * share) for edge in (number, number + 1))
            count = len(self.parts[part])
            # Passes that the window touches, and the window's part of each.
            for index in range(first // count, -(-last // count)):
                whole = self._shuffled(seed, part, index)
                drawn.append(whole[max(first - index * count, 0) : last - index * count])
        return np.concatenate(drawn)

    def _shuffle(self, seed: int, part: int, index: int) -> np.ndarray:
        """Shuffle a part's documents for one of its passes."""
        order = np.random.default_rng([seed, part, index]).permutation(len(self.parts[part]))
        return self.firsts[part] + order

    def passes(self, tokens: float) -> dict[str, float]:
        """Return how often each part is read in so many tokens of the mixture."""
        passes = tokens * (np.array(self.weights) / sum(self.weights)) / self.tokens_of_pass
        return dict(zip(self.group_names, passes.tolist()))
