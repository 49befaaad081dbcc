"""Mamba on packed documents: the layer and the language model."""

from packmamba.nn.lm import MambaLM as MambaLM
from packmamba.nn.mixer import PackedMamba as PackedMamba

__all__ = ["MambaLM", "PackedMamba"]
