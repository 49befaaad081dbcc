"""Runs of a sweep that share a GPU: which find no memory, when they begin again, how many go side by side then."""

import contextlib

import pytest
from test_sweeps import write_sweep

from packmamba.errors import Unfinished
from packmamba.records import read_records
from packmamba.training import note, pool
from packmamba.training.note import Outcome
from packmamba.training.pool import Queue, Room
from packmamba.training.run_id import run_folder
from packmamba.training.sweep import load_sweep
from packmamba.training.worker import Place

FULL = """
import os
import torch
from pathlib import Path
from packmamba.training.boundary import BOUNDARIES, Reset

class Crowded(Reset):
    \"\"\"Has no memory left while the other run is not done, as on a GPU that both share.\"\"\"

    def __init__(self, folder="", alone=False):
        self.full = alone or not any(Path(folder, "records").glob("*.jsonl"))

    def layouts(self, layout):
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().layouts(layout)

BOUNDARIES["crowded"] = Crowded
"""


@pytest.mark.slow
def test_a_run_without_memory_beside_others_waits_until_one_of_them_has_ended(tmp_path, monkeypatch):
    (tmp_path / "crowding.py").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crowded = {"trainer.boundary": "crowded", "trainer.boundary_options": {"folder": str(tmp_path / "sweep")}}
    arms = {"a": crowded, "b": {"data.strategy": "greedy"}, "c": {"data.strategy": "padded", "data.row_length": None}}
    path = write_sweep(tmp_path, arms=arms, plugins=["crowding"], throughput_rounds=0, grid={})
    sweep, configs = load_sweep(path)
    output = tmp_path / "out"
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        queue = Queue(configs, True)
        pool.run_side_by_side(queue, [Place("GPU 7", {})] * 3)
        queue.check()
    assert {record["arm"] for record in read_records(tmp_path / "sweep")} == {"a", "b", "c"}
    said = [line for line in output.read_text().splitlines() if "a, seed 0" in line]
    assert "out of memory after" in said[1] and said[1].endswith("on GPU 7 beside others: 2 at a time there for now")
    assert [line.partition("seed 0: ")[2][:5] for line in said] == ["begin", "out o", "begin", "done "]
    assert "GPU 7: 3 at a time again" in output.read_text().splitlines()
    assert "OutOfMemoryError" in note.log_path(configs[0]).read_text()


def test_room_for_runs_side_by_side():
    room = Room(["GPU 0", "GPU 1", "GPU 0", "GPU 0"])
    for which, busy in ((0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2])):
        room.take(which, busy)
    assert room.leave(3) == 2 and room.open == {0, 1, 2}
    assert room.leave(2) == 1 and room.leave(0) == 1, "the last of a group had others beside it, too"
    assert room.open == {0, 1}, "one place stays open"
    assert room.leave(1) == 0, "what is on another GPU is not beside it"
    room.take(0, [1])
    assert room.leave(0) == 0 and room.open == {0, 1, 2, 3}, "alone it found none: that is its own fault"


def test_a_closed_place_opens_again_after_as_many_runs_as_went_side_by_side():
    room = Room(["GPU 0"] * 3)

    def full():
        for which in sorted(room.open):
            room.take(which, room.open - {which})
        return room.leave(max(room.open))

    assert full() == 2 and full() == 1
    assert [room.end(0), room.end(0)] == [0, 2] and room.open == {0, 1}
    assert full() == 1 and [room.end(0) for _ in range(4)] == [0, 0, 0, 2], "too many again: twice as many"
    assert [room.end(which) for which in (0, 1, 0, 1)] == [0, 0, 0, 3] and room.open == {0, 1, 2}
    assert room.end(0) == 0, "all are open"


@pytest.mark.parametrize(
    ("why", "full"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: made to fail", False),
    ],
)
def test_what_says_that_a_gpu_has_no_memory(why, full):
    assert Outcome("failed", why=why).out_of_memory is full and not Outcome("done", why=why).out_of_memory


@pytest.mark.slow
def test_a_run_without_memory_that_is_alone_has_failed(tmp_path, monkeypatch, capfd):
    (tmp_path / "crowding.py").write_text(FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crowded = {"trainer.boundary": "crowded", "trainer.boundary_options": {"alone": True}}
    arms = {"a": crowded, "b": {"data.strategy": "greedy"}}
    _, configs = load_sweep(write_sweep(tmp_path, arms=arms, plugins=["crowding"], throughput_rounds=0, grid={}))
    queue = Queue(configs, True)
    pool.run_side_by_side(queue, [Place("GPU 7", {}), Place("GPU 8", {})])
    with pytest.raises(Unfinished, match="1 of 2 runs failed, 1 are done"):
        queue.check()


def test_a_run_that_was_put_back_waits_and_is_not_called_failed(tmp_path):
    _, configs = load_sweep(write_sweep(tmp_path, throughput_rounds=0, grid={}))
    queue = Queue(configs, False)
    queue.take(0)
    run_folder(configs[0]).mkdir(parents=True)
    note.Note(configs[0], "GPU 7").say(state="failed", why="OutOfMemoryError")
    queue.put_back(0, "on GPU 7")
    assert note.state_of(configs[0])["state"] == "stopped" and queue.next() == 0
