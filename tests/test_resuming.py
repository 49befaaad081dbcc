"""Runs that go on: after SIGKILL, after a stop in an evaluation; and what they refuse to go on from."""

import random
import shutil
import time
from pathlib import Path

import pytest
import torch

import run
from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.training.callbacks import checkpoints
from packmamba.training.fit import Stopped, fit
from packmamba.training.module import MambaLitModule
from packmamba.training.run_id import RunLock, run_folder
from processes import ROOT, fork, kill, statuses
from runs import CARRY, final_state, losses_of, tiny_config, write_config


def leaves(value):
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ["data.strategy=greedy", "data.num_workers=0"],
        [*CARRY, "data.mode=stream", "data.tokens_per_step=144", "data.num_workers=2"],
    ],
    ids=["packed", "carry"],
)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, keys):
    overrides = [*keys, "trainer.max_steps=45", "trainer.validate_every=15", "trainer.checkpoint_every=3",
                 "trainer.threads=1", "model.learned_initial_state=true"]  # fmt: skip
    whole = tiny_config(tmp_path, *overrides, f"runs_dir={tmp_path}/whole")
    killed = tiny_config(tmp_path, *overrides, f"runs_dir={tmp_path}/killed")
    expected = fit(whole, progress=False)
    path = write_config(tmp_path / "killed.yaml", killed)
    folder = run_folder(killed) / "checkpoints"
    output = tmp_path / "output.txt"
    moments = random.Random(0)
    kills = 0
    for _ in range(2):
        before = checkpoints(folder)[-1:]
        process = fork(run.main, ["train", str(path)], output=output)
        while process.is_alive() and checkpoints(folder)[-1:] == before:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        if process.is_alive():
            kill(process)
            kills += 1
    assert kills == 2 and not (run_folder(killed) / "records").exists(), "the run must die before its end, twice"
    assert statuses(fork(run.main, ["train", str(path)], output=output)) == [0], output.read_text()
    (record,) = read_records(run_folder(killed))
    assert losses_of(record) == losses_of(expected)
    a, b = final_state(killed), final_state(whole)
    for part in ("state_dict", "optimizer_states", "carry", "rng"):
        for x, y in zip(leaves(a[part]), leaves(b[part]), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else (x == y) is True or (x == y).all(), part
    again = fit(killed, progress=False)
    assert again == record, "a finished run is not repeated"


def test_a_run_stopped_in_an_evaluation_evaluates_that_step_again(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.checkpoint_every=1", "trainer.validate_every=3")
    evaluate = MambaLitModule.validation_step

    def stop(module, *arguments):
        if module.global_step == 3:
            raise RuntimeError("stopped")
        evaluate(module, *arguments)

    monkeypatch.setattr(MambaLitModule, "validation_step", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(config, progress=False)
    assert checkpoints(run_folder(config) / "checkpoints")[-1].name == "step=2.ckpt"
    monkeypatch.setattr(MambaLitModule, "validation_step", evaluate)
    assert [point["step"] for point in fit(config, progress=False)["curves"]["validation"]] == [3, 6]


def test_the_line_of_progress_goes_on_too(tmp_path, monkeypatch, capsys):
    config = tiny_config(tmp_path, "trainer.max_steps=6", "trainer.validate_every=6", "trainer.checkpoint_every=4")
    step = MambaLitModule.training_step

    def stop(module, *arguments):
        if module.global_step == 5:
            raise RuntimeError("stopped")
        return step(module, *arguments)

    monkeypatch.setattr(MambaLitModule, "training_step", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(config, progress=True)
    assert "4/6" in capsys.readouterr().err
    monkeypatch.undo()
    fit(config, progress=True)
    shown = capsys.readouterr().err
    assert "3/6" not in shown and "5/6" in shown and "6/6" in shown


def test_a_record_of_other_documents_is_not_taken_for_this_run(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy", "trainer.max_steps=1")
    fit(config, progress=False)
    with open(config.data.path, "a") as documents:
        documents.write('{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="the documents have changed since this run"):
        fit(config, progress=False)


def test_a_stopped_run_does_not_go_on_with_other_documents(tmp_path):
    config = tiny_config(tmp_path, "trainer.max_steps=6", "trainer.checkpoint_every=2")
    with pytest.raises(Stopped):
        fit(config, progress=False, stop=lambda history: bool(checkpoints(run_folder(config) / "checkpoints")))
    whole = Path(config.data.path).read_text()
    with open(config.data.path, "a") as documents:
        documents.write('{"text": "abcd"}\n')
    with pytest.raises(ConfigError, match="the documents have changed since this run was stopped; to train anew"):
        fit(config, progress=False)
    Path(config.data.path).write_text(whole)
    assert fit(config, progress=False)["metrics"]["steps"] == 6


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_refused(tmp_path):
    config = tiny_config(tmp_path, "data.strategy=greedy")
    path, output = write_config(tmp_path / "run.yaml", config), tmp_path / "output.txt"
    with RunLock(run_folder(config)):
        assert statuses(fork(run.main, ["train", str(path)], output=output)) == [2]
    folder = run_folder(config)
    assert "is in use by another process" in output.read_text()
    assert not checkpoints(folder / "checkpoints")


@pytest.mark.slow
def test_a_checkpoint_written_before_the_seams_is_gone_on_from(tmp_path):
    """Of commit a0b6fb3: states that are carried, generators, AdamW's moments and learned starts under their names."""
    keys = [*CARRY, "data.mode=stream", "data.tokens_per_step=144", "model.d_model=4", "model.d_state=2",
            "model.learned_initial_state=true", "trainer.checkpoint_every=3", "trainer.threads=1"]  # fmt: skip
    whole = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/whole")
    old = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/old")
    expected = fit(whole, progress=False)["curves"]["train"]
    folder = run_folder(old) / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "carry.step=3.ckpt", folder / "step=3.ckpt")
    with pytest.raises(ConfigError, match=f"convert {folder}/step=3.ckpt"):
        fit(old, progress=False)
    assert run.main(["convert", str(folder / "step=3.ckpt"), "yes=true"]) == 0
    state = torch.load(folder / "step=3.ckpt", weights_only=True)
    found = fit(old, progress=False)["curves"]["train"]
    assert [point["step"] for point in found] == [1, 2, 3, 4, 5, 6]
    assert [point["loss"] for point in found] == pytest.approx([point["loss"] for point in expected], rel=1e-6)
    # What it carries decides the next step: with other states the loss is another.
    for layer in state["carry"][0]["states"]:
        for part in layer:
            part += 1
    shutil.rmtree(run_folder(old))
    folder.mkdir(parents=True)
    torch.save(state, folder / "step=3.ckpt")
    assert fit(old, progress=False)["curves"]["train"][3]["loss"] != pytest.approx(expected[3]["loss"], rel=1e-6)
