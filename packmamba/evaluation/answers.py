"""How a model answers a task's examples: each answer right or wrong and its loss, packed, by length and by load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric

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


class Accuracy(Metric):
    """Share of right answers and their loss, together and by doubling length and load: [1, 2), [2, 4), ...

    Update with ``items``. Sums over ranks. ``compute`` gives ``accuracy``, ``nats``, ``answers``; of multiple choice
    ``choice_accuracy``, ``choice_accuracy_by_bytes``, and ``bits_per_byte`` of the right choice (else these are NaN); and the
    tables ``by_length`` and ``by_load``.
    """

    full_state_update = False
    BUCKETS = 32
    sums: Tensor
    choices: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # (length or load, bucket, [answers, right, nats]); [examples with choices, right, right by bytes, bytes of the right one]
        self.add_state("sums", torch.zeros(2, self.BUCKETS, 3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("choices", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, items: Iterable[Mapping[str, Any]]) -> None:
        for item in items:
            values = torch.tensor([item["answers"], item["right"], item["nats"]], dtype=torch.float64)
            for axis, size in enumerate((item["length"], item["load"])):
                self.sums[axis, min(size.bit_length() - 1, self.BUCKETS - 1)] += values.to(self.sums.device)
            if "choice" in item:
                right = [1, item["choice"] == item["answer"], item["by_bytes"] == item["answer"], item["bytes"]]
                self.choices += torch.tensor(right, dtype=torch.float64, device=self.choices.device)

    def compute(self) -> dict[str, Any]:
        count, right, nats = self.sums[0].sum(dim=0).tolist()
        examples, *chosen, size = self.choices.tolist()
        return {
            "accuracy": right / count if count else float("nan"),
            "nats": nats / count if count else float("nan"),
            "answers": count,
            "choice_accuracy": chosen[0] / examples if examples else float("nan"),
            "choice_accuracy_by_bytes": chosen[1] / examples if examples else float("nan"),
            "bits_per_byte": nats / math.log(2) / size if size else float("nan"),
            "by_length": self._table(0),
            "by_load": self._table(1),
        }

    def _table(self, axis: int) -> list[dict[str, float]]:
        return [
            {"start": 2**i, "end": 2 ** (i + 1), "answers": count, "accuracy": right / count, "nats": nats / count}
            for i, (count, right, nats) in enumerate(self.sums[axis].tolist())
            if count
        ]
