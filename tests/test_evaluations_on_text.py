"""Evaluations on documents by name: each number is that of its definition, one document at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.data.corpus import load_corpora
from packmamba.evaluation.asked import Asked
from packmamba.evaluation.evaluate import check_evaluation, evaluate
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
