"""Sweeps: the runs of a grid, what is refused before any run, what is skipped, and runs that wait
for others.
"""

import json
from collections import Counter

import pytest
from sweeps import write_sweep

from packmamba.config import ConfigError
from packmamba.lab import cli
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_id
from packmamba.lab.sweep import load_sweep, run_sweep


def test_every_arm_runs_with_every_value_of_the_grid(tmp_path):
    path = write_sweep(tmp_path, grid={"seed": [0, 1], "model.d_state": [2, 4]})
    _, configs = load_sweep(path, ["model.d_model=4"])
    assert len({run_id(config) for config in configs}) == 8
    assert {(c.name, c.seed, c.model.d_state, c.data.strategy) for c in configs} == {
        (f"{arm} d_state={n}", seed, n, strategy)
        for arm, strategy in (("padded", "padded"), ("packed", "greedy")) for seed in (0, 1) for n in (2, 4)
    }  # fmt: skip
    assert all(config.data.row_length == 30 and config.model.d_model == 4 for config in configs)


def test_a_named_size_stands_beside_keys_of_the_model_and_options_add_up(tmp_path):
    size, state, more = {"model": "130m"}, {"model.d_state": 8}, {"model.mixer_options": {"dt_min": 0.01}}
    options = {"model.mixer_options": {"dt_max": 0.2}}
    for common, arm in ((size | options, state | more), (state | size | options, more), (state | options, size | more)):
        (config, *_) = load_sweep(write_sweep(tmp_path, common=common, arms={"a": arm}))[1]
        expected = (768, 8, {"dt_max": 0.2, "dt_min": 0.01})
        assert (config.model.d_model, config.model.d_state, config.model.mixer_options) == expected


def test_overrides_are_of_the_sweep_or_of_all_runs(tmp_path):
    overrides = [f"output={tmp_path}/mine", "name=mine", "grid.seed=[7]", "grid.optimizer.lr=[0.3]", "model.d_model=4"]
    sweep, configs = load_sweep(write_sweep(tmp_path), overrides)
    assert sweep.name == "mine" and {config.output for config in configs} == {f"{tmp_path}/mine"}
    one = load_sweep(write_sweep(tmp_path, baseline="padded", primary=["packed"]), ["arms=[padded]"])[0]
    assert [*one.arms] == ["padded"] and one.primary == ["packed"], "arms that are not selected are known"
    found = {(c.name, c.optimizer.lr, c.seed, c.model.d_model) for c in configs}
    assert found == {("padded lr=0.3", 0.3, 7, 4), ("packed lr=0.3", 0.3, 7, 4)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, "unknown key 'arm'.*'arms'"),
        ({"arms": {}}, "arms: expected at least one arm"),
        ({"arms": ["x"]}, "arms: expected keys and values"),
        ({"arms": {"x": {"name": "y"}}}, "arms.x: expected no key that the sweep itself sets, got name"),
        ({"grid": {"runs_dir": ["y"]}}, "grid: expected no key that the sweep itself sets, got runs_dir"),
        ({"arms": {"x y=1": {}}}, "arms.x y=1: expected a name without ' key='"),
        ({"arms": {"x": {"data.stratgy": "padded"}}}, "unknown key 'data.stratgy'.*data.strategy"),
        ({"arms": {"x": {"model": {"d_state": 2}}}, "grid": {"model.d_state": [4]}}, "grid.model.d_state: .*arms.x"),
        ({"common": {"trainer.devices": 2}}, "trainer.devices: expected 1 in a sweep"),
        ({"grid": {"seed": [0, 1, 0]}}, "grid.seed"),
        ({"train": False}, "train: expected true without throughput_rounds"),
        ({"jobs": 0}, "jobs: expected auto or an integer"),
        ({"primary": ["a - lost"]}, "primary: expected"),
        ({"primary": ["packed - packed"]}, "primary: expected"),
        ({"primary": ["padded"], "baseline": "padded"}, "primary: expected .*, not the baseline"),
        ({"margin": 0}, "margin: expected"),
        ({"baseline": "padde"}, "baseline: expected one of padded, packed or null"),
        ({"table": {"metrics": ["val_los"]}}, "table.metrics: expected one of .*val_loss"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, **changes))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=5", "grid.seed: expected a key that 'seed=5' does not set"),
        ("model={d_state: 8}", "grid.model.d_state: expected"),
        ("data.strategy=single", "expected a key in which arms do not differ"),
    ],
)
def test_what_is_compared_is_not_one_for_all_runs(tmp_path, override, message):
    path = write_sweep(tmp_path, grid={"seed": [0, 1], "model.d_state": [2, 4]})
    with pytest.raises(ConfigError, match=message):
        load_sweep(path, [override])


def test_a_sweep_trains_times_reports_and_skips_what_is_done(tmp_path, capsys, undrawn):
    path = str(write_sweep(tmp_path))
    assert cli.main(["sweep", path, "arms=[packed]"]) == 0
    records = tmp_path / "sweep" / "records.jsonl"
    part = records.read_bytes()
    assert cli.main(["sweep", path, "arms=[packed]", "grid.seed=[1]"]) == 0
    assert records.read_bytes() == part, "nothing that is done is done again"
    assert "packed, seed 1: done: before" in capsys.readouterr().out
    for rounds in (1, 2, 1):
        assert cli.main(["sweep", path, "trainer.log_every=1", f"throughput_rounds={rounds}"]) == 0
    assert records.read_bytes().startswith(part)
    counts = Counter((record["arm"], record["seed"]) for record in read_records(tmp_path / "sweep"))
    assert counts == {("padded", 0): 3, ("padded", 1): 1, ("packed", 0): 3, ("packed", 1): 1}
    assert (tmp_path / "sweep" / "report.html").is_file()
    said = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["sweep"]
    assert said["arms"] == {"padded": [0, 1], "packed": [0, 1]}


def test_finished_runs_of_other_documents_are_refused(tmp_path):
    path = write_sweep(tmp_path, arms={"packed": {"data.strategy": "greedy"}}, grid={"seed": [0, 1]})
    run_sweep(*load_sweep(path, ["grid.seed=[0]"]), progress=False)
    documents = tmp_path / "documents.jsonl"
    whole = documents.read_text()
    documents.write_text(whole + '{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="data: the documents have changed since packed, seed 0"):
        run_sweep(*load_sweep(path), progress=False)
    documents.unlink()
    run_sweep(*load_sweep(path, ["grid.seed=[0]"]), progress=False)


@pytest.mark.slow
def test_an_arm_waits_for_the_one_that_it_starts_from(tmp_path, capsys):
    arms = {"after": {"trainer.init_from": f"{tmp_path}/sweep:packed"}, "packed": {"data.strategy": "greedy"}}
    assert cli.main(["sweep", str(write_sweep(tmp_path, arms=arms))]) == 0
    output = capsys.readouterr().out
    assert output.index("packed, seed 1: done") < output.index("after, seed 0: begins")
    assert len({r["metrics"].get("started_from_checksum") for r in read_records(tmp_path / "sweep")}) == 3
    arms["packed"]["optimizer.lr"] = 0.1  # its runs are trained anew; those of after began with others
    assert cli.main(["sweep", str(write_sweep(tmp_path, arms=arms))]) == 2
    assert "trainer.init_from: expected the run that after, seed 0, began with" in capsys.readouterr().err
