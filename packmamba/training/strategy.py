"""How the gradients of several devices meet: DDP, or FSDP2 with parameters in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from packmamba.config import TrainerConfig
from packmamba.nn import MambaLM

STRATEGIES = ("auto", "ddp", "fsdp2")


class FSDP2(ModelParallelStrategy):
    """Checkpoints are one whole file: a run may be read, or go on, on another number of devices."""

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning forgets, on this strategy's way, what Trainer.fit was told.
        return super().load_checkpoint(checkpoint_path, weights_only=True)


def make_strategy(options: TrainerConfig) -> Strategy | str:
    """Lightning's strategy for these devices; auto is one device, or DDP."""
    devices = options.devices * options.num_nodes
    if options.strategy == "fsdp2":
        return FSDP2(devices)
    if options.strategy == "auto" and devices == 1:
        return "auto"
    # Blocks are compiled one by one: gradients already meet block by block, and cutting blocks at DDP's buckets only costs.
    torch._dynamo.config.optimize_ddp = False
    return DDPStrategy(gradient_as_bucket_view=True)


def shard(model: MambaLM, mesh: DeviceMesh) -> None:
    """Cuts parameters over the devices of ``mesh`` (1-dimensional): a block is whole while it computes.

    Shards and their all-gathers are float32 and autocast rounds as on one device, so that the loss is the same.
    """
    if not isinstance(model, FSDPModule):
        for layer in model.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


@contextmanager
def without_sync(strategy: Strategy | None, model: MambaLM) -> Iterator[None]:
    """Inside, backward passes add to gradients that do not meet those of other devices yet."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        with strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext():
            yield


def cluster() -> list[Any]:
    """Plugins for a job of SLURM: Lightning shall not requeue it, whoever submitted it does."""
    in_job = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if in_job else []


def leave_signals(trainer: lightning.Trainer) -> None:
    """Has the trainer leave this process's signals to others.

    Lightning's ranks wait for their GPUs before each step to ask each other for SIGTERM; and its signal handler starts a
    collective in the middle of a step's, after which ranks wait for each other for ever.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def agree(trainer: lightning.Trainer, said: int, every: int) -> int:
    """The most that any rank says after this step; 0 but after every ``every``-th and the last: to ask is to wait for all."""
    if trainer.world_size == 1:
        return said
    step = trainer.global_step
    if step % every and step != trainer.max_steps:
        return 0
    most = torch.tensor(said, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def leave_process_group() -> None:
    """Ends this process's part in the group that a Trainer started, if it did: NCCL leaks what is not ended."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.distributed_c10d._world
        groups = world.group_count
        torch.distributed.destroy_process_group()
        # Else the next group of these processes finds this one's addresses in torchrun's store.
        world.group_count = groups
