"""Batched generation: prompts are read packed, then continue together from their states."""

import math
from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.evaluation.packed_forward import (
    DocumentState,
    InitialStates,
    log_probabilities,
    read_to_the_end,
)
from packmamba.evaluation.scoring import check_ids
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM


def generate(
    model: MambaLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_token: int | None = None,
    seed: int = 0,
    max_slots: int = 16384,
    stop: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue each prompt; return the new tokens, without the stop token. Raises TypeError or ValueError.

    Args:
        prompts: token ids, at least one each; ``stop_token`` ends one before ``max_new_tokens``.
        temperature: 0 takes the most likely token.
        top_p: draw among the most likely tokens whose probabilities reach this sum.
        seed: decides a prompt's draws, with its index.
        max_slots: slots of a pass over the prompts.
        stop: ends a continuation after new tokens for which it is true.
    """
    texts = [check_ids(prompt, f"prompts[{i}]", model, least=1) for i, prompt in enumerate(prompts)]
    check_ids([] if stop_token is None else [stop_token], "stop_token", model)
    for name, count, minimum in (("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
        whole = isinstance(count, Integral) and count >= minimum
        expect(whole, name, f"an integer of at least {minimum}", repr(count))
    expect(0 <= temperature < math.inf, "temperature", "at least 0", temperature)
    expect(
        top_p == 1 or 0 < top_p < 1 and temperature,
        "top_p",
        "above 0 to 1 (1 with temperature=0)",
        top_p,
    )
    if not texts:
        return []
    finals: dict[int, DocumentState] = {}
    hidden = read_to_the_end(model, texts, max_slots, finals)
    with torch.inference_mode():
        states = list(InitialStates(model, [finals[i] for i in range(len(texts))]))
    draws = [np.random.default_rng([seed, i]) for i in range(len(texts))]
    new, active = [list[int]() for _ in texts], list(range(len(texts)))
    while active:
        uniform = torch.tensor([draws[i].random() for i in active], dtype=torch.float64)
        sampled = _sample(model, hidden, temperature, top_p, uniform).tolist()
        rows = []
        for row, (i, token) in enumerate(zip(active, sampled)):
            if token != stop_token:
                new[i].append(token)
                if len(new[i]) < max_new_tokens and not (stop and stop(new[i])):
                    rows.append(row)
        if len(rows) < len(active):
            index = torch.tensor(rows, dtype=torch.int64, device=hidden.device)
            states = [tuple(part.index_select(0, index) for part in layer) for layer in states]
            active = [active[row] for row in rows]
        if active:
            tokens = torch.tensor([[sampled[row] for row in rows]], device=hidden.device)
            layout = SequenceLayout.from_lengths([[1] * len(rows)], row_length=len(rows)).to(
                hidden.device
            )
            with torch.inference_mode():
                out, states = model(
                    tokens, layout=layout, states=states, return_states=True, return_hidden=True
                )
            hidden = out[0]
    return new


def _sample(
    model: MambaLM, hidden: Tensor, temperature: float, top_p: float, uniform: Tensor
) -> Tensor:
    sampled = []
    for rows, log_p in log_probabilities(model, hidden):
        if temperature == 0:
            sampled.append(log_p.argmax(dim=1))
            continue
        below = log_p.double() - log_p.double().amax(
            dim=1, keepdim=True
        )  # else a tiny temperature overflows
        p, order = torch.softmax(below / temperature, dim=1).sort(
            dim=1, descending=True, stable=True
        )
        before = p.cumsum(dim=1) - p
        p = torch.where(before < top_p, p, 0)
        upto = p.cumsum(dim=1)
        place = torch.searchsorted(
            upto, uniform[rows, None].to(upto.device) * upto[:, -1:], right=True
        )
        sampled.append(
            order.gather(1, place.clamp(max=(p > 0).sum(dim=1, keepdim=True) - 1)).squeeze(1)
        )
    return torch.cat(sampled)
