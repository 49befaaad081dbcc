"""Where a step's time goes: device time of a call by family of kernels, as torch.profiler sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# The first that matches a kernel's name (on a CPU, an operator's) is its family.
FAMILIES = {
    "conv": r"conv1d|convparams",
    "scan": r"ssm|scanparams|selective_scan|scheduleparams|::schedule\(",
    "optimizer": r"multi_tensor|fused_?adam|foreach|AdamW",
    "communication": r"nccl|all_?reduce|all_?gather|reduce_scatter",
    "matrix products": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|aten::(mm|addmm|bmm|linear)$",
    "loss": r"log_?softmax|nll_loss|cross_entropy|logsumexp|_softmax",
    "norm and elementwise": r"triton|norm|aten::|at::native|at_cuda_detail",
}
OTHER = "other"


def by_family(call: Callable[[], Any], on_gpu: bool) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Seconds of device time by family, every family and "other"; and (family, name, seconds) of each kernel, slowest first."""
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    return sort_kernels(profiler, on_gpu)


def sort_kernels(profiler: profile, on_gpu: bool) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """The same of a profile that has ended."""
    seconds = dict.fromkeys([*FAMILIES, OTHER], 0.0)
    kernels = []
    for event in profiler.key_averages():
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        taken = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        family = family_of(event.key)
        seconds[family] += taken
        kernels.append((family, event.key, taken))
    return seconds, sorted(kernels, key=lambda kernel: -kernel[2])


def family_of(name: str) -> str:
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)
