"""Evaluate a model on the examples of a task: accuracy and loss of its answers, by length and by load.

Each example is read from a zero state, and under the training's boundary scheme as well if that lets something cross.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba.config import ConfigError, DataConfig, options
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import ByteTokenizer, load_tokenizer
from packmamba.evaluation.packed_forward import Reader, log_probabilities, read_documents
from packmamba.evaluation.registry import EVALUATIONS, EvalContext, EvalResult, Evaluation
from packmamba.evaluation.scoring import score
from packmamba.evaluation.tasks import TASKS, Example
from packmamba.evaluation.tasks.base import make_example
from packmamba.evaluation.tasks.contradiction import INTRUDING
from packmamba.evaluation.training_layout import TrainingLayoutReader
from packmamba.nn import MambaLM

Items = list[dict[str, Any]]
AS_TRAINED = "_as_trained"
VALIDATION = "validation"
"""Value of a task's option ``documents`` that stands for the validation documents."""


def predict(
    model: MambaLM, examples: Sequence[Example], max_slots: int = 16384, reader: Reader | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for each example of k targets the most likely ids (k,) and the targets' losses (k,) in nats.

    Examples are read from zero states, or by ``reader``. Their order and company change no bit.
    """
    predicted: list[list[int]] = [[] for _ in examples]
    nats: list[list[float]] = [[] for _ in examples]
    owners: list[int] = []
    collected: list[tuple[Tensor, np.ndarray]] = []

    def visit(i: int, first: int, hidden: Tensor) -> None:
        places = np.flatnonzero(examples[i].mask[first : first + len(hidden)])
        if len(places):
            collected.append((hidden[torch.from_numpy(places).to(hidden.device)], examples[i].targets[first + places]))
            owners.extend([i] * len(places))

    for _ in reader(visit) if reader else read_documents(model, [e.tokens for e in examples], max_slots, visit):
        if collected:
            hidden = torch.cat([part for part, _ in collected])
            targets = torch.from_numpy(np.concatenate([some for _, some in collected])).to(hidden.device)
            for rows, log_p in log_probabilities(model, hidden):
                losses = -log_p.gather(1, targets[rows, None]).squeeze(1)
                for i, best, loss in zip(owners[rows], log_p.argmax(dim=1).tolist(), losses.double().tolist()):
                    predicted[i].append(best)
                    nats[i].append(loss)
            collected.clear()
            owners.clear()
    return [np.array(ids, dtype=np.int64) for ids in predicted], [np.array(losses) for losses in nats]


def answer(
    model: MambaLM, examples: Sequence[Example], max_slots: int = 16384, reader: Reader | None = None
) -> tuple[Items, list[np.ndarray]]:
    """Return plain numbers for each example, and its most likely ids; arguments as ``predict``.

    Multiple choice is scored from zero states alone.
    """
    predicted, nats = predict(model, examples, max_slots, reader)
    choices = [] if reader else [(e.context.tolist(), choice) for e in examples for choice in e.choices]
    scores = iter(score(model, choices, max_slots, progress=False))
    items = []
    for example, ids, losses in zip(examples, predicted, nats):
        right = int((ids == example.targets[example.mask]).sum())
        item: dict[str, Any] = {
            "length": len(example.tokens),
            "load": example.load,
            "answers": len(ids),
            "right": right,
        }
        item["nats"] = float(losses.sum())
        if example.answer is not None and not reader:
            values = np.array([next(scores).log_likelihood for _ in example.choices])
            sizes = example.notes.get("bytes") or [len(choice) for choice in example.choices]
            item |= {"choice": int(values.argmax()), "by_bytes": int((values / np.array(sizes)).argmax())}
            item |= {"answer": example.answer, "bytes": sizes[example.answer]}
        items.append(item)
    return items, predicted


def accuracy(items: Items) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """Return metrics (NaN where no item has choices) and tables ``by_length`` and ``by_load`` in buckets [1, 2), [2, 4), ..."""
    sums = torch.zeros(2, 32, 3, dtype=torch.float64)  # length or load, bucket, (answers, right, nats)
    for item in items:
        for axis, key in enumerate(("length", "load")):
            values = torch.tensor([item["answers"], item["right"], item["nats"]], dtype=torch.float64)
            sums[axis, item[key].bit_length() - 1] += values
    count, right, nats = sums[0].sum(dim=0).tolist()
    chosen = [item for item in items if "choice" in item]
    size = sum(item["bytes"] for item in chosen)
    shares = {key: [item[key] == item["answer"] for item in chosen] or [math.nan] for key in ("choice", "by_bytes")}
    metrics = {
        "accuracy": right / count,
        "nats": nats / count,
        "answers": count,
        "choice_accuracy": sum(shares["choice"]) / len(shares["choice"]),
        "choice_accuracy_by_bytes": sum(shares["by_bytes"]) / len(shares["by_bytes"]),
        "bits_per_byte": nats / math.log(2) / size if size else math.nan,
    }
    tables = [
        [
            {"start": 2**i, "end": 2 ** (i + 1), "answers": count, "accuracy": right / count, "nats": nats / count}
            for i, (count, right, nats) in enumerate(axis.tolist())
            if count
        ]
        for axis in sums
    ]
    return metrics, {"by_length": tables[0], "by_load": tables[1]}


def evaluate_task(name: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate accuracy and loss of a task's answers; of multiple choice the choices' accuracy too."""
    task = check_task(name, context, len(model.lm_head.weight))
    count = min(context.examples, task.num_examples or context.examples)
    numbers = [i * (task.num_examples or count) // count for i in range(count)]  # evenly spaced over a finite task
    examples = [task.example(context.seed, number) for number in numbers]
    if getattr(task, "of_bytes", False) and not isinstance(context.tokenizer, (ByteTokenizer, type(None))):
        examples = [tokenize(example, context.tokenizer) for example in examples]
    boundary, documents = context.boundary(), [example.tokens for example in examples]
    rows = TrainingLayoutReader(documents, context.data, boundary)
    items, predicted = answer(model, examples, context.max_slots)
    add_intrusions = functools.partial(_add_intrusions, task, examples, _neighbours(rows, documents, context))
    if hasattr(task, "reads"):
        add_intrusions(items, predicted)
    if boundary.as_trained:
        trained, predicted = answer(model, examples, context.max_slots, functools.partial(rows.read, model))
        if hasattr(task, "reads"):
            add_intrusions(trained, predicted)
            if rows.leaks_between_whole_documents:
                _add_best(task, examples, rows, trained)
        same = ("length", "load", "answers", "reads_intruding")
        for item, other in zip(items, trained):
            item |= {key + AS_TRAINED: value for key, value in other.items() if key not in same}
    metrics, curves = summarize(items)
    corpus = f"task {name} {sorted(context.options.items())} seed {context.seed}"
    if context.options.get("documents") == VALIDATION:
        corpus += f" of {load_corpora(context.data).corpus_hash}"
    items = [{"index": number} | item for number, item in zip(numbers, items)]
    return EvalResult(metrics | {"chance": task.chance, "examples": len(examples)}, curves, items, corpus)


def check_task(name: str, context: EvalContext, vocab_size: int | None) -> Any:
    """Return the task with its parameters. Raises ConfigError if they are wrong or the model's vocabulary is too small."""
    known, parameters = options(TASKS[name]), dict(context.options)
    context.check_options(name, known)
    texts = None
    if "documents" in known and parameters.get("documents") is not None:
        if (given := parameters.pop("documents")) != VALIDATION:
            key = f"{context.key}.{name}.documents"
            raise ConfigError(f"{key}: expected '{VALIDATION}', or null for the standard library, got {given!r:.60}")
        if vocab_size is None:
            return None
        corpus, tokenizer = load_corpora(context.data).validation, load_tokenizer(context.data)
        groups = range(len(corpus)) if corpus.groups is None else corpus.groups
        texts = tuple((str(group), tokenizer.decode(corpus.document(i))) for i, group in enumerate(groups))
    try:
        task = _make_task(TASKS[name], json.dumps(parameters), texts)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{context.key}.{name}: {error}") from None
    if vocab_size is not None and task.vocab_size > vocab_size:
        fewer = f"; {context.key}.{name}.vocab_size sets it" * ("vocab_size" in known)
        raise ConfigError(f"{name}: needs a vocabulary of {task.vocab_size}, the model has {vocab_size}{fewer}")
    return task


@functools.lru_cache(maxsize=32)
def _make_task(make: Any, parameters: str, documents: tuple[tuple[str, str], ...] | None) -> Any:
    return make(**json.loads(parameters), **({} if documents is None else {"documents": documents}))


def tokenize(example: Example, tokenizer: Any) -> Example:
    """Return an example of bytes, whose answer stands at its end, in a tokenizer's ids."""
    encode = lambda ids: tokenizer.encode(bytes(map(int, ids)).decode(errors="replace")).tolist()  # noqa: E731
    prompt, choices = encode(example.context), tuple(encode(choice) for choice in example.choices)
    right = encode(example.targets[example.mask]) if example.answer is None else choices[example.answer]
    answers = {len(prompt) - 1 + i: token for i, token in enumerate(right)}
    notes = example.notes | ({"bytes": [len(choice) for choice in example.choices]} if choices else {})
    tokens = [*prompt, *right[:-1]]
    return make_example(tokens, answers, example.load, choices=choices, answer=example.answer, notes=notes)


def summarize(items: Items) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """Return metrics and curves of items, as trained too where the items are."""
    metrics, curves = accuracy(items)
    if f"right{AS_TRAINED}" in items[0]:
        trained = [item | {key: item[key + AS_TRAINED] for key in ("right", "nats")} for item in items]
        other_metrics, other_curves = accuracy(trained)
        metrics |= {f"{key}{AS_TRAINED}": other_metrics[key] for key in ("accuracy", "nats")}
        for key, points in curves.items():
            for point, other in zip(points, other_curves[key]):
                point |= {f"{name}{AS_TRAINED}": other[name] for name in ("accuracy", "nats")}
    total = {key: sum(item.get(key, 0) for item in items) for key in ("answers", "reads_intruding")}
    for suffix in ("", AS_TRAINED):
        for key in ("right_intruding", "intrusions", "best", "best_intruding"):
            per = total["answers" if key == "best" else "reads_intruding"]
            if key + suffix in items[0] and per:
                metrics[key.replace("right", "accuracy") + suffix] = sum(item[key + suffix] for item in items) / per
    if "reads_intruding" in items[0]:
        metrics["reads_intruding"] = total["reads_intruding"]
    return {key: value for key, value in metrics.items() if not math.isnan(value)}, curves


def _neighbours(rows: TrainingLayoutReader, documents: list[np.ndarray], context: EvalContext) -> TrainingLayoutReader:
    """Return the rows that give documents their predecessors: the training's, or greedy ones if those hold one document each."""
    if any(before is not None for before in rows.before):
        return rows
    row_length = context.data.row_length or DataConfig.row_length
    data = replace(context.data, strategy="greedy", streams=1, row_length=row_length)
    return TrainingLayoutReader(documents, data, context.boundary())


def _kinds(task: Any, examples: Sequence[Example], rows: TrainingLayoutReader, i: int) -> tuple[np.ndarray, np.ndarray]:
    before = rows.before[i]
    kinds, left = task.reads(examples[i], None if before is None else examples[before])
    return kinds == INTRUDING, left


def _add_intrusions(
    task: Any, examples: Sequence[Example], rows: TrainingLayoutReader, items: Items, predicted: list[np.ndarray]
) -> None:
    """Count reads of keys that only the predecessor wrote, right answers to them, and answers of the predecessor's value."""
    for i, (item, example) in enumerate(zip(items, examples)):
        chosen, left = _kinds(task, examples, rows, i)
        item["reads_intruding"] = int(chosen.sum())
        item["right_intruding"] = int((predicted[i] == example.targets[example.mask])[chosen].sum())
        item["intrusions"] = int((predicted[i] == left)[chosen].sum())


def _add_best(task: Any, examples: Sequence[Example], rows: TrainingLayoutReader, items: Items) -> None:
    """Count the right answers of the best reader of whole rows."""
    for row in rows.rows():
        for i, best in zip(row, task.best([examples[n] for n in row])):
            right = best == examples[i].targets[examples[i].mask]
            chosen, _ = _kinds(task, examples, rows, i)
            items[i] |= {"best": int(right.sum()), "best_intruding": int(right[chosen].sum())}


class _TaskEvaluations(Mapping[str, Evaluation]):
    """An evaluation for each of ``TASKS``, a plugin's among them."""

    def __getitem__(self, name: str) -> Evaluation:
        if name not in TASKS:
            raise KeyError(name)
        return Evaluation(functools.partial(evaluate_task, name), functools.partial(check_task, name))

    def __iter__(self) -> Iterator[str]:
        return iter(TASKS)

    def __len__(self) -> int:
        return len(TASKS)


EVALUATIONS.maps.append(_TaskEvaluations())  # type: ignore[arg-type]  # never written to
