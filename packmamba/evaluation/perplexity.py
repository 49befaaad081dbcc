"""Losses of documents' tokens, far beyond a training row: by position, per byte, and what long contexts are worth.

A document is always read from a fresh state, packed with others, and piece by piece with exact states where it is longer than a
pass. Losses are nats per target token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packmamba.evaluation.passes import Reader, log_probabilities, read, sent
from packmamba.nn import MambaLM

Losses = list[NDArray[np.float64]]
PASSES = 16
"""Losses of so many passes are fetched from a GPU together."""


def token_losses(
    model: MambaLM, documents: Sequence[Any], max_slots: int = 16384, reader: Reader | None = None
) -> Losses:
    """Of each document of n tokens the (n - 1,) losses of tokens 1 to n - 1, each given all before it.

    Args:
        model: on any device, in any dtype.
        documents: token ids; one of a single token has no losses.
        max_slots: slots of a pass, which bound the memory.
        reader: how these documents are read instead of each from a fresh state.
    """
    parts: list[list[NDArray[np.float64]]] = [[] for _ in documents]
    made: list[tuple[int, Tensor, Sequence[int]]] = []
    waiting: list[tuple[list[tuple[int, int]], Tensor]] = []

    def see(i: int, first: int, hidden: Tensor) -> None:
        targets = documents[i][first + 1 : first + 1 + len(hidden)]
        made.append((i, hidden[: len(targets)], targets))

    def fetch() -> None:
        values = torch.cat([losses for _, losses in waiting]).cpu().numpy()
        pieces = [piece for some, _ in waiting for piece in some]
        for (i, _), part in zip(pieces, np.split(values, np.cumsum([size for _, size in pieces])[:-1])):
            parts[i].append(part)
        waiting.clear()

    for _ in reader(see) if reader else read(model, [document[:-1] for document in documents], max_slots, see):
        hidden = torch.cat([part for _, part, _ in made])
        targets = np.concatenate([np.asarray(some, np.int64) for _, _, some in made])
        wanted = sent(torch.from_numpy(targets), hidden.device)
        losses = [
            -log_p.gather(1, wanted[rows, None]).squeeze(1).double() for rows, log_p in log_probabilities(model, hidden)
        ]
        waiting.append(([(i, len(part)) for i, part, _ in made], torch.cat(losses)))
        made.clear()
        if len(waiting) == PASSES:  # a GPU is not waited for after each
            fetch()
    if waiting:
        fetch()
    return [np.concatenate(some) if some else np.zeros(0) for some in parts]


class Read:
    """Losses of documents, each from a fresh state, that several evaluations of one model ask for: one that was read is not read
    again, nor is its beginning. What is beyond ``HELD`` bytes is forgotten.
    """

    HELD = 1 << 28

    def __init__(self) -> None:
        self.found: dict[int, NDArray[np.float64]] = {}
        self.held = 0

    def losses(self, model: MambaLM, documents: dict[int, Any], max_slots: int) -> Losses:
        """``token_losses`` of documents by their numbers; of one that is the beginning of what was read, perhaps more."""
        missing = [n for n, document in documents.items() if len(self.found.get(n, ())) < len(document) - 1]
        made = dict(zip(missing, token_losses(model, [documents[n] for n in missing], max_slots) if missing else ()))
        for number, some in made.items():
            more = some.nbytes - self.found.get(number, some[:0]).nbytes
            if self.held + more <= self.HELD:
                self.found[number] = some
                self.held += more
        nothing = np.zeros(0)
        return [made[number] if number in made else self.found.get(number, nothing) for number in documents]


def sums_between(edges: Sequence[int], losses: NDArray[np.float64]) -> list[float]:
    """The summed losses of a document's targets at places [edges[i], edges[i + 1]) that it has; the first target's place is 1."""
    return [
        float(losses[max(start, 1) - 1 : end - 1].sum())
        for start, end in zip(edges, edges[1:])
        if max(start, 1) <= len(losses)
    ]


def means_between(
    edges: Sequence[int], sums: Sequence[Sequence[float]], lengths: Sequence[int]
) -> list[dict[str, float]]:
    """Mean losses from the ``sums_between`` of documents with so many targets."""
    rows = []
    for i, (start, end) in enumerate(zip(edges, edges[1:])):
        reach = [n for n, some in enumerate(sums) if len(some) > i]
        count = sum(min(end - 1, lengths[n]) - max(start, 1) + 1 for n in reach)
        if count:
            loss = sum(sums[n][i] for n in reach) / count
            rows.append({"start": start, "end": end, "loss": loss, "count": count, "documents": len(reach)})
    return rows


def windows_reached(
    lengths: Sequence[int], window: int, most: int, groups: Sequence[int] | None = None, least: tuple[int, int] = (1, 1)
) -> list[int]:
    """2, 4, ... ``most``, as long as enough documents of enough groups are as long as so many windows."""
    if window < 2:
        raise ValueError(f"window: expected at least 2, got {window}")
    reached, k = [], 2
    while k <= most:
        reach = [i for i, length in enumerate(lengths) if length >= k * window]
        different = len({i if groups is None else groups[i] for i in reach})
        if len(reach) < max(1, least[0]) or different < least[1]:
            break
        reached.append(k)
        k *= 2
    return reached


def context_gains(
    model: MambaLM,
    documents: Sequence[Any],
    window: int,
    reached: Sequence[int],
    max_slots: int = 16384,
    context: int = 0,
    whole: Losses | None = None,
) -> list[dict[int, tuple[float, float]]]:
    """Of each document, at those of ``reached`` windows that it has, what context is worth and the loss with all of it.

    At k windows: the loss of tokens (k - 1) * window + 1 to k * window - 1 of a document that the model reads from token
    (k - 1) * window - context, minus their loss when it reads from the start: the same targets. Positive: it uses what came
    before. With context = window the short reading has as much context for every target as a row of a training run has at its
    end, and gains beyond are what states carry further; they begin at 4 windows.

    Args:
        whole: the documents' losses read from their starts, where they are known at least so far.
    """
    if context < 0:
        raise ValueError(f"context: expected at least 0, got {context}")
    if whole is None:
        whole = token_losses(model, [document[: max(reached, default=0) * window] for document in documents], max_slots)
    found: list[dict[int, tuple[float, float]]] = [{} for _ in documents]
    places = [
        (i, k, (k - 1) * window)
        for k in reached
        for i, document in enumerate(documents)
        if len(document) >= k * window and (k - 1) * window > context
    ]
    cut = [documents[i][first - context : first + window] for i, _, first in places]
    for (i, k, first), some in zip(places, token_losses(model, cut, max_slots) if cut else ()):
        full = float(whole[i][first : first + window - 1].mean())
        found[i][k] = (float(some[context:].mean()) - full, full)
    return found


def gain_entries(
    found: Sequence[dict[int, tuple[float, float]]], groups: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """For each number of windows the means of ``context_gains``: ``windows``, ``gain``, ``loss``, ``documents``, ``groups``, and
    ``gains`` by document for paired comparisons. ``groups``: of each document, such as its package."""
    entries = []
    for k in sorted({k for some in found for k in some}):
        reach = [i for i, some in enumerate(found) if k in some]
        gains = {i: found[i][k][0] for i in reach}
        entries.append(
            {"windows": k, "gain": float(np.mean(list(gains.values()))),
             "loss": float(np.mean([found[i][k][1] for i in reach])), "documents": len(reach),
             "groups": len({i if groups is None else groups[i] for i in reach}), "gains": gains}
        )  # fmt: skip
    return entries


def remembrance(
    model: MambaLM, documents: Sequence[Any], length: int, starts: Sequence[int], max_slots: int = 16384
) -> list[list[float]]:
    """EffRem (arXiv 2507.02782): how much what came before token t still matters after ``length`` tokens.

    Of each document, of at least ``length`` tokens, and each t of ``starts``: the total variation between the next-token
    distributions after document[:length] and after document[t:length]; 0: nothing, 1: everything.
    """
    for t in starts:
        if not 0 < t < length:
            raise ValueError(f"starts: expected places from 1 to {length - 1}, got {t}")
    whole = _last_distributions(model, [document[:length] for document in documents], max_slots)
    found = [
        (
            (whole - _last_distributions(model, [d[t:length] for d in documents], max_slots)).abs().sum(dim=1) / 2
        ).tolist()
        for t in starts
    ]
    return [list(values) for values in zip(*found)]


def _last_distributions(model: MambaLM, documents: Sequence[Any], max_slots: int) -> Tensor:
    """(documents, vocabulary), after each document's last token."""
    last: dict[int, Tensor] = {}

    def see(i: int, first: int, hidden: Tensor) -> None:
        last[i] = hidden[-1]

    for _ in read(model, documents, max_slots, see):
        pass
    hidden = torch.stack([last[i] for i in range(len(documents))])
    return torch.cat([log_p.exp() for _, log_p in log_probabilities(model, hidden)])
