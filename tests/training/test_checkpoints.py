"""Checkpoint files: written whole, read without running code, the newest that loads is used."""

import logging
import shutil

import pytest
import torch

from packmamba.config import ConfigError
from packmamba.training.callbacks import CheckpointFile, newest_checkpoint, read_checkpoint
from packmamba.training.fit import fit
from packmamba.training.run_id import run_folder
from processes import ROOT
from runs import tiny_config


def save(folder, *steps):
    for step in steps:
        CheckpointFile().save_checkpoint({"step": step, "weight": torch.arange(3000.0)}, folder / f"step={step}.ckpt")


def flip(content):
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


@pytest.mark.parametrize("changed", [lambda content: content[:-100], flip, lambda _: b""], ids=["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, changed):
    def damage(path):
        path.write_bytes(changed(path.read_bytes()))

    save(tmp_path, 1, 2)
    damage(tmp_path / "step=2.ckpt")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"
    assert "step=2.ckpt" in caplog.text
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
    config = tiny_config(tmp_path)
    folder = run_folder(config) / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "carry.step=3.ckpt", folder / "step=3.ckpt")
    with pytest.raises(ConfigError, match="step=3.ckpt.*remove it") as refused:
        fit(config, progress=False)
    assert "\n" not in str(refused.value)
