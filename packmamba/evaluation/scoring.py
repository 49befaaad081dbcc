"""Log-likelihoods of continuations, packed: a context shared by several continuations is computed once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.evaluation.packed_forward import (
    DocumentState,
    Segment,
    document_segment,
    log_probabilities,
    packed_forward,
)
from packmamba.nn import MambaLM

Request = tuple[tuple[int, ...], tuple[int, ...]]


class Score(NamedTuple):
    """Sum of a continuation's log-probabilities in nats, and whether greedy decoding generates it."""

    log_likelihood: float
    is_greedy: bool


def score(
    model: MambaLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_slots: int = 16384,
    begin_token: int | None = None,
    progress: bool | None = None,
    share_contexts: bool = True,
) -> list[Score]:
    """Score continuations given their contexts; the bits of a score depend on neither the order nor the other requests.

    A context with several continuations is computed once; each continuation starts from its final state. Requests longer
    than a pass are computed piece by piece with exact states.

    Args:
        model: on any device; its dtype decides the arithmetic.
        requests: pairs (context, continuation) of token ids.
        max_slots: slots of a pass, which bound the memory.
        begin_token: replaces an empty context.
        progress: whether to show a bar; None: if standard error is a terminal.
        share_contexts: False computes a context again for each continuation.

    Raises:
        TypeError, ValueError: naming the request, for an empty continuation, an empty context without ``begin_token``, or an id
            outside of the vocabulary.
    """
    if max_slots < 1:
        raise ValueError(f"max_slots: expected at least 1, got {max_slots}")
    begin = () if begin_token is None else (begin_token,)
    checked: list[Request] = []
    for i, (context, continuation) in enumerate(requests):
        context = check_ids(context, f"requests[{i}]: context", model) or check_ids(begin, "begin_token", model)
        checked.append((context, check_ids(continuation, f"requests[{i}]: continuation", model)))
        if not context:
            raise ValueError(f"requests[{i}]: context: expected at least one token without begin_token, got none")
        if not continuation:
            raise ValueError(f"requests[{i}]: continuation: expected at least one token, got none")
    by_context: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for context, continuation in dict.fromkeys(checked):
        by_context.setdefault(context, []).append(continuation)
    scorer = _Scorer(model, max_slots)
    segments, total = [], 0
    for context, continuations in by_context.items():
        for group in [continuations] if share_contexts else [[continuation] for continuation in continuations]:
            segments.append(scorer.segment(context, group))
            total += len(context) + sum(map(len, group))
    disable = None if progress is None else not progress
    with tqdm(total=total, desc="scores", unit="token", unit_scale=True, disable=disable) as bar:
        for tokens in packed_forward(model, segments, max_slots):
            scorer.finish_pass()
            bar.update(tokens)
    return [scorer.scores[request] for request in checked]


class _Scorer:
    """Collects the activations that predict continuations; the logits of a pass are computed together."""

    def __init__(self, model: MambaLM, max_slots: int) -> None:
        self.model = model
        self.max_slots = max_slots
        self.scores: dict[Request, Score] = {}
        self.parts: dict[Request, list[tuple[Tensor, Tensor]]] = {}
        self.collected: list[tuple[Request, Tensor, tuple[int, ...]]] = []  # of this pass: activations and targets

    def segment(self, context: tuple[int, ...], continuations: list[tuple[int, ...]]) -> Segment:
        if len(continuations) == 1:
            return self._document(context + continuations[0][:-1], context, continuations, len(context) - 1)

        def branch(final: DocumentState | None) -> list[Segment]:
            return [self._document(c[:-1], context, [c], -1, final) for c in continuations if len(c) > 1]

        branches = branch if max(map(len, continuations)) > 1 else None
        return self._document(context, context, continuations, len(context) - 1, finish=branches)

    def _document(
        self,
        tokens: Sequence[int],
        context: tuple[int, ...],
        continuations: list[tuple[int, ...]],
        offset: int,
        start: DocumentState | None = None,
        finish: Callable[[DocumentState | None], list[Segment]] | None = None,
    ) -> Segment:
        """Read tokens of which position p predicts token p - offset of each continuation."""

        def visit(first: int, hidden: Tensor) -> None:
            begin = max(offset, first)
            for c in continuations:
                end = min(first + len(hidden), offset + len(c))
                if end > begin:
                    activations = hidden[begin - first : end - first]
                    self.collected.append(((context, c), activations, c[begin - offset : end - offset]))

        return document_segment(tokens, self.max_slots, visit, start, finish)

    def finish_pass(self) -> None:
        if not self.collected:
            return
        hidden = torch.cat([part for _, part, _ in self.collected])
        targets = torch.tensor([token for _, _, wanted in self.collected for token in wanted], device=hidden.device)
        values, greedy = [], []
        for rows, log_p in log_probabilities(self.model, hidden):
            values.append(log_p.gather(1, targets[rows, None]).squeeze(1))
            greedy.append(log_p.argmax(dim=1) == targets[rows])
        sizes = [len(wanted) for _, _, wanted in self.collected]
        split = zip(torch.cat(values).double().cpu().split(sizes), torch.cat(greedy).cpu().split(sizes))
        for (request, _, _), part in zip(self.collected, split):
            parts = self.parts.setdefault(request, [])
            parts.append(part)
            if sum(len(value) for value, _ in parts) == len(request[1]):
                total = sum(torch.cat([value for value, _ in parts]).tolist())
                self.scores[request] = Score(total, all(bool(right.all()) for _, right in parts))
                del self.parts[request]
        self.collected = []


def check_ids(tokens: Iterable[int], name: str, model: MambaLM) -> tuple[int, ...]:
    """Return token ids as integers. Raises TypeError or ValueError naming the argument."""
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name}: expected integer token ids, got {tokens!r:.60}") from None
    vocab_size = len(model.lm_head.weight)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids
