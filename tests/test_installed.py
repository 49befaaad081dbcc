"""The wheel of the source distribution, installed apart from the checkout: what it brings, its commands in an empty folder."""

import os
import subprocess
import sys

import pytest
from test_build import FORWARD, run_python

from processes import ROOT

SYNTHETIC = ["data.source=synthetic", "data.num_documents=40", "data.distribution=short", "data.row_length=256"]
ARMS = "arms={packed-reset: {data.strategy: greedy}, packed-leak: {data.strategy: greedy, trainer.boundary: leak}}"
TINY = [*SYNTHETIC, "model.d_model=8", "model.n_layer=1", "trainer.max_steps=1", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the wheel is installed in, which is built from the source distribution and nothing else."""
    source = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "setup.py", "LICENSE", "packmamba", "kernels", "configs"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(source)], check=True)
    (source / "README.md").touch()
    target, made = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("made")
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(made)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (distribution,) = made.glob("packmamba-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", str(target), str(distribution)], check=True, capture_output=True)
    return target


@pytest.mark.slow
def test_the_wheel_holds_modules_kernels_and_configurations(installed):
    expected = {path.relative_to(ROOT) for path in (ROOT / "packmamba").rglob("*.py")}
    for top, suffixes in (("kernels", (".cpp", ".h", ".cu", ".cuh")), ("configs", (".yaml",))):
        expected |= {"packmamba" / p.relative_to(ROOT) for p in (ROOT / top).rglob("*") if p.suffix in suffixes}
    assert len(expected) > 100 and all((installed / path).is_file() for path in expected)


@pytest.mark.slow
def test_an_installed_wheel_builds_and_its_commands_run_in_an_empty_folder(installed, tmp_path):
    """All in one process, which imports PyTorch once."""
    command = [sys.executable, str(installed / "bin" / "packmamba"), "trian"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "packmamba: error: unknown command 'trian'; did you mean 'train'?\n"
    (tmp_path / "code").mkdir()
    for number in range(40):  # lines that are alike: the demo asks which comes next
        lines = [f"name_{i}{number} = {i * 37 % 101:03d}\n" for i in range(10)]
        (tmp_path / "code" / f"{number}.py").write_text("".join(lines))
    commands = [
        (0, ["doctor"]),
        (0, ["train", "model=130m", *TINY]),
        (0, ["demo", "throughput_rounds=1", ARMS, *TINY, "data.source=text", "data.path=code"]),
        (2, ["bench"]),
        (2, ["bench", "speedup"]),
        (2, ["report", "speedup"]),
        (2, ["reproduce"]),
        (2, ["reproduce", "speedup"]),
        (2, ["sweep", "missing.yaml"]),
    ]
    code = FORWARD.replace("layout=layout)", "layout=layout, backend='cpu')")
    code += "import packmamba\nfrom packmamba.cli import main\nprint(packmamba.__file__)\n"
    code += f"print([main(arguments) for _, arguments in {commands}])"
    printed = run_python(code, tmp_path, path=installed, OMP_NUM_THREADS="1").splitlines()
    assert f"{installed}/packmamba/__init__.py" in printed
    assert printed[-1] == str([status for status, _ in commands]), "\n".join(printed)
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    errors = [line for line in printed if line.startswith("packmamba: error: ")]
    assert len(errors) == 6 and all(f"no folder experiments/ in {tmp_path}" in error for error in errors[:5])
