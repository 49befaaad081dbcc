"""A task's examples, answered: each document from a fresh state, and where the model was trained otherwise, as trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from packmamba.config import ConfigError, DataConfig, options
from packmamba.evaluation.answers import Accuracy, Answer, answer, items
from packmamba.evaluation.as_trained import AsTrained
from packmamba.evaluation.asked import Asked, Result
from packmamba.evaluation.tasks import TASKS, Example
from packmamba.evaluation.tasks.contradiction import INTRUDING
from packmamba.nn import MambaLM

LATER = "_as_trained"


def ask(name: str, model: MambaLM, asked: Asked) -> Result:
    """Accuracy and nats of a task's answers, by length and by load; of multiple choice the choices' too."""
    made = check(name, asked, len(model.lm_head.weight))
    count = min(asked.examples, made.num_examples or asked.examples)
    examples = [made.example(asked.seed, index) for index in range(count)]
    boundary = asked.boundary()
    rows = AsTrained([example.tokens for example in examples], asked.data, boundary)
    found = [{"index": i} for i in range(count)]
    alone = answer(model, examples, asked.max_slots)
    _add(found, items(alone, examples), "")
    if hasattr(made, "reads"):
        neighbours = rows if any(n is not None for n in rows.before) else _packed(examples, asked)
        _add(found, _intrusions(made, examples, neighbours, alone), "")
    if boundary.as_trained:
        trained = answer(model, examples, asked.max_slots, functools.partial(rows.read, model))
        said = [{key: item[key] for key in ("right", "nats")} for item in items(trained, examples)]
        _add(found, said, LATER)
        if hasattr(made, "reads"):
            _add(found, _intrusions(made, examples, neighbours, trained), LATER, but=("reads_intruding",))
            if rows.flows and rows.whole:
                _add(found, _best(made, examples, neighbours), LATER)
    metrics, curves = summary(found)
    about = {"chance": made.chance, "examples": count}
    return Result(metrics | about, curves, found, f"task {name} {sorted(asked.options.items())} seed {asked.seed}")


def check(name: str, asked: Asked, vocab_size: int | None) -> Any:
    """The task with its parameters; ConfigError if they are wrong or the model has fewer ids."""
    asked.check_options(name, options(TASKS[name]))
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


def summary(found: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, list[dict[str, float]]]]:
    """Metrics and curves of items."""
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


def _add(found: list[dict[str, Any]], more: Sequence[dict[str, Any]], suffix: str, but: Sequence[str] = ()) -> None:
    for item, other in zip(found, more):
        item |= {key + suffix: value for key, value in other.items() if key not in but}


def _packed(examples: Sequence[Example], asked: Asked) -> AsTrained:
    """The examples' neighbours where training has none: those that greedy gives in rows of the same length."""
    data = replace(asked.data, strategy="greedy", streams=1, row_length=asked.data.row_length or DataConfig.row_length)
    return AsTrained([example.tokens for example in examples], data, asked.boundary())


def _intrusions(
    made: Any, examples: Sequence[Example], neighbours: AsTrained, answers: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Of each example the reads of keys that only its predecessor wrote: how many, how many are right, and to how many the
    predecessor's value is said."""
    found = []
    for example, before, said in zip(examples, neighbours.before, answers):
        kinds, left = made.reads(example, None if before is None else examples[before])
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
