"""Checkpoint files: written whole, read without running code, the newest that loads is used."""

import logging
import shutil

import pytest
import torch

from packmamba.config import ConfigError
from packmamba.training.callbacks import (
    CheckpointFile,
    Stopped,
    checkpoints,
    keep_newest,
    newest_checkpoint,
    newest_step,
    read_checkpoint,
)
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from processes import ROOT
from runs import tiny_config


def save(folder, *steps):
    for step in steps:
        CheckpointFile().save_checkpoint({"step": step, "weight": torch.arange(3000.0)}, folder / f"step={step}.ckpt")


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def test_two_newest_stay_and_a_temporary_file_is_none(tmp_path):
    save(tmp_path, 2, 10, 9)
    keep_newest(tmp_path, 2)
    shutil.copy(tmp_path / "step=10.ckpt", tmp_path / "step=11.ckpt.tmp")
    assert [path.name for path in checkpoints(tmp_path)] == ["step=9.ckpt", "step=10.ckpt"]
    assert newest_step(tmp_path) == 10 and newest_step(tmp_path / "none") == 0
    assert newest_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "step=2.ckpt")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"
    assert "step=2.ckpt" in caplog.text and "step=1.ckpt" in caplog.text
    damage(tmp_path / "step=1.ckpt")
    with pytest.raises(ConfigError, match="runs_dir"):
        newest_checkpoint(tmp_path)


def test_a_failed_write_leaves_the_file_before(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(value, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    assert read_checkpoint(tmp_path / "step=1.ckpt")["step"] == 1


def test_a_pickle_of_an_old_version_is_refused_in_one_sentence(tmp_path):
    """Of commit a0b6fb3, with NumPy's random state as an array: reading it would run what it names."""
    config = tiny_config(tmp_path)
    folder = run_folder(config) / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "carry.step=3.ckpt", folder / "step=3.ckpt")
    with pytest.raises(ConfigError, match="step=3.ckpt.*remove it") as refused:
        fit(config, progress=False)
    assert "\n" not in str(refused.value)


def test_a_file_with_the_checksum_of_older_versions_is_resumed_from(tmp_path):
    """Of commit 2e9bfb9: a torch file followed by 48 bytes; its curves are under the name History."""
    config = tiny_config(tmp_path)
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda metrics: metrics.totals["steps"] == 4)
    path = checkpoints(run_folder(config) / "checkpoints")[-1]
    assert "History" in read_checkpoint(path)["callbacks"]
    path.write_bytes(path.read_bytes() + b"packmamba sha256" + bytes(32))
    whole = fit(tiny_config(tmp_path, f"runs_dir={tmp_path}/whole"), progress=False)
    assert fit(config, progress=False)["metrics"]["val_loss"] == whole["metrics"]["val_loss"]


def test_a_checkpoint_holds_tensors_and_plain_values_of_the_step_s_end(tmp_path):
    config = tiny_config(tmp_path)
    fit(config, progress=False)
    (path,) = checkpoints(run_folder(config) / "checkpoints")
    state = torch.load(path, weights_only=True)
    assert path.name == "step=6.ckpt" and state["global_step"] == 6
    assert {"state_dict", "optimizer_states", "loops", "callbacks", "carry", "rng"} <= state.keys()


def test_fewer_steps_than_are_trained_are_refused(tmp_path):
    config = tiny_config(tmp_path, "optimizer.schedule_steps=6")
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda metrics: metrics.totals["steps"] == 4)
    with pytest.raises(ConfigError, match=r"trainer\.max_steps"):
        fit(tiny_config(tmp_path, "optimizer.schedule_steps=6", "trainer.max_steps=3"), progress=False)
