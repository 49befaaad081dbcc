"""Losses, gains and answers of packed evaluation are those of the definition, one document at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.data.corpus import load_corpora
from packmamba.evaluation import passes
from packmamba.evaluation.accuracy import Accuracy
from packmamba.evaluation.answers import answer, choose, items
from packmamba.evaluation.asked import Asked
from packmamba.evaluation.evaluate import evaluate, slots
from packmamba.evaluation.perplexity import (
    context_gains,
    gain_entries,
    means_between,
    remembrance,
    sums_between,
    token_losses,
    windows_reached,
)
from packmamba.evaluation.tasks import TASKS
from runs import tiny_config


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=256, d_model=24, n_layer=2).double()


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, n) for n in (1, 2, 70, 33, 300, 128, 5, 64)]


def log_probabilities(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(np.array([tokens])))[0].log_softmax(-1)


def losses_alone(model, document):
    if len(document) < 2:
        return np.zeros(0)
    log_p = log_probabilities(model, document)[:-1]
    return -log_p.gather(1, torch.tensor(document[1:, None])).squeeze(1).numpy()


def test_losses_are_those_of_documents_alone(model, documents):
    for found, document in zip(token_losses(model, documents, max_slots=48), documents):
        np.testing.assert_allclose(found, losses_alone(model, document), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", [3, 64, 16384])
def test_losses_do_not_depend_on_how_many_logits_are_made_at_a_time(model, documents, rows, monkeypatch):
    monkeypatch.setattr(passes, "head_rows", lambda vocab_size, on_gpu: rows)
    for found, document in zip(token_losses(model, documents, max_slots=48), documents):
        np.testing.assert_allclose(found, losses_alone(model, document), rtol=0, atol=1e-10)


def test_small_vocabularies_fill_a_gpu():
    assert [passes.head_rows(size, True) for size in (2, 256, 4096, 50280, 10**9)] == [16384, 16384, 8192, 512, 512]
    assert passes.head_rows(256, False) == 512


def test_narrow_models_have_larger_passes_on_a_gpu():
    def model(width, is_cuda):
        weight = SimpleNamespace(shape=(256, width), is_cuda=is_cuda)
        return SimpleNamespace(lm_head=SimpleNamespace(weight=weight))

    assert [slots(model(*case)) for case in ((512, True), (1024, True), (512, False))] == [65536, 16384, 2048]


def test_by_position(model, documents):
    losses = token_losses(model, documents, max_slots=128)
    edges = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    rows = means_between(edges, [sums_between(edges, some) for some in losses], [len(some) for some in losses])
    assert [row["start"] for row in rows] == edges[:-1]
    assert sum(row["count"] for row in rows) == sum(map(len, losses))
    fourth = [some[7:15] for some in losses if len(some) >= 8]
    assert rows[3]["loss"] == pytest.approx(np.concatenate(fourth).mean()) and rows[3]["documents"] == len(fourth)


def context_gain(model, documents, window, context=0, groups=None, least=(1, 1)):
    reached = windows_reached([len(document) for document in documents], window, 64, groups, least)
    return gain_entries(context_gains(model, documents, window, reached, 100, context), groups)


def test_context_gain_compares_the_same_targets(model, documents):
    entries = context_gain(model, documents, window=32)
    assert [entry["windows"] for entry in entries] == [2, 4, 8]
    assert [entry["documents"] for entry in entries] == [4, 2, 1]
    for entry in entries:
        end = entry["windows"] * 32
        for i, gain in entry["gains"].items():
            alone = losses_alone(model, documents[i][end - 32 : end]).mean()
            whole = losses_alone(model, documents[i])[end - 32 : end - 1].mean()
            assert gain == pytest.approx(alone - whole, abs=1e-10)
        assert entry["gain"] == pytest.approx(np.mean(list(entry["gains"].values())))


@pytest.mark.parametrize("context", [1, 20, 32, 64])
def test_context_gain_beyond_a_context_leaves_its_tokens_to_both(model, documents, context):
    entries = context_gain(model, documents, window=32, context=context)
    assert [entry["windows"] for entry in entries] == ([2, 4, 8] if context < 32 else [4, 8])
    for entry in entries:
        first, end = (entry["windows"] - 1) * 32, entry["windows"] * 32
        for i, gain in entry["gains"].items():
            short = losses_alone(model, documents[i][first - context : end])[context:]
            whole = losses_alone(model, documents[i])[first : end - 1]
            assert len(short) == len(whole) == 31
            assert gain == pytest.approx(short.mean() - whole.mean(), abs=1e-10)


def test_context_gain_stops_where_too_few_documents_or_groups_reach(model, documents):
    assert [e["documents"] for e in context_gain(model, documents, 32)] == [4, 2, 1]
    assert [e["windows"] for e in context_gain(model, documents, 32, least=(2, 1))] == [2, 4]
    lengths = [len(document) for document in documents]
    same = [0 if length >= 128 else i for i, length in enumerate(lengths, start=1)]
    assert [(e["windows"], e["groups"]) for e in context_gain(model, documents, 32, groups=same, least=(1, 2))] == [
        (2, 3)
    ]


def test_remembrance_is_total_variation(model, documents):
    long, starts = [document for document in documents if len(document) >= 64], [1, 32, 63]
    for document, values in zip(long, remembrance(model, long, 64, starts, max_slots=50)):
        whole = log_probabilities(model, document[:64])[-1].exp()
        for t, value in zip(starts, values):
            expected = (whole - log_probabilities(model, document[t:64])[-1].exp()).abs().sum() / 2
            assert value == pytest.approx(float(expected), abs=1e-10) and 0 <= value <= 1


@pytest.mark.parametrize("name", ["mqar", "contradiction", "next_line"])
def test_answers_are_those_of_examples_alone(model, name):
    options = {"mqar": {"vocab_size": 256}, "next_line": {"context": 60, "documents": [LINES]}}.get(name, {})
    task = TASKS[name](**options)
    examples = [task.example(0, index) for index in range(12)]
    metric = Accuracy()
    for some in (answer(model, examples, max_slots=90), answer(model, examples[::-1], max_slots=90)[::-1]):
        for said, example in zip(some, examples):
            log_p = log_probabilities(model, example.tokens)[example.mask]
            targets = torch.tensor(example.targets[example.mask])
            assert np.array_equal(said.said, log_p.argmax(-1).numpy())
            assert np.array_equal(said.right, (log_p.argmax(-1) == targets).numpy())
            np.testing.assert_allclose(said.nats, -log_p.gather(1, targets[:, None]).squeeze(1).numpy(), atol=1e-10)
            if example.choices:
                context = example.tokens[: example.load]
                values = [
                    -losses_alone(model, np.concatenate([context, choice]))[len(context) - 1 :].sum()
                    for choice in example.choices
                ]
                assert said.choice == int(np.argmax(values))
                assert said.by_bytes == int(np.argmax(np.array(values) / [len(c) for c in example.choices]))
    metric.update(items(some[:5], examples[:5]))
    metric.update(items(some[5:], examples[5:]))
    result = metric.compute()
    right = np.concatenate([said.right for said in some])
    assert result["accuracy"] == pytest.approx(right.mean()) and result["answers"] == len(right)
    for table in (result["by_length"], result["by_load"]):
        assert sum(row["answers"] for row in table) == len(right)
    assert math.isnan(result["choice_accuracy"]) == (name != "next_line")


LINES = "\n".join(f"    value_{i % 7}{i} = compute({i * 37 % 101}, name_{i % 5})" for i in range(200))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS))
def test_an_untrained_model_is_at_chance_or_below(name):
    """Tasks do not give their answers away."""
    options = {
        "passkey": {"length": (300, 400), "documents": [LINES]},
        "next_line": {"documents": [LINES], "per_package": 100},
    }
    task = TASKS[name](**options.get(name, {}))
    examples = [task.example(1, index) for index in range(100)]
    accuracies = []
    for seed in range(4):
        torch.manual_seed(seed)
        lm = MambaLM(vocab_size=task.vocab_size, d_model=16, n_layer=1)
        metric = Accuracy()
        metric.update(items(answer(lm, examples, max_slots=4096), examples))
        result = metric.compute()
        accuracies.append(result["choice_accuracy" if task.num_examples else "accuracy"])
    count = 4 * len(examples)
    assert np.mean(accuracies) < task.chance + 4 * (task.chance * (1 - task.chance) / count) ** 0.5 + 0.01


def test_ids_outside_of_the_vocabulary_are_refused():
    lm = MambaLM(vocab_size=10, d_model=8, n_layer=1)
    with pytest.raises(ValueError, match=r"examples\[0\]: expected ids below the model's vocab_size 10, got"):
        answer(lm, [TASKS["mqar"]().example(0, 0)])
    assert choose(lm, []) == []


def test_under_autocast_the_head_computes_as_its_weights_are():
    torch.manual_seed(0)
    model = MambaLM(vocab_size=256, d_model=24, n_layer=2)
    with torch.no_grad():
        model.lm_head.weight *= 40
    document = np.random.default_rng(1).integers(0, 256, 65)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (found,) = token_losses(model, [document], max_slots=64)
        hidden = model(torch.tensor(document[None, :-1]), return_hidden=True)[0]
    assert hidden.dtype == torch.bfloat16
    targets, weight = torch.tensor(document[1:]), model.lm_head.weight.detach()
    expected = torch.nn.functional.cross_entropy(hidden.float() @ weight.t(), targets, reduction="none")
    assert np.allclose(found, expected, rtol=1e-5)
    halved = torch.nn.functional.cross_entropy((hidden @ weight.t().bfloat16()).float(), targets, reduction="none")
    assert not np.allclose(found, halved, rtol=1e-4)


@pytest.mark.gpu
def test_what_was_trained_in_mixed_precision_reads_so_on_a_gpu(tmp_path):
    config = tiny_config(tmp_path, "model.d_state=16", "trainer.precision=bf16-mixed")
    vocab_size = load_corpora(config.data, progress=False).validation.vocab_size
    torch.manual_seed(0)
    model = MambaLM(vocab_size, d_model=64, n_layer=2).cuda()
    seen = []
    model.backbone.layers[1].register_forward_hook(lambda *arguments: seen.append(arguments[2][1].dtype))
    loss = {}
    for precision in ("bf16-mixed", "32-true"):
        asked = Asked(config.data, None, trainer=replace(config.trainer, precision=precision))
        loss[precision] = evaluate("perplexity", model, asked).metrics["loss"]
        assert set(seen) == {torch.bfloat16 if precision == "bf16-mixed" else torch.float32}
        seen.clear()
    assert 0 < abs(loss["bf16-mixed"] - loss["32-true"]) < 1e-3
