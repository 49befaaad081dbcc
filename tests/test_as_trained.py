"""What a model answers as it was trained: in its run's rows, with what its boundary scheme lets cross."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from packmamba import MambaLM, cli
from packmamba.config import DataConfig, TrainerConfig
from packmamba.data.packing import plan_rows
from packmamba.evaluation.asked import Asked
from packmamba.evaluation.evaluate import evaluate
from packmamba.evaluation.tasks.contradiction import INTRUDING, Contradiction
from packmamba.records import read_records
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from runs import CARRY, tiny_config

EVENTS = {"events": (2, 6), "num_keys": 3, "num_values": 4, "read_fraction": 0.6}
ASKED = [
    "evaluations=[perplexity,contradiction]",
    "evaluation_examples=20",
    "evaluation_options.contradiction.events=[2,6]",
]


def asked(boundary="leak", **data):
    return Asked(
        DataConfig(**{"strategy": "greedy", "row_length": 40} | data), None, examples=30, max_slots=256,
        options={**EVENTS, "events": [2, 6]}, trainer=TrainerConfig(boundary=boundary),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(
        vocab_size=10, d_model=16, n_layer=2, tie_embeddings=False
    ).double()  # tied, it repeats what it reads


def rows_by_hand(examples, row_length=40):
    plan = plan_rows([len(e.tokens) for e in examples], row_length=row_length, strategy="greedy")
    return [[piece.document for piece in row] for row in plan]


def test_under_leak_each_row_is_read_as_one_document(model):
    task = Contradiction(**EVENTS)
    examples = [task.example(1_000_000, i) for i in range(30)]
    found = evaluate("contradiction", model, asked())
    reads = right = said_left = alone_right = 0
    for row in rows_by_hand(examples):
        with torch.no_grad():
            flow = model(torch.tensor(np.concatenate([examples[i].tokens for i in row]))[None])[0].log_softmax(-1)
        begin = 0
        for before, i in zip([None, *row], row):
            example, own = examples[i], flow[begin : begin + len(examples[i].tokens)][torch.tensor(examples[i].mask)]
            begin += len(example.tokens)
            targets = example.targets[example.mask]
            item = found.items[i]
            assert item["right_as_trained"] == int((own.argmax(-1).numpy() == targets).sum())
            nats = -float(own.gather(1, torch.tensor(targets)[:, None]).sum())
            assert item["nats_as_trained"] == pytest.approx(nats, abs=1e-9)
            with torch.no_grad():
                alone = model(torch.tensor(example.tokens)[None])[0][torch.tensor(example.mask)].argmax(-1).numpy()
            for n, place in enumerate(np.flatnonzero(example.mask)):
                key, left = example.tokens[place], None if before is None else examples[before].notes["held"]
                if targets[n] == task.NONE and left and key in left:
                    reads += 1
                    right += int(own[n].argmax()) == targets[n]
                    said_left += int(own[n].argmax()) == left[key]
                    alone_right += alone[n] == targets[n]
    assert reads > 10 and said_left > 0
    metrics = found.metrics
    assert metrics["reads_intruding"] == reads and metrics["accuracy_intruding"] == alone_right / reads
    assert metrics["accuracy_intruding_as_trained"] == right / reads
    assert metrics["intrusions_as_trained"] == said_left / reads
    whole = sum(item["right_as_trained"] for item in found.items) / sum(item["answers"] for item in found.items)
    assert metrics["accuracy_as_trained"] == pytest.approx(whole)
    assert sum(p["accuracy_as_trained"] * p["answers"] for p in found.curves["by_length"]) == pytest.approx(
        whole * metrics["answers"]
    )


def test_arms_without_neighbours_are_asked_the_same_reads(model):
    leak, *others = (
        evaluate("contradiction", model, asked(boundary, **data)).metrics
        for boundary, data in (
            ("leak", {}), ("reset", {}), ("reset", {"strategy": "padded"}), ("reset", {"strategy": "single"})
        )
    )  # fmt: skip
    for metrics in others:
        assert metrics == {key: value for key, value in leak.items() if not key.endswith("_as_trained")}


def test_documents_are_cut_before_they_are_packed(model):
    task = Contradiction(**EVENTS)
    found = evaluate("contradiction", model, asked("leak", strategy="single", cut_documents=6))
    for i, item in enumerate(found.items):
        example = task.example(1_000_000, i)
        with torch.no_grad():
            parts = [
                model(torch.tensor(example.tokens[at : at + 6])[None])[0] for at in range(0, len(example.tokens), 6)
            ]
        log_p = torch.cat(parts).log_softmax(-1)[torch.tensor(example.mask)]
        nats = -log_p.gather(1, torch.tensor(example.targets[example.mask])[:, None]).sum()
        assert item["nats_as_trained"] == pytest.approx(float(nats), abs=1e-9)


@pytest.mark.parametrize("keys", [{"streams": 2}, {"streams": 3, "row_length": 7}])
def test_carried_documents_are_answered_as_alone(model, keys):
    """Carry cuts documents at the ends of rows and goes on from their states."""
    metrics = evaluate("contradiction", model, asked("carry", strategy="split", **keys)).metrics
    assert metrics["nats_as_trained"] == pytest.approx(metrics["nats"], abs=1e-9)
    assert metrics["accuracy_as_trained"] == metrics["accuracy"]
    assert "best_as_trained" not in metrics


def brute_force(task, row, said):
    """The chance of each answer to the last read, given every event before and the answers ``said``: the sum over all ways to
    cut the events into documents."""
    *before, (_, key) = row
    low, high = task.events
    weights: dict[int, float] = {}
    length = len(row)
    for cuts in itertools.product((False, True), repeat=length - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        chance, held, answer = 1.0, {}, None
        for start, end in zip(starts, [*starts[1:], None]):
            held, size = {}, (length if end is None else end) - start
            if end is None:  # the current document goes on or ends here
                lasting = [n for n in range(low, high + 1) if n >= size]
                own = sum((1 if n == size else task.read_fraction) / (high - low + 1) for n in lasting)
            else:
                own = 1 / (high - low + 1) if low <= size <= high else 0.0
            chance *= own
            for i in range(start, start + size):
                kind, at = row[i][:2]
                last = end is not None and i == end - 1
                if i < length - 1:
                    chance *= (kind == task.READ) if last else (
                        task.read_fraction if kind == task.READ else 1 - task.read_fraction
                    )  # fmt: skip
                if kind == task.READ:
                    right = held.get(at, task.NONE)
                    if i == length - 1:
                        answer = right
                    else:
                        chance *= right == row[i][2]
                else:
                    held[at] = row[i][2]
        weights[answer] = weights.get(answer, 0.0) + chance
    return weights


def test_the_best_reader_weighs_every_way_to_cut_the_row():
    task = Contradiction(events=(2, 4), num_keys=2, num_values=3, read_fraction=0.5)
    checked = 0
    for first in range(0, 60, 3):
        row = [task.example(3, first + i) for i in range(3)]
        events = [tuple(event) for example in row for event in example.tokens.reshape(-1, 3).tolist()]
        said = np.concatenate(task.best(row)).tolist()
        for i, event in enumerate(e for e in events):
            if event[0] == task.READ:
                weights = brute_force(task, [*events[:i], event[:2]], said)
                found = said.pop(0)
                assert weights[found] == pytest.approx(max(weights.values())), (first, i, weights)
                checked += len(weights) > 1
    assert checked > 20


def test_the_best_reader_is_perfect_in_one_document_and_not_in_two():
    task = Contradiction(num_keys=4)
    examples = [task.example(0, i) for i in range(60)]
    for example in examples[:10]:
        assert np.array_equal(task.best([example])[0], example.targets[example.mask])
    right = {kind: [] for kind in (True, False)}
    for pair in zip(examples[::2], examples[1::2]):
        kinds, _ = task.reads(pair[1], pair[0])
        for kind, said, target in zip(kinds, task.best(pair)[1], pair[1].targets[pair[1].mask]):
            right[kind == INTRUDING].append(said == target)
    assert np.mean(right[True]) < 0.9 < np.mean(right[False])
    told = Contradiction(begin=True)
    pair = [told.example(0, 0), told.example(0, 1)]
    assert all(np.array_equal(said, example.targets[example.mask]) for said, example in zip(told.best(pair), pair))


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["trainer.boundary=leak", "data.strategy=greedy"], CARRY])
def test_a_run_s_loss_as_trained(tmp_path, keys, capsys):
    config = tiny_config(tmp_path, *keys, *ASKED, "trainer.max_steps=2", "trainer.validate_every=2")
    record = fit(config, progress=False)["metrics"]
    assert record["perplexity.loss_as_trained"] == pytest.approx(record["val_loss_as_trained"], abs=1e-5)
    assert (record["perplexity.loss_as_trained"] == pytest.approx(record["val_loss"], abs=1e-7)) == (keys is CARRY)
    folder = run_folder(config)
    assert cli.main(["eval", str(folder), "tasks=[contradiction]", "examples=20", "device=cpu",
                     "options.contradiction.events=[2,6]"]) == 0  # fmt: skip
    (evaluated,) = read_records(folder / "evaluation")
    own = {key: value for key, value in record.items() if key.startswith("contradiction.")}
    assert own == {f"contradiction.{key}": value for key, value in evaluated["metrics"].items()}
    assert {"contradiction.accuracy", "contradiction.accuracy_as_trained"} <= own.keys()
    assert json.loads(json.dumps(evaluated["config"]["evaluation"]["boundary"])) == {config.trainer.boundary: {}}
