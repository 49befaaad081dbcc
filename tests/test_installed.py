"""A wheel from the source distribution, installed apart from the checkout, with kernels and configurations."""

import os
import subprocess
import sys

from processes import ROOT

TINY = [*("data.source=synthetic", "data.num_documents=40", "data.distribution=short", "data.row_length=2048")]
TINY += [*("model=130m", "model.d_model=8", "model.n_layer=1", "trainer.max_steps=1", "trainer.accelerator=cpu")]


def test_a_wheel_builds_installs_and_trains(tmp_path):
    source, target, made = tmp_path / "source", tmp_path / "installed", tmp_path / "made"
    source.mkdir()
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "packmamba", "kernels", "configs"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(source)], check=True)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(made)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (distribution,) = made.glob("packmamba-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", str(target), str(distribution)], check=True, capture_output=True)
    for top, suffixes in (("packmamba", [".py"]), ("kernels", [".cpp", ".h", ".cu", ".cuh"]), ("configs", [".yaml"])):
        for path in [path for path in (ROOT / top).rglob("*") if path.suffix in suffixes]:
            inside = path.relative_to(ROOT / "packmamba") if top == "packmamba" else path.relative_to(ROOT)
            assert (target / "packmamba" / inside).is_file(), path
    command, environment = [sys.executable, str(target / "bin/packmamba")], os.environ | {"PYTHONPATH": str(target)}
    for words, status, text in ((["train", *TINY], 0, "Record: "), (["reproduce", "speedup"], 2, "known: none")):
        done = subprocess.run([*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status and text in done.stdout + done.stderr, done.stderr
