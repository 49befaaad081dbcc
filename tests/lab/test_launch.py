"""Launching runs: device slots, runs that fail, are killed, locked or stopped."""

import os
import re
import signal
import sys
import time
from collections import Counter
from unittest import mock

import pytest
from sweeps import sweep_in_forks, write_sweep

from packmamba.errors import Unfinished
from packmamba.lab import launch
from packmamba.lab.callbacks import checkpoints
from packmamba.lab.fit import fit
from packmamba.lab.launch import device_slots, train
from packmamba.lab.records import read_records
from packmamba.lab.run_id import Locked, RunLock, run_folder
from packmamba.lab.sweep import load_sweep, run_sweep
from packmamba.training.boundary import BOUNDARIES
from processes import fork, hold, statuses


def test_slots_are_on_visible_gpus_or_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert device_slots("auto", True) == [("GPU 3", "3", 4), ("GPU 5", "5", 4)]
    assert [slot.gpu for slot in device_slots(3, True)] == ["3", "5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [slot.gpu for slot in device_slots("auto", True)] == ["0", "1"]
    slots = device_slots("auto", False)
    assert len(slots) == 16 and slots[-1] == ("CPU 15", "", 4)


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


@pytest.fixture(autouse=True)
def registry():
    """Remove the schemes that a test's plugin registers in this process."""
    with mock.patch.dict(BOUNDARIES):
        yield


def wait_for_lock(folder, seconds=70):
    end = time.monotonic() + seconds
    while True:
        try:
            with RunLock(folder):
                return
        except Locked:
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.mark.slow
def test_a_run_that_fails_or_dies_does_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "breaking.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    died = {"trainer.boundary": "breaks", "trainer.boundary_options": {"how": "exit"}}
    arms = {"a": {"trainer.boundary": "breaks"}, "b": died, "c": {"data.strategy": "greedy"}}
    path, output = write_sweep(tmp_path, arms=arms, plugins=["breaking"], grid={}), tmp_path / "output.txt"
    assert statuses(fork(sweep_in_forks, path, "jobs=2", output=output)) == [1]
    said = output.read_text()
    assert re.search(r"a, seed 0: failed on CPU \d: RuntimeError: made to fail", said)
    assert re.search(r"b, seed 0: failed on CPU \d: its process was killed", said)
    assert "2 of 3 runs failed, 1 are done" in said
    assert [record["arm"] for record in read_records(tmp_path / "sweep")] == ["c"]
    _, configs = load_sweep(path)
    assert "Traceback" in (run_folder(configs[0]) / "output.txt").read_text()


def test_a_worker_imports_the_plugins(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text(PLUGIN.replace('"breaks"', '"later"'))
    monkeypatch.chdir(tmp_path)
    later = write_sweep(tmp_path, arms={"a": {"trainer.boundary": "later"}}, plugins=["imported_later"], grid={})
    _, configs = load_sweep(later)
    del BOUNDARIES["later"]  # as in a process that was spawned
    monkeypatch.delitem(sys.modules, "imported_later")
    assert train(configs[0], False).why == "RuntimeError: made to fail"


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_has_each_record_once(tmp_path):
    keys = {"trainer.max_steps": 24, "trainer.checkpoint_every": 1, "trainer.validate_every": 24}
    path, output = write_sweep(tmp_path, common=keys), tmp_path / "output.txt"
    sweep, configs = load_sweep(path, [f"output={tmp_path}/whole"])
    run_sweep(sweep, configs, progress=False)
    sweep, configs = load_sweep(path)
    folders = [run_folder(config) / "checkpoints" for config in configs]

    def steps():
        return [len(checkpoints(folder)) and int(checkpoints(folder)[-1].stem[5:]) for folder in folders]

    def start(before):
        process, end = fork(sweep_in_forks, path, "jobs=2", output=output), time.monotonic() + 60
        while sum(steps()) <= before:
            assert process.is_alive() and time.monotonic() < end
            time.sleep(0.01)
        return process

    process = start(0)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    # whose workers hold locks until they are dead and process 1 has waited for them
    for config in configs:
        wait_for_lock(run_folder(config))
    before = steps()
    time.sleep(0.5)
    assert 0 < sum(before) < 96 and steps() == before, "its workers died with it"
    process = start(sum(before))
    os.kill(process.pid, signal.SIGTERM)
    assert statuses(process) == [130], output.read_text()
    run_sweep(sweep, configs, progress=False)
    counts = Counter((record["arm"], record["seed"]) for record in read_records(sweep.output))
    assert counts == {(arm, seed): 1 for arm in ("padded", "packed") for seed in (0, 1)}
    both = [read_records(folder) for folder in (sweep.output, tmp_path / "whole")]
    losses = [{(r["arm"], r["seed"]): r["metrics"]["val_loss"] for r in records} for records in both]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_locked_run_is_left_to_its_process(tmp_path):
    sweep, configs = load_sweep(write_sweep(tmp_path, grid={"seed": [0]}))
    holder = hold(run_folder(configs[0]))
    with pytest.raises(Locked, match="in use by another process"):
        fit(configs[0], progress=False)
    with pytest.raises(Unfinished, match="1 of 2 runs are done, other processes train 1") as caught:
        run_sweep(sweep, configs)
    assert caught.value.status == 3
    holder.kill()
    holder.join()
    run_sweep(sweep, configs)
    assert len(read_records(sweep.output)) == 2


@pytest.mark.slow
def test_processes_share_a_sweep(tmp_path):
    """As jobs of a cluster's array do: each takes runs that no other trains."""
    path = write_sweep(tmp_path)
    outputs = [tmp_path / "first.txt", tmp_path / "second.txt"]
    processes = [fork(sweep_in_forks, path, output=output) for output in outputs]
    assert set(statuses(*processes)) <= {0, 3}
    counts = Counter((record["arm"], record["seed"]) for record in read_records(tmp_path / "sweep"))
    assert counts == {(arm, seed): 1 for arm in ("padded", "packed") for seed in (0, 1)}
    assert all("done: validation loss" in output.read_text() for output in outputs)
