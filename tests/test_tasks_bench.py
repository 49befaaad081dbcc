"""The tasks' experiment at a tiny size: everything is trained, asked and tabulated; what it refuses."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binomtest

import run
from experiments.tasks import bench as answers
from experiments.tasks.report import wilson
from packmamba.config import ConfigError
from packmamba.evaluation.tasks import TASKS
from packmamba.experiments import load_bench
from packmamba.records import read_records


@pytest.mark.slow
def test_the_experiment_from_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run.main(["reproduce", "tasks", "scale=small"]) == 0
    folder = tmp_path / "runs" / "reproduce" / "tasks-small"
    records = read_records(folder)
    trained = [record for record in records if record["kind"] == "training"]
    contradiction = [r for r in trained if r["config"]["data"]["task"] == "contradiction"]
    assert len(trained) == 7 and {r["config"]["trainer"]["boundary"] for r in contradiction} == {"reset", "leak"}
    for record in contradiction:
        as_trained = "contradiction.accuracy_intruding_as_trained" in record["metrics"]
        assert as_trained == (record["config"]["trainer"]["boundary"] == "leak")
    asked = {record["arm"]: record for record in records if record["kind"] == "answers"}
    assert set(asked) == {"induction", "mqar", "parity"}
    for record in asked.values():
        assert all(point["answers"] > 0 and 0 <= point["accuracy"] <= 1 for point in record["curves"]["answers"])
    assert {record["arm"] for record in records if record["kind"] == "untrained"} == set(TASKS)
    tables = {path.name for path in (folder / "tables").glob("*.md")}
    assert {
        "untrained.md",
        "answers-mqar.md",
        "learned-parity.md",
        "leak-contradiction.md",
        "leak-contradiction-begin.md",
    } <= tables
    assert {path.name for path in (folder / "figures").glob("*.png")} == {f"answers-{arm}.png" for arm in asked} | {
        "leak-contradiction.png",
        "leak-contradiction-begin.png",
    }
    lines = capsys.readouterr().out.splitlines()
    names = ("parity: right answers at length 1024", "next_line: untrained")
    for name in names:
        (line,) = (line for line in lines if line.startswith(name))
        assert not line.rstrip().endswith("- -"), "a number was made now"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": {"mqar": {"task": "mqr", "varied": "length", "values": [8]}}}, "questions.mqar: .*mqr"),
        ({"questions": {"a": {"task": "parity", "varied": "size", "values": [8]}}}, "questions.a: .*size"),
        ({"questions": {"a": {"task": "parity", "varied": "length", "values": [0]}}}, "questions.a: length: expected"),
        ({"questions": {"a": {"task": "parity", "values": [8]}}}, "questions.a: .*varied"),
        ({"runs": "nowhere"}, "questions.induction: expected trained runs of this arm in nowhere, found none"),
    ],
)  # fmt: skip
def test_refuses_in_one_sentence(tmp_path, changes, message):
    config = load_bench("tasks/answers").config
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        answers.run(config, tmp_path / "records" / "answers.jsonl", progress=False)
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(("right", "answers"), [(0, 50), (7, 50), (500, 1000), (50, 50)])
def test_the_interval_of_a_share_is_wilson_s(right, answers):
    expected = binomtest(right, answers).proportion_ci(method="wilson")
    low, high = wilson(right, answers)
    assert math.isclose(low, expected.low, abs_tol=1e-9) and math.isclose(high, expected.high, abs_tol=1e-9)
