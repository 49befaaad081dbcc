"""The loader: one build for many processes, a cache that machines may share, and what happens
without a compiler.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch

from packmamba.errors import KernelError
from packmamba.ops import build, ssd
from processes import ROOT, fork, statuses

FORWARD = """
import torch, warnings
from packmamba import SequenceLayout, ops
layout = SequenceLayout.from_lengths([[2, 1]], row_length=4)
y = ops.conv1d_pack(torch.ones(1, 4, 3), torch.ones(3, 2), layout=layout)
y = ops.conv1d_pack(torch.ones(1, 4, 3), torch.ones(3, 2), layout=layout)
assert y[0, :, 0].tolist() == [1, 2, 1, 0], y
import sys
assert "torch._dynamo" not in sys.modules, "the compiler takes seconds to import"
"""


def run_python(code, cwd, path=None, **env):
    """A fresh interpreter outside the checkout; what it printed, both streams together."""
    env = os.environ | {"PYTHONPATH": str(path or ROOT)} | env
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, **streams)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def small_kernels(tmp_path, monkeypatch):
    """A folder of kernels that compiles at once, with its own cache."""
    for part in ("common", "cpu"):
        (tmp_path / "kernels" / part).mkdir(parents=True)
    (tmp_path / "kernels" / "common" / "answer.h").write_text("#define ANSWER 42\n")
    (tmp_path / "kernels" / "cpu" / "a.cpp").write_text('#include "../common/answer.h"\nint a() { return ANSWER; }\n')
    monkeypatch.setattr(build, "kernel_folder", lambda: tmp_path / "kernels")
    monkeypatch.setenv("PACKMAMBA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "kernels"


def test_the_key_covers_sources_headers_and_flags(small_kernels, monkeypatch):
    keys = [build.describe("cpu").path]

    def changed():
        keys.append(build.describe("cpu").path)
        return keys[-1] not in keys[:-1]

    (small_kernels / "cpu" / "a.cpp").write_text("int a() { return 1; }\n")
    assert changed()
    monkeypatch.setenv("PACKMAMBA_MARCH", "x86-64")
    assert changed()
    (small_kernels / "common" / "answer.h").write_text("#define ANSWER 43\n")
    assert changed()
    monkeypatch.setenv("PACKMAMBA_SANITIZE", "undefined")
    assert changed()


def build_small(kernels):
    build.kernel_folder = lambda: kernels
    print(build.build("cpu"))


@pytest.mark.slow
def test_eight_processes_build_once(small_kernels, tmp_path):
    counting = tmp_path / "compiler"
    note = f'case "$*" in *" -c "*) echo x >> "{tmp_path}/count"; sleep 0.3;; esac'
    counting.write_text(f'#!/bin/sh\n{note}\nexec g++ "$@"\n')
    counting.chmod(0o755)
    environment = {"CXX": str(counting), "PACKMAMBA_CACHE": str(tmp_path / "cache")}
    outputs = [tmp_path / f"output{i}.txt" for i in range(8)]
    processes = [fork(build_small, small_kernels, output=output, **environment) for output in outputs]
    assert statuses(*processes) == [0] * 8, [output.read_text() for output in outputs]
    paths = {output.read_text().splitlines()[-1] for output in outputs}
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert (tmp_path / "count").read_text().count("x") == 1
    assert not list((tmp_path / "cache").glob("build-*")), "scratch folders are gone"


def test_a_failed_compilation_shows_the_compilers_words(small_kernels):
    (small_kernels / "cpu" / "a.cpp").write_text("int a() { return nonsense; }\n")
    with pytest.raises(build.KernelError, match="nonsense"):
        build.build("cpu")
    assert not list((small_kernels.parent / "cache").glob("*.so"))


@pytest.mark.slow
def test_without_a_compiler_an_explicit_backend_raises_and_one_warning_names_the_fix(tmp_path):
    """In one process: what was refused is warned of all the same, and the reference runs."""
    explicit = FORWARD.replace("layout=layout)", "layout=layout, backend='cpu')")
    code = f"""
import sys
sys.stdout = sys.stderr
try:
{textwrap.indent(explicit, "    ")}
except Exception as error:
    print(type(error), error)
print("AUTO")
{FORWARD}
print("ran")"""
    printed = run_python(code, tmp_path, CXX="no-such-compiler", PATH="/nowhere", PACKMAMBA_CACHE=str(tmp_path))
    refused, warned = printed.split("AUTO\n")
    assert "KernelError" in refused and "install g++" in refused and "UserWarning" not in refused
    assert warned.count("UserWarning") == 1 and warned.endswith("ran\n")
    assert "install g++" in warned and build.BUILD_COMMAND in warned


def test_mamba_2_without_a_c_compiler_says_what_to_do(monkeypatch):
    kernels = mock.Mock(forward=mock.Mock(side_effect=RuntimeError("Failed to find C compiler")))
    monkeypatch.setattr(ssd, "_kernels", lambda x: kernels)
    arguments = mock.Mock(x=torch.empty(1))
    with pytest.raises(RuntimeError, match="^Failed"):
        ssd._forward(arguments, False)
    monkeypatch.setattr(build, "has_c_compiler", lambda: False)
    with pytest.raises(KernelError, match="no C compiler.*install gcc.*ops.backend=reference"):
        ssd._forward(arguments, False)


def test_architectures_may_be_named_without_a_gpu(tmp_path, monkeypatch):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PACKMAMBA_NVCC", str(nvcc))
    monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", "10.0, 8.0")
    assert build.describe("cuda").target == "sm_80, sm_100"
    for wrong in ("sm_90", "75"):
        monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", wrong)
        with pytest.raises(build.KernelError, match="PACKMAMBA_CUDA_ARCHS"):
            build.describe("cuda")
