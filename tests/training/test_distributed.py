"""DDP and FSDP2: two ranks train as one, started by Lightning and as torchrun starts them."""

import os
import sys
import time

import lightning
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import run
from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.training.callbacks import Stopped, checkpoints
from packmamba.training.distributed import disable_lightning_signals
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from packmamba.training.run_id import run_folder
from processes import ROOT, fork, fork_ranks, kill, statuses
from runs import CARRY, final_state, losses_of, tiny_config, write_config


def assert_trained_as_one(both, alone, tolerance):
    a, b = final_state(both)["state_dict"], final_state(alone)["state_dict"]
    for name, value in b.items():
        assert torch.allclose(a[name], value, rtol=tolerance, atol=tolerance / 1e3), name
    (record,) = read_records(run_folder(both))
    (whole,) = read_records(run_folder(alone))
    assert record["metrics"]["real_tokens"] == whole["metrics"]["real_tokens"]
    for curve in ("train", "validation"):
        for a_point, b_point in zip(losses_of(record)[curve], losses_of(whole)[curve], strict=True):
            assert a_point == pytest.approx(b_point, rel=1e-6)


def train_as_a_user(path):
    """``python run.py train path``, which is what Lightning starts as the other process; this one has imported all."""
    sys.argv = [str(ROOT / "run.py"), "train", str(path)]
    sys.modules["__main__"].__spec__ = None  # else it would start pytest
    return run.main(sys.argv[1:])


# Lightning refuses FSDP2 in float64.
@pytest.mark.parametrize(("strategy", "precision", "tolerance"), [("ddp", "64-true", 1e-9), ("fsdp2", "32-true", 1e-4)])
def test_two_processes_train_as_one(tmp_path, strategy, precision, tolerance):
    keys = [
        "data.strategy=greedy",
        "data.max_tokens_per_batch=24",
        "optimizer.grad_clip=0.9",  # of some steps' gradients, not of all: Adam does not see a factor that all have
        f"trainer.precision={precision}",
    ]
    alone = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/alone")
    fit(alone, progress=False)
    both = tiny_config(
        tmp_path, *keys, f"runs_dir={tmp_path}/both", "trainer.devices=2", f"trainer.strategy={strategy}"
    )
    path = write_config(tmp_path / "both.yaml", both)
    output = tmp_path / "output.txt"
    if strategy == "ddp":
        processes = [fork(train_as_a_user, path, output=output, OMP_NUM_THREADS="1")]
    else:
        processes = fork_ranks(2, run.main, ["train", str(path)], output=output)
    assert set(statuses(*processes)) == {0}, output.read_text()
    assert_trained_as_one(both, alone, tolerance)


class Meetings(lightning.Callback):
    """Notes, in order, when DDP sends gradients off and when parameters get theirs."""

    def __init__(self):
        self.noted = []

    def on_train_start(self, trainer, module):
        def send(_, bucket):
            self.noted.append("sent")
            return default_hooks.allreduce_hook(None, bucket)

        trainer.strategy.model.register_comm_hook(None, send)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.noted.append("made"))

    def on_train_batch_end(self, *_):
        self.noted.append("step")


def test_gradients_meet_once_a_step_during_its_last_backward(tmp_path, monkeypatch):
    """More than DDP's first bucket of 1 MB, so that there is something to overlap; several batches a step."""
    noted = Meetings()
    make = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **keys: make(**keys | {"callbacks": [*keys["callbacks"], noted]}))
    keys = [
        "data.strategy=greedy",
        "trainer.strategy=ddp",
        "trainer.max_steps=2",
        "model.d_model=256",
        "model.d_state=16",
    ]
    fit(tiny_config(tmp_path, *keys), progress=False)
    text = "".join({"sent": "s", "made": "m", "step": "."}[event] for event in noted.noted)
    first, second, _ = text.split(".")
    parameters = sum(1 for _ in PackedLitModule.from_config(tiny_config(tmp_path, *keys), 256).parameters())
    for step in (first, second):
        assert step.count("m") > parameters, "several batches"
        assert "s" not in step[: step.count("m") - parameters], "only the last batch's gradients meet"
    assert second.count("s") > 1 and second.index("s") < second.rindex("m"), "some are sent before all are made"


def test_a_killed_sharded_run_ends_as_one_that_was_not(tmp_path):
    keys = ["data.strategy=greedy", "data.max_tokens_per_batch=24", "trainer.devices=2", "trainer.strategy=fsdp2",
            "trainer.max_steps=20", "trainer.checkpoint_every=4", "trainer.validate_every=10"]  # fmt: skip
    whole, killed = (tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/{name}") for name in ("whole", "killed"))
    folder = run_folder(killed) / "checkpoints"
    output = tmp_path / "output.txt"

    def start(config):
        path = write_config(tmp_path / "run.yaml", config)
        return fork_ranks(2, run.main, ["train", str(path)], output=output)

    ranks = start(killed)
    while all(rank.is_alive() for rank in ranks) and not checkpoints(folder):
        time.sleep(0.005)
    kill(*ranks)
    assert checkpoints(folder) and not (run_folder(killed) / "records").exists(), "the run must die before its end"
    for config in (killed, whole):
        assert statuses(*start(config)) == [0, 0], output.read_text()
    assert_trained_as_one(killed, whole, 1e-5)


@pytest.mark.parametrize("told", [[0], [1]])
def test_ranks_end_together_when_any_is_told_to(tmp_path, told):
    keys = ["data.strategy=greedy", "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=200",
            "trainer.checkpoint_every=4", "trainer.validate_every=200", "trainer.log_every=10"]  # fmt: skip
    config = tiny_config(tmp_path, *keys)
    path, output = write_config(tmp_path / "run.yaml", config), tmp_path / "output.txt"
    ranks = fork_ranks(2, run.main, ["train", str(path)], output=output)
    while all(rank.is_alive() for rank in ranks) and not checkpoints(run_folder(config) / "checkpoints"):
        time.sleep(0.005)
    for rank in told:
        ranks[rank].terminate()
    assert statuses(*ranks, timeout=60) == [143, 143], output.read_text()
    assert not (run_folder(config) / "records").exists()
    newest = checkpoints(run_folder(config) / "checkpoints")[-1]
    step = int(newest.stem.removeprefix("step="))
    assert step % 10 == 0 and output.read_text().count(f"stopped after step {step} of 200, with a checkpoint") == 2


def stops(config):
    """One rank: a job's, of which the first alone is told."""
    with pytest.raises(Stopped) as stopped:
        fit(config, False, lambda metrics: int(os.environ["RANK"]) == 0 and metrics.totals["steps"] >= 5)
    assert stopped.value.step == 8


def test_ranks_stop_with_a_checkpoint_when_one_is_asked_to(tmp_path):
    keys = ["data.strategy=greedy", "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=16", "trainer.log_every=4",
            "trainer.checkpoint_every=16", "trainer.validate_every=8"]  # fmt: skip
    config, output = tiny_config(tmp_path, *keys), tmp_path / "output.txt"
    assert statuses(*fork_ranks(2, stops, config, output=output)) == [0, 0], output.read_text()
    assert [path.name for path in checkpoints(run_folder(config) / "checkpoints")] == ["step=8.ckpt"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["trainer.strategy=fsdp"], "trainer.strategy"),
        (["trainer.strategy=fsdp2", *CARRY], "trainer.strategy"),
        (["trainer.strategy=fsdp2", "trainer.precision=16-mixed"], "trainer.precision"),
        (["trainer.strategy=fsdp2", "trainer.average_snapshots=4"], "trainer.average_snapshots"),
    ],
)
def test_strategies_refuse_before_any_work(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        fit(tiny_config(tmp_path, *keys), progress=False)


def test_lightning_s_private_names_exist(tmp_path, monkeypatch):
    """Else signals would interrupt a collective, or every step would wait for the GPU (Lightning issue 20806)."""
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    disable_lightning_signals(trainer)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None
    monkeypatch.delattr(type(trainer.fit_loop.epoch_loop), "_broadcast_sigterm_tensor")
    with pytest.raises(AssertionError, match="_broadcast_sigterm_tensor"):
        disable_lightning_signals(lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"))
