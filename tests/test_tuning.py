"""Each arm at its own best: what chooses, what is refused, and that it waits."""

import json

import pytest
from test_sweeps import write_sweep

from made_records import training
from packmamba.config import ConfigError
from packmamba.errors import Unfinished
from packmamba.records import append_record, make_record, read_records
from packmamba.training.note import Outcome
from packmamba.training.pool import Queue
from packmamba.training.run_id import record_path, recorded_config
from packmamba.training.sweep import load_sweep, run_sweep, runs_of
from packmamba.training.tune import Tuning

TUNE = {"grid": {"optimizer.lr": [1e-3, 1e-2]}, "seeds": [100, 101]}


def done(config, **metrics):
    """The record that the run would leave."""
    values = training("padded")["metrics"] | metrics
    append_record(
        record_path(config),
        make_record("training", "x", config.name, recorded_config(config), config.seed, "hash", values, 1.0),
    )


def sweep_of(tmp_path, **changes):
    return load_sweep(write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0, 1]}, **({"tune": TUNE} | changes)))


@pytest.mark.slow
def test_arms_take_the_values_that_are_best_in_the_mean_and_never_diverge(tmp_path):
    sweep, configs = sweep_of(tmp_path)
    queue = Queue(configs, False, tuning=Tuning(sweep.tune, configs))
    tried = queue.configs[:8]
    assert [(c.name, c.seed, c.optimizer.lr) for c in tried[:4]] == [
        ("packed lr=0.001", 100, 0.001), ("packed lr=0.001", 101, 0.001), ("packed lr=0.01", 100, 0.01),
        ("packed lr=0.01", 101, 0.01),
    ]  # fmt: skip
    losses = {"packed lr=0.001": [2.0, 3.0], "packed lr=0.01": [2.4, 2.5], "padded lr=0.001": [9.0, 9.0]}
    for number, config in enumerate(tried):
        assert queue.next() == number, "the runs that choose come first"
        queue.take(number)
        loss = losses.get(config.name, [1.0, None])[config.seed - 100]
        done(config, val_loss=loss, **({} if loss else {"diverged_at_step": 3}))
        queue.close(number, Outcome("done", 1.0))
        if number == 3:
            queue.running.update(dict.fromkeys(range(4, 8), 0.0))
            assert queue.next() == 8, "an arm does not wait for what chooses for others"
            assert queue.configs[8].optimizer.lr == 1e-2, "2.45 is less than 2.5"
            queue.running.clear()
    assert queue.next() == 8
    assert {(c.name, c.optimizer.lr, c.seed) for c in runs_of(sweep, configs)[8:]} == {
        ("packed", 1e-2, 0), ("packed", 1e-2, 1), ("padded", 1e-3, 0), ("padded", 1e-3, 1),
    }  # fmt: skip
    assert not {record_path(c).parent for c in tried} & {record_path(c).parent for c in queue.configs[8:]}


@pytest.mark.slow
def test_an_arm_without_a_value_that_does_not_diverge_fails_alone(tmp_path):
    sweep, configs = sweep_of(tmp_path, tune=TUNE | {"best": "most"})
    sweep.tune.metric = "mqar.accuracy"  # which its runs would not have
    for config in Tuning(sweep.tune, configs).runs:
        accuracy = {"padded lr=0.001": 0.4, "padded lr=0.01": 0.5}.get(config.name)
        done(config, **({"diverged_at_step": 2} if accuracy is None else {"mqar.accuracy": accuracy}))
    queue = Queue(configs, False, tuning=Tuning(sweep.tune, configs))
    assert [queue.configs[queue.next()].name, queue.configs[queue.next()].optimizer.lr] == ["padded", 1e-2]
    failed = [queue.configs[number].name for number, outcome in queue.outcomes.items() if outcome.state == "failed"]
    assert failed == ["packed", "packed"]
    with pytest.raises(Unfinished, match="2 of 12 runs failed") as caught:
        queue.check()
    assert caught.value.status == 1
    done(Tuning(sweep.tune, configs).runs[4], val_loss=1.0)
    with pytest.raises(ConfigError, match="^tune.metric: expected one of .*val_loss.*, got 'mqar.accuracy'"):
        Queue(configs, False, tuning=Tuning(sweep.tune, configs))


def test_a_number_that_runs_do_not_have_is_refused_when_the_first_has_ended(tmp_path):
    sweep, configs = sweep_of(tmp_path)
    sweep.tune.metric = "parity.acuracy"
    queue = Queue(configs, False, tuning=Tuning(sweep.tune, configs))
    queue.take(0)
    done(queue.configs[0], **{"parity.accuracy": 0.5})
    with pytest.raises(ConfigError, match="^tune.metric: expected one of .*parity.accuracy.*, got 'parity.acuracy'"):
        queue.close(0, Outcome("done", 1.0))
    with pytest.raises(ConfigError, match="^tune.metric: expected one of"):
        Queue(configs, False, tuning=Tuning(sweep.tune, configs))  # the same command again trains no other
    sweep.tune.metric = "val_loss_as_trained"
    with pytest.raises(
        ConfigError, match="^tune.metric: expected a number .*, got 'val_loss_as_trained', which is null in"
    ):
        Queue(configs, False, tuning=Tuning(sweep.tune, configs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": {"grid": {"optimizer.lr": []}, "seeds": [9]}}, "tune.grid.optimizer.lr: expected at least one value"),
        ({"tune": {"grid": {"optimizer.lr": [0.1, 0.1]}, "seeds": [9]}}, "tune.grid.optimizer.lr: duplicate 0.1"),
        ({"tune": {"grid": {"optimizer.lr": [1]}}}, "tune: expected both grid and seeds, or neither"),
        (
            {"tune": {"grid": {"optimizer.lr": [0.1]}, "seeds": [9], "metric": "vall_loss"}},
            "tune.metric: expected one of .*val_loss.*, got 'vall_loss'",
        ),
        ({"tune": TUNE | {"seeds": [1]}}, "tune.seeds: expected none of grid.seed, whose runs are reported, got 1"),
        (
            {"tune": TUNE | {"grid": {"data.strategy": ["padded"]}}},
            "tune.grid.data.strategy: expected a key that no arm",
        ),
        ({"tune": TUNE | {"grid": {"optimizer.rl": [1]}}}, "unknown key 'optimizer.rl'"),
        ({"tune": TUNE | {"grid": {"optimizer.lr": [-1]}}}, "optimizer.lr: expected above 0"),
        ({"tune": TUNE | {"best": "fewest"}}, "tune.best: expected one of least, most"),
        ({"baseline": "padde"}, "baseline: expected one of packed, padded or null, got 'padde'"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused_before_any_work(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of(tmp_path, **changes)


@pytest.mark.slow
def test_a_sweep_tunes_and_reports_only_the_other_seeds(tmp_path):
    sweep, configs = sweep_of(tmp_path, baseline="packed")
    records = read_records(run_sweep(sweep, configs, progress=False))
    assert {(r["arm"], r["seed"]) for r in records} == {(a, s) for a in ("packed", "padded") for s in (0, 1)}
    tried = read_records(tmp_path / "sweep" / "tuning")
    assert len(tried) == 8 and {r["seed"] for r in tried} == {100, 101}
    for arm in ("packed", "padded"):
        means = {}
        for record in tried:
            if record["arm"].startswith(arm):
                means.setdefault(record["config"]["optimizer"]["lr"], []).append(record["metrics"]["val_loss"])
        best = min(means, key=lambda lr: sum(means[lr]))
        assert {r["config"]["optimizer"]["lr"] for r in records if r["arm"] == arm} == {best}
    said = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert said == {
        "sweep": {
            "baseline": "packed",
            "tuned": {"keys": ["optimizer.lr"], "tried": [[1e-3, 1e-2]], "seeds": [100, 101]},
            "arms": {"packed": [0, 1], "padded": [0, 1]},
        }
    }


def test_a_key_of_a_grid_is_named_on_the_command_line_as_messages_name_it(tmp_path):
    path = write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0], "optimizer.lr": [0.1, 0.2]})
    with pytest.raises(
        ConfigError, match=r"expected grid.optimizer.lr=\[...\], which is where this sweep has its values"
    ):
        load_sweep(path, ["optimizer.lr=0.3"])
    _, configs = load_sweep(path, ["grid.optimizer.lr=[0.3]", "grid.seed=[4]"])
    assert [(c.name, c.optimizer.lr, c.seed) for c in configs] == [("packed lr=0.3", 0.3, 4), ("padded lr=0.3", 0.3, 4)]
    path = write_sweep(tmp_path, throughput_rounds=0, grid={"seed": [0]})
    sweep, _ = load_sweep(path, ["tune.grid.optimizer.lr=[0.3, 0.4]", "tune.seeds=[9]"])
    assert sweep.tune.grid == {"optimizer.lr": [0.3, 0.4]}
    for nothing in ("grid={}", "tune.grid={}"):
        with pytest.raises(ConfigError, match=f"^'{nothing}': expected keys with their values; these are added to"):
            load_sweep(path, [nothing])
