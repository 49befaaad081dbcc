"""Evaluate a model on a task's examples: accuracy and loss, by length and by load."""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from packmamba.config import ConfigError, need, options, refusing
from packmamba.data.tasks import TASKS, Example
from packmamba.data.tasks.base import complete
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import ByteTokenizer, load_tokenizer
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.evaluation.packed_forward import Pass, TrainingLayoutReader, predict_documents
from packmamba.evaluation.scoring import score
from packmamba.nn import MambaLM

Items = list[dict[str, Any]]
Curves = dict[str, list[dict[str, float]]]
MEANS = {"accuracy": "right", "nats": "nats"}
VALIDATION = "validation"


def answer(
    model: MambaLM, examples: Sequence[Example], max_slots: int = 16384, passes: Iterator[Pass] | None = None
) -> tuple[Items, list[np.ndarray]]:
    """Return numbers for each example, and its most likely ids (k,) after its k questions.

    Multiple choice is read from zero states alone, the rest as in ``passes``.
    """

    def targets(i: int, start: int, end: int) -> tuple[Any, np.ndarray]:
        places = np.flatnonzero(examples[i].mask[start:end])
        return torch.from_numpy(places).to(model.lm_head.weight.device), examples[i].targets[start + places]

    # Choices continue their context alone, whatever rows the example was trained in.
    choices = [] if passes else [(e.context.tolist(), choice) for e in examples for choice in e.choices]
    scores = iter(score(model, choices, max_slots))
    predicted = predict_documents(model, [example.tokens for example in examples], targets, max_slots, passes)
    items = []
    for example, (losses, best) in zip(examples, predicted):
        item: dict[str, Any] = {"length": len(example.tokens), "load": example.load, "answers": len(best)}
        item |= {"right": int((best == example.targets[example.mask]).sum()), "nats": float(losses.sum())}
        if example.answer is not None and not passes:
            values = np.array([next(scores).log_likelihood for _ in example.choices])
            # By bytes, too: long choices have low likelihoods.
            sizes = example.notes.get("bytes") or [len(choice) for choice in example.choices]
            item |= {"choice": int(values.argmax()), "by_bytes": int((values / np.array(sizes)).argmax())}
            item |= {"answer": example.answer, "bytes": sizes[example.answer]}
        items.append(item)
    return items, [best for _, best in predicted]


def summarize(items: Items) -> tuple[dict[str, float], Curves]:
    """Return metrics and curves in buckets [1, 2), [2, 4), ..."""
    suffixes = [suffix for suffix in ("", "_as_trained") if "right" + suffix in items[0]]

    def means(some: Items) -> dict[str, float]:
        answers = float(sum(item["answers"] for item in some))
        parts = [(f"{of}{suffix}", f"{name}{suffix}") for of, name in MEANS.items() for suffix in suffixes]
        return {"answers": answers} | {mean: sum(item[name] for item in some) / answers for mean, name in parts}

    curves: Curves = {}
    for key in ("load", "length"):
        buckets: dict[int, Items] = {}
        for item in items:
            # The largest power of two that is not above the item's value.
            buckets.setdefault(2 ** (item[key].bit_length() - 1), []).append(item)
        curves["by_" + key] = [{"start": n, "end": 2 * n, **means(some)} for n, some in sorted(buckets.items())]
    metrics = means(items)
    if chosen := [item for item in items if "choice" in item]:
        for name, key in (("choice_accuracy", "choice"), ("choice_accuracy_by_bytes", "by_bytes")):
            metrics[name] = sum(item[key] == item["answer"] for item in chosen) / len(chosen)
        nats = sum(item["nats"] for item in chosen)
        metrics["bits_per_byte"] = nats / math.log(2) / sum(item["bytes"] for item in chosen)
    return metrics, curves


def evaluate_task(name: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Score a synthetic task's examples: accuracy by answer, beside chance."""
    task = make_task(name, context, len(model.lm_head.weight))
    total = getattr(task, "num_examples", None) or context.examples
    count = min(context.examples, total)
    # Evenly spaced over a finite task.
    numbers = [i * total // count for i in range(count)]
    examples = [task.example(context.seed, number) for number in numbers]
    takes_bytes = isinstance(context.tokenizer, ByteTokenizer | None)
    if getattr(task, "of_bytes", False) and not takes_bytes:
        examples = [tokenize(example, context.tokenizer) for example in examples]
    boundary = context.trainer.scheme()
    rows = TrainingLayoutReader([example.tokens for example in examples], context.data, boundary)
    annotate: Any = getattr(task, "annotate", lambda *_: {})
    # Once from zero state, then as trained; ``annotate`` may add metrics of either.
    items, predicted = answer(model, examples, context.max_slots)
    further = annotate(examples, predicted, rows)
    if boundary.as_trained:
        trained, predicted = answer(model, examples, context.max_slots, rows.read(model))
        for item, other in zip(items, trained):
            item |= {f"{key}_as_trained": other[key] for key in ("right", "nats")}
        further |= {f"{key}_as_trained": value for key, value in annotate(examples, predicted, rows).items()}
    metrics, curves = summarize(items)
    # Stands for the hash of the documents: results of equal ones compare.
    corpus = f"task {name} {sorted(context.options.items())} seed {context.seed}"
    if context.options.get("documents") == VALIDATION:
        corpus += f" of {load_corpora(context.data).corpus_hash}"
    items = [{"index": number} | item for number, item in zip(numbers, items)]
    return EvalResult(metrics | further | {"chance": task.chance, "examples": count}, curves, items, corpus)


def make_task(name: str, context: EvalContext, vocab_size: int | None) -> Any:
    """Return the task, None while its documents' vocabulary is unknown. Raises ConfigError."""
    known, parameters, texts = options(TASKS[name]), dict(context.options), None
    if parameters.get("documents") is not None and "documents" in known:
        given = parameters.pop("documents")
        need(given == VALIDATION, f"{context.key}.{name}.documents", f"'{VALIDATION}' or null", f"{given!r:.60}")
        if vocab_size is None:
            return None
        corpus, tokenizer = load_corpora(context.data).validation, load_tokenizer(context.data)
        groups = range(len(corpus)) if corpus.groups is None else corpus.groups
        texts = tuple((str(group), tokenizer.decode(corpus.document(i))) for i, group in enumerate(groups))
    suffix = f"; options are {', '.join(known) or 'none'}"
    with refusing(TypeError, ValueError, prefix=f"{context.key}.{name}: ", suffix=suffix):
        # As JSON: lru_cache needs hashable arguments.
        task = _construct(TASKS[name], json.dumps(parameters), texts)
    if vocab_size is not None and task.vocab_size > vocab_size:
        fewer = f"; {context.key}.{name}.vocab_size sets it" * ("vocab_size" in known)
        raise ConfigError(f"{name}: needs a vocabulary of {task.vocab_size}, the model has {vocab_size}{fewer}")
    return task


@functools.lru_cache(maxsize=32)
def _construct(make: Any, parameters: str, documents: tuple[tuple[str, str], ...] | None) -> Any:
    return make(**json.loads(parameters), **({} if documents is None else {"documents": documents}))


def tokenize(example: Example, tokenizer: Any) -> Example:
    """Convert an example of bytes to a tokenizer's ids."""
    encode = lambda ids: tokenizer.encode(bytes(map(int, ids)).decode(errors="replace")).tolist()
    prompt, choices = encode(example.context), tuple(encode(choice) for choice in example.choices)
    right = encode(example.targets[example.mask]) if example.answer is None else choices[example.answer]
    notes = example.notes | {"bytes": [len(choice) for choice in example.choices]}
    return complete(prompt, right, example.load, choices=choices, answer=example.answer, notes=notes)
