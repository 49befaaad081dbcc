"""Evaluations by name, and the types that they take and return."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packmamba.config import ConfigError, DataConfig, TrainerConfig, registry
from packmamba.config.schema import BOUNDARIES
from packmamba.data.tokenizer import Tokenizer
from packmamba.nn import MambaLM

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class EvalContext:
    """Everything that an evaluation uses besides the model.

    Attributes:
        data: source of the documents of evaluations on text, and the rows of evaluations as trained.
        tokenizer: of the model; None if its ids have no text.
        examples: number of a task's examples.
        seed: of a task's examples; training runs use smaller seeds.
        max_slots: slots of a pass.
        options: of the evaluation, such as a task's parameters.
        key: configuration key of the options, for errors.
        trainer: the model's training configuration. A boundary scheme under which something crosses is evaluated as trained too.
        losses: token losses by document number, shared by the evaluations of one model on the same documents.
    """

    data: DataConfig
    tokenizer: Tokenizer | None
    examples: int = 200
    seed: int = 1_000_000
    max_slots: int = 16384
    options: dict[str, Any] = field(default_factory=dict)
    key: str = "options"
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    losses: dict[int, np.ndarray] = field(default_factory=dict)

    def boundary(self) -> Any:
        """Return the boundary scheme of the model's training, without states."""
        return registry(BOUNDARIES)[self.trainer.boundary](**self.trainer.boundary_options)

    def check_options(self, name: str, known: Iterable[str]) -> None:
        """Raise ConfigError naming the first unknown option."""
        for option in self.options:
            if option not in known:
                raise ConfigError(f"{self.key}.{name}: unknown option '{option}'; known: {', '.join(known) or 'none'}")


@dataclass
class EvalResult:
    """Metrics by name (``<name>_as_trained`` under the training's boundary scheme), curves by name, one item per example."""

    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    items: list[dict[str, Any]]
    corpus_hash: str


@dataclass(frozen=True)
class Evaluation:
    """run: evaluate a model. check: raise ConfigError for what ``run`` would refuse, given the model's vocabulary size, or None
    to check options alone, without reading documents."""

    run: Callable[[MambaLM, EvalContext], EvalResult]
    check: Callable[[EvalContext, int | None], object]


EVALUATIONS: ChainMap[str, Evaluation] = ChainMap()
"""Filled by language_modeling, and by synthetic with a view of ``TASKS``. Plugins may add to it or to ``TASKS``."""


def default_max_slots(model: MambaLM) -> int:
    """Return the slots of a pass that fill the device; narrow models take more."""
    head = model.lm_head.weight
    return (16384 if head.shape[1] >= 1024 else 65536) if head.is_cuda else 2048


def evaluate(name: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Run one evaluation. On a GPU, float32 weights trained in mixed precision are evaluated under the same autocast."""
    weight = next(model.parameters())
    dtype = AUTOCAST.get(context.trainer.precision) if weight.is_cuda and weight.dtype == torch.float32 else None
    with torch.autocast("cuda", dtype) if dtype else nullcontext():
        return EVALUATIONS[name].run(model, context)
