"""Parity's average of weights: which steps it takes, and what validation reads before there is one."""

from __future__ import annotations

import pytest
import torch

from experiments.parity.snapshots import Snapshots
from packmamba import MambaLM
from packmamba.lab.fit import fit
from packmamba.lab.run_id import run_folder
from runs import losses_of, stop_at, tiny_config

SNAPSHOTS = {"class_path": "experiments.parity.snapshots.Snapshots", "init_args": {"count": 3, "share": 0.7}}


@pytest.mark.parametrize("stopped", [None, 1, 4])
def test_snapshots_are_averaged_validated_and_saved(tmp_path, monkeypatch, stopped):
    weights, average_step = {}, Snapshots.on_train_batch_end

    def keep(self, trainer, module, *rest):
        weights[trainer.global_step] = [p.detach().clone() for p in module.model.parameters()]
        return average_step(self, trainer, module, *rest)

    monkeypatch.setattr(Snapshots, "on_train_batch_end", keep)
    keys = ["trainer.validate_every=1", "optimizer.lr=0.02"]
    plain = losses_of(fit(tiny_config(tmp_path, *keys), progress=False))
    config = tiny_config(tmp_path, *keys)
    config.trainer.callbacks = [SNAPSHOTS]  # of steps 2, 4 and 6
    if stopped:
        stop_at(config, stopped)
    curves = losses_of(fit(config, progress=False))
    assert curves["train"] == plain["train"], "the training is the same"
    same = [mine == theirs for mine, theirs in zip(curves["validation"], plain["validation"], strict=True)]
    assert same == [True, True, False, False, False, False], "until step 2 the trained weights are read"
    model = MambaLM.from_pretrained(run_folder(config))
    for saved, *snapshots in zip(model.parameters(), *(weights[n] for n in (2, 4, 6))):
        torch.testing.assert_close(saved.double(), torch.stack(snapshots).double().mean(0), rtol=1e-6, atol=1e-7)


def test_a_run_that_diverges_before_the_first_snapshot_has_no_loss(tmp_path):
    config = tiny_config(tmp_path, "optimizer.lr=1e30", "trainer.max_steps=500")
    config.trainer.callbacks = [SNAPSHOTS]
    metrics = fit(config, progress=False)["metrics"]
    assert metrics["diverged_at_step"] == 2 and metrics["val_loss"] is None
