"""A task's examples as documents: packed, padded or alone, with targets only where the mask says."""

from __future__ import annotations

import pytest
import torch

from packmamba.config import load_config
from packmamba.data.datamodule import PackedDataModule
from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule

OPTIONS = {"num_pairs": 4, "length": [20, 40], "vocab_size": 64}


def make_config(folder, *overrides):
    return load_config(
        None,
        [
            f"runs_dir={folder}/runs", f"data.cache_dir={folder}/cache", "data.source=task", "data.task=mqar",
            "data.task_options={num_pairs: 4, length: [20, 40], vocab_size: 64}", "data.num_documents=60",
            "data.row_length=64", "data.tokens_per_step=256", "data.max_tokens_per_batch=256", "data.validation_fraction=0.2",
            "model.d_model=16", "model.n_layer=1", "trainer.max_steps=3", "trainer.validate_every=3",
            "trainer.checkpoint_every=3", "trainer.accelerator=cpu", *overrides,
        ],
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["single", "padded", "greedy", "concat_split"])
def test_every_answer_is_a_target_once_under_every_strategy(tmp_path, strategy):
    config = make_config(tmp_path, f"data.strategy={strategy}", "data.tokens_per_step=100000")
    data = PackedDataModule.from_config(config, progress=False)
    arrangement, groups = data.schedule().step(0)
    found = []
    for rows in groups:
        batch = arrangement.batch(rows)
        assert not batch.targets[~batch.loss_mask].any()
        assert (batch.layout.documents[batch.loss_mask] >= 0).all()
        found += batch.targets[batch.loss_mask].tolist()
    answers = data.corpora.train.targets
    assert sorted(found) == sorted(answers[answers >= 0].tolist())
    assert arrangement.count(groups)[0] == len(found) == 48 * 4


def test_packed_with_reset_has_the_gradient_of_single(tmp_path):
    gradients = []
    for strategy in ("single", "greedy"):
        config = make_config(tmp_path, f"data.strategy={strategy}", "trainer.precision=64-true")
        torch.manual_seed(0)
        module = PackedLitModule.from_config(config, 64).double()
        data = PackedDataModule.from_config(config, progress=False)
        data.setup()
        arrangement, groups = data.schedule().step(0)
        targets = arrangement.count(groups)[0]
        for rows in groups:
            (module.loss(arrangement.batch(rows))[0] / targets).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_run_trains_on_a_task_and_is_a_model(tmp_path):
    record = fit(make_config(tmp_path), progress=False)
    assert record["metrics"]["targets"] < record["metrics"]["real_tokens"] / 5
    assert record["metrics"]["val_loss"] > 3  # of answers alone: ln 32 before anything is learned
