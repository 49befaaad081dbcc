"""Evaluation: likelihood scoring, generation, language-modelling metrics and synthetic tasks."""

from packmamba.errors import require

require("lightning", "omegaconf", "tqdm")
from packmamba.evaluation.generation import generate
from packmamba.evaluation.scoring import Score, score

__all__ = ["Score", "generate", "score"]
