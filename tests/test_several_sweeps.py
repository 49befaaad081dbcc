"""Several sweeps in one command: one queue, in which a run waits for the run whose weights it starts from."""

import pytest
import yaml
from test_sweeps import write_sweep

from packmamba import cli
from packmamba.config import ConfigError
from packmamba.errors import Unfinished
from packmamba.records import read_records
from packmamba.training.fit import weights_path
from packmamba.training.note import Outcome
from packmamba.training.pool import Queue
from packmamba.training.run_id import record_path
from packmamba.training.sweep import load_sweep, run_sweeps
from processes import fork, statuses, sweep_with_forked_workers

ONE = {"grid": {"seed": [0, 1]}, "throughput_rounds": 0}


@pytest.fixture
def two(tmp_path):
    """A sweep, and one whose runs start from the weights of the first's arm packed."""
    first = write_sweep(tmp_path, **ONE)
    later = yaml.safe_load(first.read_text()) | {
        "output": str(tmp_path / "later"),
        "arms": {"after": {"trainer.init_from": f"{tmp_path}/sweep:packed"}},
    }
    path = tmp_path / "later.yaml"
    path.write_text(yaml.safe_dump(later))
    return path, first


def arms_of(folder):
    return sorted((record["arm"], record["seed"]) for record in read_records(folder))


def check_both(tmp_path):
    assert arms_of(tmp_path / "sweep") == [(arm, seed) for arm in ("packed", "padded") for seed in (0, 1)]
    assert arms_of(tmp_path / "later") == [("after", 0), ("after", 1)]
    begun = {record["metrics"]["started_from_checksum"] for record in read_records(tmp_path / "later")}
    assert len(begun) == 2, "each seed from its own run"
    for folder in ("sweep", "later"):
        assert (tmp_path / folder / "report.html").is_file() and (tmp_path / folder / "sweep.json").is_file()


@pytest.mark.slow
def test_runs_wait_for_those_that_they_start_from(two, tmp_path, capsys):
    assert cli.main(["sweep", *map(str, two)]) == 0
    check_both(tmp_path)
    said = capsys.readouterr().out
    assert said.index("packed, seed 0: done") < said.index("after, seed 0: begins")
    assert cli.main(["sweep", *map(str, two), "status"]) == 0
    said = capsys.readouterr().out
    assert said.index("later.yaml") < said.index("2 done.") < said.index("sweep.yaml") < said.index("4 done.")


@pytest.mark.slow
def test_side_by_side_too(two, tmp_path):
    process = fork(sweep_with_forked_workers, *map(str, two), "jobs=2", output=tmp_path / "output.txt")
    assert statuses(process) == [0], (tmp_path / "output.txt").read_text()
    check_both(tmp_path)


def test_one_waits_only_for_a_run_that_is_still_to_come(two):
    (_, after), (_, before) = (load_sweep(path) for path in two)

    def ready(queue):
        return {(queue.configs[n].name, queue.configs[n].seed) for n in queue.ready()}

    later = {("after", 0), ("after", 1)}
    assert ready(Queue(after, False)) == later, "for none that is not of this command"
    queue = Queue([*after, *before], False)
    assert ready(queue) == {(arm, seed) for arm in ("padded", "packed") for seed in (0, 1)}
    (trained,) = (n for n, config in enumerate(queue.configs) if (config.name, config.seed) == ("packed", 1))
    record_path(queue.configs[trained]).parent.mkdir(parents=True)
    record_path(queue.configs[trained]).touch()
    assert ready(queue) == {("padded", 0), ("padded", 1), ("packed", 0), ("after", 1)}
    queue.outcomes |= {n: Outcome("failed") for n, config in enumerate(queue.configs) if config.name == "packed"}
    assert ready(queue) == {("padded", 0), ("padded", 1), *later}, "one that failed is not waited for: it fails, too"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"jobs": 2},
            "jobs: expected one value for all sweeps of a command, got 1 in later and 2 in sweep; set it after",
        ),
        (
            {"tune": {"grid": {"optimizer.lr": [0.01, 0.02]}, "seeds": [8]}},
            "tune: a sweep that chooses values is a command",
        ),
    ],
)
def test_what_one_queue_has_once_is_the_same_in_all(two, tmp_path, changes, message):
    later = load_sweep(two[0])
    first = load_sweep(write_sweep(tmp_path, **ONE | changes))
    with pytest.raises(ConfigError, match=message):
        run_sweeps([later, first], progress=False)
    assert not (tmp_path / "later").exists() and not (tmp_path / "sweep").exists()


def test_a_second_file_that_is_not_there_is_named(two, tmp_path, capsys):
    assert cli.main(["sweep", str(two[0]), str(tmp_path / "nothing.yaml")]) == 2
    assert "nothing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("nested", [True, False])
def test_an_arm_s_section_leaves_the_other_keys_of_all_runs(tmp_path, nested):
    keys = {"data": {"strategy": "padded"}} if nested else {"data.strategy": "padded"}
    common = {"data": {"row_length": 37, "validation_documents": 3}}
    _, (config, *_) = load_sweep(write_sweep(tmp_path, **ONE, arms={"one": keys}, common=common))
    assert (config.data.strategy, config.data.row_length, config.data.validation_documents) == ("padded", 37, 3)


@pytest.mark.parametrize(
    ("keys", "grid", "name"),
    [
        ({"optimizer.lr": 0.1}, {"optimizer.lr": [0.2]}, "optimizer.lr"),
        ({"model": {"d_state": 2}}, {"model.d_state": [4, 8]}, "model.d_state"),
        ({"seed": 7}, {"seed": [0, 1]}, "seed"),
    ],
)
def test_a_key_of_the_grid_is_no_arm_s(tmp_path, keys, grid, name):
    path = write_sweep(tmp_path, arms={"one": keys}, grid=grid, throughput_rounds=0)
    with pytest.raises(ConfigError, match=f"grid.{name}: expected a key that no arm sets, but one does"):
        load_sweep(path)


def test_what_is_tuned_is_no_arm_s_in_a_section_either(tmp_path):
    tune = {"grid": {"optimizer.lr": [0.01, 0.02]}, "seeds": [8]}
    path = write_sweep(tmp_path, **ONE, arms={"one": {"optimizer": {"lr": 0.1}}}, tune=tune)
    with pytest.raises(
        ConfigError, match="tune.grid.optimizer.lr: expected a key that no arm and no grid sets, but one does"
    ):
        load_sweep(path)


@pytest.mark.slow
def test_weights_of_one_of_several_runs_are_refused(two, tmp_path):
    later, first = two
    assert cli.main(["sweep", str(first), "only.arm=[packed]", "only.seed=[0]"]) == 0
    assert cli.main(["sweep", str(first), "only.arm=[packed]", "only.seed=[0]", "optimizer.lr=0.03"]) == 0
    _, configs = load_sweep(later)
    with pytest.raises(
        ConfigError, match="has 2 runs of arm 'packed' with seed 0, expected one; name its folder, such as"
    ):
        weights_path(configs[0])


def test_runs_that_would_start_from_themselves_are_refused(two, tmp_path):
    later, _ = two
    circle = yaml.safe_load(later.read_text())
    circle["arms"] = {"after": {"trainer.init_from": f"{tmp_path}/later:other"}, "other": circle["arms"]["after"]}
    circle["arms"]["other"] = {"trainer.init_from": f"{tmp_path}/../{tmp_path.name}/later:after"}
    later.write_text(yaml.safe_dump(circle))
    with pytest.raises(ConfigError, match="trainer.init_from: after, seed 0, would start from its own weights"):
        run_sweeps([load_sweep(later)], progress=False)


def test_a_run_of_two_sweeps_is_one(two, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("packmamba.training.pool.run_one_by_one", lambda queue: seen.extend(queue.configs))
    with pytest.raises(Unfinished, match="0 of 4 runs"):
        run_sweeps([load_sweep(two[1]), load_sweep(two[1])], progress=False)
    assert len(seen) == 4


def test_how_long_a_run_takes_is_not_taken_from_another_sweep_s_arm(two, tmp_path):
    (_, first), (_, other) = load_sweep(two[1]), load_sweep(two[1], [f"output={tmp_path}/other", "trainer.max_steps=9"])
    queue = Queue([*first, *other], False)
    queue.running[0] = 0.0
    queue.close(0, Outcome("done", seconds=7.0))
    queue.running[5] = 0.0
    queue.close(5, Outcome("done", seconds=90.0))
    assert (queue.expected(first[2]), queue.expected(other[3])) == (7.0, 90.0)


def test_a_refusal_says_which_of_several_sweeps_it_is_of(two, capsys):
    first, later = map(str, two)
    assert cli.main(["sweep", later, first, "only.arm=[packed]", "status"]) == 2
    said = capsys.readouterr().err
    assert f"{first}: only.arm: expected some of after, got 'packed'" in said
    assert cli.main(["sweep", first, "only.arm=[packed]", "status"]) == 2
    assert ": error: only.arm: expected" in capsys.readouterr().err, "there is one"


def test_documents_that_are_not_there_are_refused_before_any_run(tmp_path, capsys):
    arms = {"one": {}, "two": {"data.source": "text", "data.path": str(tmp_path / "nowhere")}}
    path = str(write_sweep(tmp_path, **ONE, arms=arms))
    for jobs in (1, 2):
        assert cli.main(["sweep", path, f"jobs={jobs}"]) == 2
        said = capsys.readouterr()
        assert f"data.path '{tmp_path}/nowhere' does not exist" in said.err and "begins" not in said.out
