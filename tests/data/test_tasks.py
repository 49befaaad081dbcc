"""Tasks are pure functions whose answers follow from their documents: a solver that only reads
finds every one.
"""

import hashlib
import re

import numpy as np
import pytest

import experiments.tasks.passkey  # noqa: F401  # adds its task
from packmamba.data.tasks import TASKS

DOCUMENTS = [
    ("one", "\n".join(f"    value_{i % 7}{i} = compute({i * 37 % 101}, name_{i % 5})" for i in range(300))),
    ("two", "\n".join(f"def function_{i}(argument):\n    return argument + {i * 13 % 97}\n" for i in range(200))),
]
OPTIONS = {"passkey": {"documents": DOCUMENTS}, "next_line": {"documents": DOCUMENTS}}


def make(name, **options):
    return TASKS[name](**OPTIONS.get(name, {}) | options)


def solve_mqar(task, tokens):
    held, place = {}, 0
    while tokens[place] not in held and tokens[place] < task.vocab_size // 2:
        held[tokens[place]] = tokens[place + 1]
        place += 2
    return {t: held[token] for t, token in enumerate(tokens) if t >= place and token in held}


def solve_selective_copying(task, tokens):
    data = [token for token in tokens if token < task.vocab_size - 2]
    first = int(np.argmax(tokens == task.vocab_size - 1))
    return {first + i: value for i, value in enumerate(data)}


def solve_induction(task, tokens):
    first = list(tokens).index(task.vocab_size - 1)
    return {len(tokens) - 1: tokens[first + 1]}


def solve_passkey(task, tokens):
    text = bytes(tokens.astype(np.uint8)).decode(errors="replace")
    asked = re.search(r"print\(KEY_(\w+)\) # ", text)
    value = re.search(rf"^KEY_{asked[1]} = (\d+)$", text, re.MULTILINE)[1]
    at = len(text[: asked.end()].encode(errors="replace")) - 1
    return {at + i: ord(digit) for i, digit in enumerate(value)}


SOLVERS = {name.removeprefix("solve_"): solver for name, solver in list(globals().items()) if name.startswith("solve_")}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_an_example_is_a_pure_function(name):
    task, again = make(name), make(name)
    examples = [task.example(0, index) for index in range(30)]
    for index in reversed(range(30)):
        other = again.example(0, index)
        for part in ("tokens", "targets", "mask"):
            assert np.array_equal(getattr(examples[index], part), getattr(other, part))
    for example in examples:
        n = len(example.tokens)
        assert example.tokens.dtype == example.targets.dtype == np.int64 and example.mask.dtype == bool
        assert example.targets.shape == example.mask.shape == (n,) and example.mask.any() and example.load > 0
        assert 0 <= min(example.tokens.min(), example.targets.min())
        assert max(example.tokens.max(), example.targets.max()) < task.vocab_size
    assert len({example.tokens.tobytes() for example in examples}) > 25
    assert len({len(example.tokens) for example in examples}) > 3, "lengths vary, so that packing matters"


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_a_solver_that_only_reads_finds_every_answer(name):
    task = make(name)
    for index in range(100):
        example = task.example(2, index)
        found = SOLVERS[name](task, example.tokens)
        answers = {int(t): int(example.targets[t]) for t in np.flatnonzero(example.mask)}
        assert {int(t): int(value) for t, value in found.items()} == answers


def test_examples_of_parity_are_those_of_committed_records():
    """A solver would repeat the task's own sum."""
    digest = hashlib.sha256()
    for example in (make("parity").example(0, index) for index in range(50)):
        digest.update(np.concatenate([example.tokens, example.targets, example.mask]).tobytes())
    assert digest.hexdigest()[:8] == "3d8fb87b"


def test_next_line_s_choices_are_alike_and_none_but_the_right_one_follows():
    task = make("next_line", context=500, per_package=15)
    assert 4 <= task.num_examples <= 30
    places = []
    for index in range(task.num_examples):
        example = task.example(0, index)
        context = bytes(example.tokens[: example.load].astype(np.uint8))
        right = bytes(example.choices[example.answer])
        assert any(context + right in text.encode() + b"\n" for _, text in DOCUMENTS)
        assert bytes(example.targets[example.mask].astype(np.uint8)) == right
        assert example.load <= 500 and len(set(map(bytes, example.choices))) == 4
        for choice in map(bytes, example.choices):
            assert choice not in context
            assert len(choice) - len(choice.lstrip()) == len(right) - len(right.lstrip())
            assert max(len(choice), len(right)) <= 4 / 3 * min(len(choice), len(right)) + 1
        places.append(example.answer)
    assert len(set(places)) == 4
    same, other = task.example(0, 3), task.example(5, 3)
    assert same.choices[same.answer] == other.choices[other.answer]


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mqar", {"num_pairs": 0}, "num_pairs"),
        ("mqar", {"num_pairs": 8, "length": 31}, "length: .* at least 32"),
        ("parity", {"length": "long"}, "length"),
        ("next_line", {"per_package": 0}, "per_package"),
        ("passkey", {"documents": [("one", "short")]}, "documents"),
    ],
)
def test_errors_name_the_parameter(name, options, match):
    with pytest.raises(ValueError, match=match):
        make(name, **options)
