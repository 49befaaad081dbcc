"""Runs that were trained apart, in one table; and what their table holds."""

import csv
import io
import json

import pytest
import yaml
from scipy import stats

from made_records import training
from packmamba import cli
from packmamba.cli.comparison import compare_runs
from packmamba.config import ConfigError
from packmamba.records import append_record, read_records, write_sweep
from packmamba.report.folder import build_sections
from packmamba.report.summary import training_arms
from packmamba.report.tables import write_table
from packmamba.report.training import difference
from packmamba.training.run_id import id_of


def run_of(tmp_path, arm, seed=0, loss=2.0, lr=0.1, output=None, **changes):
    """A run's folder, as it is left behind, with an invented record."""
    config = {"optimizer": {"lr": lr}, "trainer": {"boundary": "reset", "max_steps": 10}, **changes.pop("config", {})}
    record = training(arm, seed, loss, config={**config, "output": output}, **changes)
    record["config"] = {name: value for name, value in record["config"].items() if name != "output"}
    folder = tmp_path / "runs" / id_of(arm, record["config"])
    folder.mkdir(parents=True)
    (folder / "configuration.yaml").write_text(yaml.safe_dump({"output": output}))
    append_record((tmp_path / output if output else folder) / "records" / f"{folder.name}.jsonl", record)
    return str(folder)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Padded with three seeds, packed with two of these and one that is its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # takes seconds
    padded = [run_of(tmp_path, "padded", seed, loss, output="mine") for seed, loss in ((0, 2.0), (1, 2.2), (2, 2.1))]
    packed = [run_of(tmp_path, "packed-reset", seed, loss) for seed, loss in ((0, 2.3), (1, 2.7), (9, 5.0))]
    return [*padded, *packed]


def row(folder, arm):
    (found,) = (line for line in csv.DictReader((folder / "tables" / "training.csv").open()) if line["arm"] == arm)
    return {name: float(value) for name, value in found.items() if name != "arm" and value}


def test_several_seeds_make_an_interval_paired_where_seeds_match(runs, tmp_path, capsys):
    assert cli.main(["compare", *runs, "baseline=padded", f"output={tmp_path}/together"]) == 0
    found = row(tmp_path / "together", "packed-reset")
    low, high = stats.t.interval(0.95, 1, loc=0.4, scale=stats.sem([0.3, 0.5]))
    assert found["val_loss_difference"] == pytest.approx(0.4) and found["val_loss_pairs"] == 2
    assert [found[f"val_loss_difference_{end}"] for end in ("low", "high")] == pytest.approx([low, high], abs=1e-3)
    said = capsys.readouterr().out
    assert "validation loss by arm" in said and f"Report, with figures: {tmp_path}/together/report.html" in said
    assert "(2 pairs)" in said and "missing" not in said
    assert len(read_records(tmp_path / "together")) == 6
    assert cli.main(["report", str(tmp_path / "together")]) == 0
    assert row(tmp_path / "together", "packed-reset") == found, "made again from its own records"


def test_means_over_seeds_that_do_not_match(runs):
    assert "by Welch's t" in compare_runs([*runs, "baseline=padded", "paired=false"])
    records = [record for run in runs[:3] for record in read_records("mine") if record["seed"] == int(runs.index(run))]
    records += [record for run in runs[3:] for record in read_records(run)]
    said = {"baseline": "padded", "tuned": None, "seeds": [0], "absent": {}, "table": {"paired": False}, "apart": True}
    arms = training_arms([record | {"sweep": said} for record in records])
    found = difference(next(arm for arm in arms if arm.name == "packed-reset"), arms, "val_loss")
    result = stats.ttest_ind([2.3, 2.7, 5.0], [2.0, 2.2, 2.1], equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((result.low, result.high))


def test_arms_are_compared_whatever_else_differs(tmp_path):
    """Runs of one name that differ in a key are arms; one of them is the baseline by its label or its folder."""
    one, other = (run_of(tmp_path, "padded", 0, 2.0 + lr, lr=lr) for lr in (0.1, 0.2))
    for baseline in ("padded (optimizer.lr=0.1)", one):
        text = compare_runs([one, other, f"baseline={baseline}", "columns=[optimizer.lr]"])
        assert "minus padded" in text and "+0.1000" in text
    with pytest.raises(
        ConfigError, match="^baseline: expected one of padded .*, got 'padded', which is 2 arms; name one by"
    ):
        compare_runs([one, other, "baseline=padded"])


def test_columns_show_keys_that_records_leave_out(tmp_path):
    """With the value that their absence stands for, as files of configurations have it."""
    said = {"data": {"row_length": None, "stagger": True}}
    one, other = run_of(tmp_path, "padded"), run_of(tmp_path, "packed-reset", config=said)
    text = compare_runs([one, other, "columns=[data.stagger,trainer.init_from,data.row_length]"])
    cells = {line.split()[0]: line.split()[-3:] for line in text.splitlines() if line.startswith(("padded", "packed"))}
    assert cells == {"padded": ["false", "null", "null"], "packed-reset": ["true", "null", "null"]}
    third = run_of(tmp_path, "packed-leak", config={"trainer": {"boundary_options": {"memory": 0.5}, "max_steps": 10}})
    text = compare_runs([one, third, "columns=[trainer.boundary_options,trainer.boundary_options.memory]"])
    cells = [line.split() for line in text.splitlines() if line.startswith(("padded", "packed"))]
    assert cells[0][-2:] == ["{}", "-"] and cells[1][-3:] == ["{memory:", "0.5}", "0.5"]
    with pytest.raises(
        ConfigError, match="^columns: expected numbers of the records and keys, got 'data.staggr'; did you mean"
    ):
        compare_runs([one, other, "columns=[data.staggr]"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "corpus-b"}, "are of different documents: their corpus hashes are corpus-a and corpus-b$"),
        ({"config": {"evaluations": ["mqar"]}}, r"were evaluated in different ways: evaluations is \[\] and \['mqar'\]$"),
        ({"config": {"data": {"strategy": "greedy", "validation_documents": 4}}}, "data.validation_documents is None and 4$"),
        ({"config": {"evaluation_examples": 7}}, "evaluation_examples is 200 and 7$"),
    ],
    ids=["corpus", "evaluations", "documents", "examples"],
)  # fmt: skip
def test_runs_that_are_of_something_else_are_refused(tmp_path, changes, message, capsys):
    one, other = run_of(tmp_path, "padded"), run_of(tmp_path, "packed-reset", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        compare_runs([one, other])
    assert one in str(caught.value) and other in str(caught.value) and "\n" not in str(caught.value)
    assert cli.main(["compare", one, other, f"output={tmp_path}/x"]) == 2 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "^compare: expected at least two runs, got 1"),
        (["RUN", "RUN"], "^compare: expected at least two runs, got 1"),
        (["RUN", "nowhere"], "^nowhere is not a folder; expected a run's, or one that holds records/"),
        (["RUN", "runs"], "^runs has no record of a run that has ended"),
        (["RUN", "OTHER", "baseline=leak"], "^baseline: expected one of padded; packed-reset, got 'leak', which is none of them"),
        (["RUN", "OTHER", "metrics=[val_los]"], "^metrics: expected some of .*val_loss.*, got 'val_los'"),
        (["RUN", "OTHER", "columns=[optimizer.l]"], "^columns: .* keys, got 'optimizer.l'; did you mean 'optimizer.lr'"),
        (["RUN", "OTHER", "metric=[val_loss]"], "^unknown key 'metric'.*did you mean 'metrics'"),
        (["RUN", "OTHER", "output=mine"], "^output: mine holds records of its own, such as .*; name another folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_sentence(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    named = {"RUN": run_of(tmp_path, "padded", output="mine"), "OTHER": run_of(tmp_path, "packed-reset")}
    with pytest.raises(ConfigError, match=message):
        compare_runs([named.get(word, word) for word in words])


def test_a_sweep_says_what_its_table_holds(tmp_path):
    for seed in (0, 1):
        for arm, loss in (("padded", 2.0), ("packed-leak", 2.5)):
            record = training(
                arm, seed, loss + seed / 10, **{"mqar.accuracy": loss / 10}, config={"optimizer": {"lr": 0.1}}
            )
            append_record(tmp_path / "records" / "made.jsonl", record)
    table = {"metrics": ["mqar.accuracy", "val_loss"], "columns": ["optimizer.lr", "steps"], "paired": True}
    write_sweep(tmp_path, "mine", {"padded": [0, 1], "packed-leak": [0, 1, 2], "lost": [0]}, table=table)
    (section,) = build_sections(read_records(tmp_path), figures=False)
    (found,) = (table for table in section.tables if table.name == "training")
    assert found.title == "mqar, accuracy, validation loss by arm"
    assert "differences" not in [table.name for table in section.tables]
    first, second, lost = csv.DictReader(io.StringIO(write_table(found, "csv")))
    assert list(first)[2:9] == ["mqar.accuracy", "mqar.accuracy_sd", *(f"mqar.accuracy_{p}" for p in
                                ("difference", "difference_low", "difference_high", "pairs")), "val_loss"]  # fmt: skip
    assert (second["arm"], second["optimizer.lr"], float(second["steps"])) == ("packed-leak", "0.1", 10)
    assert float(second["val_loss_difference"]) == pytest.approx(0.5)
    assert "2 of 3, 1 missing" in found.text() and lost["arm"] == "lost"
    assert json.loads((tmp_path / "sweep.json").read_text())["mine"]["table"] == table
