"""Training with Lightning.

It is imported with the first of these classes: commands check their words before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packmamba.errors import require

require("lightning", "torchmetrics")
if TYPE_CHECKING:
    from packmamba.training.datamodule import PackedDataModule
    from packmamba.training.lit_module import PackedLitModule

__all__ = ["PackedDataModule", "PackedLitModule"]
MODULES = {"PackedDataModule": "datamodule", "PackedLitModule": "lit_module"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
