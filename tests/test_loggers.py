"""Loggers as a key: which there are, and that a missing package is said before any work."""

import importlib.util

import pytest

from packmamba.config import ConfigError
from packmamba.training.fit import check_run, fit
from packmamba.training.run_id import run_folder, run_id
from runs import tiny_config

FILES = {
    "csv": "csv/**/metrics.csv",
    "tensorboard": "tensorboard/events.*",
    "wandb": "wandb/offline-run-*",
    "mlflow": "mlflow/*/*/metrics",
}


@pytest.mark.slow
@pytest.mark.parametrize("loggers", [[], ["csv"], ["tensorboard", "csv"], ["wandb"], ["mlflow"]], ids="-".join)
def test_curves_go_where_the_key_says(tmp_path, loggers):
    for name in loggers:
        if importlib.util.find_spec(name) is None and name in ("wandb", "mlflow"):
            pytest.skip(f"{name} is not installed")
    config = tiny_config(tmp_path, "data.strategy=greedy", f"trainer.loggers={loggers}", "trainer.max_steps=2")
    fit(config, progress=False)
    there = {name for name, pattern in FILES.items() if list(run_folder(config).glob(pattern))}
    assert there == set(loggers)


def test_loggers_are_no_part_of_what_is_trained(tmp_path):
    assert run_id(tiny_config(tmp_path, "trainer.loggers=[]")) == run_id(tiny_config(tmp_path))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_any_work(tmp_path, monkeypatch, name):
    config = tiny_config(tmp_path, f"trainer.loggers=[csv,{name}]")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"^trainer.loggers: {name} needs the package {name}, .*packmamba\[loggers\]'$"
    ):
        check_run(config)


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="^trainer.loggers: expected .*csv, tensorboard, wandb, mlflow"):
        tiny_config(tmp_path, "trainer.loggers=[tensorbord]")
