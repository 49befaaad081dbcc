"""``run.py reproduce``: an experiment from nothing, its headline numbers beside the committed ones."""

import hashlib
import types
from pathlib import Path

import pytest
import torch

import run
from made_records import throughput, write
from packmamba import experiments
from packmamba.cli import reproduction as reproduce
from packmamba.config import ConfigError
from packmamba.experiments import Headline, Step
from packmamba.records import has_records, read_records
from packmamba.report.tables import Cell, Column, Table, number, word
from processes import ROOT

TINY = ["num_documents=400", "strategies=[in_order,greedy]", "row_lengths=[2048]", "buffers=[4096]"]


def headlines_of(name):
    return experiments.module(experiments.find(name), "reproduce").HEADLINES


def gpus(monkeypatch, count, gib):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = types.SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)


def committed():
    files = sorted(
        path for path in (ROOT / "experiments").rglob("*") if path.suffix in (".jsonl", ".csv", ".md", ".png")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.mark.slow
def test_packing_from_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = committed()
    assert run.main(["reproduce", "packing", "scale=small", *TINY]) == 0
    folder = tmp_path / "runs" / "reproduce" / "packing-small"
    assert len(read_records(folder)) == 2
    assert {path.name for path in folder.iterdir()} >= {"tables", "figures", "report.html", "headlines.md"}
    lines = capsys.readouterr().out.splitlines()
    (greedy,) = (line for line in lines if line.startswith("padding in rows of 2048, greedy"))
    assert "0.41 %" in greedy and "0.139 %" in greedy, "the paper's and the committed number"
    (best,) = (line for line in lines if line.startswith("padding in rows of 2048, best fit"))
    assert best.split()[-1] == "-", "it was not run"
    assert "over committed" not in " ".join(lines), "a small version compares nothing"
    assert run.main(["reproduce", "packing", "scale=small", *TINY]) == 0
    assert "done before" in capsys.readouterr().out and len(read_records(folder)) == 2
    tables = {path.name: path.read_text() for path in (folder / "tables").iterdir()}
    for path in (folder / "tables").iterdir():
        path.unlink()
    assert run.main(["report", str(folder)]) == 0 and tables
    assert {path.name: path.read_text() for path in (folder / "tables").iterdir()} == tables, "the experiment's own"
    assert run.main(["reproduce", "packing", "scale=small", *TINY[1:]]) == 2
    assert "holds results of 'packing/packing.yaml" in capsys.readouterr().err
    assert committed() == before


def test_what_is_compared():
    def difference(mean, low, high):
        return Cell("", (mean, low, high, 5))

    compared = reproduce._compared
    assert compared(number(2.0, ".1f"), number(3.0, ".1f")).text == "1.50"
    assert compared(number(2.0, ".1f"), number(None, "")).text == "-"
    assert compared(difference(0.1, 0.0, 0.2), difference(-0.1, -0.2, 0.05)).text == "intervals meet"
    assert compared(difference(0.1, 0.0, 0.2), difference(0.4, 0.3, 0.5)).text == "intervals apart"
    assert compared(difference(0.1, 0.0, 0.2), difference(0.4, None, None)).text == "one seed"


@pytest.mark.slow
def test_every_headline_has_a_committed_number():
    for name in reproduce.reproducible():
        headlines = headlines_of(name)
        cells = reproduce.cells(headlines, experiments.find(name))
        assert len(cells) == len(headlines) > 3, "two headlines of one name"
        if not has_records(experiments.find(name)):  # predictions come before runs
            assert "Predictions" in (experiments.find(name) / "README.md").read_text(encoding="utf-8")
            continue
        assert [name for name, cell in cells.items() if cell.values[0] is None] == []


def test_a_headline_is_a_cell_or_a_ratio_of_two():
    cells = reproduce.cells(headlines_of("speedup"), experiments.find("speedup"))
    assert cells["1.4B: over mamba-ssm, one document at a time"].text == "11.29x"
    assert cells["1.4B: sorted into batches, over packed"].values[0] == pytest.approx(48545.1 / 49916.7, rel=1e-3)


def test_a_ratio_of_times_is_of_the_latest_timing_that_has_both(tmp_path):
    def timed(arm, rate, run, day):
        return throughput(arm, rate, run) | {"time": f"2030-01-0{day}T00:00:00+00:00"}

    first = [timed("padded", 100.0, "a", 1), timed("packed-reset", 150.0, "a", 1), timed("mine", 190.0, "a", 1)]
    second = [timed("padded", 200.0, "z", 2), timed("packed-reset", 400.0, "z", 2)]
    third = [timed("mine", 600.0, "m", 3)]
    folder = write(tmp_path, [*first, *second, *third])
    column, over = "real_tokens_per_second", {"arm": "padded"}
    headlines = [Headline(arm, "throughput", {"arm": arm}, column, over) for arm in ("packed-reset", "mine", "single")]
    headlines.append(Headline("latest", "throughput", {"arm": "mine"}, column))
    found = reproduce.cells(headlines, folder)
    assert {name: cell.values[0] for name, cell in found.items()} == {
        "packed-reset": 2.0, "mine": 1.9, "single": None, "latest": 600.0
    }  # fmt: skip


def test_what_the_machine_cannot_do_is_refused_in_one_sentence(capsys):
    assert run.main(["reproduce", "speedup"]) == 2
    assert capsys.readouterr().err.strip() == (
        "run.py: error: speedup/speedup needs a GPU that PyTorch can use, this machine has none; "
        "speedup/multi_gpu needs 4 GPUs that PyTorch can use, this machine has none"
    )


def test_what_a_machine_can_do(monkeypatch):
    step = Step("speedup.yaml", ("models=[2.8b]",), gpus=1, gpu_gib=130)
    gpus(monkeypatch, 1, 80)
    assert reproduce.lacks(step, "speedup") == (
        "speedup/speedup models=[2.8b] needs 130 GiB of GPU memory, this machine has 80"
    )
    (plan,) = reproduce.load_plans("speedup", [])
    assert [step.overrides[0] for step in plan.steps] == ["models=[130m]", "models=[1.4b]"] and len(plan.left_out) == 2
    gpus(monkeypatch, 4, 140)
    (plan,) = reproduce.load_plans("speedup", ["output=mine"])
    assert len(plan.steps) == 4 and plan.left_out == [] and plan.output == Path("mine")


def test_a_sweep_whose_kernels_are_not_installed_is_left_out(monkeypatch):
    gpus(monkeypatch, 1, 140)
    missing = Step("parity.yaml", gpus=1, packages=("mamba_ssm_that_is_not_there",))
    assert reproduce.lacks(missing, "parity") == (
        "parity/parity needs mamba_ssm_that_is_not_there, which is not installed"
    )
    assert reproduce.lacks(missing._replace(file="gradients.yaml"), "parity") is None, "a bench leaves arms out"


def test_all_of_what_this_machine_can_do(monkeypatch):
    gpus(monkeypatch, 0, 0)
    plans = reproduce.load_plans("all", ["scale=small", "output=mine"])
    assert {"operators", "packing", "schemes"} <= {plan.experiment for plan in plans} and len(plans) < len(
        reproduce.reproducible()
    )
    assert all(plan.output == Path("mine") / plan.experiment for plan in plans)
    left_out = " ".join(sentence for plan in plans for sentence in plan.left_out)
    assert "operators/gpu_operators needs a GPU" in left_out and "speedup/multi_gpu needs 4 GPUs" in left_out


@pytest.mark.parametrize(
    ("what", "arguments", "message"),
    [
        ("paking", [], "^unknown experiment 'paking'; did you mean 'packing'[?]$"),
        ("packing/x", [], "^experiment 'packing' has no step 'x'; known: packing/packing$"),
        ("packing", ["scale=tiny"], "^scale: expected one of full, small, got 'tiny'$"),
        ("operators", ["rounds=3"], "^'rounds=3' is a key of one step; name it, one of operators/operators, "),
    ],
)
def test_a_typo_is_one_sentence(what, arguments, message):
    with pytest.raises(ConfigError, match=message):
        reproduce.load_plans(what, arguments)


@pytest.mark.slow
def test_an_empty_folder_has_nothing_to_reproduce(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match="^there is no experiment with a reproduce.py below /"):
        reproduce.load_plans("all", [])
    with pytest.raises(ConfigError, match="^unknown experiment 'packing': there is no folder experiments/ in /"):
        reproduce.load_plans("packing", [])


@pytest.mark.slow
def test_the_keys_of_every_step_are_its_file_s(tmp_path):
    """Those that scale=small adds too."""
    from packmamba.training.sweep import load_sweep

    mine = tmp_path / "mine"
    for name in reproduce.reproducible():
        folder = experiments.find(name)
        for step in experiments.module(folder, "reproduce").STEPS:
            keys = [*step.keys(mine), *step.small]
            path = folder / step.file
            if "\nbench:" in "\n" + path.read_text():
                assert experiments.load_bench(path, keys).output == mine
            else:
                one_seed = ["grid.seed=[1]"] * ("\ngrid:" in path.read_text())  # the others have the same keys
                sweep, configs = load_sweep(path, [*keys, *one_seed], runs_here=False)
                assert sweep.output == str(mine)
                assert {c.trainer.init_from for c in configs} <= {None, f"{mine}:zero"}
                windows = {c.evaluation_options.get("long_context", {}).get("window", 64) for c in configs}
                assert windows == {64} or not step.small, "the standard library's functions are short"


def test_a_folder_s_own_done_json_is_no_mark(tmp_path, caplog):
    (tmp_path / "done.json").write_text("[1, 2]")
    assert (
        experiments.kinds_of(tmp_path, []) == {}
        and "expected a list of the steps that reproduce has taken" in caplog.text
    )
    with pytest.raises(ConfigError, match="done.json: expected a list of the steps"):
        experiments.done_steps(tmp_path)


def test_a_small_version_never_shows_a_number_of_another_corpus():
    """Where it has no table of the headline's, another's begins with the same word; its row is one that only it has."""
    tables = {"parity-functions": Table("parity-functions", "", [Column("arm", ("arm",)), Column("x", ("x",))])}
    tables["parity-functions"].rows.append([word("a"), number(1.0, ".1f")])
    headline = experiments.Headline("n", "parity-files", {"arm": "a"}, "x", alone="parity")
    assert reproduce._cell(headline, tables, True).text == "-"
    assert reproduce._cell(headline._replace(small={"arm": "b"}), tables, True).text == "-"
    assert reproduce._cell(headline._replace(row={"arm": "c"}, small={"arm": "a"}), tables, True).text == "1.0"
    assert reproduce._cell(headline._replace(small={"arm": "a"}), tables, False).text == "-", "only a small version's"
