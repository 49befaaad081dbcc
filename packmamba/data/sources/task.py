"""Documents of a task with right answers: targets stand only where the task's mask says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, chosen
from packmamba.data.sources.source import Document, Source, held_out_count, reads_no_path


def open_task(data: DataConfig) -> Source:
    """``data.num_documents`` examples of ``data.task`` with the parameters ``data.task_options``, drawn with the seed
    ``data.corpus_seed``. The last ``data.validation_fraction`` of them are held out. They are token ids, and
    ``data.tokenizer``, ``data.begin_token`` and ``data.end_token`` do not apply.
    """
    reads_no_path(data)
    if data.task is None:
        raise ConfigError("data.task: expected the name of a task beside data.source=task, got null")
    try:
        task = chosen(data, "task")(**data.task_options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data.task_options: {error}") from None
    if task.num_examples is not None and data.num_documents > task.num_examples:
        raise ConfigError(
            f"data.num_documents: task '{data.task}' has {task.num_examples} examples, got {data.num_documents}"
        )
    trained = data.num_documents - held_out_count(data.num_documents, "documents", data)

    def read(advance: Callable[[int], object], skipped: Counter[str]) -> Iterator[Document]:
        for index in range(data.num_documents):
            example = task.example(data.corpus_seed, index)
            targets = np.where(example.mask, example.targets, -1)
            yield Document(index >= trained, example.tokens, targets)
            advance(1)

    options: Any = json.loads(json.dumps(data.task_options, sort_keys=True))
    fingerprint = [data.task, options, data.num_documents]
    return Source(fingerprint, data.num_documents, " documents", read, vocab_size=task.vocab_size)
