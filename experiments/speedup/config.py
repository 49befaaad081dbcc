"""What the whole-model benches can be told, and what they refuse before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch

from experiments.speedup.arms import GRAPH, Documents, Scheme, feed
from packmamba.config import ConfigError, load_config
from packmamba.data.lengths import LENGTH_DISTRIBUTIONS
from packmamba.ops.backends import choose
from packmamba.training.fit import check_run

PARTS = ("forward_backward", "breakdown", "steps", "growth")
# Of the losses of single tokens, against those of documents alone, in units of their standard deviation. Rounding through 48
# blocks in bfloat16 makes 2.5e-2, and a leak 1.6e-1; through 24, 1e-2 and 5e-2.
TOLERANCES = {"bfloat16": 5e-2, "float32": 1e-4}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OVERRIDDEN = ("model.", "ops.", "optimizer.")
"""What overrides may begin with: the bench sets the rest itself."""


@dataclass
class SpeedupBenchConfig:
    bench: str = "speedup"
    """Which benchmark this is."""
    experiment: str = "speedup"
    """The question, which the records name."""
    models: list[str] = field(default_factory=lambda: ["130m", "1.4b", "2.8b"])
    """Sizes in configs/model."""
    overrides: list[str] = field(default_factory=list)
    """key=value of run configurations that hold for all, such as model.compile=true."""
    parts: list[str] = field(default_factory=lambda: list(PARTS))
    """forward_backward: the bare loop; breakdown: its kernels; steps: optimizer steps through Lightning; growth."""
    arms: list[str] = field(default_factory=list)
    """Of the bare loop: see experiments.speedup.arms.Scheme. Those of peers that are not installed are left out."""
    breakdown_arms: list[str] = field(default_factory=list)
    """Of the breakdown; some of arms."""
    step_arms: list[str] = field(default_factory=list)
    """Of the steps through Lightning, ours only."""
    distribution: str = "documents-2k"
    """Distribution of the documents' lengths: documents-2k, short or heavy."""
    documents: int = 4096
    """Documents that every arm arranges."""
    slots: int = 16384
    """Most slots of a batch, and real tokens of an optimizer step."""
    batches: int = 2
    """Batches of each arm that stand for all, evenly spread over their sizes."""
    single_batches: int = 8
    """The same for single, whose batch is a document."""
    rounds: int = 3
    """How often each arm is timed, in turns."""
    dtype: str = "bfloat16"
    """Of the bare loop's weights: bfloat16 or float32; A and D are float32 as in mamba-ssm."""
    precision: str = "bf16-mixed"
    """Lightning's, of the steps."""
    peak_flops_per_second: Optional[float] = None
    """What model FLOP utilisation is a share of; null for none."""
    growth_model: str = "130m"
    """Size for growth."""
    row_lengths: list[int] = field(default_factory=lambda: [2048 << i for i in range(7)])
    """Growth: tokens of a packed row."""
    growth_graphs: bool = False
    """Growth: as CUDA graphs, where the host would be the limit."""
    mean_lengths: list[int] = field(default_factory=lambda: [64 << i for i in range(8)])
    """Growth: mean document length in a row of slots tokens."""
    seed: int = 0
    """Of lengths, tokens and weights."""


def check(c: SpeedupBenchConfig, device: torch.device, step_key: str = "step_arms") -> list[Scheme]:
    """The arms' schemes. Raises ConfigError naming the key, ``step_key`` for arms of steps."""
    for key, known, values in [
        ("parts", PARTS, c.parts),
        ("dtype", TOLERANCES, [c.dtype]),
        ("precision", PRECISIONS, [c.precision]),
        ("distribution", LENGTH_DISTRIBUTIONS, [c.distribution]),
    ]:
        if unknown := [value for value in values if value not in known]:
            raise ConfigError(f"{key}: expected of {', '.join(known)}, got {unknown[0]!r}")
    for key in ("documents", "slots", "batches", "single_batches", "rounds", "row_lengths", "mean_lengths"):
        value = getattr(c, key)
        if (least := min(value, default=1) if isinstance(value, list) else value) < 1:
            raise ConfigError(f"{key}: expected at least 1, got {least}")
    schemes, step_schemes = _schemes("arms", c.arms, c), _schemes(step_key, c.step_arms, c)
    if peers := [scheme.name for scheme in step_schemes if scheme.peer]:
        raise ConfigError(f"{step_key}: expected arms of ours, got {peers[0]!r}")
    if unknown := [arm for arm in c.breakdown_arms if arm not in c.arms]:
        raise ConfigError(f"breakdown_arms: expected of arms ({', '.join(c.arms) or 'none'}), got {unknown[0]!r}")
    for key in ("models", "parts", "arms", "breakdown_arms", "step_arms"):
        values = getattr(c, key)
        if twice := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"{key}: expected each once, got {twice[0]!r} {values.count(twice[0])} times")
    bare = c.arms and {"forward_backward", "breakdown"} & set(c.parts)
    if not c.models or not (bare or "growth" in c.parts or (c.step_arms and "steps" in c.parts)):
        raise ConfigError(
            "models, parts, arms, step_arms: expected something to do, got none of a model's arms in a part"
        )
    if c.peak_flops_per_second is not None and not 0 < c.peak_flops_per_second < float("inf"):
        raise ConfigError(f"peak_flops_per_second: expected above 0 or null, got {c.peak_flops_per_second}")
    if device.type != "cuda" and (c.growth_graphs or any(arm.endswith(GRAPH) for arm in [*c.arms, *c.step_arms])):
        raise ConfigError(f"growth_graphs and arms that end with {GRAPH} need a GPU; PyTorch sees none")
    _check_models(c, device)
    return schemes


def _schemes(key: str, arms: Sequence[str], c: SpeedupBenchConfig) -> list[Scheme]:
    longest = Documents(np.array([LENGTH_DISTRIBUTIONS[c.distribution].longest]), 1, 0)
    try:
        schemes = [Scheme.parse(arm) for arm in arms]
        for scheme in schemes:
            if (scheme.row_length or 1) > c.slots:
                raise ConfigError(f"{scheme.name}: expected rows of at most slots={c.slots}")
            feed(longest, scheme, c.slots)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    return schemes


def _check_models(c: SpeedupBenchConfig, device: torch.device) -> None:
    for override in c.overrides:
        if not override.startswith(OVERRIDDEN):
            raise ConfigError(f"overrides: expected model.<key>=, ops.<key>= or optimizer.<key>=, got '{override}'")
    for name in dict.fromkeys([*c.models, c.growth_model]):
        config = load_config(None, [f"model={name}", *c.overrides])
        config.seed, config.trainer.precision = c.seed, c.precision
        if config.model.vocab_size is None:
            raise ConfigError("overrides: model.vocab_size: expected a number, got null")
        check_run(config)
    try:
        choose(config.ops.backend, device)
    except ValueError as error:
        raise ConfigError(f"overrides: ops.{error}") from None
