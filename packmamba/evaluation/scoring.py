"""Log-likelihoods of continuations, packed: a context shared by several continuations is computed once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial
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

Ids = tuple[int, ...]


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

    Raises:
        TypeError, ValueError: naming the request, for an empty continuation, an empty context without ``begin_token``, or an id
            outside of the vocabulary.
    """
    begin = () if begin_token is None else check_ids([begin_token], "begin_token", model)
    by_context: dict[
        Ids, dict[Ids, list[tuple[Tensor, Tensor]]]
    ] = {}  # log-probabilities, and whether they are the largest
    checked: list[tuple[Ids, Ids]] = []
    for i, (context, continuation) in enumerate(requests):
        context = check_ids(context, f"requests[{i}]: context", model) or begin
        continuation = check_ids(continuation, f"requests[{i}]: continuation", model)
        if not context or not continuation:
            name = "continuation" if context else "context"
            raise ValueError(f"requests[{i}]: {name}: expected at least one token, got none")
        checked.append((context, continuation))
        by_context.setdefault(context, {})[continuation] = []
    collected: list[tuple[list[tuple[Tensor, Tensor]], Tensor, Ids]] = []  # of a pass: activations and targets

    def visit(context: Ids, continuations: list[Ids], offset: int, first: int, hidden: Tensor) -> None:
        """Collect the activations at positions p, which predict token p - offset of each continuation."""
        start = max(offset, first)
        for c in continuations:
            end = min(first + len(hidden), offset + len(c))
            if end > start:
                wanted = c[start - offset : end - offset]
                collected.append((by_context[context][c], hidden[start - first : end - first], wanted))

    def segment(context: Ids, continuations: list[Ids]) -> Segment:
        offset = len(context) - 1
        if len(continuations) == 1:
            tokens = context + continuations[0][:-1]
            return document_segment(tokens, max_slots, partial(visit, context, continuations, offset))

        def branch(final: DocumentState | None) -> list[Segment]:
            longer = [c for c in continuations if len(c) > 1]
            return [document_segment(c[:-1], max_slots, partial(visit, context, [c], -1), final) for c in longer]

        finish = branch if max(map(len, continuations)) > 1 else None
        return document_segment(context, max_slots, partial(visit, context, continuations, offset), finish=finish)

    segments = [segment(context, list(continuations)) for context, continuations in by_context.items()]
    total = sum(len(context) + sum(map(len, continuations)) for context, continuations in by_context.items())
    disable = None if progress is None else not progress
    with tqdm(total=total, desc="scores", unit="token", unit_scale=True, disable=disable) as bar:
        for count in packed_forward(model, segments, max_slots):
            _compute_logits(model, collected)
            bar.update(count)
    scores = []
    for context, continuation in checked:
        values, greedy = zip(*by_context[context][continuation])
        scores.append(Score(sum(torch.cat(values).tolist()), bool(torch.cat(greedy).all())))
    return scores


def _compute_logits(model: MambaLM, collected: list[tuple[list[tuple[Tensor, Tensor]], Tensor, Ids]]) -> None:
    """Append each part's log-probabilities to its list; the logits of a pass are computed together."""
    if not collected:
        return
    hidden = torch.cat([part for _, part, _ in collected])
    targets = torch.tensor([token for _, _, wanted in collected for token in wanted], device=hidden.device)
    values, greedy = [], []
    for rows, log_p in log_probabilities(model, hidden):
        values.append(log_p.gather(1, targets[rows, None]).squeeze(1))
        greedy.append(log_p.argmax(dim=1) == targets[rows])
    sizes = [len(wanted) for _, _, wanted in collected]
    split = zip(torch.cat(values).double().cpu().split(sizes), torch.cat(greedy).cpu().split(sizes))
    for (parts, _, _), part in zip(collected, split):
        parts.append(part)
    collected.clear()


def check_ids(tokens: Iterable[int], name: str, model: MambaLM) -> Ids:
    """Return token ids as integers. Raises TypeError or ValueError naming the argument."""
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name}: expected integer token ids, got {tokens!r:.60}") from None
    vocab_size = len(model.lm_head.weight)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids
