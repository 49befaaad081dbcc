"""Gradients of padded and packed along a run: what the bench finds, and what it refuses."""

import csv

import pytest
import torch

import run
from experiments.parity.gradients import _apart
from experiments.parity.report import gradient_legend
from experiments.parity.reproduce import GRADIENTS
from packmamba.records import read_records

KEYS = GRADIENTS[0].partition("[")[2].rstrip("]")


def bench(tmp_path, *keys):
    return run.main(["bench", "parity/gradients", *GRADIENTS, f"output={tmp_path}", *keys])


@pytest.mark.slow
def test_packed_and_padded_have_one_gradient_along_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path) == 0
    records = read_records(tmp_path)
    assert not any("cache_dir" in one["config"]["data"] for one in records), "a place of one machine"
    assert len(records) == 8 and all(len(one["curves"]["gradients"]) == 3 for one in records)
    with open(tmp_path / "tables" / "gradients.csv") as file:
        rows = {(row["arm"], row["precision"]): row for row in csv.DictReader(file)}
    assert len(rows) == 7 and ("padded", "32-true") not in rows, "all others are compared with it"
    assert not any("mamba-ssm" in arm for arm, _ in rows), "it needs a GPU"
    for step in ("step_0", "step_20", "step_39"):
        exact = float(rows["packed-reset", "32-true"][step])
        assert 0 < float(rows["single", "32-true"][step]) <= 1e-5
        rounded = float(rows["padded", "bf16-mixed"][step])
        assert 0 < exact <= 1e-5, "other sums, and nothing else"
        assert 1e-4 < rounded < 0.1, "the precision is another"
        assert float(rows["packed-reset", "bf16-mixed"][step]) < rounded
    assert rows["padded", "bf16-mixed"]["minus"] == "padded, 32-true"
    assert rows["packed-reset", "bf16-mixed"]["minus"] == "padded, bf16-mixed"


@pytest.mark.slow
def test_a_run_of_many_places_has_a_table_that_says_where_a_difference_is_largest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = list(range(3, 10))
    assert bench(tmp_path, "precisions=[32-true]") == 0
    assert bench(tmp_path, "precisions=[32-true]", f"at={places}", f"keys=[{KEYS}, seed=2]") == 0
    tables = {}
    for name in ("gradients", "gradients-seed-2"):
        with open(tmp_path / "tables" / f"{name}.csv") as file:
            tables[name] = {row["arm"]: row for row in csv.DictReader(file)}
    assert {"step_0", "step_20", "step_39"} <= tables["gradients"]["single"].keys(), (
        "the other run has not taken its place"
    )
    row = tables["gradients-seed-2"]["packed-reset"]
    (curve,) = (
        r["curves"]["gradients"] for r in read_records(tmp_path) if (r["arm"], r["seed"]) == ("packed-reset", 2)
    )
    largest = max(curve, key=lambda point: point["relative_difference"])
    assert [int(row["steps"]), int(row["largest_at"])] == [7, largest["step"]]
    assert float(row["relative_difference"]) == pytest.approx(largest["relative_difference"], rel=1e-6)


def test_only_what_no_run_trains_is_explained_with_the_gradients():
    compared = [{"kind": "gradients", "arm": arm} for arm in ("padded", "single", "single-mamba-ssm")]
    trained = {"kind": "training", "arm": "single"}
    assert gradient_legend(compared).keys() == {"single", "single-mamba-ssm"}
    assert gradient_legend([*compared, trained]).keys() == {"single-mamba-ssm"}, "its runs say more of it"


@pytest.mark.slow
def test_an_arm_with_other_kernels_has_the_first_one_s_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path, "arms.reference=[data.strategy=single,ops.backend=reference]", "precisions=[32-true]") == 0
    (one,) = [record for record in read_records(tmp_path) if record["arm"] == "reference"]
    apart = [point["relative_difference"] for point in one["curves"]["gradients"]]
    assert len(apart) == 3 and all(0 < difference <= 1e-5 for difference in apart), "also after steps of the first"
    assert "left out, single-mamba-ssm: needs " in capsys.readouterr().err


def test_differences_are_relative():
    ones, none = torch.ones(4), torch.zeros(2)
    assert _apart((1.5, [1.5 * ones, none]), (1.0, [ones, none])) == {
        "relative_difference": 0.5, "largest_of_a_tensor": 0.5, "loss_difference": 0.5,
    }  # fmt: skip
    assert _apart((1.0, [ones, none + 1]), (1.0, [ones, none]))["largest_of_a_tensor"] == torch.inf


@pytest.mark.slow
def test_other_documents_are_not_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path, "arms.other=[data.source=synthetic]") == 2
    assert "arms: expected the same documents in every arm, got several corpora" in capsys.readouterr().err


@pytest.mark.slow
def test_steps_of_other_documents_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"^step 0 has other targets in one arm than in another: .* nothing is recorded$"
    ):
        bench(tmp_path, "arms.packed-reset=[data.strategy=greedy,data.cut_documents=64]")
    assert not [*tmp_path.glob("records/*.jsonl")]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("at=[40]", "at: expected steps below trainer.max_steps=40, got 40"),
        ("at=[-1]", "at: expected steps from 0 on, got [-1]"),
        ("precisions=[fp8]", "precisions: expected some of 32-true, bf16-mixed, got ['fp8']"),
        ("arms.leak=[trainer.boundary=leak]", "arms.leak: expected trainer.boundary=reset, got leak"),
        (
            "arms.half=[trainer.precision=bf16-mixed]",
            "arms.half: trainer.precision is what precisions says of every arm",
        ),
        (
            "arms.graphs=[trainer.cuda_graphs=true,trainer.accelerator=auto]",
            "arms.graphs: expected trainer.cuda_graphs=false",
        ),
        (
            "arms.wide=[model.d_model=16]",
            "arms.wide: expected keys of data and ops, got one of model: arms share their weights",
        ),
        ("arms.other=[seed=7]", "arms.other: expected keys of data and ops, got one of seed: "),
        ("arms.other=[optimizer.lr=1.0]", "arms.other: expected keys of data and ops, got one of optimizer: "),
        ("arms.other=[trainer.max_steps=41]", "arms.other: expected keys of data and ops, got one of trainer: "),
        ("arms.padded=[data.strategy=padded,ops.backend=cuda]", "arms.padded: needs a cuda device"),
        ("arms.typo=[data.stratgy=greedy]", "arms.typo: unknown key 'data.stratgy'"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(tmp_path, monkeypatch, capsys, key, says):
    monkeypatch.chdir(tmp_path)
    assert bench(tmp_path, key) == 2
    assert says in capsys.readouterr().err and not [*tmp_path.iterdir()]
