"""What a trained model answers when its run ends: the evaluations that the configuration names."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from packmamba.config import Config
from packmamba.evaluation.asked import Asked
from packmamba.evaluation.evaluate import check_evaluation, evaluate, slots
from packmamba.evaluation.subject import load_subject
from packmamba.records import write_items


def check_evaluations(config: Config, vocab_size: int | None = None) -> None:
    """Refuses before training what an evaluation would refuse after it. Raises ConfigError naming the key.

    Args:
        vocab_size: the model's; None: not known yet, and the documents are not looked at.
    """
    for name in config.evaluations:
        check_evaluation(name, _asked(config, name), vocab_size)


def run_evaluations(
    config: Config, folder: Path, device: torch.device, progress: bool
) -> tuple[dict[str, float | None], dict[str, list[dict[str, float]]]]:
    """Numbers and curves of all evaluations, ``<evaluation>.<metric>``; null where a number is not finite.

    The model is the one in the run's folder, so ``eval`` of that folder gives the same: each document from a fresh state, and
    where the arm trains otherwise, also as trained. Answers go to evaluation/items/<evaluation>.jsonl in the folder.
    """
    if not config.evaluations:
        return {}, {}
    subject = load_subject(folder, str(device))
    numbers: dict[str, float | None] = {}
    curves: dict[str, list[dict[str, float]]] = {}
    for name in config.evaluations:
        if progress:
            print(f"evaluation {name}", file=sys.stderr, flush=True)
        asked = _asked(config, name)
        asked.tokenizer, asked.max_slots = subject.tokenizer, slots(subject.model)
        result = evaluate(name, subject.model, asked)
        write_items(folder / "evaluation" / "items" / f"{name}.jsonl", result.items)
        for metric, value in result.metrics.items():
            numbers[f"{name}.{metric}"] = value if math.isfinite(value) else None
        curves |= {f"{name}.{curve}": points for curve, points in result.curves.items()}
    return numbers, curves


def _asked(config: Config, name: str) -> Asked:
    return Asked(
        config.data,
        tokenizer=None,
        examples=config.evaluation_examples,
        options=config.evaluation_options.get(name, {}),
        key="evaluation_options",
        trainer=config.trainer,
    )
