"""From a trained model to an answer: scores of continuations, generation, tasks. Nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packmamba.evaluation.generation import generate as generate
    from packmamba.evaluation.scoring import Score as Score
    from packmamba.evaluation.scoring import score as score

_HOMES = {"score": "scoring", "Score": "scoring", "generate": "generation"}
__all__ = ["Score", "generate", "score"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"packmamba.evaluation.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'packmamba.evaluation' has no attribute '{name}'")
