"""Faults of keys: every key of every command and bench with values of the wrong type, out of range, null, huge or empty."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from files import LINES, both, write
from trials import Trial

from packmamba.cli.comparison import CompareConfig
from packmamba.cli.conversion import ConvertConfig
from packmamba.cli.corpus import CorpusConfig
from packmamba.cli.leaks import LeakCheckConfig
from packmamba.cli.models import EvalConfig, GenerateConfig, QuestionsConfig
from packmamba.config import Config, read_yaml
from packmamba.experiments import _benches, _named, find, names
from packmamba.training.sweep import SweepConfig

ZERO_IS_RIGHT = {
    "data.corpus_seed",
    "data.num_workers",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "optimizer.final_lr_fraction",
    "trainer.average_share",
    "trainer.leakcheck_every",
    "seed",
    "throughput_rounds",
    "temperature",
    "warm_up_steps",
    "warm_up",
    "examples_seed",
    "num_workers",
    "slurm.gpus",
}
WRONG = {
    int: {
        "word": "many",
        "fraction": "1.5",
        "list": "[1,2]",
        "keys": "{a: 1}",
        "nan": ".nan",
        "inf": ".inf",
        "negative": "-1",
        "huge": "1" + "0" * 30,
        "empty": "''",
        "truth": "true",
    },
    float: {
        "word": "many",
        "list": "[0.1]",
        "keys": "{a: 1}",
        "nan": ".nan",
        "inf": ".inf",
        "negative": "-1",
        "huge": "1e400",
        "empty": "''",
        "truth": "true",
    },
    bool: {"word": "many", "number": "7", "list": "[true]", "keys": "{a: true}", "empty": "''"},
    str: {"list": "[a]", "keys": "{a: b}", "empty": "''", "nul": '"a\\0b"', "long": "x" * 5000},
    list: {"word": "many", "number": "7", "keys": "{a: b}", "nested": "[[a]]", "nulls": "[null]"},
    dict: {"word": "many", "number": "7", "list": "[a]"},
    Any: {"word": "many", "list": "[1]", "keys": "{a: 1}", "negative": "-1", "fraction": "1.5", "nan": ".nan"},
}
"""By a key's type."""


def faults(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, kind of fault, value) of every key of a dataclass."""
    hints = get_type_hints(schema)
    for key in fields(schema):
        if is_dataclass(hints[key.name]):
            yield from faults(hints[key.name], f"{prefix}{key.name}.")
            continue
        kinds = get_args(hints[key.name]) if NoneType in get_args(hints[key.name]) else (hints[key.name],)
        kind = get_origin(kinds[0]) or kinds[0]
        for fault, value in WRONG[kind].items():
            yield prefix + key.name, fault, value
        if NoneType not in kinds:
            yield prefix + key.name, "null", "null"
        if kind is list:
            yield from ((prefix + key.name, f"a list {fault}", value) for fault, value in ELEMENTS.items())
        if kind in (int, float) and prefix + key.name not in ZERO_IS_RIGHT:
            yield prefix + key.name, "zero", "0"


def of_command(schema: type, *words: str, last: tuple[str, ...] = ()) -> Iterator[Trial]:
    for key, fault, value in faults(schema):
        yield Trial(f"key: {fault}", (*words, f"{key}={value}", *last), re.escape(key.rpartition(".")[2]))


SMALL = (
    "data.source=jsonl", "data.path=docs", "model.d_model=8", "model.n_layer=1", "trainer.max_steps=1", "trainer.accelerator=cpu",
    "data.num_proc=1",
)  # fmt: skip


SWEEP = """output: out
common: {data.source: jsonl, data.path: docs, data.num_proc: 1, model.d_model: 8, trainer.max_steps: 1, trainer.accelerator: cpu}
arms: {a: {seed: 0}}
"""
ELEMENTS = {
    "of nothing": "[null]",
    "of keys": "[{a: 1}]",
    "of lists": "[[1]]",
    "of zero bytes": '["a\\0b"]',
    "of empty text": "['']",
}


def every() -> Iterator[Trial]:
    """Of the commands that take keys."""
    prepare = both(write("docs", LINES), write("it.yaml", SWEEP))
    for schema, argv in (
        (Config, ("train", *SMALL)),
        (EvalConfig, ("eval", "nowhere")),
        (GenerateConfig, ("generate", "nowhere", "hello")),
        (QuestionsConfig, ("questions", "out")),
        (LeakCheckConfig, ("leakcheck", "nowhere")),
        (CorpusConfig, ("corpus",)),
        (CompareConfig, ("compare", "a", "b")),
        (ConvertConfig, ("convert", "a.ckpt")),
        (SweepConfig, ("sweep", "it.yaml")),
    ):
        for trial in of_command(schema, *argv):
            yield replace(trial, prepare=prepare, names="" if schema in (EvalConfig, QuestionsConfig) else trial.names)
    for file, schema in benches().items():
        for trial in of_command(schema, "bench", str(file)):
            row = trial.kind.replace("key:", "key of a bench:")
            yield replace(trial, kind=row, names=f"{trial.names}|needs a GPU")  # where its kernels say what is right
        for fault, value in {"list": "[a]", "keys": "{a: b}", "nul": '"a\\0b"', "long": "x" * 5000}.items():
            for key in ("output", "bench"):
                yield Trial(f"key of a bench: {fault}", ("bench", str(file), f"{key}={value}"), key)
        yield Trial("key of a bench: unknown", ("bench", str(file), "nope=1"), "nope")
        yield Trial("key of a bench: unknown", ("bench", str(file), "arms.nope.nope=1"), "nope")
    for word in (
        "scale=tiny",
        "scale=",
        "scale=[full]",
        "scale=null",
        "output=",
        "output=[a]",
        "nope=1",
        "rounds=many",
        "seeds=3",
    ):
        yield Trial("key of reproduce", ("reproduce", "packing/packing", word), word.partition("=")[0])


@functools.cache
def benches() -> dict[Path, type]:
    """The YAML file of each bench, and the dataclass of its keys."""
    files = [path for name in names() for path in sorted(find(name).glob("*.yaml"))]
    named = {path: read_yaml(path)["bench"] for path in files if "bench" in read_yaml(path)}
    return {
        path: _benches(folder)[name].config for path, bench in named.items() for folder, name in [_named(path, bench)]
    }
