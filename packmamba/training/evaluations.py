"""What a model answers when its run ends, and on the way there: the evaluations that the configuration names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from packmamba.config import Config
from packmamba.data.sources import open_source
from packmamba.data.tokenizer import Tokenizer, load_tokenizer
from packmamba.evaluation.load import load_model
from packmamba.evaluation.registry import EvalResult, default_max_slots, evaluate
from packmamba.nn import MambaLM
from packmamba.records import write_items
from packmamba.training.asking import asked_of
from packmamba.training.callbacks import RunMetrics

PREFIX = "model."

Numbers = dict[str, float | None]


def run_evaluations(
    config: Config, folder: Path, device: torch.device, progress: bool
) -> tuple[Numbers, dict[str, list[dict[str, float]]]]:
    """Numbers and curves of all evaluations, ``<evaluation>.<metric>``; null where a number is not finite.

    The model is the one in the run's folder, so ``eval`` of that folder gives the same: each document from a fresh state, and
    where the arm trains otherwise, also as trained. Answers go to evaluation/items/<evaluation>.jsonl in the folder.
    """
    if not config.evaluations:
        return {}, {}
    subject = load_model(folder, str(device))
    numbers: Numbers = {}
    curves: dict[str, list[dict[str, float]]] = {}
    for name in config.evaluations:
        if progress:
            print(f"evaluation {name}", file=sys.stderr, flush=True)
        result = _ask(config, name, subject.model, subject.tokenizer, subject.losses)
        write_items(folder / "evaluation" / "items" / f"{name}.jsonl", result.items)
        numbers |= _numbers(name, result)
        curves |= {f"{name}.{curve}": points for curve, points in result.curves.items()}
    return numbers, curves


class Evaluations(Callback):
    """Asks the model on its way, every ``trainer.evaluate_every`` steps before the last; changes nothing in the training.

    The first process answers and tells the others, which wait. Points are saved with checkpoints, so a resumed run has one curve.
    """

    def __init__(self, config: Config, history: RunMetrics) -> None:
        self.config = config
        self.history = history
        self.points: list[dict[str, Any]] = []
        whole = open_source(config.data).vocab_size is None
        self.tokenizer = load_tokenizer(config.data) if config.evaluations and whole else None

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % self.config.trainer.evaluate_every or step == trainer.max_steps:  # type: ignore[operator]
            return
        with self.history.paused():
            weights = trainer.strategy.lightning_module_state_dict()  # whole, which shards need all ranks for
            self.add(trainer, _told(trainer, lambda: self._answer(module, weights)))

    def add(self, trainer: lightning.Trainer, numbers: Numbers) -> None:
        """Takes and logs the numbers of this step."""
        step = trainer.global_step
        point = {"step": step, "real_tokens": self.history.totals["real_tokens"]} | numbers
        self.points = [other for other in self.points if other["step"] != step] + [point]
        logged = {f"evaluation/{name}": value for name, value in numbers.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step - 1)

    def add_ends_of(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """Of a run that was raised: what it answered where it ended before, by the steps of these records."""
        every, known = self.config.trainer.evaluate_every or 1, {point["step"] for point in self.points}
        ends = [
            point
            for step, record in records.items()
            if step not in known and step % every == 0
            for point in record["curves"].get("evaluations", []) if point["step"] == step
        ]  # fmt: skip
        self.points = sorted([*self.points, *ends], key=lambda point: point["step"])

    def _answer(self, module: Any, weights: Mapping[str, Tensor]) -> Numbers:
        """Of a model of its own that shares the weights: neither compiled nor in shards."""
        own = {name.removeprefix(PREFIX): weight for name, weight in weights.items() if name.startswith(PREFIX)}
        with torch.device("meta"):
            model = MambaLM(**module.model.config)
        model.load_state_dict(own, assign=True)
        model = model.to(module.device).eval()
        numbers: Numbers = {}
        losses: dict[int, Any] = {}
        for name in self.config.evaluations:
            numbers |= _numbers(name, _ask(self.config, name, model, self.tokenizer, losses))
        return numbers


def _told(trainer: lightning.Trainer, answer: Callable[[], Numbers]) -> Numbers:
    """What the first process answers, in all of them; if it fails, all fail."""
    said: list[Any] = [None]
    failure: Exception | None = None
    if trainer.is_global_zero:
        try:
            said = [answer()]
        except Exception as error:
            failure = error
    if trainer.world_size > 1:
        torch.distributed.broadcast_object_list(said, device=trainer.strategy.root_device)
    if said[0] is None:
        raise failure or RuntimeError("an evaluation failed in the first process")
    return said[0]


def _ask(config: Config, name: str, model: MambaLM, tokenizer: Tokenizer | None, losses: dict[int, Any]) -> EvalResult:
    asked = asked_of(config, name)
    asked.tokenizer, asked.max_slots, asked.losses = tokenizer, default_max_slots(model), losses
    return evaluate(name, model, asked)


def _numbers(name: str, result: EvalResult) -> Numbers:
    return {f"{name}.{metric}": value if math.isfinite(value) else None for metric, value in result.metrics.items()}
