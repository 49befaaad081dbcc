"""Training with Lightning, which is imported with the first of these classes: commands check their words before."""

from typing import TYPE_CHECKING, Any

from packmamba.errors import require

require("lightning", "torchmetrics")
if TYPE_CHECKING:
    from packmamba.training.datamodule import PackedDataModule
    from packmamba.training.lit_module import PackedLitModule

__all__ = ["PackedDataModule", "PackedLitModule"]


def __getattr__(name: str) -> Any:
    if name == "PackedDataModule":
        from packmamba.training.datamodule import PackedDataModule

        return PackedDataModule
    if name == "PackedLitModule":
        from packmamba.training.lit_module import PackedLitModule

        return PackedLitModule
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
