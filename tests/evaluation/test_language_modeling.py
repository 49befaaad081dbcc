"""Losses and context gains of packed evaluation are those of the definition, one document at a
time.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from models import losses_alone
from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.data.token_store import load_corpora
from packmamba.evaluation.language_modeling import token_losses
from packmamba.evaluation.registry import EvalContext, check, evaluate
from runs import tiny_config


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=256, d_model=24, n_layer=2).double()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("corpus"), "data.row_length=8", "data.validation_fraction=0.5").data


@pytest.fixture(scope="module")
def texts(data):
    corpus = load_corpora(data).validation
    return [np.array(corpus.document(i), dtype=np.int64) for i in range(len(corpus))]


def test_losses_are_those_of_documents_alone(model):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, n) for n in (1, 2, 70, 33, 300, 128, 5, 64)]
    for found, document in zip(token_losses(model, documents, max_slots=48), documents):
        np.testing.assert_allclose(found, losses_alone(model, document), rtol=0, atol=1e-10)


@pytest.mark.parametrize("before", [0, 1, 4, 8])
def test_context_gain_compares_the_same_targets(model, data, texts, before):
    options = {"window": 4, "context": before}
    found = evaluate("long_context", model, EvalContext(data, None, max_slots=32, options=options))
    assert {item["windows"] for item in found.items} == ({2, 4, 8} if before < 4 else {4, 8})
    losses = {}
    for item in found.items:
        document, k = texts[item["document"]], item["windows"]
        first, end = (k - 1) * 4, k * 4
        short = losses_alone(model, document[first - before : end])[before:]
        full = losses_alone(model, document)[first : end - 1]
        assert item["gain"] == pytest.approx(short.mean() - full.mean(), abs=1e-10) and len(short) == len(full) == 3
        losses.setdefault(k, []).append(full.mean())
    for point in found.curves["context_gain"]:
        assert point["loss"] == pytest.approx(np.mean(losses[point["windows"]]))


def test_long_context_stops_where_too_few_documents_reach(model, data, texts):
    run = functools.partial(evaluate, "long_context", model)
    every = run(EvalContext(data, None, max_slots=32, options={"window": 4})).curves["context_gain"]
    reach = {k: sum(len(document) >= 4 * k for document in texts) for k in (2, 4, 8)}
    assert {entry["windows"]: entry["documents"] for entry in every} == reach
    few = run(EvalContext(data, None, max_slots=32, options={"window": 4, "documents": reach[8] + 1}))
    assert few.curves["context_gain"] == every[:2]


def test_perplexity_and_positions(model, data, texts):
    losses = [losses_alone(model, document) for document in texts]
    found = evaluate("perplexity", model, EvalContext(data, None, max_slots=32))
    assert found.metrics["loss"] == pytest.approx(np.concatenate(losses).mean(), abs=1e-10)
    assert found.metrics["targets"] == sum(map(len, losses)) and "loss_as_trained" not in found.metrics
    found = evaluate("positions", model, EvalContext(data, None, max_slots=32, options={"most": 4}))
    points = found.curves["by_window"]
    edges = [1, 2, 4, 8, 16, 32]  # the first target has position 1, and loss [0]
    assert [(point["start"], point["end"]) for point in points] == list(zip(edges, edges[1:]))
    for point in points:
        here = np.concatenate([some[point["start"] - 1 : point["end"] - 1] for some in losses])
        assert point["loss"] == pytest.approx(here.mean(), abs=1e-10) and point["count"] == len(here)
    assert found.metrics.keys() == {"loss_1", "loss_2", "loss_4", "documents"}
    assert found.metrics["loss_4"] == points[-1]["loss"]


def test_the_test_split_is_read_where_an_option_says_so(model, data):
    tested = replace(data, validation_fraction=0.2, test_fraction=0.3, validation_documents=1)
    corpus = load_corpora(tested).test
    losses = [losses_alone(model, corpus.document(i)) for i in range(len(corpus))]
    found = evaluate("perplexity", model, EvalContext(tested, options={"split": "test"}))
    assert found.metrics["documents"] == len(losses) > 5
    assert found.metrics["loss"] == pytest.approx(np.concatenate(losses).mean(), abs=1e-10)
    for wanted, options in ((data, {"split": "test"}), (tested, {"split": "tests"})):
        with pytest.raises(ConfigError, match=r"^options\.perplexity\.split: "):
            check("perplexity", EvalContext(wanted, options=options), 256)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("positions", {"window": 1}, "options.positions.window"),
        ("positions", {"length": 9}, "options.positions: .*'length'"),
        ("long_context", {"window": 40}, "long_context: .* at least 80 tokens"),
    ],
)
def test_errors_name_the_option(data, name, options, match):
    with pytest.raises(ConfigError, match=match):
        check(name, EvalContext(data, None, options=options), 256)


def test_the_head_computes_in_its_weights_dtype_under_autocast():
    torch.manual_seed(0)
    model = MambaLM(vocab_size=256, d_model=24, n_layer=2)
    document = np.random.default_rng(1).integers(0, 256, 65)
    with torch.no_grad():
        model.lm_head.weight *= 40
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        (found,) = token_losses(model, [document], max_slots=64)
        hidden = model(torch.tensor(document[None, :-1]), return_hidden=True)[0]
    logits = hidden.float() @ model.lm_head.weight.detach().t()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(document[1:]), reduction="none")
    assert hidden.dtype == torch.bfloat16 and np.allclose(found, expected, rtol=1e-5)


@pytest.mark.gpu
def test_mixed_precision_of_training_is_that_of_evaluation_on_a_gpu(tmp_path):
    config = tiny_config(tmp_path, "model.d_state=16", "trainer.precision=bf16-mixed")
    torch.manual_seed(0)
    model = MambaLM(load_corpora(config.data, progress=False).validation.vocab_size, d_model=64, n_layer=2).cuda()
    dtypes, loss = set(), {}
    model.backbone.layers[1].register_forward_hook(lambda *arguments: dtypes.add(arguments[2][1].dtype))
    for precision, dtype in (("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)):
        context = EvalContext(config.data, None, trainer=replace(config.trainer, precision=precision))
        loss[precision] = evaluate("perplexity", model, context).metrics["loss"]
        assert dtypes == {dtype}
        dtypes.clear()
    assert 0 < abs(loss["bf16-mixed"] - loss["32-true"]) < 1e-3
