"""Training with Lightning."""

from packmamba.data.datamodule import PackedDataModule
from packmamba.training.lit_module import PackedLitModule

__all__ = ["PackedDataModule", "PackedLitModule"]
