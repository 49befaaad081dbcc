"""A part of a sweep, by arm and by keys of its grid: what is trained, what is refused, and what still belongs to it."""

import json
from pathlib import Path

import pytest
import torch
from test_sweeps import write_sweep

from packmamba.config import ConfigError
from packmamba.records import read_records
from packmamba.training.sweep import chosen, load_sweep, run_sweep


def test_a_part_of_a_sweep_is_trained_and_the_rest_still_belongs_to_it(tmp_path):
    path = write_sweep(tmp_path, throughput_rounds=0)
    sweep, configs = load_sweep(path, ["only={arm: [packed], seed: [1]}"])
    assert len(configs) == 8
    assert [(c.name, c.seed) for c in chosen(sweep, configs)] == [("packed d_state=2", 1), ("packed d_state=4", 1)]
    run_sweep(sweep, configs, progress=False)
    records = read_records(sweep.output)
    assert sorted((record["arm"], record["seed"]) for record in records) == [
        ("packed d_state=2", 1),
        ("packed d_state=4", 1),
    ]
    said = json.loads(Path(sweep.output, "sweep.json").read_text())[sweep.name]
    assert said["arms"] == {f"{arm} d_state={n}": [0, 1] for arm in ("padded", "packed") for n in (2, 4)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer.cuda_graphs": True, "trainer.accelerator": "auto"}, "needs a GPU"),
        ({"trainer.accelerator": "tpu"}, "needs torch_xla"),
    ],
)
def test_what_is_not_trained_now_needs_nothing_of_this_machine(tmp_path, monkeypatch, keys, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arms = {"padded": {"data.strategy": "padded"}, "elsewhere": keys}
    path = write_sweep(tmp_path, arms=arms, grid={"seed": [0]}, throughput_rounds=0)
    with pytest.raises(ConfigError, match=message):
        run_sweep(*load_sweep(path), progress=False)
    sweep, configs = load_sweep(path, ["only.arm=[padded]"])
    run_sweep(sweep, configs, progress=False)
    assert [record["arm"] for record in read_records(sweep.output)] == ["padded"]


def test_only_the_arms_that_are_trained_now_choose_their_values(tmp_path):
    tune = {"grid": {"optimizer.lr": [0.01, 0.02]}, "seeds": [8]}
    path = write_sweep(tmp_path, grid={"seed": [0, 1]}, throughput_rounds=0, tune=tune)
    sweep, configs = load_sweep(path, ["only={arm: [packed], seed: [0]}"])
    run_sweep(sweep, configs, progress=False)
    assert [record["arm"] for record in read_records(sweep.output)] == ["packed"]
    tried = [record["arm"] for record in read_records(Path(sweep.output, "tuning"))]
    assert len(tried) == 2 and all(arm.startswith("packed") for arm in tried)


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("only.arms=[packed]", "^only.arms: expected arm or a key of the grid; did you mean 'arm'"),
        ("only.arm=[pack]", "^only.arm: expected some of .*packed.*, got 'pack'$"),
        ("only.seed=[]", "^only.seed: expected at least one value, got none$"),
        ("only.seed=[7]", "^only.seed: expected some of 0, 1, got 7$"),
    ],
)
def test_a_part_that_is_not_of_the_sweep_is_refused(tmp_path, only, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(write_sweep(tmp_path, grid={"seed": [0, 1]}), [only])
