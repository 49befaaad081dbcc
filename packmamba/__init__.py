"""PackMamba: Mamba on variable-length sequences, packed without leaking."""

from packmamba import ops
from packmamba.isolation import leakcheck
from packmamba.layout import SequenceLayout
from packmamba.nn import MambaLM, PackedMamba, PackedMamba2, PackedMamba3
from packmamba.ops.context_parallel import ContextParallel

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
