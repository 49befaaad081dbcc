"""Evaluations on documents by name: each number is that of its definition, one document at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.data.corpus import load_corpora
from packmamba.evaluation import perplexity
from packmamba.evaluation.asked import Asked
from packmamba.evaluation.evaluate import check_evaluation, evaluate
from packmamba.evaluation.perplexity import Read
from runs import tiny_config


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return MambaLM(vocab_size=256, d_model=16, n_layer=2).double()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("corpus"), "data.row_length=8", "data.validation_fraction=0.5").data


def documents_of(data):
    corpus = load_corpora(data).validation
    return [np.array(corpus.document(i), dtype=np.int64) for i in range(len(corpus))]


def log_probabilities(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)[None])[0].log_softmax(-1)


def test_positions_in_windows(model, data):
    found = evaluate("positions", model, Asked(data, None, max_slots=32, options={"most": 4}))
    by_place = {}
    for document in documents_of(data):
        if len(document) > 1:
            log_p = log_probabilities(model, document[:-1])
            for place, token in enumerate(document[1:], start=1):
                by_place.setdefault(place, []).append(-float(log_p[place - 1, token]))
    edges = [0, 1, 2, 4, 8, 16, 32]
    points = found.curves["by_window"]
    assert [(p["start"], p["end"]) for p in points] == list(zip(edges, edges[1:]))[1:], "no target stands at place 0"
    for point in points:
        here = [loss for place in range(point["start"], point["end"]) for loss in by_place.get(place, [])]
        assert point["loss"] == pytest.approx(np.mean(here), abs=1e-10) and point["count"] == len(here)
    assert found.metrics.keys() == {"loss_1", "loss_2", "loss_4", "documents"}
    assert found.metrics["loss_2"] == points[-2]["loss"] and found.metrics["loss_4"] == points[-1]["loss"]


def test_remembrance_is_total_variation(model, data):
    found = evaluate("remembrance", model, Asked(data, None, max_slots=32, options={"length": 12}))
    long = [document for document in documents_of(data) if len(document) >= 12]
    assert found.metrics["documents"] == len(long) == len(found.items)
    curve = {point["without"]: point["variation"] for point in found.curves["remembrance"]}
    assert list(curve) == [1, 2, 3, 4, 6, 8, 9, 10, 11]
    for t in (1, 6, 9):
        values = [
            (log_probabilities(model, d[:12])[-1].exp() - log_probabilities(model, d[t:12])[-1].exp()).abs().sum() / 2
            for d in long
        ]
        assert curve[t] == pytest.approx(float(torch.stack(values).mean()), abs=1e-10) and 0 < curve[t] < 1
    assert (found.metrics["quarter"], found.metrics["half"], found.metrics["three_quarters"]) == (
        curve[3],
        curve[6],
        curve[9],
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("positions", {"window": 1}, "options.positions.window: expected an integer of at least 2, got 1"),
        ("positions", {"length": 9}, "options.positions: unknown option 'length'; known: window, most"),
        ("positions", {"window": 99}, "positions: no validation document is as long as a window of 99 tokens"),
        ("remembrance", {"length": 3}, "options.remembrance.length: expected an integer of at least 4, got 3"),
        ("remembrance", {"length": 99}, "remembrance: no validation document is as long as length=99 tokens"),
        ("long_context", {"window": 40}, "long_context: no validation document is as long as two windows of 40 tokens"),
        ("perplexity", {"most": 2}, "options.perplexity: unknown option 'most'; known: none"),
    ],
)  # fmt: skip
def test_refuses_in_one_sentence(data, name, options, message):
    with pytest.raises(ConfigError) as error:
        check_evaluation(name, Asked(data, None, options=options), 256)
    assert str(error.value) == message


def test_evaluations_of_one_model_read_a_document_once(model, data, monkeypatch):
    asked = {"perplexity": {}, "positions": {"most": 4}, "long_context": {"window": 4, "context": 4}}
    alone = {name: evaluate(name, model, Asked(data, None, max_slots=32, options=o)) for name, o in asked.items()}
    read, tokens, reads = Read(), {}, perplexity.read
    for name, options in asked.items():
        passes = []
        monkeypatch.setattr(
            perplexity, "read", lambda *asked, to=passes: (to.extend(map(len, asked[1])), reads(*asked))[1]
        )
        found = evaluate(name, model, Asked(data, None, max_slots=32, options=options, read=read))
        assert repr(found) == repr(alone[name]), "to the bit"
        tokens[name] = sum(passes)
    pieces = sum(point["documents"] for point in alone["long_context"].curves["context_gain"])
    whole = sum(len(document) - 1 for document in documents_of(data))
    assert pieces > 5 and tokens == {"perplexity": whole, "positions": 0, "long_context": pieces * (4 + 4 - 1)}


def test_what_is_read_is_kept_up_to_a_size(model, monkeypatch):
    rng, read = np.random.default_rng(0), Read()
    documents = {n: rng.integers(0, 256, n) for n in (1, 5, 40, 9)}
    expected = dict(zip(documents, perplexity.token_losses(model, list(documents.values()), 16)))
    monkeypatch.setattr(Read, "HELD", 8 * 30)
    for asked in ({5: 3, 40: 20}, {1: 1, 5: 5, 9: 9}, {40: 40, 5: 4}, {40: 10}):
        found = read.losses(model, {n: documents[n][:length] for n, length in asked.items()}, 16)
        for (n, length), losses in zip(asked.items(), found):
            assert losses[: length - 1].tolist() == expected[n][: length - 1].tolist() and len(losses) >= length - 1
        assert read.held == sum(losses.nbytes for losses in read.found.values()) <= Read.HELD
    assert {n: len(losses) for n, losses in read.found.items()} == {40: 19, 5: 4}
