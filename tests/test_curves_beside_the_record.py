"""What a run shows as it trains is its record's, step by step, once, also where it was stopped and went on."""

import csv
import errno

import lightning
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packmamba.data.datamodule import PackingDataModule
from packmamba.errors import UserError
from packmamba.training.callbacks import Stopped
from packmamba.training.curves import OneFile
from packmamba.training.fit import fit
from packmamba.training.module import MambaLitModule
from packmamba.training.run_id import run_folder
from runs import tiny_config

KEYS = ["data.strategy=greedy", "trainer.boundary=leak", "trainer.max_steps=12", "trainer.log_every=2",
        "trainer.validate_every=6", "trainer.checkpoint_every=4", "optimizer.grad_clip=1e-3"]  # fmt: skip


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory):
    """A run that failed at step 8, after the checkpoint of step 4, and went on: its folder, configuration and record."""
    config = tiny_config(tmp_path_factory.mktemp("gone_on"), *KEYS)
    step = MambaLitModule.training_step

    def fail(module, *arguments):
        if module.global_step == 7:
            raise RuntimeError("stopped")
        return step(module, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaLitModule, "training_step", fail)
        with pytest.raises(RuntimeError, match="stopped"):
            fit(config, progress=False)
    return run_folder(config), config, fit(config, progress=False)


def test_there_is_one_file_of_numbers_and_each_step_is_in_it_once(gone_on):
    folder, _, record = gone_on
    (path,) = (folder / "csv").rglob("*.csv")
    rows = list(csv.DictReader(path.open()))
    for name, curve in (("train/loss", "train"), ("val/loss", "validation")):
        found = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        assert found == [(point["step"], point["loss"]) for point in record["curves"][curve]]
    assert {"val/loss_start_as_trained", "data/padding_fraction", "train/learning_rate"} <= rows[0].keys()


def test_tensorboard_s_steps_are_the_record_s_and_it_knows_the_run_s_keys(gone_on):
    folder, config, record = gone_on
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == {point["step"]: pytest.approx(point["loss"]) for point in record["curves"]["train"]}
    assert [event.step for event in events.Scalars("val/loss")] == [6, 12]
    assert len(events.Scalars("hp_metric")) == 1, "keys are told once"
    assert "optimizer/lr" in str(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    # The norm before it was clipped, of the first step.
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    module, data = MambaLitModule(config, 256), PackingDataModule(config, progress=False)
    data.setup()
    module.accumulate(data.steps[0], torch.Tensor.backward)
    gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    assert events.Scalars("train/gradient_norm")[0].value == pytest.approx(float(gradients.norm()), rel=1e-5)


def test_a_file_gets_each_line_of_progress_once(tmp_path, capsys):
    config = tiny_config(tmp_path, *KEYS, "trainer.max_steps=4")
    with pytest.raises(Stopped):
        fit(config, True, lambda history: history.totals["steps"] == 2)
    record = fit(config, True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tiny: ")]
    assert [line.split(",")[0] for line in lines] == [f"tiny: step {step}/4" for step in (1, 2, 3, 4)]
    assert f"loss={record['curves']['train'][-1]['loss']:.4f}" in lines[-1]


def test_a_row_that_a_kill_cut_short_is_left_out(tmp_path):
    curves = OneFile(tmp_path)
    for step in (2, 4, 13):
        curves.log_metrics({"train/loss": step / 10}, step)
    curves.path.write_text(curves.path.read_text()[:-6])  # of 13,1.3 there is 1
    again = OneFile(tmp_path)
    again.go_on_from(4)
    again.log_metrics({"val/loss": 0.5}, 4)
    assert again.path.read_text().split() == ["step,train/loss,val/loss", "2,0.2,", "4,0.4,", "4,,0.5"]


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=r"^runs_dir: .*metrics.csv could not be written \(No space left on device\)$"):
        OneFile(tmp_path).log_metrics({"train/loss": 1.0}, 1)
