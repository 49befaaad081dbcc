"""Sweeps of several runs at a time: killed, stopped, failing, shared; and where runs go."""

import logging
import os
import signal
import time
import warnings

import pytest
from test_sweeps import write_sweep

import run
from packmamba.config import ConfigError
from packmamba.errors import Unfinished
from packmamba.records import append_record, read_records
from packmamba.training import note, places, pool, worker
from packmamba.training.attempt import attempt
from packmamba.training.callbacks import checkpoints, newest_step
from packmamba.training.claims import alone, taken
from packmamba.training.fit import fit
from packmamba.training.note import Outcome, read_note
from packmamba.training.pool import Queue
from packmamba.training.run_id import record_path, run_folder
from packmamba.training.sweep import load_sweep, run_sweep
from packmamba.training.worker import Place, Worker
from processes import fork, statuses, sweep_with_forked_workers
from runs import losses_of

LONG = {"trainer.max_steps": 60, "trainer.checkpoint_every": 6, "trainer.validate_every": 30, "trainer.threads": 1}


def sweep_of(tmp_path, **common):
    """Four runs that differ in their packing and seed."""
    return write_sweep(tmp_path, grid={"seed": [0, 1]}, throughput_rounds=0, common=LONG | common)


def wait_for(condition, process):
    while process.is_alive() and not condition():
        time.sleep(0.02)
    assert process.is_alive(), "the sweep has ended before it could be stopped"


def results(folder):
    return {(record["arm"], record["seed"]): losses_of(record) for record in read_records(folder)}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_inside_its_runs_and_ends_as_one_that_was_not(tmp_path):
    path, output = sweep_of(tmp_path), tmp_path / "output.txt"
    sweep, configs = load_sweep(path, [f"output={tmp_path}/whole"])
    expected = results(run_sweep(sweep, configs, progress=False))
    _, configs = load_sweep(path)
    process = fork(sweep_with_forked_workers, str(path), "jobs=2", output=output)
    begun = [run_folder(config) / "checkpoints" for config in configs[:2]]
    wait_for(lambda: all(map(checkpoints, begun)), process)
    os.kill(process.pid, signal.SIGKILL)  # that process alone: its workers die with it
    process.join()
    time.sleep(0.3)
    assert not any(taken(run_folder(config)) for config in configs)
    steps = [pool.newest_step(folder) for folder in begun]
    assert 0 < min(steps) and max(steps) < 60
    process = fork(sweep_with_forked_workers, str(path), "jobs=2", output=output)
    wait_for(lambda: record_path(configs[0]).is_file(), process)
    first = record_path(configs[0]).read_bytes()
    os.kill(process.pid, signal.SIGINT)
    assert statuses(process) == [130], output.read_text()
    run_sweep(*load_sweep(path), progress=False)  # all of them in this process
    assert record_path(configs[0]).read_bytes().startswith(first)
    assert results(tmp_path / "sweep") == expected, "to the bit, whatever ran before in whichever process"


PLUGIN = """
import os
from packmamba.training.boundary import BOUNDARIES, Leak

class Breaks(Leak):
    def __init__(self, how="raise"):
        self.how = how

    def layouts(self, layout):
        if self.how == "raise":
            raise RuntimeError("made to fail")
        os._exit(5)

BOUNDARIES["breaks"] = Breaks
"""


@pytest.mark.slow
def test_a_run_that_fails_or_dies_does_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "breaking.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    arms = {
        "a": {"data.strategy": "greedy"},
        "b": {"trainer.boundary": "breaks"},
        "c": {"trainer.boundary": "breaks", "trainer.boundary_options": {"how": "exit"}},
    }
    path, output = (
        write_sweep(tmp_path, arms=arms, plugins=["breaking"], throughput_rounds=0, grid={}),
        tmp_path / "out",
    )
    assert statuses(fork(sweep_with_forked_workers, str(path), "jobs=1", "deadline=300", output=output)) == [1]
    *_, last = said = output.read_text().splitlines()
    assert any(
        line.startswith("[2/3] b, seed 0: failed after") and "RuntimeError: made to fail" in line for line in said
    )
    assert "[3/3] c, seed 0: failed: its process ended with exit status 5" in said
    assert last == "run.py: error: 2 of 3 runs failed, 1 are done; the same command tries the others again"
    assert [record["arm"] for record in read_records(tmp_path / "sweep")] == ["a"]
    _, (_, raised, died) = load_sweep(path)
    assert "Traceback" in note.log_path(raised).read_text() and read_note(raised)["state"] == "failed"
    assert read_note(died)["state"] == "running" and not taken(run_folder(died))


@pytest.mark.slow
def test_a_worker_stops_its_run_at_the_deadline_and_takes_the_next(tmp_path):
    _, configs = load_sweep(sweep_of(tmp_path))
    worker = Worker(places.Place("here", {"OMP_NUM_THREADS": "1"}))
    for config in configs[:2]:
        worker.begin(config, deadline=time.monotonic())
        assert worker.outcome().state == "stopped"
        assert pool.newest_step(run_folder(config) / "checkpoints") == 1
        assert (read_note(config)["state"], read_note(config)["step"]) == ("stopped", 1)
    worker.stop()
    assert worker.end(60) == "exit status 0"


@pytest.mark.slow
def test_what_still_runs_at_the_deadline_is_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pool, "STOP_SECONDS", 0.1)
    sweep, configs = load_sweep(sweep_of(tmp_path), ["jobs=2", "deadline=1"])  # before a worker has imported PyTorch
    with pytest.raises(Unfinished, match="0 of 4 runs are done; the same command goes on") as caught:
        run_sweep(sweep, configs)
    assert caught.value.status == 3
    assert capsys.readouterr().out.count("stopped after 1 s on CPU") == 2


def test_what_is_done_is_a_line_for_each_arm(tmp_path, capsys):
    _, configs = load_sweep(sweep_of(tmp_path))
    queue = Queue(configs, True)
    queue.outcomes |= {
        n: Outcome("done") for n, config in enumerate(configs) if config.name == "packed" or not config.seed
    }
    queue.say_what_is_done()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "done before: packed, seeds 0, 1", "done before: padded, seed 0"
    ]  # fmt: skip


def test_a_deadline_that_is_too_short_says_why(tmp_path):
    _, configs = load_sweep(sweep_of(tmp_path))
    kept = ", 10 of the deadline's {} seconds are kept for stopping; "
    goes_on = "the same command goes on"
    for seconds, said in (
        (9.0, kept.format(9) + "give a longer one"), (12.0, kept.format(12) + goes_on), (300.0, "; " + goes_on)
    ):  # fmt: skip
        with pytest.raises(Unfinished, match=f"^0 of 4 runs are done{said}$"):
            Queue(configs, False, seconds=seconds).check()


@pytest.mark.slow
def test_a_second_process_takes_the_next_free_run(tmp_path):
    _, configs = load_sweep(sweep_of(tmp_path, **{"trainer.max_steps": 1}))
    with alone(run_folder(configs[0])):
        assert statuses(fork(next_run, configs, output=tmp_path / "output.txt")) == [1]
    assert statuses(fork(next_run, configs, output=tmp_path / "output.txt")) == [0]
    with alone(run_folder(configs[0])):
        pass
    assert statuses(fork(claim, configs[0], output=tmp_path / "output.txt")) == [0]


def next_run(configs):
    return Queue(configs, progress=False).next()


def claim(config):
    """0 if this process may train it."""
    with alone(run_folder(config)):
        return 0


def test_no_run_begins_that_would_be_cut(tmp_path, monkeypatch):
    _, configs = load_sweep(sweep_of(tmp_path))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now = 1000.0
    queue = Queue(configs, False, begun=now, seconds=540)
    assert queue.next() == 0, "nothing is known yet"
    for number, seconds in ((0, 60.0), (1, 200.0)):
        queue.take(number)
        queue.close(number, Outcome("done", seconds))
    assert (configs[2].name, configs[3].name) == (configs[0].name, configs[1].name)
    now = 1000.0 + 530 - 59
    assert queue.next() is None, "neither 60 nor 200 s are left"
    now -= 2
    assert queue.next() == 2
    monkeypatch.setattr(pool, "newest_step", lambda folder: 30)  # of 60: half of it is left
    now += 30
    assert queue.next() == 2
    with pytest.raises(Unfinished, match="2 of 4 runs are done; the same command goes on") as caught:
        queue.check()
    assert caught.value.status == 3
    queue.take(2)
    queue.close(2, Outcome("done", 540.0))
    assert queue.next() is None, "half of 200 s"
    now = 1000.0 + 530 - 101
    assert queue.next() == 3
    now, queue.most = 1000.0 + 530 - 31, 90.0
    assert queue.next() == 3, "it never fits: it goes on from checkpoints"


def test_an_interrupted_run_s_note_has_the_step_of_its_checkpoint(tmp_path, monkeypatch):
    _, configs = load_sweep(sweep_of(tmp_path, **{"trainer.checkpoint_every": 2}))

    def stop():
        if newest_step(run_folder(configs[0]) / "checkpoints") >= 2:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        attempt(configs[0], "here", False, stop)
    step = newest_step(run_folder(configs[0]) / "checkpoints")
    assert step >= 2 and read_note(configs[0])["step"] == step


def test_what_this_command_has_seen_counts_before_records(tmp_path):
    """Those may be of a machine that did other work, too."""
    sweep, configs = load_sweep(sweep_of(tmp_path, **{"trainer.max_steps": 1}))
    run_sweep(sweep, configs[:2], progress=False)
    for config, record in zip(configs, [fit(config, progress=False) for config in configs[:2]]):
        record_path(config).unlink()
        append_record(record_path(config), record | {"wall_seconds": 400.0})
    queue = Queue(configs, False)
    assert [queue.expected(config) for config in configs[2:]] == [400.0, 400.0]
    queue.take(2)
    queue.close(2, Outcome("done", 90.0))
    assert [queue.expected(config) for config in configs[2:]] == [90.0, 400.0]


def test_a_corpus_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    sweep, configs = load_sweep(sweep_of(tmp_path), ["jobs=2", "data.path=missing.jsonl"])
    with pytest.raises(ConfigError, match="missing.jsonl"):
        run_sweep(sweep, configs, progress=False)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_runs_that_take_several_devices_go_one_by_one(tmp_path):
    with pytest.raises(
        ConfigError, match="^jobs: expected 1, and no deadline, where a run takes several devices, got 2 with"
    ):
        load_sweep(sweep_of(tmp_path), ["jobs=2", "trainer.devices=2"])


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "true"])
def test_jobs_are_a_number_or_auto(tmp_path, value):
    with pytest.raises(ConfigError, match="^jobs: expected auto or an integer of at least 1, got"):
        load_sweep(sweep_of(tmp_path), [f"jobs={value}"])


GPUS = [places.Gpu(0, "GPU-a", 3), places.Gpu(1, "GPU-b", 70000), places.Gpu(2, "GPU-c", 0)]


def test_auto_takes_the_gpus_that_are_free_and_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setattr(places, "visible_gpus", lambda: GPUS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with places.places("auto", True) as found:
        assert [(place.name, place.environment["CUDA_VISIBLE_DEVICES"]) for place in found] == [
            ("GPU 0", "GPU-a"), ("GPU 2", "GPU-c"),
        ]  # fmt: skip
        assert {place.environment["OMP_NUM_THREADS"] for place in found} == {"4"}
        with pytest.raises(ConfigError, match="none of the 3 GPUs is free .GPU 0: 3 MiB in use, GPU 1: 70000"):
            with places.places("auto", True):
                pass
    with places.places(4, True) as found:
        assert [place.name for place in found] == ["GPU 0", "GPU 2", "GPU 1", "GPU 0"]
    with places.places("auto", False) as found:
        assert len(found) == 16 and found[0].environment["CUDA_VISIBLE_DEVICES"] == ""
        assert found[0].environment["OMP_NUM_THREADS"] == "4"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with places.places(32, False) as found:
        assert "OMP_NUM_THREADS" not in found[0].environment and found[0].environment["MKL_NUM_THREADS"] == "2"


def test_gpus_are_those_that_cuda_shows(monkeypatch, tmp_path):
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho '0, GPU-a, 3'\necho '1, GPU-b, 70000'\necho '2, GPU-c, 0'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert places.visible_gpus() == GPUS
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-b")
    assert places.visible_gpus() == [GPUS[2], GPUS[1]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert places.visible_gpus() == []


@pytest.mark.slow
def test_status_says_how_far_each_run_is(tmp_path, capsys):
    path = sweep_of(tmp_path, **{"trainer.max_steps": 2})
    _, configs = load_sweep(path)
    fit(configs[0], progress=False)
    for config, where, said in zip(
        configs[1:3], ("GPU 3", "GPU 4"), ({"state": "failed", "why": "no memory"}, {"step": 1})
    ):
        run_folder(config).mkdir(parents=True)
        note.Note(config, where).say(**said)
    assert run.main(["sweep", str(path), "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[4:8]] == [
        ["packed", "0", "done", "-", "2", "2", "-", "-"],
        ["padded", "0", "failed", "GPU", "3", "0", "2", "0", "no", "memory"],
        ["packed", "1", "interrupted", "GPU", "4", "1", "2", "0", "-"],
        ["padded", "1", "waiting", "-", "-", "2", "-", "-"],
    ], "speed and time left stand where a run goes on"
    assert lines[-2] == "1 done, 1 waiting, 1 interrupted, 1 failed."


@pytest.mark.slow
def test_what_a_worker_warns_of_is_said_once_where_it_is_seen(tmp_path, capfd):
    """Its own output goes to a file."""
    rows, length = 3, 8
    short = {
        "data.strategy": "split", "data.mode": "stream", "data.streams": 12, "data.stagger": True, "data.row_length": length,
        "data.tokens_per_step": 2 * rows * length, "data.slots_per_batch": rows * length, "trainer.max_steps": 2,
        "trainer.boundary": "carry",
    }  # fmt: skip
    path = write_sweep(tmp_path, arms={"own": short}, grid={"seed": [0, 1]}, throughput_rounds=0, common={})
    _, configs = load_sweep(path)
    queue = Queue(configs, True)
    pool.run_side_by_side(queue, [Place("CPU 0", {}), Place("CPU 1", {})])
    said = [line for line in capfd.readouterr().out.splitlines() if "no row went on from a state" in line]
    assert len(said) == 1 and "own, seed " in said[0] and ": warning: trainer.boundary=carry" in said[0]
    assert all("no row went on from a state" in note.log_path(config).read_text() for config in configs)


def test_a_worker_hears_what_this_package_warns_of_and_nothing_else(capsys):
    with pytest.warns(UserWarning), worker.heard() as said:
        logging.getLogger("packmamba.training.fit").warning("a run of %d steps", 2)
        logging.getLogger("packmamba.training.fit").info("small talk")
        logging.getLogger("another").warning("of another package")
        here = str(worker.ROOT / "packmamba" / "ops" / "build.py")
        warnings.warn_explicit("the slower reference runs", UserWarning, here, 1)
        warnings.warn_explicit("an old name", UserWarning, "elsewhere.py", 1)
    assert said == ["a run of 2 steps", "the slower reference runs"]
    logging.getLogger("packmamba").warning("afterwards")
    assert len(said) == 2 and "a run of 2 steps" in capsys.readouterr().err
