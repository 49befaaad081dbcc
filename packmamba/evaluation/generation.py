"""Generation: prompts are read packed, then all go on together, one token a step, from their states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from packmamba.evaluation.passes import Start, Starts, States, log_probabilities, read
from packmamba.evaluation.scoring import check_ids, check_list, vocabulary
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
) -> list[list[int]]:
    """Continues each prompt; returns the new tokens, without the stop token.

    A step is ``model(tokens, layout, states, return_states=True)`` on one row of as many documents of one token as there are
    prompts: no second code path.

    Args:
        prompts: token ids, each prompt at least one.
        max_new_tokens: most tokens that are added to a prompt.
        temperature: 0: the most likely token; else logits are divided by it and a token is drawn.
        top_p: draw among the most likely tokens whose probabilities reach this sum.
        stop_token: ends a prompt's continuation.
        seed: of the draws. Each prompt draws its own numbers: they depend on the seed and on its place alone.
        max_slots: slots of a pass over the prompts, which bound the memory.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    vocab_size = vocabulary(model)
    given = check_list(prompts, "prompts", "lists of token ids")
    texts = [check_ids(prompt, f"prompts[{i}]", vocab_size) for i, prompt in enumerate(given)]
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"prompts[{i}]: expected at least one token, got none")
    for name, value, kind, right, words in (
        ("max_new_tokens", max_new_tokens, Integral, lambda n: n >= 1, "at least 1"),
        ("temperature", temperature, Real, lambda t: 0 <= t < float("inf"), "at least 0 and finite"),
        ("top_p", top_p, Real, lambda p: 0 < p <= 1, "above 0 and at most 1"),
        ("seed", seed, Integral, lambda n: n >= 0, "at least 0"),
        ("max_slots", max_slots, Integral, lambda n: n >= 1, "at least 1"),
    ):
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name}: expected {'an integer' if kind is Integral else 'a number'}, got {value!r}")
        if not right(value):
            raise ValueError(f"{name}: expected {words}, got {value!r}")
    temperature = float(temperature)
    if problem := nothing_to_cut(temperature, top_p):
        raise ValueError(problem)
    if max_slots >= 2**31:
        raise ValueError(f"max_slots: expected below 2**31, got {max_slots}")
    if stop_token is not None:
        check_ids([stop_token], "stop_token", vocab_size)
    if not texts:
        return []
    new = go_on(
        model, texts, max_new_tokens, temperature, top_p, lambda i, tokens: tokens[-1] == stop_token, seed, max_slots
    )
    return [tokens[:-1] if tokens[-1] == stop_token else tokens for tokens in new]


def nothing_to_cut(temperature: float, top_p: float) -> str | None:
    """What is wrong with a ``top_p`` that would change nothing."""
    if temperature or top_p == 1:
        return None
    return f"top_p: expected 1 with temperature=0, which takes the most likely token, got {top_p:g}; give a temperature"


def go_on(
    model: MambaLM,
    texts: list[tuple[int, ...]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    ended: Callable[[int, list[int]], bool],
    seed: int,
    max_slots: int,
) -> list[list[int]]:
    """The new tokens of each text, up to the first after which ``ended(i, tokens)``; arguments as ``generate``."""
    draws = [np.random.default_rng([seed, i]) for i in range(len(texts))]
    hidden, states = _read(model, texts, max_slots)
    new: list[list[int]] = [[] for _ in texts]
    going = list(range(len(texts)))
    bar = tqdm(total=max_new_tokens, desc="writes", unit="step", disable=None)
    while True:
        bar.update()
        uniform = torch.tensor([draws[i].random() for i in going], dtype=torch.float64)
        chosen = _choose(model, hidden, temperature, top_p, uniform).tolist()
        rows = []
        for row, (i, token) in enumerate(zip(going, chosen)):
            new[i].append(token)
            if len(new[i]) < max_new_tokens and not ended(i, new[i]):
                rows.append(row)
        if not rows:
            bar.close()
            return new
        if len(rows) < len(going):
            index = torch.tensor(rows, device=hidden.device)
            states = [tuple(part.index_select(0, index) for part in layer) for layer in states]
            going = [going[row] for row in rows]
        tokens = torch.tensor([[chosen[row] for row in rows]], device=hidden.device)
        layout = SequenceLayout.from_lengths([[1] * len(rows)], row_length=len(rows)).to(hidden.device)
        with torch.inference_mode():
            out, states = model(tokens, layout=layout, states=states, return_states=True, return_hidden=True)
        hidden = out[0]


def _read(model: MambaLM, texts: list[tuple[int, ...]], max_slots: int) -> tuple[Tensor, States]:
    """Each prompt's last hidden activations (S, d_model) and final states."""
    last: dict[int, Tensor] = {}
    finals: dict[int, Start] = {}

    def see(i: int, first: int, hidden: Tensor) -> None:
        last[i] = hidden[-1]

    for _ in read(model, texts, max_slots, see, finals):
        pass
    places = range(len(texts))
    with torch.inference_mode():
        states = list(Starts(model, [finals[i] for i in places]))
    return torch.stack([last[i] for i in places]), states


def _choose(model: MambaLM, hidden: Tensor, temperature: float, top_p: float, uniform: Tensor) -> Tensor:
    """(S,) the next token of each prompt."""
    chosen = []
    for rows, log_p in log_probabilities(model, hidden):
        if temperature == 0:
            chosen.append(log_p.argmax(dim=1))
            continue
        below = log_p.double() - log_p.double().amax(dim=1, keepdim=True)  # else a tiny temperature overflows
        p, order = torch.softmax(below / temperature, dim=1).sort(dim=1, descending=True, stable=True)
        before = p.cumsum(dim=1) - p
        p = torch.where(before < top_p, p, 0)
        upto = p.cumsum(dim=1)
        place = torch.searchsorted(upto, uniform[rows, None].to(upto.device) * upto[:, -1:], right=True)
        chosen.append(order.gather(1, place.clamp(max=(p > 0).sum(dim=1, keepdim=True) - 1)).squeeze(1))
    return torch.cat(chosen)
