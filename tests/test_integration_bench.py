"""The bench of Hugging Face's Trainer at a tiny size: what it records, and that arms which must not leak are held to it."""

from __future__ import annotations

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from experiments.integration import bench as integration
from experiments.integration.arms import Arm, Measured
from packmamba.config import ConfigError
from packmamba.experiments import kinds_of, load_bench
from packmamba.records import read_records
from packmamba.report.html import write_report

TINY = [
    "overrides=[model.n_layer=1,model.d_model=16,model.vocab_size=300]", "distribution=short", "documents_per_step=3",
    "steps=2", "warm_up_steps=1", "rounds=1", "precision=float32",
]  # fmt: skip
ARMS = {
    "padded": {"batches": "padded", "kernels": "torch"},
    "grouped": {"batches": "grouped", "kernels": "torch"},
    "flattened": {"batches": "flattened", "kernels": "torch", "leaks": True},
    "patched": {"batches": "flattened", "patched": True},
    "slow-path": {
        "batches": "padded",
        "kernels": "torch",
        "documents_per_step": 2,
        "steps": 1,
        "warm_up_steps": 0,
        "rounds": 1,
    },
}


def load(arms):
    config = load_bench("integration", TINY).config
    config.arms = arms
    return config


@pytest.mark.slow
def test_every_arm_is_recorded_and_tabulated(tmp_path):
    integration.run(load(ARMS), tmp_path / "records" / "integration.jsonl", progress=False)
    records = read_records(tmp_path)
    found = {record["arm"]: record["metrics"] for record in records}
    assert list(found) == list(ARMS)
    assert [len(record["curves"]["loss"]) for record in records] == [3, 3, 3, 3, 1]
    assert all(metrics["real_tokens_per_second"] > 0 for metrics in found.values())
    for name in ("first_loss", "last_loss", "tokens_per_step"):
        assert found["patched"][name] == pytest.approx(found["padded"][name], rel=1e-5), "the same steps"
    assert found["flattened"]["difference"] > 100 * found["patched"]["difference"]
    assert found["flattened"]["last_loss"] != pytest.approx(found["padded"]["last_loss"], rel=1e-5)
    assert (
        found["patched"]["padding_fraction"]
        == 0
        < found["grouped"]["padding_fraction"]
        < found["padded"]["padding_fraction"]
    )
    write_report(tmp_path, kinds_of(tmp_path, records))
    text = (tmp_path / "tables" / "integration.md").read_text()
    assert all(arm in text for arm in ARMS)


def test_a_patched_arm_that_leaks_is_not_timed(tmp_path, monkeypatch):
    real = Arm.collate

    def without_boundaries(self, features):
        return {name: value for name, value in real(self, features).items() if name != "position_ids"}

    monkeypatch.setattr(Arm, "collate", without_boundaries)
    with pytest.raises(RuntimeError, match="patched: logits differ from single documents' by"):
        integration.run(load({"patched": ARMS["patched"]}), tmp_path / "r.jsonl", progress=False)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.slow
def test_an_arm_that_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    real = Measured.train

    def train(self, arm, documents, *sizes):
        if arm.patched:
            return real(self, arm, documents, *sizes)
        with self.borrowed(arm):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Measured, "train", train)
    arms = {name: ARMS[name] for name in ("padded", "patched")}
    integration.run(load(arms), tmp_path / "records" / "r.jsonl", progress=False)
    assert [record["arm"] for record in read_records(tmp_path)] == ["patched"]
    assert "padded: out of memory; it is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"batches": "flat", "patched": True},
            "arms.x.batches: expected one of padded, grouped, flattened, got 'flat'",
        ),
        ({"batches": "padded"}, "arms.x.kernels: expected mamba_ssm or torch, and none where patched, got None"),
        ({"batches": "padded", "size": 3}, "arms.x: .*size"),
    ],
)
def test_refuses_in_one_sentence(fields, message):
    with pytest.raises(ConfigError, match=message):
        Arm.of("x", fields)
