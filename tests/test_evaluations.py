"""Evaluations of a run when its training ends: numbers in its record, answers in its folder, differences in tables."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import yaml

import run
from made_records import table, training
from packmamba.data.datamodule import PackedDataModule
from packmamba.records import METRICS, read_records
from packmamba.report import training_figures
from packmamba.report.folder import build_sections, table_files
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import run_folder, run_id
from packmamba.training.sweep import load_sweep, run_sweep
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


@pytest.mark.slow
def test_a_sweep_gives_paired_differences(tmp_path, monkeypatch):
    base = write_config(tmp_path / "base.yaml", tiny(tmp_path))
    sweep = {
        "output": str(tmp_path / "sweep"),
        "base": str(base),
        "evaluations": ["parity", "perplexity"],
        "evaluation_options": {"parity": {"length": 6}},
        "common": {"evaluation_examples": 12},
        "arms": {
            "padded": {"data.strategy": "padded"},
            "leak": {"data.strategy": "greedy", "trainer.boundary": "leak"},
        },
        "grid": {"seed": [0, 1]},
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    sweep, configs = load_sweep(path)
    assert all(config.evaluations == ["parity", "perplexity"] for config in configs)
    assert all(config.evaluation_options == {"parity": {"length": 6}} for config in configs)
    records = read_records(run_sweep(sweep, configs, progress=False))
    files = table_files(records)
    monkeypatch.setattr(training_figures, "finish", lambda fig, name, caption: (plt.close(fig), name)[1])
    figures = training_figures.training_figures(records)
    for name, metric in (("parity", "parity.nats"), ("perplexity", "perplexity.loss")):
        by_run = {(record["arm"], record["seed"]): record["metrics"] for record in records}
        main = f"{name}.{'accuracy' if name == 'parity' else 'loss'}"
        differences = [by_run["leak", seed][main] - by_run["padded", seed][main] for seed in (0, 1)]
        padded, leak = table(records, f"evaluation-{name}")
        assert (padded["arm"], leak["arm"], leak["seeds"], leak["pairs"]) == ("padded", "leak", "2", "2")
        assert float(leak["difference"]) == pytest.approx(sum(differences) / 2, rel=1e-6, abs=1e-12)
        assert float(leak["difference_low"]) <= float(leak["difference"]) <= float(leak["difference_high"])
        own = [by_run["leak", seed][metric] for seed in (0, 1)]
        assert float(leak[metric.split(".")[1]]) == pytest.approx(sum(own) / 2, rel=1e-6)
        assert {f"evaluation-{name}.{form}" for form in ("md", "csv", "tex")} <= files.keys()
        assert f"differences-{name}" in figures


def test_the_main_number_of_a_table_and_seeds_without_it():
    choices = [
        training(arm, seed, **{"next_line.accuracy": 0.1, "next_line.nats": 3.0, "next_line.choice_accuracy": right,
                               "next_line.chance": 0.25, "next_line.examples": 200})
        for arm, rights in (("padded", (0.5, 0.25, None)), ("packed-reset", (0.75, 1.0, 0.5)))
        for seed, right in enumerate(rights)
    ]  # fmt: skip
    padded, packed = table(choices, "evaluation-next_line")
    assert (float(padded["choice_accuracy"]), float(padded["chance"]), padded["seeds"]) == (0.375, 0.25, "2")
    assert padded["seeds_without"] == "1"
    shown = [
        column.title
        for column in next(
            t for t in build_sections(choices, figures=False)[0].tables if t.name == "evaluation-next_line"
        ).columns
    ]
    assert shown[2] == "right choices" and shown[4:6] == ["tokens right", "nats an answer"]
    assert shown[6] == "right choices by chance"  # no share of tokens
    assert (float(packed["difference"]), packed["pairs"], packed["difference_low"] < packed["difference"]) == (
        0.5,
        "2",
        True,
    )
    (section,) = build_sections(choices, figures=False)
    shown = next(table for table in section.tables if table.name == "evaluation-next_line")
    assert [row[1].text for row in shown.rows] == ["2 of 3, 1 missing", "3"]
    assert any("one that is missing has no record, or no such number" in note for note in shown.notes)
    # The same run before it had evaluations is no other arm.
    before = training("padded", 2, config={"evaluations": []})
    assert len(table([*choices, before], "evaluation-next_line")) == 2
    # An arm that was not asked lacks nothing; one that was, and has no number, does.
    others = [
        training("packed-leak", 0, config={"evaluations": []}),
        training("single", 0, config={"evaluations": ["next_line"]}),
    ]
    rows = table([*choices, *others], "evaluation-next_line")
    assert {row["arm"]: row["seeds_without"] for row in rows} == {"padded": "1", "packed-reset": "0", "single": "3"}
    # Without a known main number the first.
    (first, second) = table([training(arm, **{"long_context.gain_2": 0.5, "long_context.documents": 3.0})
                             for arm in ("padded", "packed-leak")], "evaluation-long_context")  # fmt: skip
    assert float(first["gain_2"]) == 0.5 and first["documents"] == "3" and float(second["difference"]) == 0


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
