"""The studies' small versions compute everything that the real ones do; what comes out is not looked at."""

import pytest

from packmamba import experiments
from packmamba.cli.reproduction import comparison, load_plans, run

FEWER = (
    *(f"trainer.{key}=3" for key in ("max_steps", "validate_every", "checkpoint_every", "average_snapshots")),
    "trainer.average_share=1.0",
    "optimizer.warmup_steps=1",
    "model.n_layer=1",
    "data.validation_documents=4",
    "evaluation_examples=4",
    "grid={seed: [1, 2]}",
)


@pytest.mark.slow
@pytest.mark.parametrize(("study", "steps"), [("parity", 2), ("downstream", 1)])
def test_small_computes_everything(study, steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("packmamba.report.folder._drawn", lambda *_: [])  # other tests draw
    (plan,) = load_plans(study, ["scale=small", f"output={tmp_path}/out"])
    kept = [step._replace(overrides=(*step.overrides, *FEWER)) for step in plan.steps[:steps]]
    run(plan._replace(steps=kept))
    table = comparison(plan._replace(steps=kept))
    if study == "parity":  # the other's headlines name the tables of four tasks
        assert len(table.rows) == len(plan.headlines)
        later = ("gradients",)  # of steps that are left out here
        found = [row[3].text for row, h in zip(table.rows, plan.headlines) if h.alone and h.alone not in later]
        assert len(found) >= 8 and "-" not in found
    tables = {path.stem for path in (tmp_path / "out" / "tables").glob("*.md")}
    assert {"parity": {"parity", "calibration", "training"}, "downstream": {"answers", "training"}}[study] <= tables
    capsys.readouterr()


@pytest.mark.slow
def test_the_speed_of_tasks_has_a_table_for_each(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("packmamba.report.folder._drawn", lambda *_: [])
    (plan,) = load_plans("downstream/speed", ["scale=small", f"output={tmp_path}/out"])
    run(plan)
    tables = {path.stem: path.read_text() for path in (tmp_path / "out" / "tables").glob("*.md")}
    assert tables.keys() == {"throughput-mqar", "throughput-contradiction"}
    assert "| packed-reset, contradiction | 2 |" in tables["throughput-contradiction"]
    capsys.readouterr()


@pytest.mark.parametrize("study", ["parity", "boundaries", "downstream"])
def test_predictions_and_margins_stand_before_the_runs(study):
    text = (experiments.find(study) / "README.md").read_text(encoding="utf-8")
    assert "## Predictions\nWritten on 22 November 2026, before any run of the real size." in text
    files = {path.name for path in experiments.find(study).glob("*.yaml")} - {"train.yaml"}
    steps = {step.file for step in experiments.module(experiments.find(study), "reproduce").STEPS}
    assert steps <= files and len(steps) >= 4
