"""Evaluations by name."""

from collections import ChainMap
from contextlib import nullcontext
from typing import Any

import torch

from packmamba.data.tasks import TASKS
from packmamba.evaluation import harness, language_modeling, synthetic
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.nn import MambaLM

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
EVALUATIONS: ChainMap[str, Any] = ChainMap(language_modeling.EVALUATIONS, TASKS)


def default_max_slots(model: MambaLM) -> int:
    """Return the slots of a pass that fill the device."""
    head = model.lm_head.weight
    return (16384 if head.shape[1] >= 1024 else 65536) if head.is_cuda else 2048


def check(name: str, context: EvalContext, vocab_size: int | None = None) -> None:
    """Raise ConfigError for what ``evaluate`` would refuse.

    Without a vocabulary size no documents are read.
    """
    if name not in EVALUATIONS:
        if vocab_size is None:  # once: its documents are read
            harness.check_task(name, context, EVALUATIONS)
        return
    (synthetic.make_task if name in TASKS else language_modeling.validation)(name, context, vocab_size)


def evaluate(name: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Run an evaluation, or a task of lm-evaluation-harness.

    float32 weights on a GPU run under their training's autocast.
    """
    weight = next(model.parameters())
    dtype = AUTOCAST.get(context.trainer.precision) if weight.is_cuda and weight.dtype == torch.float32 else None
    with torch.autocast("cuda", dtype) if dtype else nullcontext():
        if name not in EVALUATIONS:
            return harness.evaluate_task(name, model, context)
        if name in TASKS:
            return synthetic.evaluate_task(name, model, context)
        return language_modeling.EVALUATIONS[name](model, context)
