"""Metrics of the record, leakcheck in training, weight averaging, loggers, a user's callbacks, the progress bar."""

import csv

import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packmamba import MambaLM, SequenceLayout
from packmamba.config import ConfigError
from packmamba.errors import UserError
from packmamba.training.boundary import BOUNDARIES, Boundary, Leak
from packmamba.training.callbacks import Average, check_isolation
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder, run_id
from runs import CARRY, final_state, losses_of, tiny_config

LAYOUT = SequenceLayout.from_lengths([[5, 1, 6], [9, 3], [4]], row_length=14)


class Lying(Boundary):
    """Leaks, and says that nothing crosses."""

    def hidden(self, model, batch):
        return Leak().hidden(model, batch)


class Gradients(Boundary):
    """Lets gradients cross, and nothing else."""

    def hidden(self, model, batch):
        leaked = Leak().hidden(model, batch)
        return super().hidden(model, batch) + (leaked - leaked.detach())


def test_a_leak_ends_the_run(tmp_path, monkeypatch, recwarn):
    torch.manual_seed(0)
    model = MambaLM(23, 8, 2, d_state=4)
    for scheme in BOUNDARIES.values():
        check_isolation(model, scheme(), LAYOUT)
    for scheme in (Lying, Gradients):
        with pytest.raises(UserError, match="expected isolated documents"):
            check_isolation(model, scheme(), LAYOUT)
        check_isolation(model, scheme(), SequenceLayout.from_lengths([[5], [3], []], row_length=14))
    monkeypatch.setattr(BOUNDARIES["reset"], "hidden", Lying.hidden)
    with pytest.raises(UserError, match=r"trainer\.boundary=reset"):
        fit(tiny_config(tmp_path), progress=False)
    fit(tiny_config(tmp_path, "trainer.leakcheck_every=null"), progress=False)
    assert not recwarn.list


@pytest.mark.parametrize("keys", [[], CARRY, ["model.recompute=block"]], ids=["reset", "carry", "recompute"])
def test_leakcheck_changes_no_bit_of_training(tmp_path, keys):
    states = []
    for every in ("null", "2"):
        config = tiny_config(tmp_path, f"trainer.leakcheck_every={every}", f"runs_dir={tmp_path}/{every}", *keys)
        record = fit(config, progress=False)
        states.append((final_state(config)["state_dict"], losses_of(record)))
    assert states[0][1] == states[1][1]
    assert all(torch.equal(tensor, states[1][0][name]) for name, tensor in states[0][0].items())


def test_the_mean_of_snapshots_is_evaluated_and_saved(tmp_path, monkeypatch):
    weights, average = {}, Average.on_train_batch_end

    def keep(self, trainer, module, *rest):
        weights[trainer.global_step] = {n: p.detach().clone() for n, p in module.model.named_parameters()}
        return average(self, trainer, module, *rest)

    monkeypatch.setattr(Average, "on_train_batch_end", keep)
    plain = fit(tiny_config(tmp_path), progress=False)["metrics"]
    config = tiny_config(tmp_path, "trainer.average_snapshots=3", "trainer.average_share=0.7")  # steps 2, 4 and 6
    record = fit(config, progress=False)["metrics"]
    for name, saved in MambaLM.from_pretrained(run_folder(config)).named_parameters():
        mean = torch.stack([weights[step][name].double() for step in (2, 4, 6)]).mean(0)
        torch.testing.assert_close(saved.detach().double(), mean, rtol=1e-6, atol=1e-7)
    assert record["val_loss_last_weights"] == plain["val_loss"] != record["val_loss"]
    assert "val_loss_last_weights" not in plain


@pytest.mark.parametrize("keys", [[], ["data.strategy=padded", "trainer.average_snapshots=2"]])
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
    monkeypatch.setattr("lightning.pytorch.callbacks.Counter", Counter, raising=False)
    path = "lightning.pytorch.callbacks.Counter"
    config = tiny_config(tmp_path, "trainer.loggers=[]")
    config.trainer.callbacks = [path, {"class_path": path, "init_args": {"every": 3}}]
    fit(config, progress=False)
    assert Counter.counts == [1, 2, 3, 3, 4, 5, 6, 6]
    assert run_id(config) != run_id(tiny_config(tmp_path)), "a callback may change the training"
    for wrong in ("nowhere.Callback", "lightning.Nothing", {"class_path": path, "init_args": {"unknown": 1}}):
        config.trainer.callbacks = [wrong]
        with pytest.raises(ConfigError, match=r"trainer\.callbacks"):
            fit(config, progress=False)


FILES = {
    "csv": "csv/version_0/metrics.csv",
    "tensorboard": "tensorboard/events.*",
    "wandb": "wandb/offline-run-*",
    "mlflow": "mlflow/*/*/metrics",
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


def test_loggers_have_the_record_s_numbers_after_a_resume_too(tmp_path):
    keys = ["trainer.boundary=leak", "trainer.max_steps=12", "trainer.log_every=2", "trainer.validate_every=6",
            "trainer.checkpoint_every=4"]  # fmt: skip
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
        assert logged == {step: pytest.approx(points[step]) for step in logged} and max(logged) == 12
    assert not any("hp_metric" in tag for tag in events.Tags()["scalars"])
    rows = [row for path in (run_folder(config) / "csv").rglob("*.csv") for row in csv.DictReader(path.open())]
    assert {"train/loss", "train/learning_rate", "train/real_tokens_per_second"} <= rows[0].keys()


def test_the_progress_bar_is_on_stderr(tmp_path, capsys):
    fit(tiny_config(tmp_path, "trainer.max_steps=4", "trainer.validate_every=4"), progress=True)
    shown = capsys.readouterr()
    assert "4/" in shown.err and "train/loss" in shown.err and "val/loss" in shown.err and not shown.out
