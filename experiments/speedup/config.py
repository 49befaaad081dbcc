"""Configuration of the bench of whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from experiments.speedup.arms import BARE, BREAKDOWN, STEPS, Arm
from packmamba.config import Config as RunConfig
from packmamba.config import key, load_config

PARTS = (BARE, BREAKDOWN, STEPS)
# Of the losses of single tokens, against those of documents alone, in units of their standard deviation. Rounding through 48
# blocks in bfloat16 makes 2.5e-2, and a leak 1.6e-1; through 24, 1e-2 and 5e-2.
TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4}
DISTRIBUTION = "packmamba.data.lengths:LENGTH_DISTRIBUTIONS"


@dataclass
class Config:
    experiment: str = key("speedup", "The question, which the records name.")
    models: list[str] = key(["130m", "1.4b", "2.8b"], "Sizes in configs/model.")
    overrides: list[str] = key([], "key=value of run configurations that hold for all, such as model.compile=true.")
    parts: list[str] = key(
        list(PARTS),
        "forward_backward: the bare loop; breakdown: its kernels; steps: optimizer steps through Lightning.",
        choices=PARTS,
    )
    arms: dict[str, Arm] = key({}, "By name; arms=[single,padded-2048] takes some of the file's.")
    distribution: str = key("documents-2k", "Distribution of the documents' lengths.", choices=DISTRIBUTION)
    documents: int = key(4096, "Documents that every arm arranges.", low=1)
    slots: int = key(16384, "Most slots of a batch, and real tokens of an optimizer step.", low=1)
    batches: int = key(2, "Batches of each arm that stand for all, evenly spread over their sizes.", low=1)
    single_batches: int = key(8, "The same for single, whose batch is a document.", low=1)
    rounds: int = key(3, "How often each arm is timed, in turns.", low=1)
    dtype: str = key("bfloat16", "Of the bare loop's weights; A and D are float32 as in mamba-ssm.", choices=TOLERANCES)
    precision: str = key("bf16-mixed", "Lightning's, of the steps.", choices=("32-true", "bf16-mixed", "bf16-true"))
    num_workers: int = key(2, "Processes that prepare the batches of steps.", low=0)
    peak_flops_per_second: Optional[float] = key(None, "Of which model FLOP utilisation is a share.", above=0)
    seed: int = key(0, "Of lengths, tokens and weights.", low=0)

    def taking_part(self, part: str) -> dict[str, Arm]:
        """Return the arms that take part in a part."""
        return {name: arm for name, arm in self.arms.items() if part in arm.parts}


def run_config(model: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run of a model size."""
    return load_config(None, [f"model={model}", *overrides])
