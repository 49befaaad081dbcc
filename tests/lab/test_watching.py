"""What is seen of a run while it trains: speed, memory and MFU on the progress bar and in loggers, generated samples."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from packmamba import MambaLM
from packmamba.lab import callbacks
from packmamba.lab.fit import fit
from packmamba.lab.run_id import run_folder
from runs import tiny_config


def logged(config):
    (path,) = (run_folder(config) / "csv").rglob("metrics.csv")
    return list(csv.DictReader(path.open()))


def test_the_bar_and_the_loggers_have_tokens_a_second(tmp_path, capsys):
    config = tiny_config(tmp_path, "trainer.loggers=[csv]")
    record = fit(config, progress=True)
    shown = capsys.readouterr().err
    assert "tokens/s=" in shown and "real_tokens" not in shown
    assert "memory=" not in shown and "MFU=" not in shown, "neither is known of a CPU"
    rows = logged(config)
    assert all(float(row["train/real_tokens_per_second"]) > 0 for row in rows if row["train/loss"])
    tokens = {point["step"]: point["real_tokens"] for point in record["curves"]["validation"]}
    validated = {int(row["step"]) + 1: float(row["train/real_tokens"]) for row in rows if row["val/loss"]}
    assert validated == tokens, "losses of validation have tokens as an axis, too"


def test_mfu_is_speed_times_operations_over_the_peak(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(callbacks, "peak_flops", lambda trainer: 1e9)
    config = tiny_config(tmp_path, "trainer.loggers=[csv]")
    fit(config, progress=True)
    assert "%" in capsys.readouterr().err.rpartition("MFU=")[2][:8]
    operations = callbacks.flops_per_token(MambaLM.from_pretrained(run_folder(config)))
    for row in logged(config):
        if row["train/loss"]:
            speed = float(row["train/real_tokens_per_second"])
            assert float(row["train/mfu"]) == pytest.approx(operations * speed / 1e9, rel=1e-5)


def test_operations_of_a_token_leave_out_an_embedding_that_is_no_head():
    tied = MambaLM(50, 8, 2)
    untied = MambaLM(50, 8, 2, tie_embeddings=False)
    parameters = sum(weight.numel() for weight in tied.parameters())
    assert callbacks.flops_per_token(tied) == callbacks.flops_per_token(untied) == 6 * parameters


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_the_peak_of_known_gpus(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    strategy = SimpleNamespace(root_device=torch.device("cuda:0"))
    precision = MixedPrecision("bf16-mixed", "cuda")
    trainer = SimpleNamespace(strategy=strategy, precision_plugin=precision, world_size=2)
    assert callbacks.peak_flops(trainer) == 2 * 989.4e12, "of dense matrices"
    strategy.root_device = torch.device("cpu")
    assert callbacks.peak_flops(trainer) is None


@pytest.mark.gpu
def test_the_bar_has_the_memory_of_a_gpu(tmp_path, capsys):
    config = tiny_config(tmp_path, "trainer.loggers=[csv]", "trainer.accelerator=gpu", "trainer.precision=bf16-mixed")
    record = fit(config, progress=True)
    assert "memory=0.0 GiB" in capsys.readouterr().err
    rows = [row for row in logged(config) if row["train/loss"]]
    assert float(rows[-1]["train/peak_memory_gib"]) * 2**30 <= record["metrics"]["peak_memory_bytes"]
