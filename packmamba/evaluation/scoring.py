"""Log-likelihoods of continuations, packed: a context that several share is computed once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.evaluation.passes import Segment, Start, log_probabilities, run_passes
from packmamba.nn import MambaLM

Request = tuple[tuple[int, ...], tuple[int, ...]]


class Score(NamedTuple):
    """Of one continuation: the sum of its tokens' log-probabilities in nats, and whether greedy decoding would say it."""

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
    """How likely each continuation is after its context.

    Requests are packed into passes of ``max_slots`` slots. A context with several continuations is computed once, and
    its final state is where each of them starts: exact, by packing-unpacking invariance. A request longer than a pass
    goes piece by piece with exact states. Passes have one shape, so a score's bits depend on neither the order nor the
    company of its request; another ``max_slots`` may round otherwise.

    Args:
        model: on any device, in any dtype; its dtype decides the arithmetic.
        requests: pairs (context, continuation) of token ids.
        max_slots: slots of a pass, which bound the memory.
        begin_token: put before an empty context, as lm-evaluation-harness does.
        progress: whether to show a bar; None: if this is a terminal.
        share_contexts: false computes a context again for each continuation: to measure what sharing saves.

    Raises:
        TypeError, ValueError: naming the request; an empty continuation, an empty context without ``begin_token``, an id outside
            of the vocabulary.
    """
    if isinstance(max_slots, bool) or not isinstance(max_slots, int) or max_slots < 1:
        raise ValueError(f"max_slots: expected an integer of at least 1, got {max_slots!r}")
    if max_slots >= 2**31:
        raise ValueError(f"max_slots: expected below 2**31, got {max_slots}")
    asked = _check(requests, vocabulary(model), begin_token)
    answers = _Answers(model)
    by_context: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for context, continuation in dict.fromkeys(asked):
        by_context.setdefault(context, []).append(continuation)
    groups = [
        (context, group)
        for context, continuations in by_context.items()
        for group in ([continuations] if share_contexts else [[continuation] for continuation in continuations])
    ]
    segments = [answers.segment(context, continuations, max_slots) for context, continuations in groups]
    shown = sys.stderr.isatty() if progress is None else progress
    total = sum(len(context) + sum(map(len, rest)) for context, rest in groups)
    with tqdm(total=total, desc="scores", unit="token", unit_scale=True, disable=not shown) as bar:
        for tokens in run_passes(model, segments, max_slots):
            answers.settle()
            bar.update(tokens)
    return [answers.scores[request] for request in asked]


class _Answers:
    """Collects what passes say of each request; the logits of a pass are made together."""

    def __init__(self, model: MambaLM) -> None:
        self.model = model
        self.scores: dict[Request, Score] = {}
        self._parts: dict[Request, list[tuple[Tensor, Tensor]]] = {}
        self._hidden: list[Tensor] = []
        self._targets: list[int] = []
        self._owners: list[tuple[Request, int, int]] = []  # request, first and last row of this pass

    def segment(self, context: tuple[int, ...], continuations: list[tuple[int, ...]], max_slots: int) -> Segment:
        """The document of a context and its continuations."""
        if len(continuations) == 1:
            tokens, wanted = context + continuations[0][:-1], [(continuations[0], len(context) - 1)]
        else:
            tokens, wanted = context, [(continuation, len(context) - 1) for continuation in continuations]
        return self._piece(tokens, 0, None, [((context, c), place, 0) for c, place in wanted], max_slots)

    def _piece(
        self, tokens: tuple[int, ...], first: int, start: Start | None, asked: list[tuple[Request, int, int]],
        max_slots: int,
    ) -> Segment:  # fmt: skip
        """The piece from ``first`` on. ``asked``: (request, place, n): its n-th token is the target at ``place``."""
        last = min(first + max_slots, len(tokens))
        ends = last == len(tokens)
        branches = ends and any(len(request[1]) - n > last - place for request, place, n in asked)

        def done(hidden: Tensor, final: Start | None) -> list[Segment]:
            following = []
            for request, place, n in asked:
                begin = max(place, first)
                count = min(last - begin, len(request[1]) - n - (begin - place))
                if count > 0:
                    n_first = n + begin - place
                    self._ask(request, hidden[begin - first : begin - first + count], n_first, count)
            if not ends:
                following.append(self._piece(tokens, last, final, asked, max_slots))
            elif branches:
                for request, place, n in asked:
                    answered = n + last - place
                    if len(request[1]) > answered:
                        rest = request[1][answered - 1 : -1]
                        following.append(self._piece(rest, 0, final, [(request, 0, answered)], max_slots))
            return following

        return Segment(tokens[first:last], done, start, keep=not ends or branches)

    def _ask(self, request: Request, hidden: Tensor, n: int, count: int) -> None:
        at = len(self._targets)
        self._hidden.append(hidden)
        self._targets += request[1][n : n + count]
        self._owners.append((request, at, at + count))

    def settle(self) -> None:
        """Turns what was asked of this pass into log-probabilities."""
        if not self._targets:
            return
        hidden = torch.cat(self._hidden)
        targets = torch.tensor(self._targets, device=hidden.device)
        found, greedy = [], []
        for rows, log_p in log_probabilities(self.model, hidden):
            found.append(log_p.gather(1, targets[rows, None]).squeeze(1))
            greedy.append(log_p.argmax(dim=1) == targets[rows])
        log_p, is_greedy = torch.cat(found).double().cpu(), torch.cat(greedy).cpu()
        for request, begin, end in self._owners:
            self._parts.setdefault(request, []).append((log_p[begin:end], is_greedy[begin:end]))
            parts = self._parts[request]
            if sum(len(part) for part, _ in parts) == len(request[1]):
                values = torch.cat([part for part, _ in parts]).tolist()
                self.scores[request] = Score(sum(values), all(bool(part.all()) for _, part in parts))
                del self._parts[request]
        self._hidden, self._targets, self._owners = [], [], []


def _check(requests: Any, vocab_size: int, begin_token: int | None) -> list[Request]:
    if begin_token is not None:
        check_ids([begin_token], "begin_token", vocab_size)
    checked = []
    for number, request in enumerate(check_list(requests, "requests", "pairs (context, continuation)")):
        if not isinstance(request, (tuple, list)) or len(request) != 2:
            raise TypeError(f"requests[{number}]: expected a pair (context, continuation), got {request!r:.60}")
        context = check_ids(request[0], f"requests[{number}]: context", vocab_size)
        continuation = check_ids(request[1], f"requests[{number}]: continuation", vocab_size)
        if not continuation:
            raise ValueError(f"requests[{number}]: continuation: expected at least one token, got none")
        if not context and begin_token is None:
            raise ValueError(f"requests[{number}]: context: expected at least one token without begin_token, got none")
        checked.append((context or (int(begin_token),), continuation))  # type: ignore[arg-type]
    return checked


def check_list(values: Any, name: str, expected: str) -> list[Any]:
    """Its values. Raises TypeError naming the argument."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError
        return list(values)
    except (TypeError, RuntimeError):  # also of tensors that have no rows, or no values
        raise TypeError(f"{name}: expected {expected}, got {type(values).__name__}") from None


def vocabulary(model: Any) -> int:
    """How many ids the model knows. Raises TypeError of what is no model."""
    try:
        return len(model.lm_head.weight)
    except AttributeError:
        raise TypeError(f"model: expected a MambaLM, got {type(model).__name__}") from None


def check_ids(tokens: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    """The ids as integers. Raises TypeError or ValueError naming the argument."""
    if isinstance(tokens, (Tensor, np.ndarray)):
        try:
            tokens = tokens.tolist()
        except RuntimeError:
            raise TypeError(f"{name}: expected a list of token ids, got a tensor without values") from None
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
        raise TypeError(f"{name}: expected a list of token ids, got {type(tokens).__name__}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, (Integral, Tensor)) or getattr(token, "shape", ()) != ():
            raise TypeError(f"{name}: expected integers, got {token!r:.60}")
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {token}")
    return tuple(int(token) for token in tokens)
