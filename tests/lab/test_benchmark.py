"""Timing optimizer steps of several arms in turns."""

from dataclasses import replace

import pytest
import torch

from packmamba.lab import benchmark
from packmamba.lab.benchmark import measure_throughput
from packmamba.lab.fit import fit
from packmamba.training.lit_module import PackedLitModule
from runs import final_state, tiny_config


def test_rounds_that_warm_up_are_not_counted(tmp_path, monkeypatch):
    seconds = iter([100.0] * (1 + benchmark.WARM_UP) + [2.0] * 2)
    monkeypatch.setattr(benchmark, "seconds", lambda call, device: (call(), next(seconds))[1])
    (record,) = measure_throughput([tiny_config(tmp_path)], rounds=2, output="x", progress=False)
    assert record["metrics"]["seconds_per_step_median"] == 2 and record["metrics"]["seconds_per_step_spread"] == 0


def test_arms_that_disagree_are_not_timed(tmp_path, monkeypatch):
    keys = ([], ["data.strategy=single"], ["model.d_state=3"], ["trainer.boundary=leak"], ["data.tokens_per_step=24"])
    configs = [tiny_config(tmp_path, f"name=arm{i}", *overrides) for i, overrides in enumerate(keys)]
    list(measure_throughput(configs, rounds=1, output="x", progress=False))
    accumulate, calls = PackedLitModule.accumulate, []

    def off(module, *arguments):
        calls.append(module)
        return accumulate(module, *arguments) * (1 + 1e-3 * (len(calls) > 1))

    monkeypatch.setattr(PackedLitModule, "accumulate", off)
    with pytest.raises(RuntimeError, match="arms disagree .* arm1"):
        list(measure_throughput(configs, rounds=1, output="x", progress=False))
    assert len(calls) == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_the_step_that_is_timed_is_the_one_that_trains(tmp_path, precision):
    """Clipped, at its learning rate, in the run's precision: the weights after it are the run's, to
    the bit.
    """
    config = tiny_config(tmp_path, f"trainer.precision={precision}", "optimizer.grad_clip=0.9", "trainer.max_steps=4")
    fit(config, progress=False)
    arm = benchmark.Arm(config)
    for step in range(4):
        arm.step(step)
    trained = final_state(config)["state_dict"]
    assert all(torch.equal(value, trained[name]) for name, value in arm.module.state_dict().items() if "model" in name)


@pytest.mark.parametrize("boundary", ["reset", "carry"])
def test_graphs_of_all_steps_are_captured_before_any_is_timed(tmp_path, monkeypatch, boundary):
    taken, take = [], benchmark.Arm.step

    def step(arm, number):
        # a CPU has no graphs
        arm.config = replace(arm.config, trainer=replace(arm.config.trainer, cuda_graphs=True))
        taken.append(number)
        return take(arm, number)

    monkeypatch.setattr(benchmark.Arm, "step", step)
    config = tiny_config(tmp_path, "data.strategy=concat_split", f"trainer.boundary={boundary}", "trainer.max_steps=20")
    list(measure_throughput([config], rounds=3, output="x", progress=False))
    # rows that go on have one shape, and states in their order
    captured = [1, 2, 3, 4] if boundary != "carry" else []
    assert taken == [0, *captured, 1, 2, 3, 4]
