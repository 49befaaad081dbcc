"""SIGTERM and SIGINT end a run at the end of its step, with a checkpoint from which it goes on to the same bits."""

import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

import run
from packmamba.training import signals, worker
from packmamba.training.callbacks import checkpoints
from packmamba.training.fit import fit
from packmamba.training.module import MambaLitModule
from packmamba.training.run_id import run_folder
from processes import fork, statuses
from runs import final_state, losses_of, tiny_config, write_config

KEYS = ["data.strategy=greedy", "trainer.max_steps=6", "trainer.checkpoint_every=6", "trainer.threads=1",
        "trainer.loggers=[]"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record and the last state of a run that was left alone."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), *KEYS)
    return fit(config, progress=False), final_state(config)


@pytest.fixture(autouse=True)
def usual_handlers():
    """A shell may have started this process with SIGINT ignored."""
    before = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    yield
    now = [signal.signal(signal.SIGINT, before[0]), signal.signal(signal.SIGTERM, before[1])]
    assert now == [signal.default_int_handler, signal.SIG_DFL], "handlers are put back"


def tell_at(monkeypatch, name, step, *told):
    """Has a call of the module's, after so many steps, send signals to this process."""
    call = getattr(MambaLitModule, name)

    def call_and_tell(module, *arguments):
        if module.global_step == step and told:
            monkeypatch.setattr(MambaLitModule, name, call)
            for one in told:
                signal.raise_signal(one)
        return call(module, *arguments)

    monkeypatch.setattr(MambaLitModule, name, call_and_tell)


@pytest.mark.parametrize(
    ("where", "step", "told"),
    [("training_step", 3, signal.SIGTERM), ("training_step", 3, signal.SIGINT), ("validation_step", 3, signal.SIGTERM)],
)
def test_a_run_that_is_told_to_end_writes_a_checkpoint_and_says_where(
    tmp_path, monkeypatch, capsys, whole, where, step, told
):
    config = tiny_config(tmp_path, *KEYS)
    path = write_config(tmp_path / "run.yaml", config)
    reached = 4 if where == "training_step" else 3
    tell_at(monkeypatch, where, step, told)
    assert run.main(["train", str(path)]) == 128 + told
    assert f"stopped after step {reached} of 6, with a checkpoint; the same command goes on" in capsys.readouterr().err
    (checkpoint,) = checkpoints(run_folder(config) / "checkpoints")
    assert checkpoint.name == f"step={reached}.ckpt"
    assert losses_of(fit(config, progress=False)) == losses_of(whole[0])
    ended = final_state(config)
    for name, weight in whole[1]["state_dict"].items():
        assert torch.equal(ended["state_dict"][name], weight), name


def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path / "run.yaml", config := tiny_config(tmp_path, *KEYS))
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0.0)
    tell_at(monkeypatch, "training_step", 3, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
    assert run.main(["train", str(path)]) == 130
    assert "stopped; the same command goes on from the last checkpoint" in capsys.readouterr().err
    assert not checkpoints(run_folder(config) / "checkpoints")


def test_outside_of_steps_it_ends_at_once(tmp_path, monkeypatch, capsys, whole):
    """As in the evaluation at its end, inside Lightning, which would end the process with status 1 and no word."""
    config = tiny_config(tmp_path, *KEYS, "trainer.validate_every=4")
    path = write_config(tmp_path / "run.yaml", config)
    tell_at(monkeypatch, "validation_step", 6, signal.SIGTERM)
    assert run.main(["train", str(path)]) == 143
    assert "stopped; the same command goes on" in capsys.readouterr().err
    assert fit(config, progress=False)["metrics"]["val_loss"] == whole[0]["metrics"]["val_loss"]


def test_a_handler_of_somebody_else_stays(tmp_path, monkeypatch):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    tell_at(monkeypatch, "training_step", 3, signal.SIGTERM)
    try:
        assert fit(tiny_config(tmp_path, *KEYS), progress=False)["metrics"]["steps"] == 6
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert told == [True]


@pytest.mark.slow
def test_a_signal_to_the_whole_group_leaves_loaders_their_work(tmp_path):
    """As `timeout`, SLURM and a terminal send it."""
    keys = ["data.num_workers=2", "trainer.max_steps=2000", "trainer.validate_every=2000", "trainer.checkpoint_every=2"]
    config = tiny_config(tmp_path, *KEYS, *keys)
    path, output = write_config(tmp_path / "run.yaml", config), tmp_path / "output.txt"
    process = fork(run.main, ["train", str(path)], output=output)
    while process.is_alive() and not checkpoints(run_folder(config) / "checkpoints"):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    assert statuses(process) == [143], output.read_text()
    (said,) = [line for line in output.read_text().splitlines() if "stopped after step" in line]
    newest = checkpoints(run_folder(config) / "checkpoints")[-1]
    assert f"after step {newest.stem.removeprefix('step=')} of 2000, with a checkpoint" in said


def keep_a_worker(said):
    """The worker holds both ends of its pipe: nothing but the system can tell it that this process is gone."""
    ends = Pipe()
    if child := os.fork():
        said.write_text(str(child))
        return signal.pause()
    return worker.main(ends[1])


def status_of(pid):
    try:
        return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except FileNotFoundError:
        return {"State": "Z"}


def test_a_worker_dies_with_the_process_that_started_it(tmp_path):
    said = tmp_path / "pid"
    process = fork(keep_a_worker, said, output=tmp_path / "output.txt")
    ignores = 1 << signal.SIGTERM - 1  # what it does next
    while process.is_alive() and not (
        said.is_file() and said.read_text() and int(status_of(said.read_text())["SigIgn"], 16) & ignores
    ):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    end = time.monotonic() + 10
    while not status_of(said.read_text())["State"].startswith("Z"):
        assert time.monotonic() < end or os.kill(int(said.read_text()), signal.SIGKILL), "it outlives that"
        time.sleep(0.005)
