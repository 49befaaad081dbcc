"""Sequence mixers by name: the values of ``MambaLM(mixer=...)`` and ``model.mixer``.

A mixer is a file here, or a plugin that adds its class to ``MIXERS``; docs/extend.md has the
interface.
"""

from typing import Any

from packmamba.nn.mixers.mamba1 import PackedMamba
from packmamba.nn.mixers.mamba2 import PackedMamba2
from packmamba.nn.mixers.mamba3 import PackedMamba3
from packmamba.nn.mixers.mixer import State

__all__ = ["MIXERS", "State"]

MIXERS: dict[str, Any] = {"mamba1": PackedMamba, "mamba2": PackedMamba2, "mamba3": PackedMamba3}
