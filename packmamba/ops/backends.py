"""Which implementation runs: chosen by name, or by the device of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from packmamba.ops import build

BACKENDS = ("auto", "reference", "cpu", "cuda", "mamba_ssm")

Implementation = TypeVar("Implementation", bound=Callable)


def choose(backend: str | None, device: torch.device, implementations: Mapping[str, Implementation]) -> Implementation:
    """The operator's implementation for ``backend`` on ``device``.

    ``auto`` (and None) takes the compiled kernels of the device. A CPU that cannot build them runs the reference,
    which is as exact, and says so once; a GPU never falls back.

    Raises:
        KernelError: the compiled kernels can be neither found nor built.
        ValueError: an unknown backend, or one that does not run here.
    """
    if backend is None:
        backend = "auto"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = "reference" if device.type == "cpu" and not build.ready("cpu") else device.type
    needs = "cuda" if backend == "mamba_ssm" else backend
    if needs in ("cpu", "cuda") and needs != device.type:
        raise ValueError(f"backend: '{backend}' expected tensors on a {needs} device, got {device}")
    if backend not in implementations:
        available = ", ".join(sorted(implementations))
        raise ValueError(
            f"backend: no compiled '{backend}' kernels in this version for {device}; available: {available}"
        )
    return implementations[backend]
