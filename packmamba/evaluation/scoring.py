"""Log-likelihoods of continuations, which share the pass over their context."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from packmamba.evaluation.packed_forward import (
    DocumentState,
    Pass,
    Predictions,
    Segment,
    packed_forward,
    predict,
)
from packmamba.nn import MambaLM

Ids = tuple[int, ...]


class Score(NamedTuple):
    """Hold the sum of log-probabilities in nats, and if greedy decoding generates the continuation."""

    log_likelihood: float
    is_greedy: bool


def score(
    model: MambaLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_slots: int = 16384,
    begin_token: int | None = None,
) -> list[Score]:
    """Score continuations given their contexts, in order; a score's bits do not depend on other requests.

    Args:
        requests: pairs (context, continuation) of token ids.
        max_slots: slots of a pass, which bound the memory.
        begin_token: replaces an empty context.

    Raises:
        TypeError, ValueError: naming the request that is empty or has an id outside of the vocabulary.
    """
    begin = () if begin_token is None else check_ids([begin_token], "begin_token", model)
    by_context: dict[Ids, dict[Ids, Predictions]] = {}
    checked: list[tuple[Ids, Ids]] = []
    for i, request in enumerate(requests):
        if not isinstance(request, (tuple, list)) or len(request) != 2:
            raise TypeError(
                f"requests[{i}]: expected a pair (context, continuation), got {request!r:.60}"
            )
        context = check_ids(
            request[0] if len(request[0]) else begin, f"requests[{i}]: context", model, least=1
        )
        continuation = check_ids(request[1], f"requests[{i}]: continuation", model, least=1)
        checked.append((context, continuation))
        by_context.setdefault(context, {})[continuation] = []

    def segment(context: Ids, continuations: list[Ids]) -> Segment:
        owner = (context, continuations, len(context) - 1)
        if len(continuations) == 1:
            return Segment(owner, context + continuations[0][:-1])
        longer = [c for c in continuations if len(c) > 1]

        def branch(final: DocumentState) -> list[Segment]:
            return [Segment((context, [c], -1), c[:-1], final) for c in longer]

        return Segment(owner, context, finish=branch if longer else None)

    def with_targets(pieces: Pass) -> Iterator[tuple[Predictions, torch.Tensor, Ids]]:
        for (context, continuations, offset), first, hidden in pieces:
            start = max(offset, first)
            for c in continuations:
                end = min(first + len(hidden), offset + len(c))
                if end > start:
                    part = hidden[start - first : end - first]
                    yield by_context[context][c], part, c[start - offset : end - offset]

    segments = [
        segment(context, list(continuations)) for context, continuations in by_context.items()
    ]
    predict(
        model, (list(with_targets(pieces)) for pieces in packed_forward(model, segments, max_slots))
    )
    scores = []
    for context, continuation in checked:
        values, best = (
            torch.cat(parts).tolist() for parts in zip(*by_context[context][continuation])
        )
        scores.append(Score(sum(values), best == list(continuation)))
    return scores


def check_ids(tokens: Iterable[int], name: str, model: MambaLM, least: int = 0) -> Ids:
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name}: expected integer token ids, got {tokens!r:.60}") from None
    vocab_size = len(model.lm_head.weight)
    if len(ids) < least:
        raise ValueError(f"{name}: expected at least one token, got none")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"{name}: expected ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}"
        )
    return ids
