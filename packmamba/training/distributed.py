"""Gradients of several devices: DDP, or FSDP2 with sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from packmamba.config import TrainerConfig
from packmamba.nn import MambaLM


class FSDP2(ModelParallelStrategy):
    """Write a checkpoint as one whole file, which loads on any number of devices."""

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(checkpoint_path, weights_only=True)  # Lightning drops Trainer.fit's flag here


def make_strategy(options: TrainerConfig) -> Strategy | str:
    """Make Lightning's strategy for the configured devices; auto is one device, or DDP."""
    devices = options.devices * options.num_nodes
    if options.strategy == "fsdp2":
        return FSDP2(devices)
    if options.strategy == "auto" and devices == 1:
        return "auto"
    # Blocks compile one by one, so gradients already meet block by block; splitting blocks at DDP's buckets only costs.
    torch._dynamo.config.optimize_ddp = False
    return DDPStrategy(gradient_as_bucket_view=True)


def shard(model: MambaLM, mesh: DeviceMesh) -> None:
    """Shard float32 parameters over the devices of ``mesh`` (1-dimensional); a block is gathered while it computes."""
    if not isinstance(model, FSDPModule):
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


@contextmanager
def without_sync(strategy: Strategy | None, model: MambaLM) -> Iterator[None]:
    """Accumulate gradients without reducing them over ranks."""
    sharded: Any = model if isinstance(model, FSDPModule) else None
    if sharded is not None:
        sharded.set_requires_gradient_sync(False)
    with strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext():
        yield
    if sharded is not None:
        sharded.set_requires_gradient_sync(True)


def disable_lightning_signals(trainer: lightning.Trainer) -> None:
    """Disable Lightning's signal handlers and its SIGTERM broadcast before every step (Lightning issue 20806).

    The broadcast waits for the GPU at each step, and the handler starts a collective in the middle of a step's.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert callable(connector.register_signal_handlers) and callable(loop._broadcast_sigterm_tensor)
    connector.register_signal_handlers = loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def max_over_ranks(value: int, device: torch.device) -> int:
    result = torch.tensor(value, device=device)
    torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return int(result)
