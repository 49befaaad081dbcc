"""Evaluations of a run when its training ends: numbers in its record, answers in its folder, differences in tables."""

from __future__ import annotations

import pytest

import run
from packmamba.data.datamodule import PackedDataModule
from packmamba.records import METRICS, read_records
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import run_folder, run_id
from processes import fork_ranks, statuses
from runs import tiny_config, write_config

ASKED = ["evaluations=[parity,perplexity]", "evaluation_examples=12", "evaluation_options.parity.length=6"]
SPEED = {"real_tokens_per_second", "slots_per_second", "train_seconds"}


def tiny(folder, *overrides):
    return tiny_config(folder, "trainer.max_steps=2", "trainer.validate_every=2", *overrides)


def test_a_run_without_evaluations_is_what_it_was(tmp_path):
    config, asked = tiny(tmp_path), tiny(tmp_path, *ASKED)
    assert run_id(config) == run_id(tiny(tmp_path, "evaluations=[]")) != run_id(asked)
    before, after = (fit(one, progress=False) for one in (config, asked))
    behind = {"documents_behind_another", "tokens_behind_another"}
    assert before["metrics"].keys() == {*METRICS["training"], *behind}
    assert not before["config"].keys() & {"evaluations", "evaluation_options", "evaluation_examples"}
    for metric in METRICS["training"]:
        assert metric in SPEED or before["metrics"][metric] == after["metrics"][metric]
    assert not (run_folder(config) / "evaluation").exists()


def test_a_run_whose_evaluation_failed_only_evaluates(tmp_path, monkeypatch):
    config = tiny(tmp_path, *ASKED)
    with monkeypatch.context() as patch:
        patch.setattr(
            "packmamba.training.callbacks.evaluate", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            fit(config, progress=False)
    monkeypatch.setattr(PackedLitModule, "training_step", lambda *_: pytest.fail("trained again"))
    record = fit(config, progress=False)
    assert record["metrics"]["steps"] == 2 and record["metrics"]["perplexity.loss"] == pytest.approx(
        record["metrics"]["val_loss"], abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_of_several_ranks_evaluates(tmp_path, strategy):
    config = tiny(
        tmp_path,
        *ASKED,
        "data.strategy=greedy",
        "data.slots_per_batch=24",
        "data.validation_documents=10",
        "trainer.devices=2",
        f"trainer.strategy={strategy}",
    )
    ranks = [PackedDataModule.from_config(config)._evaluations(2, rank)[0] for rank in range(2)]
    assert len(ranks[0].groups) == len(ranks[1].groups) + 1 and len(ranks[0]) == len(ranks[1]), (
        "one rank has a batch more"
    )
    assert not ranks[1][len(ranks[1]) - 1].loss_mask.any()
    path, output = write_config(tmp_path / "both.yaml", config), tmp_path / "output.txt"
    assert statuses(*fork_ranks(2, run.main, ["train", str(path)], output=output)) == [0, 0], output.read_text()
    (record,) = read_records(run_folder(config))
    assert record["metrics"]["perplexity.loss"] == pytest.approx(record["metrics"]["val_loss"], abs=1e-5)
