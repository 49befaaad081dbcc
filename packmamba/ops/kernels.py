"""The compiled kernels of each type of device, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packmamba.ops.build import operator
from packmamba.ops.cuda import launch

OUTPUTS = {"conv1d_forward": 2, "conv1d_backward": 4, "ssm_forward": 3, "ssm_backward": 9}
"""How many outputs end a kernel's arguments. dx, dz, dB and dC may be slices, which the CPU's kernels write elsewhere first."""


def _cpu(name: str) -> Callable[..., None]:
    first = -OUTPUTS[name]

    def run(*arguments: Any) -> None:
        outputs = arguments[first:]
        for t in outputs:
            if t is not None and not t.is_contiguous():
                break
        else:
            operator("cpu", name)(*arguments)
            return
        written = [t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in outputs]
        operator("cpu", name)(*arguments[:first], *written)
        for t, made in zip(outputs, written):
            if made is not t:
                t.copy_(made)

    return run


KERNELS: dict[str, Mapping[str, Callable[..., None]]] = {
    "cpu": {name: _cpu(name) for name in OUTPUTS},
    "cuda": launch.KERNELS,
}
"""By device type: what runs, with the schemas of kernels/cpu/bindings.cpp, outputs last."""
