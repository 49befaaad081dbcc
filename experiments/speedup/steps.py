"""Whole optimizer steps with PackedDataModule, arms in turns: what training costs."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch

from experiments import timing
from experiments.common import PeakMemory
from experiments.speedup.model import STEPS, Arm, Model, feed, run_config
from packmamba.config import Config
from packmamba.lab.benchmark import Arm as Stepping
from packmamba.lab.fit import configured_runtime
from packmamba.training.datamodule import PackedDataModule, StepDataset

# steps of a turn: the device waits for the host at its start, as it does not in training
TURN_STEPS = 4


def measure(model: Model) -> None:
    """Append a speedup record for each arm that takes part in steps; all train one model."""
    arms = model.c.taking_part(STEPS)
    # Graphs keep memory that the others would be counted with.
    for graphs in (False, True):
        group = {name: arm for name, arm in arms.items() if arm.graphs == graphs}
        if group:
            timing.free_memory()
            with tempfile.TemporaryDirectory() as cache:
                _measure(model, group, {name: step_config(model, arm, cache) for name, arm in group.items()})


def _measure(model: Model, arms: dict[str, Arm], configs: dict[str, Config]) -> None:
    c, first = model.c, next(iter(configs.values()))
    peaks: dict[str, int | None] = {}
    slots: dict[str, list[float]] = {name: [] for name in arms}
    torch.compiler.reset()
    with configured_runtime(first):
        shared = Stepping(first)

        def turns(name: str) -> Any:
            arm, own = arms[name], copy.copy(shared)
            own.steps = StepDataset(PackedDataModule.from_config(configs[name], progress=False).schedule())
            # Single waits for the host whatever it does, but as graphs; the others' steps overlap.
            count = 1 if arm.strategy == "single" and not arm.graphs else TURN_STEPS

            def turn(number: int) -> float:
                places = range(number * count, (number + 1) * count)
                steps = [own.steps[place].to(model.device) for place in places]
                # each shape's graph is captured before anything is timed
                if arm.graphs and not number:
                    for place in range((c.rounds + 1) * count):
                        own.step(place)
                peak, begun = PeakMemory(model.device), timing.now(model.device)
                for step, place in zip(steps, places):
                    own.take(step, place)
                seconds = timing.now(model.device) - begun
                # graphs' memory was taken before
                peaks[name] = None if arm.graphs else peak.bytes()
                slots[name].append(sum(step.num_slots for step in steps) / count)
                return seconds / count

            return turn

        samples = timing.take_turns({name: turns(name) for name in arms}, c.rounds, bar=model.bar("optimizer steps"))
    for name, seconds in samples.items():
        padding = feed(model.documents, arms[name], c.slots).padding_fraction
        of_turns = slots[name][-len(seconds) :]
        rates = [n / taken for n, taken in zip(of_turns, seconds)]
        tokens, rate = sum(of_turns) / len(of_turns) * (1 - padding), timing.median(rates) * (1 - padding)
        metrics = {"peak_memory_bytes": peaks[name]} | dict.fromkeys(("position_bytes", "loss_error", "leak_error"))
        metrics |= model.speed(seconds, tokens, rate, padding)
        model.record("speedup", name, arms[name].fields(), STEPS, metrics)


def step_config(model: Model, arm: Arm, cache: str) -> Config:
    """Configure a run on synthetic documents, arranged by the arm as they come, as many in a step
    as in the others'.
    """
    c, tokens = model.c, model.c.slots
    if arm.strategy == "padded" and arm.row_length is not None:
        rows = max(1, c.slots // arm.row_length)  # whole batches
        tokens = arm.row_length * rows * max(1, round(c.slots / float(model.documents.lengths.mean()) / rows))
    config = run_config(model.name, c.overrides)
    config.data = arm.data(
        source="synthetic", distribution=c.distribution, num_documents=c.documents, vocab_size=model.vocab_size,
        cache_dir=cache, validation_fraction=0.01, tokens_per_step=tokens, max_tokens_per_batch=c.slots, num_workers=0,
    )  # fmt: skip
    config.seed = c.seed
    config.trainer.precision, config.trainer.accelerator = c.precision, model.device.type
    config.trainer.cuda_graphs = arm.graphs
    return config
