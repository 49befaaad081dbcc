"""The mean of the last weights, and learning rates that end at zero."""

import pytest
import torch

from packmamba.config import ConfigError, load_config
from packmamba.nn import MambaLM
from packmamba.training.average import snapshot_steps
from packmamba.training.callbacks import Checkpoints
from packmamba.training.fit import fit
from packmamba.training.optimizer import learning_rate
from packmamba.training.run_id import run_folder
from runs import tiny_config


@pytest.mark.parametrize(
    ("steps", "snapshots", "share", "expected"),
    [
        (100, 1, 0.5, []),
        (100, 5, 0.2, [80, 85, 90, 95, 100]),
        (900, 2, 0.1, [810, 900]),
        (6, 3, 0.7, [2, 4, 6]),
        (3, 10, 1.0, [1, 2, 3]),
    ],
)
def test_snapshots_are_evenly_spaced_up_to_the_last_step(steps, snapshots, share, expected):
    assert snapshot_steps(steps, snapshots, share) == expected


def test_the_learning_rate_ends_at_zero():
    config = load_config(
        None, ["optimizer.final_lr_fraction=0", "optimizer.lr=3e-3", "optimizer.warmup_steps=5"]
    ).optimizer
    rates = [learning_rate(config, step, 50) for step in range(50)]
    assert max(rates) == 3e-3 and rates[-1] == 0 and all(rate > 0 for rate in rates[:-1])
    assert learning_rate(config, 4, 5) == 3e-3  # a run that is all warm-up


@pytest.fixture
def weights(monkeypatch):
    """Of a run, after each step, as a checkpoint there would have them."""
    found = {}
    save = Checkpoints.on_train_batch_end

    def keep(self, trainer, module, *rest):
        found[trainer.global_step] = {n: p.detach().clone() for n, p in module.model.named_parameters()}
        return save(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", keep)
    return found


AVERAGE = ("trainer.average_snapshots=3", "trainer.average_share=0.7")  # after steps 2, 4 and 6


def test_the_mean_of_snapshots_is_evaluated_and_kept(tmp_path, weights):
    plain = fit(tiny_config(tmp_path), progress=False)["metrics"]
    config = tiny_config(tmp_path, *AVERAGE)
    record = fit(config, progress=False)["metrics"]
    kept = dict(MambaLM.from_pretrained(run_folder(config)).named_parameters())
    for name, one in kept.items():
        mean = torch.stack([weights[step][name].double() for step in (2, 4, 6)]).mean(0)
        torch.testing.assert_close(one.detach().double(), mean, rtol=1e-6, atol=1e-7)
    assert record["val_loss_last_weights"] == plain["val_loss"] != record["val_loss"]
    assert "val_loss_last_weights" not in plain


def test_a_resumed_run_has_the_same_mean(tmp_path, monkeypatch):
    whole = fit(tiny_config(tmp_path, *AVERAGE), progress=False)
    config = tiny_config(tmp_path, *AVERAGE, f"runs_dir={tmp_path}/stopped")
    done = Checkpoints._save_if_due

    def stop(self, trainer):
        done(self, trainer)
        if trainer.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Checkpoints, "_save_if_due", stop)
        fit(config, progress=False)
    resumed = fit(config, progress=False)
    assert resumed["metrics"]["val_loss"] == whole["metrics"]["val_loss"]


def test_shards_have_no_mean():
    with pytest.raises(ConfigError, match="trainer.average_snapshots: trainer.strategy=fsdp2"):
        load_config(None, ["trainer.average_snapshots=4", "trainer.strategy=fsdp2"])


def test_the_record_says_how_much_a_step_holds(tmp_path):
    record = fit(tiny_config(tmp_path), progress=False)
    (tokens,), (targets,) = record["curves"]["tokens_per_step"], record["curves"]["targets_per_step"]
    metrics = record["metrics"]
    assert tokens["least"] < tokens["mean"] == metrics["real_tokens"] / 6 < tokens["most"]
    assert targets["mean"] == metrics["targets"] / 6 < tokens["mean"]
    exact = fit(tiny_config(tmp_path, "data.cut_at_steps=true"), progress=False)["curves"]["tokens_per_step"]
    assert exact == [{"least": 96, "mean": 96, "most": 96}]
