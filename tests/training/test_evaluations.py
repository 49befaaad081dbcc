"""Evaluations during training leave the training alone; their curve is that of the models at those steps."""

from __future__ import annotations

import csv

import pytest
import torch

from packmamba import MambaLM
from packmamba.data.tokenizer import load_tokenizer
from packmamba.evaluation.registry import evaluate
from packmamba.training.callbacks import Stopped, evaluation_context
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import run_folder
from runs import CARRY, final_state, losses_of, tiny_config

ASKED = ["evaluations=[parity,perplexity]", "evaluation_examples=5", "evaluation_options.parity.length=6"]
EVERY = [*ASKED, "trainer.evaluate_every=2"]
LEAK = ["data.strategy=greedy", "trainer.boundary=leak"]


def own(record, step):
    (point,) = (point for point in record["curves"]["evaluations"] if point["step"] == step)
    return {name: value for name, value in point.items() if "." in name}


@pytest.mark.parametrize("keys", [LEAK, CARRY], ids=["leak", "carry"])
def test_the_training_is_the_same_to_the_bit(tmp_path, keys):
    plain = tiny_config(tmp_path, *keys)
    asked = tiny_config(tmp_path, *keys, *EVERY, f"runs_dir={tmp_path}/asked")
    expected, record = (fit(config, progress=False) for config in (plain, asked))
    found = {name: points for name, points in losses_of(record).items() if name in expected["curves"]}
    assert found == losses_of(expected)
    a, b = final_state(asked), final_state(plain)
    for name, value in b["state_dict"].items():
        assert torch.equal(a["state_dict"][name], value), name
    assert torch.equal(a["rng"]["torch"], b["rng"]["torch"]) and a["rng"]["python"] == b["rng"]["python"]
    assert [point["step"] for point in record["curves"]["evaluations"]] == [2, 4, 6]
    assert own(record, 6) == {name: value for name, value in record["metrics"].items() if "." in name}
    assert {"parity.nats", "perplexity.loss_as_trained"} <= own(record, 2).keys() and own(record, 2) != own(record, 4)
    (metrics,) = (run_folder(asked) / "csv").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(metrics.open()) if row["evaluation/parity.nats"]]
    logged = {int(row["step"]) + 1: float(row["evaluation/parity.nats"]) for row in rows}
    assert logged == {p["step"]: pytest.approx(p["parity.nats"]) for p in record["curves"]["evaluations"]}


def test_points_are_the_model_s_and_a_stopped_run_has_the_same(tmp_path):
    whole = tiny_config(tmp_path, *LEAK, *EVERY, "trainer.checkpoint_every=1")
    stopped = tiny_config(tmp_path, *LEAK, *EVERY, "trainer.checkpoint_every=1", f"runs_dir={tmp_path}/stopped")
    with pytest.raises(Stopped):
        fit(stopped, progress=False, stop=lambda metrics: metrics.totals["steps"] == 4)
    state = final_state(stopped)["state_dict"]
    record = fit(whole, progress=False)
    model = MambaLM(vocab_size=256, d_model=8, n_layer=2, d_state=4)
    model.load_state_dict({n.removeprefix("model."): v for n, v in state.items() if n.startswith("model.")})
    expected = {}
    for name in whole.evaluations:
        context = evaluation_context(whole, name, tokenizer=load_tokenizer(whole.data), max_slots=2048)
        found = evaluate(name, model, context).metrics
        expected |= {f"{name}.{metric}": value for metric, value in found.items()}
    assert own(record, 4) == expected
    assert fit(stopped, progress=False)["curves"]["evaluations"] == record["curves"]["evaluations"]


def test_a_run_whose_evaluation_failed_only_evaluates(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "trainer.max_steps=2", "trainer.validate_every=2", *ASKED)
    with monkeypatch.context() as patch:
        patch.setattr("packmamba.training.callbacks.evaluate", None)
        with pytest.raises(TypeError):
            fit(config, progress=False)
    monkeypatch.setattr(PackedLitModule, "training_step", lambda *_: pytest.fail("trained again"))
    record = fit(config, progress=False)
    metrics = record["metrics"]
    assert metrics["steps"] == 2 and metrics["perplexity.loss"] == pytest.approx(metrics["val_loss"], abs=1e-5)
