"""Evaluate trained models at sizes within and beyond those of their training, untrained ones on
every task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from tqdm import tqdm

from experiments.by_name import Bench
from packmamba import MambaLM
from packmamba.config import DataConfig, key, need
from packmamba.data.tasks import TASKS
from packmamba.evaluation.load import load_model, read_config
from packmamba.evaluation.registry import EvalContext, default_max_slots, evaluate
from packmamba.lab.records import append_record, make_record, provenance


@dataclass
class AnswersConfig:
    experiment: str = "tasks"
    runs: Optional[str] = key(None, "Folder of the trained runs; null: runs/ in the output folder.")
    questions: dict[str, Any] = key({}, "By trained arm: task, options, varied (one more of them) and its values.")
    untrained: list[str] = key([], "Tasks of untrained models too.", choices="packmamba.data.tasks:TASKS")
    untrained_options: dict[str, Any] = key({}, "For each of these tasks its parameters; else their defaults.")
    seeds: list[int] = key([0, 1, 2], "Seeds of untrained weights.", low=0)
    d_model: int = key(64, "Width of untrained models.", low=1)
    n_layer: int = key(2, "Layers of untrained models.", above=0)
    examples: int = key(500, "Examples of a task, at each value.", low=1)
    examples_seed: int = key(1_000_000, "Seed of the examples; those of training have others.", low=0)


@dataclass
class Question:
    """Hold a task at several values of one of its parameters."""

    task: str
    varied: str
    values: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


def run(config: AnswersConfig, records_path: Path, progress: bool = True) -> None:
    """Append a record of kind answers per trained run, of kind untrained per task and seed."""
    provenance()
    questions = {arm: Question(**fields) for arm, fields in config.questions.items()}
    folder = Path(config.runs) if config.runs else records_path.parent.parent / "runs"
    runs = {arm: _runs_of(arm, folder) for arm in questions}
    for arm, asked in questions.items():
        for path in runs[arm]:
            _ask_trained(config, arm, asked, path, records_path, progress)
    for name in tqdm(config.untrained, desc="untrained", disable=not progress):
        _ask_untrained(config, name, records_path)


def _runs_of(arm: str, folder: Path) -> list[Path]:
    found = [path.parent for path in sorted(folder.glob("*/config.json")) if read_config(path.parent).name == arm]
    need(found, f"questions.{arm}", f"trained runs of this arm in {folder}", "none")
    return found


def _ask_trained(
    config: AnswersConfig, arm: str, asked: Question, path: Path, records_path: Path, progress: bool
) -> None:
    begun = time.perf_counter()
    subject = load_model(path, "cpu")
    points, chance = [], 0.0
    for value in tqdm(asked.values, desc=f"{arm}, seed {subject.config.seed}", disable=not progress):
        point = _numbers(asked.task, subject.model, asked.options | {asked.varied: value}, config)
        chance = point.pop("chance")
        points.append({"value": value} | point)
    told = {"task": asked.task, "options": asked.options, "varied": asked.varied, "examples": config.examples}
    told |= {"trained": subject.config.data.task_options}
    corpus = f"{asked.task} {sorted(asked.options.items())} by {asked.varied}, seed {config.examples_seed}"
    measured = (subject.config.seed, corpus, {"chance": chance}, time.perf_counter() - begun, {"answers": points})
    append_record(records_path, make_record("answers", config.experiment, arm, told, *measured))


def _ask_untrained(config: AnswersConfig, name: str, records_path: Path) -> None:
    """Beside the models stands who always says the most frequent answer: chance may be below it."""
    options = config.untrained_options.get(name, {})
    task = TASKS[name](**options)
    examples = [task.example(config.examples_seed, i) for i in range(config.examples)]
    answers = np.concatenate([example.targets[example.mask] for example in examples])
    frequent = None if examples[0].choices else float(np.bincount(answers).max() / len(answers))
    for seed in config.seeds:
        begun = time.perf_counter()
        torch.manual_seed(seed)
        model = MambaLM(vocab_size=task.vocab_size, d_model=config.d_model, n_layer=config.n_layer).eval()
        told = {"options": options, **{key: getattr(config, key) for key in ("d_model", "n_layer", "examples")}}
        metrics = _numbers(name, model, options, config) | {"most_frequent": frequent}
        measured = (seed, "untrained", metrics, time.perf_counter() - begun)
        append_record(records_path, make_record("untrained", config.experiment, name, told, *measured))


def _numbers(name: str, model: MambaLM, options: Mapping[str, Any], config: AnswersConfig) -> dict[str, float]:
    """accuracy, answers and chance; of multiple choice the share of right choices, and how many
    there were.
    """
    shared = DataConfig(), None, config.examples, config.examples_seed, default_max_slots(model)
    asked = EvalContext(*shared, options=dict(options), key="questions")
    found = evaluate(name, model, asked).metrics
    numbers = {name: found[name] for name in ("accuracy", "answers", "chance")}
    if "choice_accuracy" in found:
        numbers |= {"accuracy": found["choice_accuracy"], "answers": found["examples"]}
    return numbers


BENCHES = {"answers": Bench(AnswersConfig, run)}
