"""A task's examples, answered: each document from a fresh state, and where the model was trained otherwise, as trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from packmamba.config import ConfigError, DataConfig, options
from packmamba.data.corpus import load_corpora
from packmamba.data.tokenization import ByteTokenizer
from packmamba.evaluation.answers import Answer, answer, items
from packmamba.evaluation.as_trained import AsTrained
from packmamba.evaluation.asked import Asked, Result
from packmamba.evaluation.on_text import HELD_OUT, held_out_texts
from packmamba.evaluation.tasks import TASKS, Example
from packmamba.evaluation.tasks.contradiction import INTRUDING
from packmamba.evaluation.tasks.example import make_example
from packmamba.nn import MambaLM

LATER = "_as_trained"


def ask(name: str, model: MambaLM, asked: Asked) -> Result:
    """Accuracy and nats of a task's answers, by length and by load; of multiple choice the choices' too."""
    made, numbers, examples = drawn(name, asked, len(model.lm_head.weight))
    boundary = asked.boundary()
    documents = [example.tokens for example in examples]
    rows = AsTrained(documents, asked.data, boundary)
    neighbours = (
        rows if any(n is not None for n in rows.before) or not hasattr(made, "reads") else _packed(examples, asked)
    )

    def said(which: list[int], answers: list[Answer]) -> list[dict[str, Any]]:
        found = items(answers, [examples[i] for i in which])
        if hasattr(made, "reads"):
            found = [a | b for a, b in zip(found, _intrusions(made, examples, neighbours, which, answers))]
        return found

    def alone(which: list[int]) -> list[dict[str, Any]]:
        return said(which, answer(model, [examples[i] for i in which], asked.max_slots))

    def together(which: list[int]) -> list[dict[str, Any]]:
        found = said(which, answer(model, examples, asked.max_slots, functools.partial(rows.read, model)))
        if hasattr(made, "reads") and rows.flows and rows.whole:
            found = [a | b for a, b in zip(found, _best(made, examples, rows))]
        asked_alone = ("length", "load", "answers", "reads_intruding")
        return [{key + LATER: value for key, value in item.items() if key not in asked_alone} for item in found]

    found = [
        {"index": n} | item for n, item in zip(numbers, asked.kept.answers(name, documents, asked.max_slots, alone))
    ]
    if boundary.as_trained:
        later = asked.kept.answers(f"{name} as trained", documents, asked.max_slots, together, together=True)
        found = [item | other for item, other in zip(found, later)]
    metrics, curves = summary(found)
    about = {"chance": made.chance, "examples": len(examples)}
    corpus = f"task {name} {sorted(asked.options.items())} seed {asked.seed}"
    if asked.options.get("documents") == HELD_OUT:
        corpus += f" of {load_corpora(asked.data).corpus_hash}"
    return Result(metrics | about, curves, found, corpus)


def drawn(name: str, asked: Asked, vocab_size: int) -> tuple[Any, list[int], list[Example]]:
    """The task, which of its examples are asked, and these; of a task that has an end they are evenly spaced over it."""
    made = check(name, asked, vocab_size)
    count = min(asked.examples, made.num_examples or asked.examples)
    numbers = [i * (made.num_examples or count) // count for i in range(count)]
    examples = [made.example(asked.seed, number) for number in numbers]
    if getattr(made, "of_bytes", False) and not isinstance(asked.tokenizer, (ByteTokenizer, type(None))):
        examples = [in_tokens(example, asked.tokenizer) for example in examples]
    return made, numbers, examples


def check(name: str, asked: Asked, vocab_size: int | None) -> Any:
    """The task with its parameters; ConfigError if they are wrong or the model has fewer ids."""
    known, parameters = options(TASKS[name]), dict(asked.options)
    asked.check_options(name, known)
    texts = None
    if "documents" in known and parameters.get("documents") is not None:
        if parameters.pop("documents") != HELD_OUT:
            raise ConfigError(
                f"{asked.key}.{name}.documents: expected '{HELD_OUT}', or null for the standard library, got "
                f"{asked.options['documents']!r:.60}"
            )
        if vocab_size is None:
            return None
        texts = tuple(held_out_texts(asked))
    try:
        made = _task(TASKS[name], json.dumps(parameters), texts)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{asked.key}.{name}: {error}") from None
    if vocab_size is not None and made.vocab_size > vocab_size:
        fewer = f"; {asked.key}.{name}.vocab_size sets it" * ("vocab_size" in known)
        raise ConfigError(f"{name}: needs a vocabulary of {made.vocab_size}, the model has {vocab_size}{fewer}")
    return made


@functools.lru_cache(maxsize=32)
def _task(make: Callable[..., Any], parameters: str, documents: tuple[tuple[str, str], ...] | None) -> Any:
    """Made once a process: some read many files."""
    return make(**json.loads(parameters), **({} if documents is None else {"documents": documents}))


def in_tokens(example: Example, tokenizer: Any) -> Example:
    """An example of bytes in a tokenizer's ids. Its answer stands at its end."""
    prompt = tokenizer.encode(_text(example.context)).tolist()
    right = tokenizer.encode(_text(example.targets[example.mask])).tolist()
    choices = tuple(tokenizer.encode(_text(choice)).tolist() for choice in example.choices)
    if choices and example.answer is not None:
        right = choices[example.answer]
    answers = {len(prompt) - 1 + i: token for i, token in enumerate(right)}
    notes = example.notes | ({"bytes": [len(choice) for choice in example.choices]} if choices else {})
    return make_example(
        [*prompt, *right[:-1]], answers, example.load, choices=choices, answer=example.answer, notes=notes
    )


def _text(ids: Any) -> str:
    return bytes(int(i) for i in ids).decode(errors="replace")


def summary(found: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """Metrics and curves of items."""
    from packmamba.evaluation.accuracy import Accuracy  # takes seconds

    metric = Accuracy(sync_on_compute=False)  # this process answers all of them, other ranks none
    metric.update(found)
    metrics = metric.compute()
    curves = {key: metrics.pop(key) for key in ("by_length", "by_load")}
    first = found[0]
    if f"right{LATER}" in first:
        trained = Accuracy(sync_on_compute=False)
        trained.update([item | {"right": item[f"right{LATER}"], "nats": item[f"nats{LATER}"]} for item in found])
        later = trained.compute()
        metrics |= {f"{key}{LATER}": later[key] for key in ("accuracy", "nats")}
        for key, points in curves.items():
            for point, other in zip(points, later[key]):
                point |= {f"{name}{LATER}": other[name] for name in ("accuracy", "nats")}
    sums = {key: sum(item[key] for item in found) for key in first if key not in metrics}
    for suffix in ("", LATER):
        for key, whole in (("right_intruding", "reads_intruding"), ("intrusions", "reads_intruding"),
                           ("best", "answers"), ("best_intruding", "reads_intruding")):  # fmt: skip
            if key + suffix in first and (number := metrics.get(whole, sums.get(whole))):
                metrics[key.replace("right", "accuracy") + suffix] = sums[key + suffix] / number
    if "reads_intruding" in sums:
        metrics["reads_intruding"] = sums["reads_intruding"]
    return {key: value for key, value in metrics.items() if value == value}, curves


def _packed(examples: Sequence[Example], asked: Asked) -> AsTrained:
    """The examples' neighbours where training has none: those that greedy gives in rows of the same length."""
    data = replace(asked.data, strategy="greedy", streams=1, row_length=asked.data.row_length or DataConfig.row_length)
    return AsTrained([example.tokens for example in examples], data, asked.boundary())


def _intrusions(
    made: Any, examples: Sequence[Example], neighbours: AsTrained, which: Sequence[int], answers: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Of each example in ``which`` the reads of keys that only its predecessor wrote: how many, how many are right, and to how
    many the predecessor's value is said."""
    found = []
    for number, said in zip(which, answers):
        before = neighbours.before[number]
        kinds, left = made.reads(examples[number], None if before is None else examples[before])
        chosen = kinds == INTRUDING
        found.append(
            {"reads_intruding": int(chosen.sum()), "right_intruding": int(said.right[chosen].sum()),
             "intrusions": int((said.said == left)[chosen].sum())}
        )  # fmt: skip
    return found


def _best(made: Any, examples: Sequence[Example], rows: AsTrained) -> list[dict[str, Any]]:
    """How many answers the best reader of a whole row gets right."""
    found: list[dict[str, Any]] = [{} for _ in examples]
    for row in rows.rows():
        for number, said in zip(row, made.best([examples[n] for n in row])):
            example, before = examples[number], rows.before[number]
            kinds, _ = made.reads(example, None if before is None else examples[before])
            right = said == example.targets[example.mask]
            found[number] = {"best": int(right.sum()), "best_intruding": int(right[kinds == INTRUDING].sum())}
    return found
