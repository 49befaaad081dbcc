"""Sweeps: each run of a grid once, arms timed in turns, refusals before any work."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import yaml

from packmamba import cli, timing
from packmamba.config import ConfigError
from packmamba.records import METRICS, make_record, read_records
from packmamba.report.folder import build_sections
from packmamba.report.training import throughput_tables
from packmamba.training import benchmark
from packmamba.training import sweep as sweep_module
from packmamba.training.benchmark import measure_throughput
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.sweep import load_sweep, run_sweep
from runs import final_state, tiny_config, write_config


def write_sweep(tmp_path, **changes):
    base = write_config(tmp_path / "base.yaml", tiny_config(tmp_path, "trainer.max_steps=2"))
    sweep = {
        "output": str(tmp_path / "sweep"),
        "base": str(base),
        "common": {"data.row_length": 30},
        "arms": {"padded": {"data.strategy": "padded"}, "packed": {"data.strategy": "greedy"}},
        "grid": {"seed": [0, 1], "model.d_state": [2, 4]},
        "throughput_rounds": 3,
    } | changes
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


@pytest.mark.slow
def test_a_sweep_may_only_time(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path, train=False, grid={}))
    folder = run_sweep(sweep, configs, progress=False)
    records = read_records(folder)
    assert {record["kind"] for record in records} == {"throughput"} and len(records) == 2
    (section,) = build_sections(records)
    assert [figure.name for figure in section.figures] == ["speed"]
    other = replace(sweep, name="another")
    run_sweep(other, configs, progress=False)
    assert {file.stem for file in (folder / "records").iterdir()} == {"sweep", "another"}, "each has its own timings"


def test_rounds_that_warm_up_are_not_counted(tmp_path, monkeypatch):
    seconds = iter([100.0] * (1 + benchmark.WARM_UP) + [2.0] * 2)
    monkeypatch.setattr(timing, "seconds", lambda call, device: (call(), next(seconds))[1])
    (record,) = measure_throughput([tiny_config(tmp_path)], rounds=2, output="x", progress=False)
    assert record["metrics"]["seconds_per_step_median"] == 2 and record["metrics"]["seconds_per_step_spread"] == 0


def test_values_are_taken_as_they_are(tmp_path):
    """Not read as YAML again: a name may be a word or a mark of YAML."""
    names, values = ["a: b", "a # b", "null", "[x"], {"data.end_token": "true", "data.begin_token": "< #1: a>"}
    _, configs = load_sweep(write_sweep(tmp_path, arms=dict.fromkeys(names, values), grid={}))
    assert {config.name for config in configs} == set(names)
    assert {(config.data.begin_token, config.data.end_token) for config in configs} == {("< #1: a>", "true")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {}}, "unknown key 'arm'.*'arms'"),
        ({"arms": {}}, "at least one arm"),
        ({"arms": {"x": {"data.stratgy": "padded"}}}, "unknown key 'data.stratgy'.*data.strategy"),
        ({"arms": {"x": {"trainer.boundary": "carry"}}}, "carry needs data.strategy=split"),
        ({"grid": {"seed": []}}, "grid.seed: expected at least one value"),
        ({"grid": {"seed": [0, 1, 0]}}, "grid.seed: duplicate 0"),
        ({"base": "missing.yaml"}, "missing.yaml does not exist"),
        ({"throughput_rounds": "many"}, "throughput_rounds|many"),
        ({"train": False, "throughput_rounds": 0}, "nothing to do"),
        ({"common": {"trainer.max_steps": 0}}, "trainer.max_steps: expected at least 1"),
        ({"arms": {"x": {"trainer.boundary": "lek"}}}, "trainer.boundary: expected one of"),
        ({"arms": {"x": {"model.d_conv": 5}}}, "model.d_conv: expected 2, 3 or 4, got 5"),
        ({"grid": {"seed": 0}}, "grid.seed in .*sweep.yaml: .*"),
        ({"arms": ["x"]}, "^arms in .*sweep.yaml: expected keys and their values$"),
        ({"arms": {"x": {"data.path": "${nothing}"}}}, "Interpolation key 'nothing' not found"),
        ({"arms": {"x": {"": 3}}}, "^expected a key for 3, got ''"),
        ({"arms": {"x": "padded"}}, "arms.* in .*sweep.yaml"),
    ],
)
def test_a_sweep_refuses_before_any_work(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_sweep(write_sweep(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_sweep_takes_its_own_keys_too(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path), [f"output={tmp_path}/mine", "grid.seed=[7]", "model.d_model=4"])
    assert sweep.output == f"{tmp_path}/mine" and {config.seed for config in configs} == {7}
    assert {config.model.d_model for config in configs} == {4}
    (tmp_path / "file").touch()
    sweep.output = f"{tmp_path}/file"
    with pytest.raises(ConfigError, match="^output: .* cannot be written"):
        run_sweep(sweep, configs, progress=False)


def test_a_sweep_s_folder_and_name_may_be_said_for_all_runs(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path), [f"experiment={tmp_path}/mine", "name=mine"])
    assert (sweep.output, sweep.name) == (f"{tmp_path}/mine", "mine")
    assert {config.output for config in configs} == {f"{tmp_path}/mine"}
    assert {config.name for config in configs} == {f"{arm} d_state={n}" for arm in ("padded", "packed") for n in (2, 4)}


@pytest.mark.parametrize(
    ("override", "changes", "message"),
    [
        ("seed=5", {}, "^'seed=5': expected grid.seed=.*values$"),
        ("model.d_state=8", {}, "^'model.d_state=8': expected grid.model.d_state="),
        ("model={d_state: 8}", {}, "expected grid.model.d_state="),
        ("optimizer.lr=1", {"tune": {"grid": {"optimizer.lr": [1, 2]}, "seeds": [8]}}, "expected tune.grid.optimizer.lr="),
        ("data.strategy=split", {}, "^'data.strategy=split': expected a key in which arms do not differ"),
        ("common.name=x", {}, "^common.name: expected no such key, a sweep sets it for each run$"),
        ("arms.packed.runs_dir=x", {}, "^arms.packed.runs_dir: expected no such key"),
        ("grid.experiment=[x]", {}, "^grid.experiment: expected no such key"),
    ],
)  # fmt: skip
def test_what_is_compared_is_not_one_for_all_runs(tmp_path, override, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, **changes), [override])


def test_what_one_arm_sets_may_be_set_for_all(tmp_path):
    arms = {"plain": {}, "leak": {"trainer.boundary": "leak"}}
    _, configs = load_sweep(write_sweep(tmp_path, arms=arms), ["trainer.boundary=reset"])
    assert {config.trainer.boundary for config in configs} == {"reset"}


def test_arms_that_disagree_are_not_timed(tmp_path, monkeypatch):
    keys = ([], ["data.strategy=single"], ["model.d_state=3"], ["trainer.boundary=leak"])
    configs = [tiny_config(tmp_path, f"name=arm{i}", *overrides) for i, overrides in enumerate(keys)]
    list(measure_throughput(configs, rounds=1, output="x", progress=False))
    accumulate, calls = PackedLitModule.accumulate, []

    def off(module, *arguments):
        calls.append(module)
        return accumulate(module, *arguments) * (1 + 1e-3 * (len(calls) > 1))

    monkeypatch.setattr(PackedLitModule, "accumulate", off)
    with pytest.raises(RuntimeError, match="nothing is timed: arms disagree .* arm0 has 5.5.*, arm1 has 5.5"):
        list(measure_throughput(configs, rounds=1, output="x", progress=False))
    assert len(calls) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_the_step_that_is_timed_is_the_one_that_trains(tmp_path, precision):
    """Clipped, at its learning rate, in the run's precision: the weights after it are the run's, to the bit."""
    config = tiny_config(tmp_path, f"trainer.precision={precision}", "optimizer.grad_clip=0.9", "trainer.max_steps=4")
    fit(config, progress=False)
    arm = benchmark.Arm(config)
    for step in range(4):
        arm.step(step)
    trained = final_state(config)["state_dict"]
    assert all(torch.equal(value, trained[name]) for name, value in arm.module.state_dict().items() if "model" in name)


@pytest.mark.parametrize("boundary", ["reset", "leak", "carry"])
def test_graphs_of_all_steps_are_captured_before_any_is_timed(tmp_path, monkeypatch, boundary):
    taken = []

    class Replaying(benchmark.Arm):
        """Called so; a CPU has no graphs."""

        def __init__(self, config):
            super().__init__(config)
            self.config = replace(config, trainer=replace(config.trainer, cuda_graphs=True))

        def step(self, number):
            taken.append(number)
            return super().step(number)

    monkeypatch.setattr(benchmark, "Arm", Replaying)
    config = tiny_config(tmp_path, "data.strategy=split", f"trainer.boundary={boundary}", "trainer.max_steps=20")
    list(measure_throughput([config], rounds=3, output="x", progress=False))
    captured = [1, 2, 3, 4] if boundary != "carry" else []  # rows that go on have one shape, and states in their order
    assert taken == [0, *captured, 1, 2, 3, 4]


@pytest.mark.slow
def test_throughput_times_the_same_work_for_every_arm(tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(timing, "now", lambda device: float(next(seconds)))
    monkeypatch.setattr(timing.OtherPrograms, "cores", lambda self: 1.25)
    configs = [
        tiny_config(tmp_path, f"name={strategy}", f"data.strategy={strategy}")
        for strategy in ("single", "padded", "greedy")
    ]
    records = list(measure_throughput(configs, rounds=4, output="x", progress=False))
    assert [record["arm"] for record in records] == ["single", "padded", "greedy"]
    padding = [record["metrics"]["padding_fraction"] for record in records]
    assert padding[0] == 0 and padding[1] > padding[2] > 0
    for record in records:
        metrics = record["metrics"]
        assert metrics["seconds_per_step_median"] == 1
        assert 60 < metrics["real_tokens_per_second"] < 140, "about data.tokens_per_step real tokens a step"
        assert metrics["cores_of_others"] == 1.25
    (table,) = throughput_tables(records)
    assert table.notes[-1] == "Cores that other programs kept busy during this timing: 1.2."


def test_arms_are_timed_again_with_a_new_one(tmp_path, monkeypatch):
    timed = []

    def times(configs, *_):
        timed.append([config.name for config in configs])
        names = METRICS["throughput"]
        return [
            make_record("throughput", "x", c.name, {"run": len(timed)}, 0, "x", dict.fromkeys(names), 1.0)
            for c in configs
        ]

    monkeypatch.setattr("packmamba.training.benchmark.measure_throughput", times)
    arms = {"a": {}, "b": {"trainer.boundary": "leak"}, "c": {"data.strategy": "greedy"}}
    for names in ("ab", "ab", "abc"):
        path = write_sweep(tmp_path, arms={arm: arms[arm] for arm in names}, grid={}, train=False, name="mine")
        run_sweep(*load_sweep(path), progress=False)
    assert timed == [["a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"metrics": ["val_los"]}, "^table.metrics: expected some of steps, .*val_loss, .*got 'val_los'"),
        ({"metrics": ["mqar.accuracy"]}, "^table.metrics: expected some of .*, got 'mqar.accuracy'"),
        (
            {"columns": ["optimizer.lrr"]},
            "^table.columns: expected numbers of the records and keys, got 'optimizer.lrr'",
        ),
        ({"paired": "perhaps"}, "^table.paired in .*perhaps"),
        ({"metric": ["val_loss"]}, "^unknown key 'table.metric'"),
    ],
)
def test_a_table_of_what_there_will_not_be_is_refused(tmp_path, table, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, table=table))


def test_what_the_table_holds_stands_beside_the_records(tmp_path, monkeypatch):
    table = {"metrics": ["val_loss", "parity.accuracy"], "columns": ["optimizer.lr", "speedup"], "paired": False}
    sweep, configs = load_sweep(write_sweep(tmp_path, table=table, evaluations=["parity"]))
    (tmp_path / "sweep" / "records").mkdir(parents=True)
    sweep_module._say_which(sweep, configs)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["sweep"]["table"] == table


def test_a_machine_that_only_looks_need_not_be_able_to_train(tmp_path, monkeypatch, capsys):
    """Nor one that hands runs to a cluster."""
    path = write_sweep(
        tmp_path, common={"trainer.cuda_graphs": True, "trainer.accelerator": "auto"}, throughput_rounds=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["sweep", str(path), "status"]) == 0
    assert "8 waiting." in capsys.readouterr().out
    load_sweep(path, ["launcher=slurm"])
    with pytest.raises(ConfigError, match="cuda_graphs needs a GPU"):
        load_sweep(path)
