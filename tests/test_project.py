"""What the project promises about its own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from packaging.requirements import Requirement

from packmamba.config import load_config
from packmamba.experiments import load_bench
from packmamba.training.sweep import load_sweep
from processes import fork, statuses

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "model")
CONFIGS += sorted((ROOT / "experiments").rglob("*.yaml"))
MODELS = sorted((ROOT / "configs" / "model").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("config report.folder records data.packing training.runs training.worker cli.status", "torch"),
        ("data.steps training.sweep", "lightning"),
    ],  # loaders' workers, jobs that are told before they train; a refused key
)
def test_what_takes_seconds_to_import_is_imported_where_it_is_needed(modules, absent):
    imports = "".join(f"import packmamba.{module}; " for module in modules.split())
    subprocess.run(
        [sys.executable, "-c", f"{imports}import sys; assert {absent!r} not in sys.modules"], check=True, cwd=ROOT
    )


def test_environment_agrees_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    conda = OmegaConf.to_container(OmegaConf.load(ROOT / "environment.yml"))["dependencies"]
    (pip,) = (entry["pip"] for entry in conda if isinstance(entry, dict))
    assert sorted(pip) == sorted([*project["dependencies"], "-e ."])
    assert f"python{project['requires-python']}" in conda


def test_extras_are_those_documented():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras) == {"test", "dev", "peers", "cuda", "eval", "integrations", "loggers", "slurm"}
    for requirement in (r for name, required in extras.items() for r in required if "packmamba[" not in r):
        assert any(mark in requirement for mark in (">=", "==")), f"{requirement} has no lower bound"


def test_ci_s_lock_has_what_is_asked_for():
    """Every package that CI asks for, in a version that is allowed, and the hash of its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(name for extra in ("test", "dev", "eval", "integrations") for name in extras[extra]),
    ]
    lines = (ROOT / ".ci" / "lock.txt").read_text().splitlines()
    assert all(re.fullmatch(r"# .*|[a-z0-9.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = dict(re.match(r"(?:# )?([a-z0-9.-]+)==(\S+)", line).groups() for line in lines if "==" in line)
    for requirement in map(Requirement, asked):
        if requirement.name != "packmamba":
            version = locked.get(requirement.name.lower().replace("_", "-"))
            assert version is not None and requirement.specifier.contains(version), requirement


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_loads(path):
    keys = OmegaConf.to_container(OmegaConf.load(path))
    if "bench" in keys:
        load_bench(path)
    elif "arms" in keys:
        _, configs = load_sweep(path, runs_here=False)  # a GPU, and peers, are not here
        for config in configs:
            arms = keys["arms"]  # what the grid adds comes after an arm's name
            arm = arms.get(config.name) or arms[config.name.split(" ")[0]]
            for key, value in {**keys.get("common", {}), **arm}.items():
                assert reduce(getattr, key.split("."), config) == value, f"{config.name}: {key}"
    else:
        load_config(path)


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.name)
def test_every_model_size_loads(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_config(None, [f"model={path.stem}"]).model
    for key, value in OmegaConf.load(path).items():
        assert getattr(loaded, key) == value


def test_make_asks_for_a_newer_python(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [ROOT / ".ci" / "setup", tmp_path / "venv", "core"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "python3 is Python 3.9.2; packmamba needs Python 3.10 or newer\n"
    assert not (tmp_path / "venv").exists()


GPU_TIMING = ("phases_are_timed_on_the_device_and_the_host_is_not", "peak_memory_counts_from_when_it_was_made")


def collect_as_on_a_gpu(*arguments):
    torch.cuda.is_available = lambda: True
    return pytest.main(["-q", "--collect-only", *arguments])


@pytest.mark.slow
def test_gpus_are_for_the_tests_that_are_marked(tmp_path):
    assert not torch.cuda.is_available() and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    path, seen = "tests/test_timing.py", []
    for asked in ("", "1"):
        output = tmp_path / f"output{asked}.txt"
        assert statuses(fork(collect_as_on_a_gpu, path, output=output, PACKMAMBA_TEST_GPU=asked)) == [0]
        seen.append({line for line in output.read_text().splitlines() if line.startswith(path)})
    marked = {f"{path}::test_{name}" for name in GPU_TIMING}
    assert seen[1] == marked and not seen[0] & marked and seen[0]


@pytest.mark.slow
def test_make_test_gpu_asks_for_a_gpu(tmp_path):
    output = tmp_path / "output.txt"
    assert statuses(fork(pytest.main, ["-q", "tests/test_layout.py"], output=output, PACKMAMBA_TEST_GPU="1")) == [4]
    assert output.read_text().strip() == (
        "ERROR: make test-gpu needs a GPU that PyTorch can use; make test runs what needs none"
    )
