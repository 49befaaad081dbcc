"""Where a step's time goes: device time of a call by family of kernels, as torch.profiler sees it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from packmamba import timing

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
LAUNCH = 10.0
"""Microseconds: shorter gaps between kernels are those of launching, whatever the host does."""


@dataclass
class Breakdown:
    """Of calls that were profiled: seconds by family, every family and "other"; (family, name, seconds) of each kernel, slowest
    first; and seconds in which none ran, and of these those of gaps as short as launching makes them."""

    families: dict[str, float]
    kernels: list[tuple[str, str, float]]
    idle: float
    gaps: float = 0.0


def by_family(call: Callable[[], Any], device: torch.device) -> Breakdown:
    """Where a call's time goes."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        taken = timing.seconds(call, device)
    return sort_kernels(profiler, on_gpu, taken)


def sort_kernels(profiler: profile, on_gpu: bool, taken: float) -> Breakdown:
    """The same of a profile that has ended, of calls that took so many seconds."""
    gaps = 0.0
    if on_gpu:
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        by_name, gaps = exclusive((event.time_range.start, event.time_range.end, event.name) for event in events)
    else:
        by_name = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    families = dict.fromkeys([*FAMILIES, OTHER], 0.0)
    kernels = []
    for name, microseconds in by_name.items():
        family = family_of(name)
        families[family] += microseconds / 1e6
        kernels.append((family, name, microseconds / 1e6))
    idle = max(0.0, taken - sum(families.values()))
    return Breakdown(families, sorted(kernels, key=lambda kernel: -kernel[2]), idle, min(idle, gaps / 1e6))


def exclusive(events: Iterable[tuple[float, float, str]]) -> tuple[dict[str, float], float]:
    """Time by name of (start, end, name): where several run, it is the one's that started first; and that of all gaps below
    ``LAUNCH``.

    A kernel that is launched early, and waits for the one before it to end, has only its own end counted.
    """
    taken: dict[str, float] = {}
    covered, gaps = -math.inf, 0.0
    for start, end, name in sorted(events):
        taken[name] = taken.get(name, 0.0) + max(0.0, end - max(start, covered))
        gaps += start - covered if 0 < start - covered < LAUNCH else 0.0
        covered = max(covered, end)
    return taken, gaps


def family_of(name: str) -> str:
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)
