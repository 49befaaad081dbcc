"""Checkpoints that are written while training goes on hold the step that they are of, and a kill leaves the one before."""

import os
import signal
import threading
from collections import OrderedDict

import pytest
import torch

from packmamba.errors import UserError
from packmamba.training import checkpoint_behind, checkpoint_file
from packmamba.training.callbacks import checkpoints
from packmamba.training.checkpoint_behind import CheckpointsBehind
from packmamba.training.checkpoint_file import read_checkpoint
from packmamba.training.fit import fit
from packmamba.training.run_id import record_path, run_folder
from processes import fork, statuses
from runs import final_state, losses_of, tiny_config

KEYS = ["trainer.checkpoint_every=2", "trainer.validate_every=6", "trainer.leakcheck_every=null"]


def same(a, b):
    """Recursively, tensors to the bit and of one dtype."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def without_times(state):
    history = state["callbacks"]["History"]
    for points in (history["train"], history["validation"]):
        for point in points:
            point.pop("seconds")
    history["totals"].pop("seconds")
    history["timed"].pop("seconds")
    return state


@pytest.mark.slow
def test_a_checkpoint_that_is_written_late_is_of_its_own_step(tmp_path, monkeypatch):
    """The first is written only when two more steps are made, and holds what it holds without a thread."""
    config = tiny_config(tmp_path, *KEYS, "trainer.checkpoint_async=false", f"runs_dir={tmp_path}/plain")
    fit(config, False)
    written, go_on = {}, threading.Event()
    write = checkpoint_behind.write_checkpoint

    def late(path, checkpoint):
        assert go_on.wait(60), "training waits for the write"
        write(path, checkpoint)
        written[path.name] = without_times(read_checkpoint(path))

    monkeypatch.setattr(checkpoint_behind, "write_checkpoint", late)
    behind = tiny_config(tmp_path, *KEYS)
    record = fit(behind, False, lambda history: history.totals["steps"] == 3 and go_on.set())
    monkeypatch.undo()
    assert list(written) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert same(without_times(final_state(config)), written["step=6.ckpt"])
    stopped = tiny_config(tmp_path, *KEYS, "trainer.checkpoint_async=false", f"runs_dir={tmp_path}/stopped")
    with pytest.raises(Exception, match="stopped after step 2"):
        fit(stopped, False, lambda history: history.totals["steps"] == 2)
    assert same(without_times(final_state(stopped)), written["step=2.ckpt"])
    assert record["config"] == fit(config, False)["config"], "the key decides nothing"


def trained(folder, killed_at=None):
    """In a process of its own; killed where the checkpoint of that number would appear."""
    replace, calls = os.replace, []

    def replace_or_die(source, target):
        calls.append(target)
        if len(calls) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    checkpoint_file.os = type("os", (), {**vars(os), "replace": staticmethod(replace_or_die)})
    fit(tiny_config(folder, *KEYS, f"runs_dir={folder}/{'whole' if killed_at == 0 else 'killed'}"), False)


@pytest.mark.slow
def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path):
    output = tmp_path / "output.txt"
    tiny_config(tmp_path)  # writes the documents
    assert statuses(fork(trained, tmp_path, 2, output=output)) == [-signal.SIGKILL]
    config = tiny_config(tmp_path, *KEYS, f"runs_dir={tmp_path}/killed")
    folder = run_folder(config) / "checkpoints"
    assert [path.name for path in checkpoints(folder)] == ["step=2.ckpt"], output.read_text()
    assert list(folder.glob("*.tmp")), "it died in writing the next"
    record = fit(config, False)
    whole = tiny_config(tmp_path, *KEYS, f"runs_dir={tmp_path}/whole")
    assert losses_of(record) == losses_of(fit(whole, False))
    ends = final_state(config), final_state(whole)
    assert all(same(ends[0][part], ends[1][part]) for part in ("state_dict", "optimizer_states", "rng"))
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_what_cannot_be_written_ends_the_run_without_a_record(tmp_path, monkeypatch, last):
    def fail(path, checkpoint):
        if last == (path.name == "step=6.ckpt"):
            raise UserError("the disk is full")

    monkeypatch.setattr(checkpoint_behind, "write_checkpoint", fail)
    config = tiny_config(tmp_path, *KEYS)
    with pytest.raises(UserError, match="the disk is full"):
        fit(config, False)
    assert not record_path(config).exists()


def test_a_copy_shares_what_is_shared_and_nothing_with_the_original():
    weight = torch.arange(12.0)
    state = OrderedDict(embedding=weight.view(3, 4), head=weight.view(3, 4), part=weight[2:5], empty=torch.empty(0))
    live = {"state_dict": state, "points": [{"loss": 1.0}], "rng": (1, [2, torch.tensor(3, dtype=torch.uint8)])}
    behind = CheckpointsBehind()
    first = behind.copy(live)
    assert type(first["state_dict"]) is OrderedDict and same(first, live)
    copied = first["state_dict"]
    assert len({tensor.untyped_storage().data_ptr() for name, tensor in copied.items() if name != "empty"}) == 1
    weight.add_(1)
    live["points"].append({"loss": 2.0})
    assert copied["part"].tolist() == [2, 3, 4] and len(first["points"]) == 1
    place = copied["head"].data_ptr()
    second = behind.copy(live)
    assert second["state_dict"]["head"].data_ptr() == place, "memory is taken once"
    assert same(second, live)
