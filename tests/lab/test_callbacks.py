"""Callbacks of a run: metrics of the record, Lightning's weight averaging, loggers, evaluations."""

from __future__ import annotations

import csv

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packmamba import MambaLM
from packmamba.config import ConfigError
from packmamba.data.tokenizer import load_tokenizer
from packmamba.evaluation.registry import evaluate
from packmamba.lab.callbacks import evaluation_context
from packmamba.lab.fit import fit
from packmamba.lab.run_id import run_folder, run_id
from packmamba.training.lit_module import PackedLitModule
from runs import CARRY, assert_same_training, final_state, stop_at, tiny_config

LIGHTNING = "lightning.pytorch.callbacks"
AVERAGES = {
    "exponential": {"class_path": f"{LIGHTNING}.EMAWeightAveraging", "init_args": {"decay": 0.6}},
    "mean": {"class_path": f"{LIGHTNING}.WeightAveraging"},
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_lightning_s_averages_of_weights_are_validated_and_saved_after_a_resume_too(tmp_path, monkeypatch, kind):
    steps, average_step = [], WeightAveraging.on_train_batch_end

    def keep(self, trainer, module, *rest):
        steps.append([parameter.detach().clone() for parameter in module.model.parameters()])
        return average_step(self, trainer, module, *rest)

    monkeypatch.setattr(WeightAveraging, "on_train_batch_end", keep)
    plain = fit(tiny_config(tmp_path), progress=False)
    config = tiny_config(tmp_path, "evaluations=[perplexity]", "trainer.evaluate_every=3")
    config.trainer.callbacks = [AVERAGES[kind]]
    stop_at(config, step=4)
    record = fit(config, progress=False)
    evaluated = {point["step"]: point["perplexity.loss"] for point in record["curves"]["evaluations"]}
    validated = {point["step"]: point["loss"] for point in record["curves"]["validation"]}
    assert evaluated == pytest.approx(validated, rel=1e-5)
    assert len(steps) == 6 and record["curves"]["train"][-1]["loss"] == plain["curves"]["train"][-1]["loss"]
    weights = [0.4 * 0.6 ** (5 - i) if i else 0.6**5 for i in range(6)] if kind == "exponential" else [1 / 6] * 6
    expected = [sum(w * each for w, each in zip(weights, parameters)) for parameters in zip(*steps)]
    model = MambaLM.from_pretrained(run_folder(config))
    for saved, average in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(saved.detach(), average, rtol=1e-5, atol=1e-6)
    perplexity = evaluate("perplexity", model, evaluation_context(config, "perplexity", tokenizer=None, max_slots=1000))
    assert record["metrics"]["val_loss"] == pytest.approx(perplexity.metrics["loss"], rel=1e-5)
    assert record["metrics"]["val_loss"] != pytest.approx(plain["metrics"]["val_loss"], rel=1e-5)


@pytest.mark.parametrize("keys", [[], ["data.strategy=padded"]])
def test_a_diverged_run_stops_and_is_recorded(tmp_path, keys, caplog):
    config = tiny_config(tmp_path, *keys, "optimizer.lr=1e30", "trainer.max_steps=500", "evaluations=[perplexity]")
    metrics = fit(config, progress=False)["metrics"]
    assert metrics["diverged_at_step"] == metrics["steps"] == 2 and metrics["val_loss"] is None
    assert "not finite at step 2" in caplog.text
    assert not any(name.startswith("perplexity") for name in metrics)
    assert not (run_folder(config) / "config.json").exists(), "weights that are not finite are no model"
    assert fit(config, progress=False)["metrics"] == metrics, "it is not repeated"


class Counter(lightning.Callback):
    """A user's callback, named by its class path."""

    counts: list[int] = []

    def __init__(self, every=1):
        self.every = every

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step % self.every == 0:
            self.counts.append(trainer.global_step)


def test_callbacks_by_class_path(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{LIGHTNING}.Counter", Counter, raising=False)
    path = f"{LIGHTNING}.Counter"
    config = tiny_config(tmp_path, "trainer.loggers=[]")
    config.trainer.callbacks = [path, {"class_path": path, "init_args": {"every": 3}}]
    fit(config, progress=False)
    assert Counter.counts == [1, 2, 3, 3, 4, 5, 6, 6]
    assert run_id(config) != run_id(tiny_config(tmp_path)), "a callback may change the training"
    misspelt = {"class_path": path, "init_arg": {"every": 3}}
    unknown = {"class_path": path, "init_args": {"unknown": 1}}
    of_epochs = {"class_path": f"{LIGHTNING}.StochasticWeightAveraging", "init_args": {"swa_lrs": 0.1}}
    for wrong in ("nowhere.Callback", "lightning.Nothing", misspelt, unknown, 3, of_epochs):
        config.trainer.callbacks = [wrong]
        with pytest.raises(ConfigError, match=r"trainer\.callbacks"):
            fit(config, progress=False)


def test_a_run_that_a_callback_stops_keeps_its_last_step(tmp_path):
    early = f"{{class_path: {LIGHTNING}.EarlyStopping, init_args: {{monitor: val/loss, min_delta: 9.0, patience: 2}}}}"
    config = tiny_config(tmp_path, f"trainer.callbacks=[{early}]", "trainer.validate_every=1")
    assert fit(config, progress=False)["metrics"]["steps"] == 3
    assert (run_folder(config) / "checkpoints/step=3.ckpt").is_file()


FILES = {
    "csv": "csv/version_0/metrics.csv",
    "tensorboard": "tensorboard/events.*",
    "wandb": "wandb/offline-run-*",
    "mlflow": "../mlflow.db",
    "lightning.pytorch.loggers.CSVLogger": "lightning_logs/version_0/metrics.csv",
}


@pytest.mark.parametrize("loggers", [[], *([name] for name in FILES)], ids="-".join)
def test_loggers_by_name_or_class_path(tmp_path, monkeypatch, loggers):
    for name in {"wandb", "mlflow"} & {*loggers}:
        pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(tmp_path, f"trainer.loggers={loggers}", "trainer.max_steps=2")
    fit(config, progress=False)
    assert {name for name, pattern in FILES.items() if list(run_folder(config).glob(pattern))} == {*loggers}
    assert run_id(config) == run_id(tiny_config(tmp_path, "trainer.max_steps=2"))


def test_loggers_may_plot_against_tokens(tmp_path):
    keys = ["trainer.log_axis=tokens", "trainer.log_every=2", "trainer.validate_every=3", "evaluations=[perplexity]"]
    config = tiny_config(tmp_path, *keys, "trainer.evaluate_every=3", "trainer.loggers=[tensorboard]")
    curves = fit(config, progress=False)["curves"]
    assert run_id(config) == run_id(tiny_config(tmp_path, *keys[1:], "trainer.evaluate_every=3"))
    events = EventAccumulator(str(run_folder(config) / "tensorboard")).Reload()
    names = {"train/loss": "train", "val/loss": "validation", "evaluation/perplexity.loss": "evaluations"}
    for name, curve in names.items():
        logged = [event.step for event in events.Scalars(name)]
        assert logged == [point["real_tokens"] for point in curves[curve] if point["step"] > 1]


def test_loggers_have_the_record_s_numbers_after_a_resume_too(tmp_path):
    keys = ["trainer.boundary=leak", "trainer.max_steps=12", "trainer.log_every=2", "trainer.validate_every=6",
            "trainer.checkpoint_every=4", "trainer.loggers=[csv,tensorboard]"]  # fmt: skip
    config = tiny_config(tmp_path, *keys)

    def crash(metrics):
        if metrics.totals["steps"] == 7:
            raise RuntimeError("crashed")
        return False

    with pytest.raises(RuntimeError, match="crashed"):
        fit(config, progress=False, stop=crash)
    record = fit(config, progress=False)
    events = EventAccumulator(str(run_folder(config) / "tensorboard")).Reload()
    for name, curve in (("train/loss", "train"), ("val/loss", "validation")):
        logged = {event.step + 1: event.value for event in events.Scalars(name)}
        points = {point["step"]: point["loss"] for point in record["curves"][curve]}
        assert logged == {at: pytest.approx(points[at]) for at in logged} and max(logged) == max(points)
    assert not any("hp_metric" in tag for tag in events.Tags()["scalars"])
    rows = [row for path in (run_folder(config) / "csv").rglob("*.csv") for row in csv.DictReader(path.open())]
    assert {"train/loss", "train/learning_rate", "train/real_tokens_per_second"} <= rows[0].keys()


ASKED = ["evaluations=[parity,perplexity]", "evaluation_examples=5", "evaluation_options.parity.length=6"]
EVERY = [*ASKED, "trainer.evaluate_every=2"]
LEAK = ["data.strategy=greedy", "trainer.boundary=leak"]


def own(record, step):
    (point,) = (point for point in record["curves"]["evaluations"] if point["step"] == step)
    return {name: value for name, value in point.items() if "." in name}


@pytest.mark.parametrize("keys", [LEAK, CARRY], ids=["leak", "carry"])
def test_the_training_is_the_same_to_the_bit(tmp_path, keys):
    plain = tiny_config(tmp_path, *keys)
    asked = tiny_config(tmp_path, *keys, *EVERY, f"runs_dir={tmp_path}/asked", "trainer.loggers=[csv]")
    expected, record = (fit(config, progress=False) for config in (plain, asked))
    assert_same_training(asked, plain, record, expected)
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
    stop_at(stopped, step=4)
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
        patch.setattr("packmamba.lab.callbacks.evaluate", None)
        with pytest.raises(TypeError):
            fit(config, progress=False)
    monkeypatch.setattr(PackedLitModule, "training_step", lambda *_: pytest.fail("trained again"))
    record = fit(config, progress=False)
    metrics = record["metrics"]
    assert metrics["steps"] == 2 and metrics["perplexity.loss"] == pytest.approx(metrics["val_loss"], abs=1e-5)
