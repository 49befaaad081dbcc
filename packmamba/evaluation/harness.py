"""Tasks of lm-evaluation-harness (extra ``[eval]``) as evaluations, in training and by ``eval``.

Options of a task: ``limit`` (maximum examples), ``num_fewshot``, and ``include_path``, a folder of
YAML tasks. Importing the harness takes seconds, so that only a name that is no evaluation does.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packmamba.data.sources import reads_text
from packmamba.data.sources.records import write_tokenizer_of
from packmamba.errors import need, refusing, suggest
from packmamba.evaluation.load import EvalContext, EvalResult
from packmamba.nn import MambaLM

# Options of a task, and what they may be.
OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "limit": ("a number above 0", lambda value: type(value) in (int, float) and value > 0),
    "num_fewshot": ("an integer of at least 0", lambda value: type(value) is int and value >= 0),
    "include_path": ("a folder", lambda value: isinstance(value, str) and Path(value).is_dir()),
}


@functools.cache
def task_manager(include_path: str | None) -> Any:
    """Return the harness' index of tasks, and of those of a folder."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def check_task(name: str, context: EvalContext, evaluations: Iterable[str]) -> None:
    """Check a task's name and options, and read its documents, which may be downloaded.

    evaluations: names that are no tasks. Raises ConfigError.
    """
    expected = "an evaluation, or a task of lm-evaluation-harness"
    got = f"'{name}'{suggest(name, evaluations)}"
    remedy = "; pip install 'packmamba[eval]' for the harness"
    need(importlib.util.find_spec("lm_eval"), context.names, expected, got + remedy)
    need(reads_text(context.data), context.names, "evaluations of ids, since the documents are no text", f"'{name}'")
    for option, value in context.options.items():
        place = f"{context.key}.{name}"
        need(option in OPTIONS, place, f"options of {', '.join(OPTIONS)}", f"'{option}'")
        valid, holds = OPTIONS[option]
        need(value is None or holds(value), f"{place}.{option}", valid, repr(value))
    manager = task_manager(context.options.get("include_path"))
    remedy = "; name the folder of a task of your own in include_path"
    need(name in manager.all_tasks, context.names, expected, got + remedy)
    need(name in manager.all_subtasks, context.names, "tasks and no group of them", f"'{name}'; name its tasks")
    ends = context.folder or context.data.end_token
    need(ends, "data.end_token", f"a token, which the harness needs for '{name}'", None)
    with refusing(Exception, prefix=f"{context.names}: cannot read '{name}': "):
        manager.load(name)


def evaluate_task(name: str, model: MambaLM, context: EvalContext) -> EvalResult:
    """Evaluate a task by the harness; its metrics, and an item for each example and filter.

    The tokenizer is that of ``context.folder``, or one as the run's folder will have. The harness
    seeds the generators of random numbers. Raises ConfigError.
    """
    import lm_eval

    from packmamba.evaluation.lm_eval_adapter import PackMambaLM

    options = dict(context.options)
    manager = task_manager(options.pop("include_path", None))
    with TemporaryDirectory() as folder, refusing(ValueError, prefix=f"{context.names}: '{name}': "):
        if context.folder is None:
            write_tokenizer_of(context.data, folder)
        adapter = PackMambaLM(model, context.folder or folder, context.max_slots)
        results = lm_eval.simple_evaluate(adapter, tasks=[name], task_manager=manager, **options)
    values = results["results"][name]
    values.pop("sample_len", None)  # the number of examples is no metric
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    # acc,none, or of each of a task's filters: exact_match,strict-match
    metrics = {key.removesuffix(",none"): value for key, value in numbers.items()}
    items = []
    for sample in results["samples"][name]:
        scores = {metric: sample[metric] for metric in sample["metrics"]}
        described = {"doc_id": sample["doc_id"], "filter": sample["filter"]}
        items.append({**described, "responses": sample["filtered_resps"], **scores})
    return EvalResult(metrics, {}, items, f"lm-eval {lm_eval.__version__} {name}")
