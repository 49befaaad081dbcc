"""PackMamba: Mamba on variable-length sequences, packed without leaking."""

from packmamba import ops as ops
from packmamba.isolation import leakcheck as leakcheck
from packmamba.layout import SequenceLayout as SequenceLayout
from packmamba.nn import MambaLM as MambaLM
from packmamba.nn import PackedMamba as PackedMamba
from packmamba.nn import PackedMamba2 as PackedMamba2
from packmamba.nn import PackedMamba3 as PackedMamba3
from packmamba.ops.context_parallel import ContextParallel as ContextParallel

__version__ = "0.1.0"
__all__ = [
    "ContextParallel",
    "MambaLM",
    "PackedMamba",
    "PackedMamba2",
    "PackedMamba3",
    "SequenceLayout",
    "leakcheck",
    "ops",
]
