"""Experiments by name: benches of a user's own folder, steps from nothing, headline numbers beside
the committed ones.
"""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

import experiments.reproduce as engine
import run
from experiments import by_name
from experiments.reproduce import Headline, Step
from packmamba.config import ConfigError
from packmamba.lab import cli
from packmamba.lab.records import has_records, read_records
from processes import ROOT

BENCH = """
from dataclasses import dataclass, field
from packmamba.config import key
from packmamba.lab.records import append_record, make_record
from experiments.by_name import Bench

@dataclass
class Arm:
    rows: int = key(1, "Rows.", low=1)

@dataclass
class Config:
    experiment: str = "toy"
    answer: int = key(42, "The answer.", low=1)
    arms: dict[str, Arm] = field(default_factory=dict)

def run(config, path, progress):
    for arm, keys in config.arms.items():
        values = {"answer": config.answer * keys.rows}
        append_record(path, make_record("answers", config.experiment, arm, {}, 0, "none", values, 1.0))

BENCHES = {"toy": Bench(Config, run)}
"""
REPORT = """
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Column, Table, number, word

def tables(records):
    rows = [[word(record["arm"]), number(record["metrics"]["answer"], "d")] for record in records[:1]]
    return [Table("answers", "Answers", [Column("arm", ("arm",)), Column("answer", ("answer",))], rows)]

KINDS = {"answers": Kind(tables)}
"""
REPRODUCE = """
from experiments.reproduce import Headline, Step

TAKES = "5 minutes"
STEPS = [Step("toy.yaml", ("answer=2",), small=("answer=3",)), Step("toy.yaml", ("answer=5",), gpus=1)]
HEADLINES = [Headline("toy: the answer", "answers", {"arm": "a"}, "answer", paper="1")]
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An experiment below the current folder, outside the checkout."""
    folder = tmp_path / "experiments" / "toy"
    folder.mkdir(parents=True)
    (folder / "bench.py").write_text(BENCH)
    (folder / "report.py").write_text(REPORT)
    (folder / "reproduce.py").write_text(REPRODUCE)
    (folder / "toy.yaml").write_text("bench: toy\nanswer: 43\narms: {a: {rows: 1}, b: {rows: 2}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("experiments.toy")]:
        del sys.modules[name]


def test_a_bench_by_name_or_file(toy, tmp_path):
    for what in ("toy", "toy/toy", toy / "toy.yaml"):
        bench = by_name.load_bench(what, ["arms=[b]", "answer=7", "output=mine"])
        assert (bench.name, str(bench.output)) == ("toy", "mine")
        assert (bench.config.experiment, bench.config.answer, [*bench.config.arms]) == ("toy", 7, ["b"])
    by_name.run_bench("toy", [f"output={tmp_path}/mine"])
    assert [record["metrics"]["answer"] for record in read_records(tmp_path / "mine")] == [43, 86]


@pytest.mark.parametrize(
    ("what", "overrides", "message"),
    [
        ("tony", [], "did you mean 'toy'"),
        ("toy/small", [], "toy/small.yaml: expected a YAML file"),
        ("toy", ["answer=0"], "^answer: expected at least 1"),
        ("toy", ["arms.a.rows=0"], "^arms.a.rows: expected at least 1"),
        ("toy", ["arms.a.rows=x"], "^arms.a.rows: expected an integer"),
        ("toy", ["arms=[c]"], "^arms: expected some of a, b"),
        ("toy", ["bench=toy/other"], "^bench: expected one of toy"),
        ("toy", ["plugins=[nowhere]"], "^plugins: "),
    ],
)
def test_a_wrong_bench_is_named(toy, what, overrides, message):
    with pytest.raises(ConfigError, match=message):
        by_name.load_bench(what, overrides)


def test_steps_from_nothing(toy, tmp_path, monkeypatch, capsys):
    (toy / "tables").mkdir()
    (toy / "tables" / "answers.csv").write_text("arm,answer,answer_low,answer_high\na,4,3,5\n")
    output = tmp_path / "runs" / "reproduce" / "toy"

    for _ in range(2):
        assert run.main(["reproduce", "toy"]) == 0
        assert [record["metrics"]["answer"] for record in read_records(output)] == [2, 4], "a step is not repeated"
    printed = capsys.readouterr().out
    assert "left out, as it needs 1 GPU" in printed and "done before" in printed
    assert re.search(r"toy: the answer +1 +4 \[3, 5\] +2 +0.50 +outside", printed)
    page = (output / "report.html").read_text()
    assert "Headline numbers" in page.partition("</table>")[0] and ">outside<" in page
    assert run.main(["reproduce", "toy", "output="]) == 0 and not (tmp_path / "report.html").exists()
    assert run.main(["reproduce", "toy", "scale=small", "output=mine"]) == 0
    assert read_records(tmp_path / "mine")[0]["metrics"]["answer"] == 3
    assert "outside" not in (tmp_path / "mine" / "tables" / "headlines.md").read_text()
    capsys.readouterr()
    assert run.main(["reproduce"]) == 0
    assert re.search(r"^toy +GPU +5 minutes$", capsys.readouterr().out, re.MULTILINE)
    assert run.main(["reproduce", "toy/nothing"]) == 2 and run.main(["reproduce", "toy", "scale=tiny"]) == 2


def test_wrong_keys_are_refused_before_the_first_step(toy, tmp_path, capsys):
    (toy / "reproduce.py").write_text(REPRODUCE.replace('answer=5",), gpus=1', 'answer=0",)'))
    assert run.main(["reproduce", "toy", "output=mine"]) == 2 and not (tmp_path / "mine").exists()
    assert "answer: expected at least 1" in capsys.readouterr().err
    assert run.main(["reproduce", "scale=small"]) == 2 and "scale=small" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["reproduce", "bench"])
def test_outside_a_clone(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "PACKAGE", tmp_path / "site-packages" / "packmamba")
    for name in ([], ["packing"]):
        assert run.main([command, *name]) == 2
        shown = capsys.readouterr()
        assert "experiments: expected a clone" in shown.err and not shown.out and shown.err.count("\n") == 1


def test_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80 * 2**30))
    assert engine.missing(Step("a.yaml", gpus=1, gpu_gib=70), True, False) == ""
    assert engine.missing(Step("a.yaml", gpus=1, gpu_gib=130), True, False) == "1 GPU of 130 GiB"
    assert engine.missing(Step("a.yaml", gpus=2, small_on_cpu=True), True, True) == ""
    peers = Step("a.yaml", packages=("not_installed_here",))
    assert engine.missing(peers, False, False) == "the package not_installed_here"
    assert engine.missing(peers, True, False) == "", "a bench leaves arms out"


def test_a_headline_is_a_cell_with_its_interval():
    rows = "arm,rate,rate_low,rate_high\npadded,100,,\npacked,150,140,160\nfew,,,\n"

    def number(arm):
        return engine.number_of(Headline("", "rates", {"arm": arm}, "rate"), {"rates.csv": rows})

    assert number("packed") == [150, 140, 160] and number("padded") == [100] and number("few") == [] == number("none")


def test_every_headline_has_a_committed_number():
    for name, folder in by_name.experiments().items():
        declared = by_name.module(name, "reproduce") if ROOT in folder.parents else None
        if declared is None or not has_records(folder):
            continue
        tables = {path.name: path.read_text() for path in (folder / "tables").glob("*.csv")}
        numbers = {headline.name: engine.number_of(headline, tables) for headline in declared.HEADLINES}
        assert len(numbers) == len(declared.HEADLINES) and [key for key, value in numbers.items() if not value] == []


@pytest.mark.slow
def test_the_keys_of_every_step_are_valid(tmp_path):
    """With scale=small, which adds keys; sweeps with one seed, as the others have the same keys."""
    from packmamba.lab.sweep import load_sweep

    for name, folder in by_name.experiments().items():
        for step in getattr(by_name.module(name, "reproduce"), "STEPS", ()) if ROOT in folder.parents else ():
            keys = [key.replace("{output}", str(tmp_path)) for key in (*step.overrides, *step.small)]
            if "\nbench:" in f"\n{(folder / step.file).read_text()}":
                by_name.load_bench(folder / step.file, keys)
            else:
                load_sweep(folder / step.file, [*keys, "grid.seed=[1]"])
