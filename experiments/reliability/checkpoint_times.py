"""How long a checkpoint stops training, and what its writing costs the steps beside it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from packmamba import timing
from packmamba.config import ConfigError, at_least, key, load_config
from packmamba.records import append_record, make_record, provenance
from packmamba.training.checkpoint_behind import CheckpointsBehind
from packmamba.training.surroundings import surroundings
from packmamba.training.throughput import Arm

PROBE = 1 << 30
"""Bytes copied to find out how fast the host's memory takes them."""
COPIES = 3


@dataclass
class Config:
    experiment: str = key("reliability", "The question, which the records name.")
    keys: list[str] = key([], "The training run, as key=value.")
    steps: int = key(8, "Steps that are timed before anything is written.", at_least(2))
    folder: Optional[str] = key(None, "Where the checkpoint lies meanwhile; null for the system's folder for such.")

    def problems(self) -> Iterator[str]:
        try:
            load_config(None, self.keys)
        except ConfigError as error:
            yield f"keys: {error}"


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record.

    Steps are those that train. Some are timed with nothing beside them; then the state is saved as training saves it and steps go
    on until it is written; then it is copied again, into memory that is there already.

    metrics: parameters, checkpoint_bytes; seconds_per_step, the median with nothing beside it, and seconds_per_step_most;
    copy_seconds_first and copy_seconds (a median), how long training waits; write_seconds, in the thread; steps_beside,
    seconds_per_step_beside, seconds_per_step_beside_most; host_bytes_per_second and pinned_bytes_per_second, of a plain copy to
    memory of the host (the latter null without a GPU); cores_of_others.
    """
    provenance()
    others, begun = timing.OtherPrograms(), time.perf_counter()
    config = load_config(None, c.keys)
    with surroundings(config), tempfile.TemporaryDirectory(prefix="checkpoint-", dir=c.folder) as name:
        on_gpu = config.trainer.accelerator != "cpu" and torch.cuda.is_available()
        with torch.device("cuda" if on_gpu else "cpu"):  # a large model is not made on the host first
            arm = Arm(config)
        number = iter(range(10**9))

        def steps(count: int) -> list[float]:
            return [arm.step(next(number))[0].seconds for _ in range(count)]

        steps(3)
        alone = steps(c.steps)
        state = {"state_dict": arm.module.state_dict(), "optimizer_states": [arm.optimizer.state_dict()]}
        size = sum(tensor.nbytes for tensor in _tensors(state))
        if (free := shutil.disk_usage(name).free) < 1.1 * size:
            raise ConfigError(f"folder: {name} needs room for {size / 1e9:.0f} GB and has {free / 1e9:.0f}")
        behind = CheckpointsBehind()
        first = timing.seconds(lambda: behind.save_checkpoint(state, Path(name) / "step=1.ckpt"), arm.fabric.device)
        written, beside = time.perf_counter(), []
        while behind.writing:
            beside += steps(1)
        behind.teardown()
        written = time.perf_counter() - written
        again = [timing.seconds(lambda: behind.copy(state), arm.fabric.device) for _ in range(COPIES)]
        metrics: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in arm.module.parameters()),
            "checkpoint_bytes": (Path(name) / "step=1.ckpt").stat().st_size,
            "seconds_per_step": timing.median(alone),
            "seconds_per_step_most": max(alone),
            "copy_seconds_first": first,
            "copy_seconds": timing.median(again),
            "write_seconds": written,
            "steps_beside": len(beside),
            "seconds_per_step_beside": timing.median(beside) if beside else None,
            "seconds_per_step_beside_most": max(beside, default=None),
            "host_bytes_per_second": _rate(arm.fabric.device, False),
            "pinned_bytes_per_second": _rate(arm.fabric.device, True) if on_gpu else None,
            "cores_of_others": others.cores(),
        }
    record = make_record(
        kind="checkpoint",
        experiment=c.experiment,
        arm="behind",
        config={"keys": c.keys, "steps": c.steps},
        seed=config.seed,
        corpus_hash=arm.corpus_hash,
        metrics=metrics,
        wall_seconds=time.perf_counter() - begun,
    )
    append_record(records_path, record)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _rate(device: torch.device, pinned: bool) -> float:
    """Bytes a second from a device to memory of the host that was written before."""
    source = torch.ones(PROBE, dtype=torch.uint8, device=device)
    target = torch.ones(PROBE, dtype=torch.uint8, pin_memory=pinned)
    return PROBE / timing.median([timing.seconds(lambda: target.copy_(source), device) for _ in range(COPIES)])
