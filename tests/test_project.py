"""What the project promises about its own files."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from packmamba.config import load_config
from packmamba.experiments import load_bench
from packmamba.training.sweep import load_sweep
from processes import fork, statuses

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "packmamba").rglob("*.py"))
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "model")
CONFIGS += sorted((ROOT / "experiments").rglob("*.yaml"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))
MODELS = sorted((ROOT / "configs" / "model").glob("*.yaml"))
MOST_LINES = 420  # about 400

# What each layer may import of packmamba. Layers not named here (commands, benchmarks) may import everything.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "layout": set(),
    "ops": {"layout", "errors"},
    "nn": {"layout", "ops"},
    "data": {"layout", "config", "errors"},
    "records": {"errors"},
    "report": {"records", "errors"},
    "timing": set(),
    "training": {"layout", "config", "ops", "nn", "data", "records", "timing"},
    "evaluation": {"layout", "config", "ops", "nn", "data", "records", "training"},
}


def imported(path):
    """Every module that a source file imports anywhere, also inside functions, by absolute name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*package[: len(package) - node.level + 1], node.module or "")) if node.level else node.module
            )
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def layer(path):
    return path.relative_to(ROOT / "packmamba").with_suffix("").parts[0]


LAYERED = [path for path in SOURCES if layer(path) in MAY_IMPORT]


@pytest.mark.parametrize("path", LAYERED, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_import_only_from_above(path):
    own = layer(path)
    for name in imported(path):
        root, *rest = name.split(".")
        if root == "packmamba" and rest and rest[0] != "__version__":
            # The package's own lazy names live in their layers.
            target = {"SequenceLayout": "layout", "PackedMamba": "nn", "MambaLM": "nn"}.get(rest[0], rest[0])
            assert target == own or target in MAY_IMPORT[own], f"{own} must not import {name}"
        if own in ("records", "report", "config"):
            assert root not in ("torch", "lightning", "torchmetrics"), f"{own} must not import {root}"


def test_the_layers_are_those_of_the_package():
    layers = {layer(path) for path in SOURCES}
    assert {"config", "layout", "ops", "nn", "data", "records", "report"} <= layers
    found = {name for path in SOURCES for name in imported(path)}
    assert {"packmamba.layout.SequenceLayout", "packmamba.records.make_record"} & found, "imports are not seen"


@pytest.mark.parametrize("module", ["config", "report.folder", "records", "data.packing"])
def test_planning_and_reporting_need_no_torch(module):
    code = f"import sys, packmamba.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", [*SOURCES, *EXPERIMENTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_holds_two_ideas(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MOST_LINES, f"{path.name} has {lines} lines"


def test_environment_agrees_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    conda = OmegaConf.to_container(OmegaConf.load(ROOT / "environment.yml"))["dependencies"]
    (pip,) = (entry["pip"] for entry in conda if isinstance(entry, dict))
    assert sorted(pip) == sorted([*project["dependencies"], "-e ."])
    assert f"python{project['requires-python']}" in conda


def test_extras_are_those_documented():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras) == {"test", "dev", "peers", "cuda", "eval"}
    for requirement in (r for name, required in extras.items() for r in required if "packmamba[" not in r):
        assert any(mark in requirement for mark in (">=", "==")), f"{requirement} has no lower bound"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_loads(path):
    keys = OmegaConf.to_container(OmegaConf.load(path))
    if "bench" in keys:
        load_bench(path)
    elif "arms" in keys:
        _, configs = load_sweep(path)
        for config in configs:
            for key, value in {**keys["common"], **keys["arms"][config.name]}.items():
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_make_test_gpu_asks_for_a_gpu(tmp_path):
    output = tmp_path / "output.txt"
    assert statuses(fork(pytest.main, ["-q", "tests/test_layout.py"], output=output, PACKMAMBA_TEST_GPU="1")) == [4]
    assert output.read_text().strip() == (
        "ERROR: make test-gpu needs a GPU that PyTorch can use; make test runs what needs none"
    )
