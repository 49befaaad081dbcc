"""What is seen of a run while it trains: speed, memory and MFU on the progress bar and in loggers,
generated samples.
"""

from __future__ import annotations

import csv
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packmamba import MambaLM
from packmamba.data.token_store import load_corpora
from packmamba.data.tokenizer import load_tokenizer
from packmamba.evaluation import generate
from packmamba.lab import callbacks
from packmamba.lab.fit import fit
from packmamba.lab.run_id import recorded_config, run_folder, run_id
from runs import CARRY, assert_same_training, stop_at, tiny_config


def logged(config):
    (path,) = (run_folder(config) / "csv").rglob("metrics.csv")
    return list(csv.DictReader(path.open()))


def test_the_bar_and_the_loggers_have_tokens_a_second(tmp_path, capsys):
    config = tiny_config(tmp_path, "trainer.loggers=[csv]")
    record = fit(config, progress=True)
    shown, output = reversed(capsys.readouterr())
    assert "6/" in shown and "train/loss" in shown and "val/loss" in shown and not output
    assert "tokens/s=" in shown and "real_tokens" not in shown and "v_num" not in shown
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
    trainer = SimpleNamespace(strategy=strategy, precision_plugin=MixedPrecision("bf16-mixed", "cuda"), world_size=2)
    assert callbacks.peak_flops(trainer) == 2 * 989.4e12, "of dense matrices"
    strategy.root_device = torch.device("cpu")
    assert callbacks.peak_flops(trainer) is None


@pytest.mark.gpu
def test_the_bar_has_the_memory_of_a_gpu(tmp_path, capsys):
    config = tiny_config(tmp_path, "trainer.loggers=[csv]", "trainer.accelerator=gpu", "trainer.precision=bf16-mixed")
    record = fit(config, progress=True)
    # What tests before this one hold on the GPU is part of it.
    assert re.search(r"memory=\d\.\d GiB", capsys.readouterr().err)
    rows = [row for row in logged(config) if row["train/loss"]]
    assert float(rows[-1]["train/peak_memory_gib"]) * 2**30 <= record["metrics"]["peak_memory_bytes"]


SAMPLES = ["trainer.samples=2", "trainer.loggers=[tensorboard]"]


def samples(config):
    return [json.loads(line) for line in (run_folder(config) / "samples.jsonl").read_text().splitlines()]


def test_samples_continue_validation_documents(tmp_path):
    config = tiny_config(tmp_path, *SAMPLES, "trainer.validate_every=4")
    fit(config, progress=False)
    found = samples(config)
    assert [each["step"] for each in found] == [4, 4, 6, 6], "the last step is validated, too"
    corpus, tokenizer = load_corpora(config.data).validation, load_tokenizer(config.data)
    model = MambaLM.from_pretrained(run_folder(config))
    for number, each in enumerate(found[2:]):
        document = corpus.document(number).tolist()
        prompt = document[: min(callbacks.Samples.PROMPT_TOKENS, (len(document) + 1) // 2)]
        (new,) = generate(model, [prompt], callbacks.Samples.NEW_TOKENS)
        assert each == {"step": 6, "prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(new)}
    events = EventAccumulator(str(run_folder(config) / "tensorboard")).Reload()
    assert [event.step + 1 for event in events.Tensors("val/samples/text_summary")] == [4, 6]


def test_texts_go_to_each_logger_in_its_own_way(tmp_path):
    callback = callbacks.Samples(tiny_config(tmp_path), tmp_path / "samples.jsonl")
    taken = [{"step": 3, "prompt": "a", "continuation": "b"}]
    wandb = SimpleNamespace(log_text=Mock())
    callback.log_texts(wandb, taken, 3)
    wandb.log_text.assert_called_once_with("val/samples", columns=[*taken[0]], data=[[3, "a", "b"]])
    mlflow = SimpleNamespace(run_id="x", experiment=SimpleNamespace(log_text=Mock()))
    callback.log_texts(mlflow, taken, 3)
    mlflow.experiment.log_text.assert_called_once_with("x", "a|b", "samples/step=3.txt")
    callback.log_texts(CSVLogger(tmp_path), taken, 3)  # takes no text


@pytest.mark.parametrize("keys", [["data.strategy=greedy"], CARRY], ids=["reset", "carry"])
def test_samples_change_no_bit_of_the_training(tmp_path, keys):
    plain = tiny_config(tmp_path, *keys)
    sampled = tiny_config(tmp_path, *keys, *SAMPLES, f"runs_dir={tmp_path}/sampled")
    expected, record = (fit(config, progress=False) for config in (plain, sampled))
    assert run_id(plain) == run_id(sampled) and recorded_config(plain) == recorded_config(sampled)
    assert record["curves"].keys() == expected["curves"].keys()
    assert_same_training(sampled, plain, record, expected)


def test_a_resumed_run_has_each_sample_once(tmp_path):
    whole = tiny_config(tmp_path, *SAMPLES)
    stopped = tiny_config(tmp_path, *SAMPLES, f"runs_dir={tmp_path}/stopped", "trainer.checkpoint_every=2")
    fit(whole, progress=False)
    stop_at(stopped, step=4)  # before its validation counts: step 3 is taken and validated again
    (run_folder(stopped) / "checkpoints" / "step=4.ckpt").unlink()
    fit(stopped, progress=False)
    assert samples(stopped) == samples(whole)
