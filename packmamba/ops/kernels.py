"""The compiled kernels of each type of device, by name; operators declare theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packmamba.ops.build import operator

KERNELS: dict[str, dict[str, Callable[..., None]]] = {"cpu": {}, "cuda": {}}
"""By device type: what runs, with the schemas of kernels/cpu, outputs last."""
OUTPUTS: dict[str, int] = {}
"""How many outputs end a kernel's arguments."""


def declare(name: str, outputs: int, cuda: Callable[..., None]) -> None:
    """``torch.ops.packmamba_cpu.<name>``, and what launches the CUDA kernels. Outputs are allocated by whoever calls."""
    OUTPUTS[name] = outputs
    KERNELS["cpu"][name] = _cpu(name, -outputs)
    KERNELS["cuda"][name] = cuda


def _cpu(name: str, first: int) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        outputs = arguments[first:]
        for t in outputs:
            if t is not None and not t.is_contiguous():
                break
        else:
            operator("cpu", name)(*arguments)
            return
        # Slices (dx, dz, dB and dC may be): written elsewhere first.
        written = [t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in outputs]
        operator("cpu", name)(*arguments[:first], *written)
        for t, made in zip(outputs, written):
            if made is not t:
                t.copy_(made)

    return run
