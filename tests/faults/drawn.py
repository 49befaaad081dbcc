"""Faults that hypothesis draws: any value for any key, any change to any file, any argument of any public function.

What is drawn need not be wrong. So a command has an anchor too: a fault that is looked at last. Whatever stands before it, the
end is one sentence, status 2, and nothing written. Where a changed file may be right by chance, status 0 is as good. A block is
some draws of one seed; of what fails, hypothesis finds the smallest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import changes
import constructors
import hypothesis
import keys
from files import LINES, Make, both, write
from hypothesis import strategies as st
from trials import Trial, bounded, try_out

EDGES = [0, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**19, 10**400]
ODD = [
    "\u0663", "1_000", "0x10", "0o7", "1e3", "1e400", "-0.0", ".inf", "-.inf", ".nan", "NaN", "Infinity", "yes", "NO", "~",
    "2020-01-01", "12:30:00", "!!binary AAAA", "!!python/name:os.system", "*a", "&a b", "${seed}", "${oc.env:HOME}", "${nope",
    "???", "\udc80", "\ufeff1", "\u202e1", "\u00a01", "\x1b[31m", "a\0b", "[" * 40, "{a: 1", "- 1", "|", "%TAG", "..", "/",
    "~root", "con:fig", "null", "x" * 5000,
]  # fmt: skip
"""Words that mean something to YAML, to a shell or to a file system."""
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from(EDGES), st.floats(), st.sampled_from(ODD), st.text(max_size=12)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=5), some, max_size=3),
    max_leaves=6,
)
WORDS = st.one_of(st.sampled_from(ODD), st.text(max_size=20), VALUES.map(json.dumps))

NOWHERE = "data.path=nowhere"
ANCHORED: dict[str, tuple[type | None, tuple[str, ...], tuple[str, ...]]] = {
    "train": (keys.Config, ("train", *keys.SMALL), ("data.source=text", NOWHERE)),
    "sweep": (keys.SweepConfig, ("sweep", "it.yaml"), ("table.columns=[no_such_column]",)),
    "sweep's runs": (keys.Config, ("sweep", "it.yaml"), ("table.columns=[no_such_column]",)),
    "eval": (keys.EvalConfig, ("eval", "m"), ("tasks=[perplexity]", "data.source=text", NOWHERE)),
    "generate": (keys.GenerateConfig, ("generate", "m", "hello"), ("device=nowhere",)),
    "questions": (keys.QuestionsConfig, ("questions", "q"), ("data.source=text", NOWHERE)),
    "leakcheck": (keys.LeakCheckConfig, ("leakcheck", "m"), ("device=nowhere",)),
    "corpus": (keys.CorpusConfig, ("corpus",), ("manifest=nowhere",)),
    "compare": (keys.CompareConfig, ("compare", "a", "b"), ()),
    "convert": (keys.ConvertConfig, ("convert", "a.ckpt"), ()),
    "reproduce": (None, ("reproduce", "packing/packing"), ("output=/proc/nowhere",)),
}
"""For each command the schema of its keys, its words, and its anchor."""


def commands(model: Path) -> Iterator[tuple[str, st.SearchStrategy[Trial]]]:
    """(row, trials) of each command that takes keys."""
    prepare = both(write("docs", LINES), write("it.yaml", keys.SWEEP), changes.copied(model, "m"))
    made = {name: (*of, prepare) for name, of in ANCHORED.items()}
    for file, schema in keys.benches().items():
        words, end = ("bench", str(file)), ("output=/proc/nowhere",)
        made[f"bench {file.parent.name}/{file.stem}"] = (schema, words, end, lambda _: None)
    for schema, words, end, make in made.values():
        named = sorted({key for key, _, _ in keys.faults(schema)}) if schema else ["scale", "output", "rounds", "seeds"]
        named += [f"{key}.nope" for key in named[::7]]
        key = st.sampled_from(named) | st.text(max_size=6).filter(lambda key: key.strip() not in ("status", "train"))
        assignment = st.tuples(key, WORDS).map("=".join)
        argv = st.lists(assignment | WORDS.filter(lambda word: word != "status"), min_size=1, max_size=3)
        trial = partial(_trial, words, end, make)
        yield f"key, drawn for {'a bench' if words[0] == 'bench' else words[0]}", argv.map(trial)


def _trial(words: tuple[str, ...], end: tuple[str, ...], make: Make, drawn: list[str]) -> Trial:
    return Trial("key, drawn", (*words, *drawn, *end), "", make)


def arguments() -> Iterator[tuple[str, st.SearchStrategy[Any], Callable[[Any], str | None]]]:
    """(row, faults, how one is tried) of each public function: one or two of its arguments become something else."""
    for name, target in constructors.targets(("reference", "cpu")).items():
        given = [argument for argument in target.good if argument != "max_new_tokens"]
        value = TENSORS | VALUES | st.sampled_from(constructors.THINGS)
        wrong = st.dictionaries(st.sampled_from(given), value, min_size=1, max_size=2)
        yield f"argument of {name.partition(' ')[0]}, drawn", wrong, partial(_call, name, target)


def _call(name: str, target: constructors.Target, wrong: dict[str, Any]) -> str | None:
    with bounded():
        found = constructors.problem(target, wrong)
    shown = ", ".join(f"{key}={value!r:.60}" for key, value in wrong.items())
    return found and f"{name}({shown}): {found}"


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Of any shape, dtype and strides, on a device of values or of none, with a gradient or without; numpy's too."""
    import torch

    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
             torch.bool, torch.complex64]  # fmt: skip
    made = torch.full(shape, draw(st.sampled_from([0, 1, -1, 2, 3, 99]))).to(draw(st.sampled_from(kinds)))
    if draw(st.booleans()) and made.numel() and not made.dtype.is_complex and made.dtype != torch.bool:
        made.view(-1).copy_(torch.arange(made.numel()) % draw(st.integers(1, 9)))
    match draw(
        st.sampled_from(["", "turned", "strided", "expanded", "meta", "gradient", "numpy", "parameter", "subclass"])
    ):
        case "turned" if made.dim() > 1:
            return made.transpose(0, -1)
        case "strided" if made.dim():
            return torch.stack([made, made], -1)[..., 0]
        case "expanded" if made.dim():
            return made[:1].expand(draw(st.integers(0, 7)), *made.shape[1:]) if len(made) else made
        case "meta":
            return made.to("meta")
        case "gradient" if made.is_floating_point():
            return made.requires_grad_()
        case "numpy" if made.dtype != torch.bfloat16:
            return made.numpy()
        case "parameter" if made.is_floating_point():
            return torch.nn.Parameter(made)
    return made


TENSORS = tensors()


def blocks(model: Path, record: str) -> Iterator[tuple[str, Callable[[Path, int, int], tuple[int, str | None]]]]:
    """(row, how a block is tried in a folder with a seed and so many draws) of everything that is drawn."""
    for row, trials in commands(model):
        yield row, partial(block, trials, try_out)
    for row, made, attempt in changes.every(model, record):
        yield row, partial(block, made, attempt)
    for row, wrong, call in arguments():
        yield row, partial(block, wrong, lambda drawn, _, call=call: call(drawn))


def block(
    what: Any, attempt: Callable[[Any, Path], str | None], folder: Path, seed: int, examples: int
) -> tuple[int, str | None]:
    """(how many were tried, None or the smallest of what is wrong with its reason)."""
    tried, failed, numbers = 0, False, itertools.count()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink], report_multiple_bugs=False, print_blob=False,
    )  # fmt: skip
    @hypothesis.given(what)
    def one(drawn: Any) -> None:
        nonlocal tried, failed
        place = folder / str(next(numbers))
        place.mkdir()
        found = attempt(drawn, place)
        tried, failed = tried + (not failed), failed or found is not None
        if found is not None:
            raise Found(f"{drawn if isinstance(drawn, (Trial, changes.Change)) else ''}: {found}")

    try:
        one()
    except Found as error:
        return tried, str(error)
    except hypothesis.errors.FlakyFailure as error:  # only once: as when a first import is counted, or a disk is slow
        return tried, f"only once: {', '.join(map(str, error.exceptions))}"
    return tried, None


class Found(Exception):
    """What is wrong with a draw."""
