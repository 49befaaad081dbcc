"""Run ids: what decides them, how a run is continued with more steps, and who may train in a run's
folder.
"""

import copy
import hashlib
import json

import pytest
import torch

from packmamba.config import Config, ConfigError, to_dict
from packmamba.lab import run_id as ids
from packmamba.lab.fit import fit
from packmamba.lab.run_id import find_records, id_of, recorded_config, run_folder, run_id
from runs import final_state, losses_of, tiny_config


def having(config, **changes):
    """The configuration with other values of keys, section__key."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, key = name.split("__")
        setattr(getattr(config, section), key, value)
    return config


def test_defaults_are_those_of_the_schema_version():
    """Keys at their defaults are no part of an id: where a default changes, raise
    ``SCHEMA_VERSION``, and put the hash here.
    """
    defaults = {key: value for key, value in ids.flatten(to_dict(Config())).items() if key not in ids.EXCLUDED}
    digest = hashlib.sha256(json.dumps(defaults, sort_keys=True).encode()).hexdigest()[:10]
    assert (ids.SCHEMA_VERSION, digest) == (2, "d14852dfca")


def test_keys_that_decide_the_result_are_the_id(tmp_path):
    config = tiny_config(tmp_path)
    others = {"data__num_workers": 3, "trainer__log_every": 7, "trainer__checkpoint_every": 9, "trainer__threads": 2}
    assert run_folder(having(config, **others)) == run_folder(config)
    hashed = {"ops__backend": "reference", "data__max_tokens_per_batch": 48, "trainer__precision": "64-true"}
    hashed |= {"trainer__validate_every": 2, "optimizer__final_lr_fraction": 0.5, "trainer__max_steps": 7}
    hashed |= {"model__mixer_options": {"a": 1}, "trainer__deterministic": True}
    assert len({run_id(having(config, **{key: value})) for key, value in hashed.items()} - {run_id(config)}) == 8
    strict = having(config, trainer__deterministic=True)
    assert run_id(having(strict, trainer__threads=2)) != run_id(strict)


def test_a_run_has_the_id_of_one_that_ends_with_its_schedule(tmp_path):
    config = tiny_config(tmp_path)
    whole, short = having(config, trainer__max_steps=8), having(config, optimizer__schedule_steps=8)
    assert run_folder(whole) == run_folder(short)
    steady = [having(config, optimizer__final_lr_fraction=1, trainer__max_steps=n) for n in (6, 8)]
    assert len({run_id(config) for config in steady}) == 1
    endless = [having(config, optimizer__schedule="constant", trainer__max_steps=n) for n in (6, 8)]
    assert len({run_id(config) for config in endless}) == 1


def test_a_record_without_later_keys_is_found(tmp_path):
    config = tiny_config(tmp_path)
    values = recorded_config(config)
    assert "init_from" not in values["trainer"] and id_of(config.name, values) == run_id(config)
    del values["model"]["recompute"]  # of a record from before the key
    values["data"]["gone"] = 1
    values["trainer"]["average_snapshots"] = 1
    assert id_of(config.name, values) == run_id(config)
    values["trainer"]["average_snapshots"] = 5
    assert id_of(config.name, values) != run_id(config), "a removed key that changed the result"


def test_a_raised_run_ends_as_one_that_was_as_long_from_the_start(tmp_path):
    keys = ["data.strategy=greedy", "evaluations=[parity]", "evaluation_examples=2", "trainer.evaluate_every=2"]
    whole = tiny_config(tmp_path, *keys, f"runs_dir={tmp_path}/whole", "trainer.max_steps=8")
    short = tiny_config(tmp_path, *keys, "trainer.max_steps=4", "optimizer.schedule_steps=8")
    long = tiny_config(tmp_path, *keys, "data.num_workers=1", "trainer.checkpoint_every=3", "trainer.max_steps=8")
    expected, first, second = (fit(config, progress=False) for config in (whole, short, long))
    assert run_folder(short) == run_folder(long)
    assert (first["metrics"]["steps"], second["metrics"]["steps"]) == (4, 8)
    curves, whole_curves = losses_of(second), losses_of(expected)
    points = [[p for p in one.pop("evaluations") if p["step"] != 4] for one in (curves, whole_curves)]
    assert points[0] == points[1] and curves == whole_curves
    a, b = final_state(long)["state_dict"], final_state(whole)["state_dict"]
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert find_records([short, long]) == [first, second]
    assert fit(short, progress=False) == first
    with pytest.raises(ConfigError, match=r"^trainer.max_steps: expected at least 8"):
        fit(having(short, trainer__max_steps=6), progress=False)
