"""The loader: one build for many processes, a cache that machines may share, and what happens without a compiler."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from packmamba.ops import build
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
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
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


def test_the_key_covers_sources_headers_flags_compiler_and_instruction_set(small_kernels, monkeypatch):
    keys = [build.describe("cpu").key]

    def changed():
        keys.append(build.describe("cpu").key)
        return keys[-1] not in keys[:-1]

    (small_kernels / "cpu" / "a.cpp").write_text("int a() { return 1; }\n")
    assert changed()
    monkeypatch.setenv("PACKMAMBA_MARCH", "x86-64")
    assert changed()
    (small_kernels / "common" / "answer.h").write_text("#define ANSWER 43\n")
    assert changed()
    monkeypatch.setenv("PACKMAMBA_SANITIZE", "undefined")
    assert changed()
    output = build._output
    monkeypatch.setattr(build, "_output", lambda *c: output(*c) + ("#define __OTHER_CPU__ 1\n" if "-dM" in c else ""))
    assert changed()
    monkeypatch.setattr(build, "_output", lambda *c: "another compiler\n")
    assert changed()
    monkeypatch.undo()


def test_the_ablation_is_another_library(monkeypatch):
    monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", "90")
    monkeypatch.setattr(build, "_find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "_output", lambda *_: "nvcc 13\n")
    plain = build.describe("cuda")
    monkeypatch.setenv("PACKMAMBA_PER_TOKEN_INDICES", "1")
    assert build.describe("cuda").key != plain.key


def build_small(kernels):
    build.kernel_folder = lambda: kernels
    print(build.build("cpu"))


@pytest.mark.slow
def test_eight_processes_build_once(small_kernels, tmp_path):
    counting = tmp_path / "compiler"
    counting.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> "{tmp_path}/count"; sleep 0.3;; esac\nexec g++ "$@"\n'
    )
    counting.chmod(0o755)
    environment = {"CXX": str(counting), "PACKMAMBA_CACHE": str(tmp_path / "cache")}
    outputs = [tmp_path / f"output{i}.txt" for i in range(8)]
    processes = [fork(build_small, small_kernels, output=output, **environment) for output in outputs]
    assert statuses(*processes) == [0] * 8, [output.read_text() for output in outputs]
    paths = {output.read_text().splitlines()[-1] for output in outputs}
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert (tmp_path / "count").read_text().count("x") == 1
    assert not list((tmp_path / "cache").glob("build-*")), "scratch folders are gone"


@pytest.mark.parametrize("kept", [0, 1 / 2, None], ids=["empty", "cut", "garbage"])
def test_a_damaged_library_is_built_again(small_kernels, kept, capfd):
    path = build.build("cpu")
    whole = path.read_bytes()
    assert "Compiling the 'cpu' kernels" in capfd.readouterr().err
    build.build("cpu")
    assert not capfd.readouterr().err, "a whole one is not"
    path.write_bytes(b"x" * 999 if kept is None else whole[: int(len(whole) * kept)])
    assert not build.describe("cpu").built
    build.build("cpu")
    assert "Compiling" in capfd.readouterr().err and build.describe("cpu").built


@pytest.mark.slow
@pytest.mark.parametrize(("march", "needs"), [("x86-64", "sse2"), ("x86-64-v3", "avx512f")])
def test_the_kernels_are_right_for_older_instruction_sets(march, needs, tmp_path):
    """What is built here is for this machine. Older ones run other code; AVX2's is an AVX2 machine's own."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if f" {needs} " not in cpu:
        pytest.skip(f"this machine has no {needs}")
    compiler = tmp_path / "compiler"  # optimises less, in half the time, and says so: its libraries are cached apart
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "-O1";; esac\nexec g++ "$@" -O1\n')
    compiler.chmod(0o755)
    tests = [str(ROOT / "tests" / name) for name in ("test_operator_parity.py", "test_cpu_kernels.py")]
    chosen = "awkward and cpu and states and not stateless or exp2 or softplus"
    output = tmp_path / "output.txt"
    arguments = ["-q", "-p", "no:cacheprovider", "-k", chosen, *tests]
    environment = {"PACKMAMBA_MARCH": march, "CXX": str(compiler)}
    assert statuses(fork(pytest.main, arguments, output=output, **environment)) == [0], output.read_text()[-4000:]
    assert " passed" in output.read_text()


def test_a_failed_compilation_shows_the_compilers_words(small_kernels):
    (small_kernels / "cpu" / "a.cpp").write_text("int a() { return nonsense; }\n")
    with pytest.raises(build.KernelError, match="nonsense"):
        build.build("cpu")
    assert not list((small_kernels.parent / "cache").glob("*.so"))


def test_an_unwritable_cache_names_the_variable(small_kernels, monkeypatch):
    monkeypatch.setenv("PACKMAMBA_CACHE", "/proc/nowhere")
    with pytest.raises(build.KernelError, match="PACKMAMBA_CACHE"):
        build.build("cpu")


def test_info_says_what_is_built_and_what_is_missing():
    build.build("cpu")
    rows = {row["kind"]: row for row in build.info()}
    assert rows.keys() == set(build.KINDS)
    assert rows["cpu"]["built"] and rows["cpu"]["problem"] is None
    assert all(row["built"] or row["path"] or row["problem"] for row in rows.values())


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
