"""Files that repeat each other, and configurations that ship."""

import pytest
from omegaconf import OmegaConf

from experiments.by_name import load_bench
from packmamba.config import load_config
from packmamba.lab.sweep import load_sweep
from processes import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest brings tomli there
    import tomli as tomllib

CONFIGS = [path for folder in ("configs", "experiments") for path in sorted((ROOT / folder).rglob("*.yaml"))]
CONFIGS.remove(ROOT / "experiments" / "pages.yaml")  # tables of pages


def test_environment_has_the_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    conda = OmegaConf.to_container(OmegaConf.load(ROOT / "environment.yml"))["dependencies"]
    (pip,) = (entry["pip"] for entry in conda if isinstance(entry, dict))
    train = project["optional-dependencies"]["train"]
    assert sorted(pip) == sorted([*project["dependencies"], *train, "-e .[dev,integrations]"])


def path_and_marks(path):
    name = str(path.relative_to(ROOT))
    return pytest.param(path, id=name, marks=[pytest.mark.slow] * name.startswith("experiments"))


@pytest.mark.parametrize("path", [path_and_marks(path) for path in CONFIGS])
def test_every_configuration_loads(path):
    keys = OmegaConf.to_container(OmegaConf.load(path))
    if path.parent.name == "model":
        load_config(None, [f"model={path.stem}"])
    elif "bench" in keys:
        load_bench(path)
    elif "arms" in keys:
        one_seed = path.is_relative_to(ROOT / "experiments") and "seed" in keys.get("grid", ())
        load_sweep(path, ["grid.seed=[0]"] * one_seed)  # of many, which change nothing else
    else:
        load_config(path, ["model.pretrained=my/model"] * (path.stem == "fine_tune"))
