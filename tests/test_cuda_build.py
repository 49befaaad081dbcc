"""The CUDA kernels' build where there is no GPU: what it asks for, what it refuses, and a reduced library that loads."""

import sys
import types

import pytest
import torch

from packmamba.ops import build
from packmamba.ops.kernels import OUTPUTS
from packmamba.ops.scan.cuda import ssm_forward
from processes import fork, statuses


def compare_schemas():
    for kind in ("cpu", "cuda"):
        build.load(kind)

    def arguments(kind, name):
        found = getattr(getattr(torch.ops, "packmamba_" + kind), name).default._schema.arguments
        found = [a for a in found if not a.has_default_value()]
        return [(a.name, str(a.type), a.alias_info is not None and a.alias_info.is_write) for a in found]

    ours = ["schedule", "cut_above", "cut_length", "window", "stream"]
    for name in OUTPUTS:
        cpu, cuda = arguments("cpu", name), arguments("cuda", name)
        assert cuda[: len(cpu)] == cpu, (name, cpu, cuda)
        assert [argument for argument, _, _ in cuda[len(cpu) :]] == ours, (name, cuda)
    plan = torch.ops.packmamba_cuda.schedule_size(3, 2, 64, 2**31 - 1, 2**31 - 1, 128)
    print("schemas match", plan)


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """One that only says which it is."""
    found = tmp_path / "toolkit" / "bin" / "nvcc"
    found.parent.mkdir(parents=True)
    found.write_text("#!/bin/sh\necho release 13.0\n")
    found.chmod(0o755)
    monkeypatch.setenv("PACKMAMBA_NVCC", str(found))
    monkeypatch.delenv("PACKMAMBA_CUDA_ARCHS", raising=False)
    return found


def pretend_gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])


def refusal():
    with pytest.raises(build.KernelError) as caught:
        build.describe("cuda")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_nvcc_one_sentence_names_the_wheels(monkeypatch):
    for name in ("PACKMAMBA_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [])
    assert refusal() == f"no nvcc: pip install 'packmamba[cuda]', then run `{build.BUILD_COMMAND}`"


def test_a_gpu_that_is_too_old_is_told_so(nvcc, monkeypatch):
    pretend_gpus(monkeypatch, (7, 5))
    assert "too old" in refusal() and "8.0 (A100) or newer, it has 7.5" in refusal()


def test_builds_for_the_gpus_that_are_new_enough(nvcc, monkeypatch):
    pretend_gpus(monkeypatch, (9, 0), (7, 5), (10, 0), (9, 0))
    assert build.describe("cuda").target == "sm_90, sm_100"


def test_without_a_gpu_architectures_must_be_named(nvcc, monkeypatch):
    pretend_gpus(monkeypatch)
    assert "PACKMAMBA_CUDA_ARCHS" in refusal()
    for wrong in ("sm_90", "75", "8.0,,9.0"):
        monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", wrong)
        assert "PACKMAMBA_CUDA_ARCHS: expected compute capabilities from 8.0 up" in refusal()
    monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", "10.0, 8.0")
    assert build.describe("cuda").target == "sm_80, sm_100"


def test_links_with_the_runtime_that_lies_beside_the_wheels_nvcc(nvcc, monkeypatch):
    monkeypatch.setenv("PACKMAMBA_CUDA_ARCHS", "90")
    without = build.describe("cuda")
    runtime = nvcc.parents[1] / "lib"
    runtime.mkdir()
    (runtime / "libcudart_static.a").touch()
    assert f"-L{runtime}" in build.describe("cuda").link_flags
    assert f"-L{runtime}" not in without.link_flags


@pytest.mark.skipif(build._find_nvcc() is None, reason="no nvcc: pip install 'packmamba[cuda]'")
def test_a_reduced_build_loads_without_a_gpu_and_takes_what_the_cpu_s_kernels_take(tmp_path):
    """bfloat16, for sm_80 and sm_90: under a minute of one core where it is not cached."""
    output = tmp_path / "output.txt"
    environment = {"PACKMAMBA_CUDA_ARCHS": "80,90", "PACKMAMBA_CUDA_REDUCED": "1"}
    if "--Ofast-compile" in build._output(build._find_nvcc(), "--help"):
        environment["NVCC_APPEND_FLAGS"] = "--Ofast-compile=max"  # nothing is computed
    assert statuses(fork(compare_schemas, output=output, **environment)) == [0], output.read_text()
    assert output.read_text().splitlines()[-1].startswith("schemas match")


def test_a_gpu_without_room_for_the_scans_gradients_is_told_so(monkeypatch):
    properties = types.SimpleNamespace(shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    u, B = torch.zeros(1, 2, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    A, kept = torch.zeros(16, 16), torch.zeros(1)
    starts, ends = torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(build.KernelError, match="need 109 KiB of shared memory a block, this GPU has 99; take float16"):
        ssm_forward(u, u, A, B, B, None, None, None, True, starts, ends, None, u.clone(), None, kept)
