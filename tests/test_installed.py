"""A wheel from the source distribution, installed apart from the checkout, with kernels and
configurations.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from processes import ROOT

TINY = [*("data.source=synthetic", "data.num_documents=40", "data.distribution=short", "data.row_length=2048")]
TINY += [*("model=130m", "model.d_model=8", "model.n_layer=1", "trainer.max_steps=1", "trainer.accelerator=cpu")]


def pip(command, *words, **environment):
    options = ["--disable-pip-version-check", "-q", "--no-build-isolation", "--no-deps"]
    words = [sys.executable, "-m", "pip", command, *options, *map(str, words)]
    subprocess.run(words, env=os.environ | environment, check=True, capture_output=True)


def run_python(code, folder, environment):
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


# Says which library a layer's convolution ran, and whether its numbers are the reference's.
LAYER = """
import torch
from packmamba import PackedMamba, SequenceLayout
from packmamba.ops import build

layer, layout = PackedMamba(8), SequenceLayout.from_lengths([[3, 5]], 8)
hidden = torch.randn(1, 8, 8)
found = layer(hidden, layout=layout)
layer.backend = "reference"
print(build.build("cpu").name, torch.allclose(found, layer(hidden, layout=layout), atol=1e-6))
print([(row["target"], row["problem"]) for row in build.info()][0])
"""


@pytest.mark.slow
def test_a_wheel_with_kernels_runs_without_a_compiler(tmp_path):
    """Of three instruction sets the machine's best, or the one that PyTorch is told to take, is
    chosen.
    """
    wheels, target = tmp_path / "wheels", tmp_path / "installed"
    pip("wheel", "-w", wheels, ROOT, PACKMAMBA_PREBUILT="cpu", TMPDIR=str(tmp_path))
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("packmamba-") and "-py3-none-" in wheel.name and "any" not in wheel.name
    pip("install", "--target", target, wheel)
    without = {"PATH": "/nowhere", "CXX": "no-such-compiler", "PACKMAMBA_CACHE": str(tmp_path / "empty")}
    for capability in ("default", "avx2") if os.uname().machine == "x86_64" else ("default",):
        environment = os.environ | without | {"PYTHONPATH": str(target), "ATEN_CPU_CAPABILITY": capability}
        done = run_python(LAYER, tmp_path, environment)
        assert done.stdout == f"cpu-{capability}.so True\n('cpu-{capability}.so', None)\n", done.stderr
    assert not (tmp_path / "empty").exists()


def test_an_isolated_build_compiles_for_the_environment_s_pytorch(tmp_path):
    """As pip isolates a build: setuptools is there, the environment's packages are not."""
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    code = "import sys; sys.path = [place for place in sys.path if 'site-packages' not in place]; "
    code += "sys.argv[1:] = ['--version']; import setup; print(setup.wanted_kinds())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run_python(code, ROOT, environment)
    assert done.stdout.split()[-1:] == ["['cpu']"], done.stderr


@pytest.mark.slow
def test_a_wheel_builds_installs_and_trains(tmp_path):
    source, target, made = tmp_path / "source", tmp_path / "installed", tmp_path / "made"
    source.mkdir()
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "packmamba", "kernels", "configs"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(source)], check=True)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (distribution,) = made.glob("packmamba-*.tar.gz")
    pip("install", "--target", target, distribution, PACKMAMBA_PREBUILT="")
    for top, suffixes in (("packmamba", [".py"]), ("kernels", [".cpp", ".h", ".cu", ".cuh"]), ("configs", [".yaml"])):
        for path in [path for path in (ROOT / top).rglob("*") if path.suffix in suffixes]:
            inside = path.relative_to(ROOT / "packmamba") if top == "packmamba" else path.relative_to(ROOT)
            assert (target / "packmamba" / inside).is_file(), path
    assert (target / "packmamba/py.typed").is_file()
    code = f"import packmamba.cli as c; print(c.main(['train', *{TINY}]), c.main(['reproduce', 'speedup']))"
    done = run_python(code, tmp_path, os.environ | {"PYTHONPATH": str(target)})
    assert done.stdout.endswith("0 2\n") and "Record: " in done.stdout, done.stderr
    assert "expected a clone" in done.stderr
    (script,) = (target / "bin").iterdir()
    assert "from packmamba.lab.cli import main" in script.read_text()


def test_a_release_has_absolute_links(tmp_path):
    """An index shows README alone."""
    # in place of its build
    (tmp_path / "python").write_text('#!/bin/sh\ncp "$5/README.md" "$5/pyproject.toml" "$4"\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([ROOT / ".ci/release", "https://host/us", tmp_path], env=environment, check=True)
    links = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    assert 'Repository = "https://host/us"\n' in (tmp_path / "pyproject.toml").read_text()
