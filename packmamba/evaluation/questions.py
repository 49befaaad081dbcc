"""A task's multiple-choice questions as a task of lm-evaluation-harness: YAML and JSON lines, which need no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from packmamba.evaluation.tasks import Example

PREFIX = "packmamba_"
"""Before our task's name: the harness must not take it for one of its own."""


def write_questions(folder: str | Path, name: str, examples: Sequence[Example]) -> Path:
    """Writes <folder>/packmamba_<name>.yaml and .jsonl; returns the YAML's path.

    Args:
        examples: with choices, ids are bytes of UTF-8.

    Raises:
        ValueError: examples that are not.
    """
    lines = []
    for number, example in enumerate(examples):
        if not example.choices:
            raise ValueError(f"expected a task with choices, such as next_line, got '{name}'")
        try:
            context, *choices = (bytes(ids).decode() for ids in (example.context.tolist(), *example.choices))
        except ValueError:
            raise ValueError(f"expected a task whose ids are bytes of text, got '{name}', example {number}") from None
        lines.append({"context": context, "choices": choices, "answer": example.answer})
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / f"{PREFIX}{name}.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    task = {
        "task": PREFIX + name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in ("acc", "acc_norm", "acc_bytes")
        ],
        "metadata": {"version": 1.0},
    }
    path = questions.with_suffix(".yaml")
    path.write_text(json.dumps(task, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return path
