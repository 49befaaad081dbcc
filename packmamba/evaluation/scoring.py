"""Score continuations by their log-likelihood; those of one context share the pass over it."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from packmamba.errors import expect
from packmamba.evaluation.packed_forward import DocumentState, Pass, Predictions, Segment, packed_forward, predict
from packmamba.nn import MambaLM

Ids = tuple[int, ...]
# By context and continuation.
Wanted = dict[Ids, dict[Ids, Predictions]]


class Score(NamedTuple):
    """Hold the sum of log-probabilities in nats.

    ``is_greedy``: greedy decoding generates the continuation.
    """

    log_likelihood: float
    is_greedy: bool


def score(
    model: MambaLM,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_slots: int = 16384,
    begin_token: int | None = None,
) -> list[Score]:
    """Score continuations given their contexts, in order.

    A score's bits do not depend on other requests; of Mamba-3 they do on those of the same context.

    Args:
        requests: pairs (context, continuation) of token ids.
        max_slots: slots of a pass, which bound the memory.
        begin_token: replaces an empty context.

    Raises:
        TypeError, ValueError: naming the request that is
            empty or has an id outside of the vocabulary.
    """
    begin = () if begin_token is None else check_ids([begin_token], "begin_token", model)
    checked = []
    for i, (given, continuation) in enumerate(requests):
        name = f"requests[{i}]"
        context = check_ids(given if len(given) else begin, f"{name}: context", model, least=1)
        checked.append((context, check_ids(continuation, f"{name}: continuation", model, least=1)))
    predictions: Wanted = {}
    for context, continuation in checked:
        predictions.setdefault(context, {})[continuation] = []
    segments = [_segment(context, list(others)) for context, others in predictions.items()]
    predict(model, (_with_targets(pieces, predictions) for pieces in packed_forward(model, segments, max_slots)))
    scores = []
    for context, continuation in checked:
        # In pieces, where a pass ended inside the continuation.
        values, most_likely = zip(*predictions[context][continuation])
        is_greedy = torch.cat(most_likely).tolist() == list(continuation)
        scores.append(Score(sum(torch.cat(values).tolist()), is_greedy))
    return scores


def _segment(context: Ids, continuations: list[Ids]) -> Segment:
    """Read a context, and from its end each continuation but for its last token.

    A piece's owner is (context, continuations, position of the token before the continuation).
    """
    owner = (context, continuations, len(context) - 1)
    if len(continuations) == 1:
        # One continuation: context and continuation are read in one go.
        return Segment(owner, context + continuations[0][:-1])
    longer = [continuation for continuation in continuations if len(continuation) > 1]

    def branch(final: DocumentState) -> list[Segment]:
        return [Segment((context, [continuation], -1), continuation[:-1], start=final) for continuation in longer]

    return Segment(owner, context, finish=branch if longer else None)


def _with_targets(pieces: Pass, predictions: Wanted) -> Iterator[tuple[Predictions, torch.Tensor, Ids]]:
    """Yield the activations of a pass that predict continuations, and what they should predict."""
    for (context, continuations, offset), first, hidden in pieces:
        # The activation at position offset + n predicts token n of the continuation.
        start = max(offset, first)
        for continuation in continuations:
            end = min(first + len(hidden), offset + len(continuation))
            if end > start:
                activations = hidden[start - first : end - first]
                targets = continuation[start - offset : end - offset]
                yield predictions[context][continuation], activations, targets


def check_ids(tokens: Iterable[int], name: str, model: MambaLM, least: int = 0) -> Ids:
    """Return token ids as integers. Raises TypeError or ValueError that names ``name``."""
    try:
        ids = tuple(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name}: expected integer token ids, got {tokens!r:.60}") from None
    vocab_size = len(model.lm_head.weight)
    expect(len(ids) >= least, name, "at least one token", "none")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids
