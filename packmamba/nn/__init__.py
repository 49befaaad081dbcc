"""Mamba on packed documents: the layer and the language model."""

from packmamba.nn.lm import MambaLM
from packmamba.nn.mixers.mamba1 import PackedMamba
from packmamba.nn.mixers.mamba2 import PackedMamba2
from packmamba.nn.mixers.mamba3 import PackedMamba3

__all__ = ["MambaLM", "PackedMamba", "PackedMamba2", "PackedMamba3"]
