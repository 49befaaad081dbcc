"""Moved to distributed.py."""

from packmamba.training.distributed import shard, without_sync

__all__ = ["shard", "without_sync"]
