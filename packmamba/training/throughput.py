"""Optimizer steps of several arms, timed turn by turn in one process on the same machine state."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from tqdm import tqdm

from packmamba.config import Config
from packmamba.data.batching import StepBatch
from packmamba.data.datamodule import PackingDataModule, StepDataset
from packmamba.records import make_record
from packmamba.training.module import MambaLitModule
from packmamba.training.runs import decisive

WARMUP_ROUNDS = 2


@dataclass
class _Arm:
    config: Config
    module: MambaLitModule
    optimizer: torch.optim.Optimizer
    steps: StepDataset
    corpus_hash: str
    seconds: list[float]
    tokens: list[int]
    slots: list[int]


def measure_throughput(
    configs: list[Config], rounds: int, experiment: str, progress: bool = True
) -> Iterator[dict[str, Any]]:
    """One record per configuration: in each round every arm in turn takes its next optimizer step (A B C A B C ...).

    A step is forward, backward, clipping and AdamW on batches made beforehand; preparing them is not timed. In matched mode
    all arms of a round compute the same documents. Runs on the GPU if there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (threads := configs[0].trainer.threads) is not None:
        torch.set_num_threads(threads)
    arms = [_prepare(config, device) for config in configs]
    run = uuid.uuid4().hex
    begun = time.perf_counter()
    for i in tqdm(range(WARMUP_ROUNDS + rounds), desc="interleaved steps", unit="round", disable=not progress):
        losses: dict[str, float] = {}
        for arm in arms:
            batch = arm.steps[i].to(device)
            seconds, loss = _timed_step(arm, batch)
            if arm.config.data.mode == "matched" and arm.config.trainer.boundary == "reset":
                losses[arm.config.name] = loss
            if i >= WARMUP_ROUNDS:
                arm.seconds.append(seconds)
                arm.tokens.append(batch.num_tokens)
                arm.slots.append(batch.num_slots)
        if i == 0:
            _check_agreement(losses)
    wall_seconds = time.perf_counter() - begun
    for arm in arms:
        rate = statistics.median(tokens / seconds for tokens, seconds in zip(arm.tokens, arm.seconds))
        quartiles = statistics.quantiles(arm.seconds, n=4) if rounds > 1 else [0.0, 0.0, 0.0]
        yield make_record(
            kind="throughput",
            experiment=Path(experiment).name,
            arm=arm.config.name,
            config=decisive(arm.config) | {"run": run},
            seed=arm.config.seed,
            corpus_hash=arm.corpus_hash,
            metrics={
                "seconds_per_step_median": statistics.median(arm.seconds),
                "seconds_per_step_spread": quartiles[2] - quartiles[0],
                "real_tokens_per_second": rate,
                "slots_per_second": statistics.median(n / seconds for n, seconds in zip(arm.slots, arm.seconds)),
                "padding_fraction": 1 - sum(arm.tokens) / sum(arm.slots),
                "rounds": rounds,
                "parameters": sum(parameter.numel() for parameter in arm.module.parameters()),
            },
            wall_seconds=wall_seconds,
        )


def _prepare(config: Config, device: torch.device) -> _Arm:
    data = PackingDataModule(config, progress=False)
    lightning.seed_everything(config.seed, verbose=False)
    module = MambaLitModule(config, data.corpora.train.vocab_size).to(device)
    optimizer = module.configure_optimizers()
    return _Arm(config, module, optimizer, StepDataset(data.schedule()), data.corpora.corpus_hash, [], [], [])


def _check_agreement(losses: dict[str, float]) -> None:
    """Arms that reset have the same weights and documents in the first round: other losses mean that one is wrong."""
    if losses and max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
        raise RuntimeError(f"nothing is timed: arms disagree on the loss of the same documents: {losses}")


def _timed_step(arm: _Arm, batch: StepBatch) -> tuple[float, float]:
    _synchronise(batch)
    begun = time.perf_counter()
    arm.optimizer.zero_grad()
    loss = arm.module.accumulate(batch, torch.Tensor.backward)
    if arm.config.optimizer.grad_clip is not None:
        torch.nn.utils.clip_grad_norm_(arm.module.parameters(), arm.config.optimizer.grad_clip)
    arm.optimizer.step()
    _synchronise(batch)
    return time.perf_counter() - begun, float(loss)


def _synchronise(batch: StepBatch) -> None:
    if batch.batches[0].tokens.device.type == "cuda":
        torch.cuda.synchronize()
