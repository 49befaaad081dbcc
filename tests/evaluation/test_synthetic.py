"""Answers to a task's examples are those of examples alone, and as trained those of the run's rows."""

import itertools
import math

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.config import DataConfig, TrainerConfig
from packmamba.data.packing import plan_rows
from packmamba.data.tokenizer import ByteTokenizer
from packmamba.evaluation.registry import EvalContext, evaluate
from packmamba.evaluation.synthetic import accuracy, answer, predict, tokenize
from packmamba.evaluation.tasks import TASKS
from packmamba.evaluation.tasks.contradiction import Contradiction

LINES = "\n".join(f"    value_{i % 7}{i} = compute({i * 37 % 101}, name_{i % 5})" for i in range(200))
EVENTS = {"events": (2, 6), "num_keys": 3, "num_values": 4, "read_fraction": 0.6}


def log_probabilities(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.array([tokens])))[0].log_softmax(-1)


@pytest.mark.parametrize("name", ["mqar", "contradiction", "next_line"])
def test_answers_are_those_of_examples_alone(name):
    torch.manual_seed(0)
    model = MambaLM(vocab_size=256, d_model=24, n_layer=2).double()
    options = {"mqar": {"vocab_size": 256}, "next_line": {"context": 60, "documents": [LINES]}}.get(name, {})
    examples = [TASKS[name](**options).example(0, index) for index in range(12)]
    predicted, nats = predict(model, examples, max_slots=90)
    items, _ = answer(model, examples, max_slots=90)
    assert items == answer(model, examples[::-1], max_slots=90)[0][::-1], "to the bit"
    for example, item, ids, losses in zip(examples, items, predicted, nats):
        log_p = log_probabilities(model, example.tokens)[example.mask]
        targets = torch.tensor(example.targets[example.mask])
        assert np.array_equal(ids, log_p.argmax(-1).numpy())
        assert item["right"] == int((log_p.argmax(-1) == targets).sum())
        np.testing.assert_allclose(losses, -log_p.gather(1, targets[:, None]).squeeze(1).numpy(), atol=1e-10)
        if example.choices:
            values = []
            for choice in example.choices:
                whole = np.concatenate([example.context, choice])
                rows = log_probabilities(model, whole)[len(example.context) - 1 : -1]
                values.append(float(rows.gather(1, torch.tensor(choice)[:, None]).sum()))
            assert item["choice"] == int(np.argmax(values))
            assert item["by_bytes"] == int(np.argmax(np.array(values) / [len(c) for c in example.choices]))
    metrics, curves = accuracy(items)
    count = sum(item["answers"] for item in items)
    assert metrics["accuracy"] == pytest.approx(sum(item["right"] for item in items) / count)
    for table in curves.values():
        assert sum(row["answers"] for row in table) == metrics["answers"] == count
    assert math.isnan(metrics["choice_accuracy"]) == (name != "next_line")


class Pairs(ByteTokenizer):
    """Two ASCII bytes are one token, from the left."""

    vocab_size = 256 * 128

    def encode(self, text):
        pairs = itertools.zip_longest(text.encode()[::2], text.encode()[1::2], fillvalue=0)
        return np.array([a + 256 * b for a, b in pairs], dtype=np.int64)


@pytest.mark.parametrize("name", ["next_line", "passkey"])
def test_examples_of_bytes_in_a_tokenizer_s_tokens(name):
    task = TASKS[name](documents=[LINES], **({"length": 400} if name == "passkey" else {"context": 200}))
    plain = [task.example(0, i) for i in range(6)]
    examples = [tokenize(example, Pairs()) for example in plain]
    for before, after in zip(plain, examples):
        text, right = (bytes(ids.tolist()).decode() for ids in (before.context, before.targets[before.mask]))
        assert after.context.tolist() == Pairs().encode(text).tolist()
        assert after.targets[after.mask].tolist() == Pairs().encode(right).tolist()
    torch.manual_seed(0)
    items, _ = answer(MambaLM(vocab_size=Pairs.vocab_size, d_model=8, n_layer=1), examples, 512)
    for item, before in zip(items, plain):
        assert item["answers"] == math.ceil(before.mask.sum() / 2)
        assert name == "passkey" or item["bytes"] == len(before.choices[before.answer])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)  # tied, it repeats what it reads
    return MambaLM(vocab_size=10, d_model=16, n_layer=2, tie_embeddings=False).double()


def ask(model, boundary="leak", **data):
    data = DataConfig(**{"strategy": "greedy", "row_length": 40} | data)
    options = {**EVENTS, "events": [2, 6]}
    trainer = TrainerConfig(boundary=boundary)
    context = EvalContext(data, None, examples=30, max_slots=256, options=options, trainer=trainer)
    return evaluate("contradiction", model, context)


def test_under_leak_each_row_is_read_as_one_document(model):
    task = Contradiction(**EVENTS)
    examples = [task.example(1_000_000, i) for i in range(30)]
    found = ask(model)
    reads = right = said_left = alone_right = 0
    plan = plan_rows([len(e.tokens) for e in examples], row_length=40, strategy="greedy")
    for row in [[piece.document for piece in row] for row in plan]:
        flow = log_probabilities(model, np.concatenate([examples[i].tokens for i in row]))
        begin = 0
        for before, i in zip([None, *row], row):
            example, own = examples[i], flow[begin : begin + len(examples[i].tokens)][examples[i].mask]
            begin += len(example.tokens)
            targets = example.targets[example.mask]
            item = found.items[i]
            assert item["right_as_trained"] == int((own.argmax(-1).numpy() == targets).sum())
            nats = -float(own.gather(1, torch.tensor(targets)[:, None]).sum())
            assert item["nats_as_trained"] == pytest.approx(nats, abs=1e-9)
            alone = log_probabilities(model, example.tokens)[example.mask].argmax(-1).numpy()
            for n, place in enumerate(np.flatnonzero(example.mask)):
                key, left = example.tokens[place], {} if before is None else examples[before].notes["held"]
                if targets[n] == task.NONE and key in left:
                    reads += 1
                    right += int(own[n].argmax()) == targets[n]
                    said_left += int(own[n].argmax()) == left[key]
                    alone_right += alone[n] == targets[n]
    assert reads > 10 and said_left > 0
    metrics = found.metrics
    assert metrics["reads_intruding"] == reads and metrics["accuracy_intruding"] == alone_right / reads
    assert metrics["accuracy_intruding_as_trained"] == right / reads
    assert metrics["intrusions_as_trained"] == said_left / reads
    for strategy in ("greedy", "padded", "single"):  # arms without neighbours get the same reads
        others = ask(model, "reset", strategy=strategy).metrics
        assert others == {key: value for key, value in metrics.items() if not key.endswith("_as_trained")}


def test_documents_are_cut_before_they_are_packed(model):
    task = Contradiction(**EVENTS)
    for i, item in enumerate(ask(model, "leak", strategy="single", cut_documents=6).items):
        example = task.example(1_000_000, i)
        parts = [log_probabilities(model, example.tokens[at : at + 6]) for at in range(0, len(example.tokens), 6)]
        log_p = torch.cat(parts)[example.mask]
        nats = -log_p.gather(1, torch.tensor(example.targets[example.mask])[:, None]).sum()
        assert item["nats_as_trained"] == pytest.approx(float(nats), abs=1e-9)


@pytest.mark.parametrize("keys", [{"streams": 2}, {"streams": 3, "row_length": 7}])
def test_carried_documents_are_answered_as_alone(model, keys):
    metrics = ask(model, "carry", strategy="concat_split", **keys).metrics
    assert metrics["nats_as_trained"] == pytest.approx(metrics["nats"], abs=1e-9)
    assert metrics["accuracy_as_trained"] == metrics["accuracy"] and "best_as_trained" not in metrics


def posterior(task, events):
    """Chances of each answer to the last read given all events before: the sum over all ways to cut them into documents."""
    low, high = task.events
    weights = {}
    for cuts in itertools.product((False, True), repeat=len(events) - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        chance, right = 1.0, None
        for start, end in zip(starts, [*starts[1:], len(events)]):
            held, size, current = {}, end - start, end == len(events)
            lasting = [n for n in range(low, high + 1) if (n >= size if current else n == size)]
            chance *= sum(1 if n == size or not current else task.read_fraction for n in lasting) / (high - low + 1)
            for i in range(start, end):
                kind, key, *value = events[i]
                if i < end - 1:
                    chance *= task.read_fraction if kind == task.READ else 1 - task.read_fraction
                elif not current:
                    chance *= kind == task.READ
                if kind != task.READ:
                    held[key] = value[0]
                elif value:
                    chance *= held.get(key, task.NONE) == value[0]
                else:
                    right = held.get(key, task.NONE)
        weights[right] = weights.get(right, 0.0) + chance
    return weights


def test_the_best_reader_weighs_every_way_to_cut_the_row():
    task = Contradiction(events=(2, 4), num_keys=2, num_values=3, read_fraction=0.5)
    checked = 0
    for first in range(0, 60, 6):
        row = [task.example(3, first + i) for i in range(3)]
        events = [tuple(event) for example in row for event in example.tokens.reshape(-1, 3).tolist()]
        best = np.concatenate(task.best(row)).tolist()
        for i, event in enumerate(events):
            if event[0] == task.READ:
                weights = posterior(task, [*events[:i], event[:2]])
                assert weights[best.pop(0)] == pytest.approx(max(weights.values())), (first, i, weights)
                checked += len(weights) > 1
    assert checked > 10
