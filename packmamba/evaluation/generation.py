"""Generate from several prompts at once: they are read packed, then go on from their states.

A step reads one token of each prompt that goes on, as documents of one token in one row, so that a
prompt's text does not depend on the other prompts; a prompt draws from random numbers of its own.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba.errors import expect
from packmamba.evaluation.packed_forward import DocumentState, InitialStates, log_probabilities, read_to_the_end
from packmamba.evaluation.scoring import check_ids
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM


@torch.inference_mode()
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
    """Continue each prompt; return the new tokens, without the stop token.

    Raises TypeError or ValueError.

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
    _check_sampling(max_new_tokens, temperature, top_p, seed)
    if not texts:
        return []
    finals: dict[int, DocumentState] = {}
    hidden = read_to_the_end(model, texts, max_slots, finals)
    # From the prompts' ends: by layer, states of all prompts (prompts, ...).
    states: Any = list(InitialStates(model, [finals[i] for i in range(len(texts))]))
    # One generator a prompt: its draws do not depend on the others, or on when they end.
    draws = [np.random.default_rng([seed, i]) for i in range(len(texts))]
    new_tokens: list[list[int]] = [[] for _ in texts]
    active = list(range(len(texts)))  # prompts that go on; row r of hidden and states is active[r]
    while active:
        sampled = _sample(model, hidden, [draws[prompt] for prompt in active], temperature, top_p)
        rows = []
        for row, (prompt, token) in enumerate(zip(active, sampled)):
            if token != stop_token:
                new_tokens[prompt].append(token)
                if len(new_tokens[prompt]) < max_new_tokens and not (stop and stop(new_tokens[prompt])):
                    rows.append(row)
        if len(rows) < len(active):
            active = [active[row] for row in rows]
            states = _states_of(rows, states)
        if active:
            hidden, states = _read_next(model, [sampled[row] for row in rows], states)
    return new_tokens


def _sample(model: MambaLM, hidden: Tensor, draws: list[Any], temperature: float, top_p: float) -> list[int]:
    """Draw the token after each row of hidden (prompts, d_model), by the prompt's own generator."""
    uniform = torch.tensor([generator.random() for generator in draws], dtype=torch.float64)
    parts = log_probabilities(model, hidden)
    return torch.cat([_draw(log_p, temperature, top_p, uniform[part]) for part, log_p in parts]).tolist()


def _states_of(rows: list[int], states: Any) -> Any:
    """Select the states of the prompts that go on, by layer."""
    index = torch.tensor(rows, dtype=torch.int64, device=states[0][0].device)
    return [tuple(state.index_select(0, index) for state in layer) for layer in states]


def _read_next(model: MambaLM, tokens: list[int], states: Any) -> tuple[Tensor, Any]:
    """Read one token of each prompt, as documents in one row; return activations and states."""
    device = model.lm_head.weight.device
    layout = SequenceLayout.from_lengths([[1] * len(tokens)], len(tokens)).to(device)
    row = torch.tensor([tokens], device=device)
    hidden, states = model(row, layout=layout, states=states, return_states=True, return_hidden=True)
    return hidden[0], states


def _check_sampling(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> None:
    """Raise ValueError for an argument of ``generate`` that is out of its range."""
    for name, count, minimum in (("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0)):
        is_enough = isinstance(count, Integral) and count >= minimum
        expect(is_enough, name, f"an integer of at least {minimum}", repr(count))
    expect(0 <= temperature < math.inf, "temperature", "at least 0", temperature)
    is_share = top_p == 1 or (0 < top_p < 1 and temperature > 0)
    expect(is_share, "top_p", "above 0 to 1 (1 with temperature=0)", top_p)


def _draw(log_p: Tensor, temperature: float, top_p: float, uniform: Tensor) -> Tensor:
    """Draw a token for each row of log-probabilities (documents, V) by its number in [0, 1).

    By inverting the cumulative distribution of the most likely tokens (nucleus sampling).
    """
    if temperature == 0:
        return log_p.argmax(dim=1)
    log_p = log_p.double()
    # Relative to the largest, else a tiny temperature overflows.
    relative = log_p - log_p.amax(dim=1, keepdim=True)
    p, order = torch.softmax(relative / temperature, dim=1).sort(dim=1, descending=True, stable=True)
    # A token stays while those more likely than it do not reach top_p; the first always does.
    more_likely = p.cumsum(dim=1) - p
    p = torch.where(more_likely < top_p, p, 0)
    cumulative = p.cumsum(dim=1)
    threshold = uniform[:, None].to(cumulative.device) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, threshold, right=True)
    last = (p > 0).sum(dim=1, keepdim=True) - 1  # where rounding would go past it
    return order.gather(1, place.clamp(max=last)).squeeze(1)
