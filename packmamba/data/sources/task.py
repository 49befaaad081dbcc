"""Documents of a task with right answers: targets stand only where the task's mask says."""

from __future__ import annotations

import inspect
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, suggest
from packmamba.data.sources.source import (
    PART_EXAMPLES,
    Advance,
    Document,
    Part,
    Source,
    held_out_count,
    in_parts,
    reads_no_path,
)


def open_task(data: DataConfig) -> Source:
    """``data.num_documents`` examples of ``data.task`` with the parameters ``data.task_options``, drawn with the seed
    ``data.corpus_seed``. The last ``data.validation_fraction`` of them are held out. They are token ids, and
    ``data.tokenizer``, ``data.begin_token`` and ``data.end_token`` do not apply.
    """
    reads_no_path(data)
    if data.task is None:
        raise ConfigError("data.task: expected the name of a task beside data.source=task, got null")
    from packmamba.evaluation.tasks import TASKS

    kind = TASKS[data.task]
    known = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for option in data.task_options:
            if option not in known:
                raise ConfigError(f"data.task_options: unknown option '{option}'{suggest(option, known)}")
    try:
        task = kind(**data.task_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data.task_options: {error}") from None
    if task.num_examples is not None and data.num_documents > task.num_examples:
        raise ConfigError(
            f"data.num_documents: task '{data.task}' has {task.num_examples} examples, got {data.num_documents}"
        )
    trained = data.num_documents - held_out_count(data.num_documents, "documents", data)

    def parts() -> list[Part]:
        several = data.num_documents > PART_EXAMPLES and _is_found_elsewhere(task)
        each = PART_EXAMPLES if several else data.num_documents
        starts = range(0, data.num_documents, each)
        ranges = (range(start, min(start + each, data.num_documents)) for start in starts)
        return [partial(_read, task, data.corpus_seed, indices, trained) for indices in ranges]

    options: Any = json.loads(json.dumps(data.task_options, sort_keys=True))
    fingerprint = [data.task, options, data.num_documents]
    return in_parts(fingerprint, data.num_documents, " documents", parts, vocab_size=task.vocab_size)


def _read(
    task: Any, seed: int, indices: range, trained: int, advance: Advance, skipped: Counter[str]
) -> Iterator[Document]:
    for index in indices:
        example = task.example(seed, index)
        yield Document(index >= trained, example.tokens, np.where(example.mask, example.targets, -1))
        advance(1)


def _is_found_elsewhere(task: Any) -> bool:
    """Whether another process finds the task's class: not that of a script, or one made inside a function."""
    try:
        pickle.dumps(task)
    except Exception:  # what a task of somebody's own holds may refuse in any way
        return False
    return type(task).__module__ != "__main__"
