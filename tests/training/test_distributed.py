"""DDP and FSDP2: ranks train as one process does, started by Lightning and as torchrun starts them."""

import sys
import time

import pytest
import torch

import run
from packmamba.lab.callbacks import checkpoints
from packmamba.lab.fit import fit
from packmamba.lab.records import read_records
from packmamba.lab.run_id import run_folder
from processes import ROOT, fork, fork_ranks, kill, statuses
from runs import final_state, losses_of, tiny_config, write_config

HEADS = ["model.mixer_options.headdim=8"]


def assert_trained_as_one(both, alone, tolerance):
    a, b = final_state(both)["state_dict"], final_state(alone)["state_dict"]
    torch.testing.assert_close({**a}, {**b}, rtol=tolerance, atol=tolerance / 1e3)
    (record,) = read_records(run_folder(both))
    (whole,) = read_records(run_folder(alone))
    assert record["metrics"]["real_tokens"] == whole["metrics"]["real_tokens"]
    for curve in {"train", "validation", "evaluations"} & record["curves"].keys():
        for a_point, b_point in zip(losses_of(record)[curve], losses_of(whole)[curve], strict=True):
            assert a_point == pytest.approx(b_point, rel=1e-4 if curve == "evaluations" else 1e-6)


def train_as_a_user(path):
    """``python run.py train path``, which is what Lightning starts as the other process; this one
    has imported all.
    """
    sys.argv = [str(ROOT / "run.py"), "train", str(path)]
    sys.modules["__main__"].__spec__ = None  # else it would start pytest
    return run.main(sys.argv[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "tolerance", "devices", "sharing"),
    [
        ("ddp", "64-true", 1e-9, 2, []),
        ("fsdp2", "32-true", 1e-4, 2, []),
        ("ddp", "64-true", 1e-9, 2, ["trainer.context_parallel=2"]),
        ("ddp", "64-true", 1e-9, 4, ["trainer.context_parallel=2", *HEADS, "model.mixer=mamba3"]),
        ("fsdp2", "32-true", 1e-4, 2, ["trainer.context_parallel=2", *HEADS, "model.mixer=mamba2"]),
    ],
)
def test_several_processes_train_as_one(tmp_path, strategy, precision, tolerance, devices, sharing):
    # Some steps' gradients are clipped, not all: Adam does not see a factor that all have.
    keys = ["data.strategy=greedy", "data.max_tokens_per_batch=24", "optimizer.grad_clip=0.9"]
    keys += [f"trainer.precision={precision}", "evaluations=[parity]", "evaluation_examples=5"]
    # where rank 0 has all weights
    keys += ["trainer.evaluate_every=2"] if strategy == "ddp" else []
    keys += [key for key in sharing if key.startswith("model.")]
    alone = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/alone")
    fit(alone, progress=False)
    both = tiny_config(tmp_path, *keys, f"trainer.devices={devices}", f"trainer.strategy={strategy}", *sharing)
    path, output = write_config(tmp_path / "both.yaml", both), tmp_path / "output.txt"
    if strategy == "ddp":
        processes = [fork(train_as_a_user, path, output=output, OMP_NUM_THREADS="1")]
    else:
        processes = fork_ranks(2, run.main, ["train", str(path)], output=output)
    assert set(statuses(*processes)) == {0}, output.read_text()
    assert_trained_as_one(both, alone, tolerance)
    checked = {"ddp": "checked at step 1", "fsdp2": "unchecked: rank 0: model: expected whole weights"}[strategy]
    assert read_records(run_folder(both))[0]["leakcheck"].startswith(checked)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [[], ["trainer.context_parallel=2"]])
def test_a_killed_sharded_run_ends_as_one_that_was_not(tmp_path, sharing):
    keys = ["data.strategy=greedy", "data.max_tokens_per_batch=24", "trainer.devices=2", "trainer.strategy=fsdp2",
            "trainer.max_steps=20", "trainer.checkpoint_every=4", "trainer.validate_every=10", *sharing]  # fmt: skip
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
        output.unlink()
        assert statuses(*start(config)) == [0, 0], output.read_text()
    assert_trained_as_one(killed, whole, 1e-5)


@pytest.mark.slow
def test_ranks_end_together_when_any_is_told_to(tmp_path):
    keys = ["data.strategy=greedy", "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=200",
            "trainer.checkpoint_every=4", "trainer.validate_every=200", "trainer.log_every=10"]  # fmt: skip
    config = tiny_config(tmp_path, *keys)
    path, output = write_config(tmp_path / "run.yaml", config), tmp_path / "output.txt"
    ranks = fork_ranks(2, run.main, ["train", str(path)], output=output)
    while all(rank.is_alive() for rank in ranks) and not checkpoints(run_folder(config) / "checkpoints"):
        time.sleep(0.005)
    ranks[1].terminate()
    assert statuses(*ranks, timeout=60) == [143, 143], output.read_text()
    assert not (run_folder(config) / "records").exists()
    newest = checkpoints(run_folder(config) / "checkpoints")[-1]
    step = int(newest.stem.removeprefix("step="))
    assert step % 10 == 0 and output.read_text().count(f"stopped after step {step} of 200, with a checkpoint") == 2
