"""What a run's configuration and this machine show before documents are read, and before what takes seconds to import."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from packmamba.config import Config, ConfigError
from packmamba.data.packing import STRATEGIES
from packmamba.data.sources import open_source
from packmamba.data.tokenizer import load_tokenizer
from packmamba.ops import BACKENDS
from packmamba.training.boundary import BOUNDARIES
from packmamba.training.lit_module import make_model
from packmamba.training.process import LAUNCHED

CGROUP = Path("/sys/fs/cgroup/memory.max")


def check_accelerator(config: Config) -> None:
    """Raises ConfigError where the run needs a GPU, or another device, and this machine has none."""
    accelerator = config.trainer.accelerator
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"trainer.accelerator: '{accelerator}' needs a GPU that PyTorch can use")
    if accelerator == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("trainer.accelerator: 'mps' needs a Mac whose GPU PyTorch can use")
    if accelerator == "tpu" and importlib.util.find_spec("torch_xla") is None:
        raise ConfigError("trainer.accelerator: 'tpu' needs torch_xla, which is not installed")


def check_run(config: Config, here: bool = True) -> None:
    """Refuses, before any work, what the trainer and the model cannot be, and if it runs ``here``, what this machine cannot do.
    Raises ConfigError naming the key."""
    trainer = config.trainer
    if here and trainer.cuda_graphs and not torch.cuda.is_available():
        raise ConfigError("trainer.cuda_graphs needs a GPU that PyTorch can use")
    if here and (missing := BACKENDS[config.ops.backend].missing):
        raise ConfigError(f"ops.backend: '{config.ops.backend}' needs {' and '.join(missing)}, not installed here")
    if here and trainer.devices > (most := _devices(trainer.accelerator)):
        raise ConfigError(f"trainer.devices: expected at most the {most} of this machine, got {trainer.devices}")
    if here and trainer.num_nodes > 1 and not any(name in os.environ for name in LAUNCHED):
        raise ConfigError(
            f"trainer.num_nodes: {trainer.num_nodes} machines need torchrun or SLURM to start a process on each, and none "
            "has started this one"
        )
    BOUNDARIES[trainer.boundary](**trainer.boundary_options)
    if here:
        check_memory(config)


def check_documents(config: Config) -> None:
    """Refuses keys of ``data`` that the source does not take, missing files, and too small a vocabulary. Reads no document.

    Raises:
        ConfigError: naming the key.
    """
    size = open_source(config.data).vocab_size
    if size is None:
        size = load_tokenizer(config.data).vocab_size
    if isinstance(size, int):  # else it is known once documents are read
        check_vocabulary(config, size)


def check_all_documents(configs: Iterable[Config]) -> None:
    """The same once for all runs of the same documents."""
    for config in {repr((config.data, config.model.vocab_size)): config for config in configs}.values():
        check_documents(config)


def check_vocabulary(config: Config, corpus: int) -> None:
    given = config.model.vocab_size
    if given is not None and given < corpus:
        raise ConfigError(f"model.vocab_size: expected at least {corpus}, the tokens of the corpus, got {given}")


def check_memory(config: Config) -> None:
    """Refuses a model or batch that cannot fit: what each device holds at least, against the memory that it has."""
    trainer, data, model = config.trainer, config.data, config.model
    with torch.device("meta"):
        alone = make_model(replace(config, model=replace(model, n_layer=1)), 1)
    of_layer = sum(parameter.numel() for parameter in alone.backbone.layers.parameters())
    parameters = sum(parameter.numel() for parameter in alone.parameters()) + (model.n_layer - 1) * of_layer
    shards = trainer.devices * trainer.num_nodes if trainer.strategy == "fsdp2" else 1
    size = {"16-true": 2, "bf16-true": 2, "64-true": 8, "64": 8}.get(trainer.precision, 4)
    room = memory(trainer.accelerator)
    needed = 2 * size * parameters // shards  # weights and their gradients
    if needed > room:
        raise ConfigError(
            f"model: expected to fit into {room / 2**30:.0f} GiB of memory, got {parameters:,} parameters, which with their "
            f"gradients take {needed / 2**30:,.1f} GiB (model.d_model={model.d_model}, model.n_layer={model.n_layer})"
        )
    row = data.row_length if STRATEGIES[data.strategy].pads and data.row_length else 0
    for name, slots, each in (
        ("data.slots_per_batch", data.slots_per_batch, 17 + size * model.d_model),  # ids, targets, mask; the embedding
        ("data.row_length", row, 17 + size * model.d_model),
        ("data.tokens_per_step", data.tokens_per_step // (trainer.devices * trainer.num_nodes), 17),
    ):
        if slots * each > room:
            raise ConfigError(
                f"{name}: {slots} slots take {slots * each / 2**30:,.1f} GiB, got {room / 2**30:.0f} GiB of memory"
            )


def _devices(accelerator: str) -> int:
    """GPUs, or processes on the CPU."""
    gpus = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 0
    return gpus or max(4, os.cpu_count() or 1)


def memory(accelerator: str) -> int:
    """Bytes of one device that the accelerator would take."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if CGROUP.is_file() and (text := CGROUP.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits)
