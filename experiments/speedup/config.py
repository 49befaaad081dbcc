"""What the bench of whole models can be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from experiments.speedup.arms import BARE, BREAKDOWN, STEPS, Arm, Documents, feed
from packmamba.config import Config as RunConfig
from packmamba.config import ConfigError, Holds, above, at_least, each, key, load_config, named, one_of, unique
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS
from packmamba.ops.backends import choose
from packmamba.training.checks import check_run

GROWTH = "growth"
PARTS = (BARE, BREAKDOWN, STEPS, GROWTH)
# Of the losses of single tokens, against those of documents alone, in units of their standard deviation. Rounding through 48
# blocks in bfloat16 makes 2.5e-2, and a leak 1.6e-1; through 24, 1e-2 and 5e-2.
TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OVERRIDE = Holds(
    "model.<key>=, ops.<key>= or optimizer.<key>=, the bench sets the rest",
    lambda override: override.startswith(("model.", "ops.", "optimizer.")),
)
DISTRIBUTION = named("packmamba.data.lengths:LENGTH_DISTRIBUTIONS")


@dataclass
class Config:
    experiment: str = key("speedup", "The question, which the records name.")
    models: list[str] = key(["130m", "1.4b", "2.8b"], "Sizes in configs/model.", unique)
    overrides: list[str] = key(
        [], "key=value of run configurations that hold for all, such as model.compile=true.", each(OVERRIDE)
    )
    parts: list[str] = key(
        list(PARTS),
        "forward_backward: the bare loop; breakdown: its kernels; steps: optimizer steps through Lightning; growth.",
        each(one_of(*PARTS)),
        unique,
    )
    arms: dict[str, Arm] = key({}, "By name; arms=[single,padded-2048] takes some of the file's.")
    distribution: str = key(
        "documents-2k", "Distribution of the documents' lengths: documents-2k, short or heavy.", DISTRIBUTION
    )
    documents: int = key(4096, "Documents that every arm arranges.", at_least(1))
    slots: int = key(16384, "Most slots of a batch, and real tokens of an optimizer step.", at_least(1))
    batches: int = key(2, "Batches of each arm that stand for all, evenly spread over their sizes.", at_least(1))
    single_batches: int = key(8, "The same for single, whose batch is a document.", at_least(1))
    rounds: int = key(3, "How often each arm is timed, in turns.", at_least(1))
    dtype: str = key(
        "bfloat16",
        "Of the bare loop's weights: bfloat16 or float32; A and D are float32 as in mamba-ssm.",
        one_of(*TOLERANCES),
    )
    precision: str = key("bf16-mixed", "Lightning's, of the steps.", one_of(*PRECISIONS))
    num_workers: int = key(2, "Processes that prepare the batches of steps.", at_least(0))
    peak_flops_per_second: Optional[float] = key(
        None, "What model FLOP utilisation is a share of; null for none.", above(0)
    )
    growth_model: str = key("130m", "Size for growth.")
    row_lengths: list[int] = key([2048 << i for i in range(7)], "Growth: tokens of a packed row.", each(at_least(1)))
    growth_graphs: bool = key(False, "Growth: as CUDA graphs, where the host would be the limit.")
    mean_lengths: list[int] = key(
        [64 << i for i in range(8)], "Growth: mean document length in a row of slots tokens.", each(at_least(1))
    )
    seed: int = key(0, "Of lengths, tokens and weights.", at_least(0))

    def problems(self) -> Iterator[str]:
        for name, arm in self.arms.items():
            for problem in misfits(arm, self.slots, self.distribution):
                yield f"arms.{name}: {problem}"
        bare = self.taking_part(BARE) and {BARE, BREAKDOWN} & set(self.parts)
        steps = self.taking_part(STEPS) and STEPS in self.parts
        if not self.models or not (bare or steps or GROWTH in self.parts):
            yield "models, parts, arms: expected something to do, got none of a model's arms in a part"
        for name in dict.fromkeys([*self.models, self.growth_model]):
            yield from problems_of_model(name, self.overrides, self.seed, self.precision)

    def taking_part(self, part: str) -> dict[str, Arm]:
        """The arms that take part in a part."""
        return {name: arm for name, arm in self.arms.items() if part in arm.parts}


def misfits(arm: Arm, slots: int, distribution: str) -> Iterator[str]:
    """What keeps an arm's rows from holding a distribution's documents, or batches from holding its rows."""
    if (arm.row_length or 1) > slots:
        yield f"expected rows of at most slots={slots}, got {arm.row_length}"
        return
    try:
        feed(Documents(np.array([LENGTH_DISTRIBUTIONS[distribution].longest]), 1, 0), arm, slots)
    except ValueError as error:
        yield str(error)


def problems_of_model(name: str, overrides: list[str], seed: int, precision: str) -> Iterator[str]:
    config = run_config(name, overrides)
    config.seed, config.trainer.precision = seed, precision
    if config.model.vocab_size is None:
        yield "overrides: model.vocab_size: expected a number, got null"
        return
    check_run(config)


def run_config(model: str, overrides: list[str]) -> RunConfig:
    """The configuration of a run of a model size."""
    return load_config(None, [f"model={model}", *overrides])


def check_device(device: torch.device, overrides: list[str], arms: dict[str, Arm], growth_graphs: bool = False) -> None:
    """ConfigError if this device cannot measure so."""
    graphs = [f"arms.{name}: graphs" for name, arm in arms.items() if arm.graphs]
    if device.type != "cuda" and (graphs or growth_graphs):
        raise ConfigError(f"{', '.join([*graphs, *['growth_graphs'] * growth_graphs])} need a GPU; PyTorch sees none")
    try:
        choose(run_config("130m", overrides).ops.backend, device)
    except ValueError as error:
        raise ConfigError(f"overrides: ops.{error}") from None
