"""Answers to a task's examples are those of examples alone, and as trained those of the run's rows."""

import itertools
import math

import numpy as np
import pytest
import torch

import experiments.tasks.contradiction  # adds its task
import experiments.tasks.passkey  # noqa: F401
from packmamba import MambaLM
from packmamba.config import DataConfig, TrainerConfig
from packmamba.data.packing import plan_rows
from packmamba.data.tasks import TASKS
from packmamba.data.tokenizer import ByteTokenizer
from packmamba.evaluation.packed_forward import TrainingLayoutReader
from packmamba.evaluation.registry import EvalContext, evaluate
from packmamba.evaluation.synthetic import answer, summarize, tokenize
from packmamba.training.boundary import Reset

LINES = "\n".join(f"    value_{i % 7}{i} = compute({i * 37 % 101}, name_{i % 5})" for i in range(200))


def log_probabilities(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.array([tokens])))[0].log_softmax(-1)


@pytest.mark.parametrize("name", ["mqar", "contradiction", "next_line"])
def test_answers_are_those_of_examples_alone(name):
    torch.manual_seed(0)
    model = MambaLM(vocab_size=256, d_model=24, n_layer=2).double()
    options = {"mqar": {"vocab_size": 256}, "next_line": {"context": 60, "documents": [("one", LINES)]}}.get(name, {})
    examples = [TASKS[name](**options).example(0, index) for index in range(12)]
    items, predicted = answer(model, examples, max_slots=90)
    assert items == answer(model, examples[::-1], max_slots=90)[0][::-1], "to the bit"
    for example, item, ids in zip(examples, items, predicted):
        log_p = log_probabilities(model, example.tokens)[example.mask]
        targets = torch.tensor(example.targets[example.mask])
        assert np.array_equal(ids, log_p.argmax(-1).numpy())
        assert item["right"] == int((log_p.argmax(-1) == targets).sum())
        assert item["nats"] == pytest.approx(-float(log_p.gather(1, targets[:, None]).sum()), abs=1e-9)
        if example.choices:
            values = []
            for choice in example.choices:
                whole = np.concatenate([example.context, choice])
                rows = log_probabilities(model, whole)[len(example.context) - 1 : -1]
                values.append(float(rows.gather(1, torch.tensor(choice)[:, None]).sum()))
            assert item["choice"] == int(np.argmax(values))
            assert item["by_bytes"] == int(np.argmax(np.array(values) / [len(c) for c in example.choices]))
    metrics, curves = summarize(items)
    count = sum(item["answers"] for item in items)
    assert metrics["accuracy"] == pytest.approx(sum(item["right"] for item in items) / count)
    assert all(sum(row["answers"] for row in table) == metrics["answers"] == count for table in curves.values())
    assert ("choice_accuracy" in metrics) == (name == "next_line")


class Pairs(ByteTokenizer):
    """Two ASCII bytes are one token, from the left."""

    vocab_size = 256 * 128

    def encode(self, text):
        pairs = itertools.zip_longest(text.encode()[::2], text.encode()[1::2], fillvalue=0)
        return np.array([a + 256 * b for a, b in pairs], dtype=np.int64)


@pytest.mark.parametrize("name", ["next_line", "passkey"])
def test_examples_of_bytes_in_a_tokenizer_s_tokens(name):
    task = TASKS[name](documents=[("one", LINES)], **({"length": 400} if name == "passkey" else {"context": 200}))
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


def ask(model, boundary, **data):
    config, trainer = DataConfig(**{"strategy": "greedy", "row_length": 40} | data), TrainerConfig(boundary=boundary)
    context = EvalContext(config, None, 30, max_slots=256, options={"length": [2, 15]}, trainer=trainer)
    return evaluate("parity", model, context)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=10, d_model=16, n_layer=2, tie_embeddings=False).double()


def test_under_leak_each_row_is_read_as_one_document(model):
    examples = [TASKS["parity"](length=(2, 15)).example(1_000_000, i) for i in range(30)]
    plan = plan_rows([len(e.tokens) for e in examples], row_length=40, strategy="greedy")
    found = ask(model, "leak")
    for row in [[examples[piece.document] for piece in row] for row in plan]:
        flow = log_probabilities(model, np.concatenate([example.tokens for example in row]))
        for example, end in zip(row, np.cumsum([len(example.tokens) for example in row])):
            item = found.items[examples.index(example)]
            assert item["nats_as_trained"] == pytest.approx(-float(flow[end - 1, example.targets[-1]]), abs=1e-9)
            assert item["right_as_trained"] == int(flow[end - 1].argmax() == example.targets[-1])
            alone = log_probabilities(model, example.tokens)[-1, example.targets[-1]]
            assert item["nats"] == pytest.approx(-float(alone))
    alone = ask(model, "reset").metrics
    assert alone == {key: value for key, value in found.metrics.items() if not key.endswith("_as_trained")}


def test_documents_are_cut_before_they_are_packed(model):
    for i, item in enumerate(ask(model, "leak", strategy="single", cut_documents=6).items):
        example = TASKS["parity"](length=(2, 15)).example(1_000_000, i)
        last = log_probabilities(model, example.tokens[(len(example.tokens) - 1) // 6 * 6 :])[-1]
        assert item["nats_as_trained"] == pytest.approx(-float(last[example.targets[-1]]), abs=1e-9)


@pytest.mark.parametrize("keys", [{"streams": 2}, {"streams": 3, "row_length": 7}])
def test_carried_documents_are_answered_as_alone(model, keys):
    metrics = ask(model, "carry", strategy="concat_split", **keys).metrics
    assert metrics["nats_as_trained"] == pytest.approx(metrics["nats"], abs=1e-9)
    assert metrics["accuracy_as_trained"] == metrics["accuracy"]


def test_contradiction_counts_reads_that_only_the_document_before_wrote():
    task = TASKS["contradiction"](events=(2, 6), num_keys=3, num_values=4)
    examples = [task.example(0, i) for i in range(20)]
    rows = TrainingLayoutReader([e.tokens for e in examples], DataConfig(strategy="next_fit", row_length=36), Reset())
    plan = rows.plan
    order = [[examples[d] for d in plan.document[a:b]] for a, b in itertools.pairwise(plan.row_offsets)]
    expected = []
    for before, example in (pair for row in order for pair in itertools.pairwise(row)):
        left = {key: value for kind, key, value in before.tokens.reshape(-1, 3).tolist() if kind == task.WRITE}
        reads = [event for event in example.tokens.reshape(-1, 3).tolist() if event[0] == task.READ]
        expected += [left[key] for _, key, value in reads if value == task.NONE and key in left]
    right = [example.targets[example.mask] for example in examples]
    assert len(expected) > 1
    assert task.annotate(examples, right, rows) == {"accuracy_intruding": 1.0, "intrusions": 0.0}
    said = [np.full_like(some, expected[0]) for some in right]
    share = sum(value == expected[0] for value in expected) / len(expected)
    assert task.annotate(examples, said, rows) == {"accuracy_intruding": 0.0, "intrusions": pytest.approx(share)}
