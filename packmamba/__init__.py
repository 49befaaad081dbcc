"""PackMamba: Mamba on variable-length sequences, packed without leaking."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packmamba import ops as ops
    from packmamba.isolation import leakcheck as leakcheck
    from packmamba.layout import SequenceLayout as SequenceLayout
    from packmamba.nn import MambaLM as MambaLM
    from packmamba.nn import PackedMamba as PackedMamba

__version__ = "0.1.0"
__all__ = ["MambaLM", "PackedMamba", "SequenceLayout", "leakcheck", "ops"]

_HOMES = {
    "SequenceLayout": "packmamba.layout",
    "MambaLM": "packmamba.nn",
    "PackedMamba": "packmamba.nn",
    "leakcheck": "packmamba.isolation",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that packmamba.data and packmamba.report are usable without importing torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "ops":
        return importlib.import_module("packmamba.ops")
    raise AttributeError(f"module 'packmamba' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
