"""The optimizer of a run: gradients are clipped."""

import lightning
import pytest

from packmamba.training.fit import fit
from packmamba.training.lit_module import PackedLitModule
from runs import final_state, tiny_config


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("clip", "moves"), [("null", True), ("1.0e-9", False)])
def test_clipping_limits_the_step(tmp_path, clip, moves, accelerator):
    keys = [
        f"trainer.accelerator={accelerator}",
        f"optimizer.grad_clip={clip}",
        "optimizer.weight_decay=0",
        "trainer.max_steps=1",
        "optimizer.warmup_steps=0",
    ]
    config = tiny_config(tmp_path, "data.strategy=greedy", *keys)
    fit(config, progress=False)
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    start = PackedLitModule.from_config(config, 256).state_dict()
    end = final_state(config)["state_dict"]
    most = max(float((end[name].cpu() - start[name]).abs().max()) for name in end)
    # AdamW's first step is the learning rate wherever the gradient is far above its epsilon, 1e-8.
    assert (most > 1e-3) is moves


@pytest.mark.gpu
def test_clipping_in_the_fused_step_is_clipping(tmp_path):
    losses = []
    for accelerator in ("cpu", "gpu"):
        keys = [
            "data.strategy=greedy",
            "optimizer.grad_clip=0.9",
            f"trainer.accelerator={accelerator}",
        ]  # of some steps
        config = tiny_config(tmp_path, f"name={accelerator}", *keys)
        losses.append([point["loss"] for point in fit(config, progress=False)["curves"]["train"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
