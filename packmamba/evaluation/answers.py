"""How a model answers a task's examples: each answer right or wrong and its loss, packed, by length and by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packmamba.evaluation.passes import Reader, log_probabilities, read
from packmamba.evaluation.scoring import score
from packmamba.evaluation.tasks import Example
from packmamba.nn import MambaLM


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model says of one example. k places count.

    Attributes:
        said: (k,) int64, the most likely ids.
        right: (k,) bool.
        nats: (k,) float64, minus the log-probability of the right ids.
        length, load: the example's.
        choice: of multiple choice, the most likely choice; by_bytes: the most likely one divided by its bytes; else None.
    """

    said: NDArray[np.int64]
    right: NDArray[np.bool_]
    nats: NDArray[np.float64]
    length: int
    load: int
    choice: int | None = None
    by_bytes: int | None = None


def answer(
    model: MambaLM, examples: Sequence[Example], max_slots: int = 16384, reader: Reader | None = None
) -> list[Answer]:
    """A model's answers, each document from a fresh state; order and company of the examples change no bit.

    Args:
        model: its vocabulary holds the task's ids.
        examples: of a task.
        max_slots: slots of a pass, which bound the memory; longer examples go piece by piece.
        reader: how the examples' tokens are read instead; choices are left out.

    Raises:
        ValueError: an id outside of the model's vocabulary.
    """
    vocab_size = len(model.lm_head.weight)
    said: list[list[int]] = [[] for _ in examples]
    nats: list[list[float]] = [[] for _ in examples]
    asked: list[tuple[int, Tensor, list[int]]] = []

    def see(i: int, first: int, hidden: Tensor) -> None:
        places = np.flatnonzero(examples[i].mask[first : first + len(hidden)])
        if len(places):
            asked.append(
                (i, hidden[torch.from_numpy(places).to(hidden.device)], examples[i].targets[first + places].tolist())
            )

    for i, example in enumerate(examples):
        largest = int(max(example.tokens.max(), example.targets.max()))
        if largest >= vocab_size:
            raise ValueError(f"examples[{i}]: expected ids below the model's vocab_size {vocab_size}, got {largest}")
    for _ in reader(see) if reader else read(model, [example.tokens for example in examples], max_slots, see):
        _settle(model, asked, said, nats)
    chosen = [(None, None)] * len(examples) if reader else choose(model, examples, max_slots)
    return [
        Answer(
            np.array(said[i], dtype=np.int64), np.array(said[i]) == example.targets[example.mask], np.array(nats[i]),
            len(example.tokens), example.load, *chosen[i],
        )
        for i, example in enumerate(examples)
    ]  # fmt: skip


def choose(model: MambaLM, examples: Sequence[Example], max_slots: int = 16384) -> list[tuple[int | None, int | None]]:
    """Of multiple choice, the choice with the highest log-likelihood, as it is and divided by its bytes: its ids, unless
    ``example.notes["bytes"]`` says how many those are."""
    requests = [(example.context.tolist(), choice) for example in examples for choice in example.choices]
    scores = iter(score(model, requests, max_slots, progress=False) if requests else ())
    found: list[tuple[int | None, int | None]] = []
    for example in examples:
        values = np.array([next(scores).log_likelihood for _ in example.choices])
        lengths = np.array(example.notes.get("bytes") or [len(choice) for choice in example.choices])
        found.append((int(values.argmax()), int((values / lengths).argmax())) if len(values) else (None, None))
    return found


def _settle(
    model: MambaLM, asked: list[tuple[int, Tensor, list[int]]], said: list[list[int]], nats: list[list[float]]
) -> None:
    """Turns what a pass left into answers, and forgets it."""
    if not asked:
        return
    hidden = torch.cat([part for _, part, _ in asked])
    targets = torch.tensor([target for _, _, some in asked for target in some], device=hidden.device)
    best, losses = [], []
    for rows, log_p in log_probabilities(model, hidden):
        best.append(log_p.argmax(dim=1))
        losses.append(-log_p.gather(1, targets[rows, None]).squeeze(1))
    ids, values = iter(torch.cat(best).tolist()), iter(torch.cat(losses).double().tolist())
    for i, part, _ in asked:
        said[i] += [next(ids) for _ in range(len(part))]
        nats[i] += [next(values) for _ in range(len(part))]
    asked.clear()


def items(answers: Sequence[Answer], examples: Sequence[Example]) -> list[dict[str, Any]]:
    """What is kept of each example: plain numbers, from which ``Accuracy`` makes its own."""
    return [
        {"length": said.length, "load": said.load, "answers": len(said.right), "right": int(said.right.sum()),
         "nats": float(said.nats.sum())}
        | ({} if said.choice is None else
           {"choice": said.choice, "by_bytes": said.by_bytes, "answer": example.answer, "bytes": _bytes_of_right(example)})
        for said, example in zip(answers, examples)
    ]  # fmt: skip


def _bytes_of_right(example: Example) -> int:
    assert example.answer is not None
    return example.notes["bytes"][example.answer] if "bytes" in example.notes else len(example.choices[example.answer])
