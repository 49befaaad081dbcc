"""Experiments are folders, found by their names; the package imports none before it is asked."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from packmamba import experiments
from packmamba.config import ConfigError
from processes import ROOT

TOY = """
from dataclasses import dataclass
from packmamba.experiments import Bench
from packmamba.records import append_record, make_record

@dataclass
class Config:
    experiment: str = ""
    answer: int = 42

def run(config, path, progress):
    values = {"padding_fraction": 0.5, "planning_seconds": 1, "num_rows": 1, "num_documents": config.answer}
    append_record(path, make_record("packing", config.experiment, "toy", {}, 0, "none", values, 1.0))

BENCHES = {"toy": Bench(Config, run)}
"""
REPORT = """
from packmamba.report.kinds import Kind

KINDS = {"packing": Kind(lambda records: [], lambda records: [])}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An experiment below the current folder, outside the checkout."""
    folder = tmp_path / "experiments" / "toy"
    folder.mkdir(parents=True)
    (folder / "bench.py").write_text(TOY)
    (folder / "report.py").write_text(REPORT)
    (folder / "toy.yaml").write_text("bench: toy\nanswer: 43\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("experiments.toy")]:
        del sys.modules[name]


def test_every_folder_is_an_experiment():
    folders = {path.parent.name for path in ROOT.glob("experiments/*/README.md")}
    assert set(experiments.names()) <= folders and "speedup" in folders
    assert experiments.find("speedup") == ROOT / "experiments" / "speedup"


@pytest.mark.slow
def test_the_package_imports_no_experiment():
    code = "import sys, packmamba.experiments as e; e.names(); print([m for m in sys.modules if m.startswith('experiments')])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("what", ["speedup/multi_gpu", "experiments/speedup/multi_gpu.yaml"])
def test_a_bench_by_name_or_file(what, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = experiments.load_bench(what, ["rounds=2"])
    assert (loaded.question, loaded.name, loaded.config.experiment) == ("speedup", "multi_gpu", "speedup")
    assert loaded.output.parts == ("runs", "multi_gpu"), "committed records are written to only when asked"
    assert experiments.load_bench(what, ["output=mine"]).output.name == "mine"


def test_a_copied_file_finds_its_bench(tmp_path):
    keys = OmegaConf.load(ROOT / "experiments" / "speedup" / "multi_gpu.yaml")
    for bench in ("multi_gpu", "speedup/multi_gpu"):
        OmegaConf.save(OmegaConf.merge(keys, {"bench": bench}), tmp_path / "mine.yaml")
        assert experiments.load_bench(tmp_path / "mine.yaml").name == "multi_gpu"


@pytest.mark.parametrize(
    ("what", "overrides", "message"),
    [
        ("sppedup", [], "^unknown experiment 'sppedup'; did you mean 'speedup'[?]$"),
        ("nothing", [], "^unknown experiment 'nothing'; known: .*operators, packing.*, scoring, speedup"),
        ("downstream", [], "^experiment 'downstream' has no bench, only sweeps; expected reproduce boundaries$"),
        ("speedup/multigpu", [], "^experiment 'speedup' has no bench 'multigpu'; did you mean 'multi_gpu'[?]$"),
        ("schemes", [], "^.*schemes.yaml is for another command: python run.py sweep .*schemes.yaml$"),
        ("packing", ["seed=1"], "^unknown key 'seed' in 'seed=1'; did you mean 'seeds'[?]$"),
        ("packing", ["rounds=few"], "^rounds in 'rounds=few': "),
    ],
)
def test_what_is_not_there_is_one_sentence(what, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        experiments.load_bench(what, overrides)
    assert "\n" not in str(caught.value)


def test_an_experiment_of_ones_own(toy):
    assert {"toy", "speedup"} <= set(experiments.names())
    folder = experiments.run_bench("toy", ["answer=44"])
    text = (folder / "records" / "toy.jsonl").read_text()
    assert '"num_documents": 44' in text and '"experiment": "toy"' in text
    (kind,) = experiments.kinds_of(folder, [{"experiment": "toy", "config": {}}]).values()
    assert kind.tables([]) == []


def test_a_folder_s_own_report_comes_first(toy, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "report.py").write_text(REPORT.replace("packing", "mine"))
    records = [{"experiment": name, "config": {}} for name in ("toy", "packing", "my runs")]
    assert experiments.kinds_of(mine, records).keys() == {"mine"}
    (mine / "report.py").unlink()
    assert experiments.kinds_of(mine, records).keys() == {"packing"}
    assert experiments.kinds_of(mine, records[2:]) == {}
