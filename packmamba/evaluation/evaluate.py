"""Evaluations by name: what a model is asked, and what its answers come to, together and item by item."""

from __future__ import annotations

import functools
import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packmamba.config import ConfigError, DataConfig, options
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
        key: of the configuration that holds the options, as errors name it.
    """

    data: DataConfig
    tokenizer: Tokenizer | None
    examples: int = 200
    seed: int = 1_000_000
    max_slots: int = 16384
    options: dict[str, Any] = field(default_factory=dict)
    key: str = "options"


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
    _check_options("perplexity", asked, ())
    corpus, numbers, documents = _validation(len(model.lm_head.weight), asked)
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
    windows = _windows(asked)
    corpus, numbers, documents = _validation(len(model.lm_head.weight), asked)
    _check_length(documents, windows["window"])
    entries: list[dict[str, Any]] = list(context_gain(model, documents, max_slots=asked.max_slots, **windows))
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
    made = _made(name, asked, len(model.lm_head.weight))
    count = min(asked.examples, made.num_examples or asked.examples)
    examples = [made.example(asked.seed, index) for index in range(count)]
    answers = answer(model, examples, asked.max_slots)
    metric = Accuracy(sync_on_compute=False)  # this process answers all of them, other ranks none
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


class _OfTasks(Mapping[str, Evaluation]):
    """Those of all tasks, a plugin's among them."""

    def __getitem__(self, name: str) -> Evaluation:
        if name not in TASKS:
            raise KeyError(name)
        return functools.partial(task, name)

    def __iter__(self) -> Iterator[str]:
        return iter(TASKS)

    def __len__(self) -> int:
        return len(TASKS)


EVALUATIONS: ChainMap[str, Evaluation] = ChainMap(
    {"perplexity": perplexity, "long_context": long_context},
    _OfTasks(),  # type: ignore[arg-type]  # never written to
)
"""What ``evaluations`` and ``eval tasks=`` may name. Plugins may add to it, or to ``TASKS``."""


def slots(model: MambaLM) -> int:
    """Of a pass, where nothing else is said."""
    return 16384 if next(model.parameters()).is_cuda else 2048


def evaluate(name: str, model: MambaLM, asked: Asked) -> Result:
    """One evaluation. Raises ConfigError naming what is wrong."""
    return EVALUATIONS[name](model, asked)


def check_evaluation(name: str, asked: Asked, vocab_size: int | None = None) -> None:
    """Refuses, before any model answers, what the evaluation would refuse.

    Args:
        vocab_size: the model's; None: not known yet, and neither the vocabulary nor the documents are looked at.

    Raises:
        ConfigError: naming what is wrong.
    """
    if name in TASKS:
        _made(name, asked, vocab_size)
    elif name == "perplexity":
        _check_options(name, asked, ())
        if vocab_size is not None:
            _validation(vocab_size, asked)
    elif name == "long_context":
        windows = _windows(asked)
        if vocab_size is not None:
            _check_length(_validation(vocab_size, asked)[2], windows["window"])


def _made(name: str, asked: Asked, vocab_size: int | None) -> Any:
    """The task with its parameters; ConfigError if they are wrong or the model has fewer ids."""
    known = options(TASKS[name])
    for option in asked.options:
        if option not in known:
            raise ConfigError(f"{asked.key}.{name}: unknown option '{option}'; known: {', '.join(known) or 'none'}")
    try:
        made = _task(TASKS[name], json.dumps(asked.options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{asked.key}.{name}: {error}") from None
    if vocab_size is not None and made.vocab_size > vocab_size:
        raise ConfigError(f"{name}: needs a vocabulary of {made.vocab_size}, the model has {vocab_size}")
    return made


@functools.lru_cache(maxsize=32)
def _task(make: Callable[..., Any], parameters: str) -> Any:
    """Made once a process: some read many files."""
    return make(**json.loads(parameters))


def _windows(asked: Asked) -> dict[str, int]:
    found = {"window": asked.data.row_length or 1024, "most": 64} | asked.options
    _check_options("long_context", asked, ("window", "most"))
    return found


def _check_length(documents: Sequence[np.ndarray], window: int) -> None:
    if max(map(len, documents)) < 2 * window:
        raise ConfigError(f"long_context: no validation document is as long as two windows of {window} tokens")


def _check_options(name: str, asked: Asked, known: Sequence[str]) -> None:
    for option, value in asked.options.items():
        if option not in known:
            raise ConfigError(f"{asked.key}.{name}: unknown option '{option}'; known: {', '.join(known) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise ConfigError(f"{asked.key}.{name}.{option}: expected an integer of at least 2, got {value!r}")


def _validation(vocab_size: int, asked: Asked) -> tuple[Corpus, np.ndarray, list[np.ndarray]]:
    corpus = load_corpora(asked.data).validation
    if corpus.vocab_size > vocab_size:
        raise ConfigError(f"data.tokenizer: the documents have {corpus.vocab_size} tokens, the model {vocab_size}")
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
