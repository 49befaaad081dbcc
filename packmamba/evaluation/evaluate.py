"""Evaluations by name: what a model is asked, and what its answers come to, together and item by item."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig
from packmamba.data.corpus import Corpus, load_corpora
from packmamba.data.datamodule import evaluation_documents
from packmamba.data.tokenization import Tokenizer
from packmamba.evaluation.answers import Accuracy, answer
from packmamba.evaluation.perplexity import bits_per_byte, by_position, context_gain, token_losses
from packmamba.evaluation.tasks import TASKS
from packmamba.nn import MambaLM


@dataclass
class Asked:
    """What an evaluation may use besides the model.

    Attributes:
        data: where documents come from, for evaluations on text.
        tokenizer: of the model; None if its ids have no text.
        examples: how many of a task.
        seed: of a task's examples: those of training runs have others.
        max_slots: slots of a pass.
        options: of the evaluation itself, such as a task's parameters.
    """

    data: DataConfig
    tokenizer: Tokenizer | None
    examples: int = 200
    seed: int = 1_000_000
    max_slots: int = 16384
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """metrics: name -> number. curves: name -> points. items: one mapping for each document or example."""

    metrics: dict[str, float]
    curves: dict[str, list[dict[str, float]]]
    items: list[dict[str, Any]]
    corpus_hash: str


Evaluation = Callable[[MambaLM, Asked], Result]


def perplexity(model: MambaLM, asked: Asked) -> Result:
    """Loss, bits per byte, loss by position on the validation documents of ``data``."""
    _check_options("perplexity", asked.options, ())
    corpus, numbers, documents = _validation(model, asked)
    losses = token_losses(model, documents, asked.max_slots)
    sizes = [_bytes(document, corpus, asked.tokenizer) for document in documents]
    targets = sum(map(len, losses))
    return Result(
        {
            "loss": sum(float(some.sum()) for some in losses) / targets,
            "bits_per_byte": bits_per_byte(losses, sum(sizes)) if all(sizes) else float("nan"),
            "targets": targets,
            "documents": len(documents),
        },
        {"by_position": by_position(losses)},
        [
            {"document": int(number), "targets": len(some), "nats": float(some.sum()), "bytes": size}
            for number, some, size in zip(numbers, losses, sizes)
        ],
        corpus.corpus_hash,
    )


def long_context(model: MambaLM, asked: Asked) -> Result:
    """Context gain on the validation documents: options ``window`` (the row length) and ``most`` (64 windows)."""
    options = {"window": asked.data.row_length or 1024, "most": 64} | asked.options
    _check_options("long_context", options, ("window", "most"))
    corpus, numbers, documents = _validation(model, asked)
    entries: list[dict[str, Any]] = list(context_gain(model, documents, max_slots=asked.max_slots, **options))
    if not entries:
        raise ConfigError(
            f"data.row_length: no validation document is as long as two windows of {options['window']} tokens"
        )
    return Result(
        {f"gain_{entry['windows']}": entry["gain"] for entry in entries} | {"documents": float(len(documents))},
        {"context_gain": [{key: value for key, value in entry.items() if key != "gains"} for entry in entries]},
        [
            {"document": int(numbers[i]), "windows": entry["windows"], "gain": gain}
            for entry in entries
            for i, gain in entry["gains"].items()
        ],
        corpus.corpus_hash,
    )


def task(name: str, model: MambaLM, asked: Asked) -> Result:
    """Accuracy and nats of a task's answers, by length and by load; of multiple choice the choices' too."""
    try:
        made = TASKS[name](**asked.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options.{name}: {error}") from None
    if made.vocab_size > len(model.lm_head.weight):
        raise ConfigError(f"{name}: needs a vocabulary of {made.vocab_size}, the model has {len(model.lm_head.weight)}")
    count = min(asked.examples, made.num_examples or asked.examples)
    examples = [made.example(asked.seed, index) for index in range(count)]
    answers = answer(model, examples, asked.max_slots)
    metric = Accuracy()
    metric.update(answers, examples)
    result = metric.compute()
    curves = {key: result.pop(key) for key in ("by_length", "by_load")}
    metrics = {key: value for key, value in result.items() if value == value} | {
        "chance": made.chance,
        "examples": count,
    }
    items = [
        {"index": i, "length": a.length, "load": a.load, "answers": len(a.right), "right": int(a.right.sum()),
         "nats": float(a.nats.sum())} | ({} if a.choice is None else {"choice": a.choice, "answer": e.answer})
        for i, (a, e) in enumerate(zip(answers, examples))
    ]  # fmt: skip
    return Result(metrics, curves, items, f"task {name} {sorted(asked.options.items())} seed {asked.seed}")


EVALUATIONS: dict[str, Evaluation] = {
    "perplexity": perplexity,
    "long_context": long_context,
    **{name: functools.partial(task, name) for name in TASKS},
}
"""What ``evaluations`` and ``eval tasks=`` may name. Plugins may add to it, or to ``TASKS``."""


def evaluate(name: str, model: MambaLM, asked: Asked) -> Result:
    """One evaluation. Raises ConfigError naming what is wrong."""
    if name not in EVALUATIONS and name in TASKS:  # a plugin's task
        return task(name, model, asked)
    return EVALUATIONS[name](model, asked)


def _check_options(name: str, options: dict[str, Any], known: Sequence[str]) -> None:
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"options.{name}: unknown option '{key}'; known: {', '.join(known) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise ConfigError(f"options.{name}.{key}: expected an integer of at least 2, got {value!r}")


def _validation(model: MambaLM, asked: Asked) -> tuple[Corpus, np.ndarray, list[np.ndarray]]:
    corpus = load_corpora(asked.data).validation
    if corpus.vocab_size > len(model.lm_head.weight):
        raise ConfigError(
            f"data.tokenizer: the documents have {corpus.vocab_size} tokens, the model {len(model.lm_head.weight)}"
        )
    numbers = evaluation_documents(corpus, asked.data)
    if not len(numbers):
        raise ConfigError(f"data.source={asked.data.source} gives no validation documents")
    return corpus, numbers, [corpus.document(int(number)) for number in numbers]


def _bytes(document: np.ndarray, corpus: Corpus, tokenizer: Tokenizer | None) -> int:
    """Bytes of a document's text, begin and end tokens left out; 0 if its ids have no text."""
    if tokenizer is None:
        return 0
    own = document[~np.isin(document, [i for i in (corpus.begin_id, corpus.end_id) if i is not None])]
    return len(tokenizer.decode(own).encode("utf-8", "replace"))
