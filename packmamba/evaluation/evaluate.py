"""Evaluations by name: what a model is asked, and what its answers come to, together and item by item."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch

from packmamba.evaluation import on_tasks, on_text
from packmamba.evaluation.asked import Asked, Evaluation, Result
from packmamba.evaluation.tasks import TASKS
from packmamba.nn import MambaLM
from packmamba.registry import Registry


class _OfTasks(Mapping[str, Evaluation]):
    """Those of all tasks, a plugin's among them."""

    def __getitem__(self, name: str) -> Evaluation:
        if name not in TASKS:
            raise KeyError(name)
        return Evaluation(functools.partial(on_tasks.ask, name), functools.partial(on_tasks.check, name))

    def __iter__(self) -> Iterator[str]:
        return iter(TASKS)

    def __len__(self) -> int:
        return len(TASKS)


EVALUATIONS: ChainMap[str, Evaluation] = ChainMap(
    Registry(
        "evaluation",
        {
            "perplexity": Evaluation(on_text.perplexity, on_text.check_perplexity),
            "positions": Evaluation(on_text.positions, on_text.check_positions),
            "long_context": Evaluation(on_text.long_context, on_text.check_long_context),
            "remembrance": Evaluation(on_text.remembers, on_text.check_remembers),
        },
    ),
    _OfTasks(),  # type: ignore[arg-type]  # never written to
)
"""What ``evaluations`` and ``eval tasks=`` may name. Plugins may add to it, or to ``TASKS``."""


def slots(model: MambaLM) -> int:
    """Of a pass, where nothing else is said: what fills a GPU, more of a narrow model."""
    head = model.lm_head.weight
    return (16384 if head.shape[1] >= 1024 else 65536) if head.is_cuda else 2048


MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def evaluate(name: str, model: MambaLM, asked: Asked) -> Result:
    """One evaluation. On a GPU, float32 weights that were trained in mixed precision read as they did in training, but for the
    head: the scan's fast kernel is for 16 bits. Raises ConfigError naming what is wrong."""
    weight = next(model.parameters())
    dtype = MIXED.get(asked.trainer.precision) if weight.is_cuda and weight.dtype == torch.float32 else None
    with torch.autocast("cuda", dtype) if dtype else nullcontext():
        return EVALUATIONS[name].ask(model, asked)


def check_evaluation(name: str, asked: Asked, vocab_size: int | None = None) -> None:
    """Refuses, before any model answers, what the evaluation would refuse.

    Args:
        vocab_size: the model's; None: not known yet, and neither the vocabulary nor the documents are looked at.

    Raises:
        ConfigError: naming what is wrong.
    """
    EVALUATIONS[name].check(asked, vocab_size)
