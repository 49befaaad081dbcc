"""Optimizers by name, gradient clipping and the learning rate of a step.

Clipping happens inside ``optimizer.step`` (a hook), so that a loss scale is removed first and a
fused optimizer divides while it reads the gradients, instead of writing them once more.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from packmamba.config import OptimizerConfig, refusing
from packmamba.nn import MambaLM


def adamw(model: MambaLM, config: OptimizerConfig, fused: bool, eps: float = 1e-8) -> Optimizer:
    """Make AdamW (arXiv 1711.05101)."""
    groups = model.weight_decay_groups(config.weight_decay)
    betas: Any = tuple(config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=eps, fused=fused)


class Joint(Optimizer):
    """Step several optimizers as one, each with parameters of its own.

    Groups and state are shared with the parts, so that a schedule sets all learning rates and a
    checkpoint holds all states.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        # The same dictionaries: a schedule that sets a group's rate sets the part's.
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parts."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Step each part, after the closure."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def muon(
    model: MambaLM, config: OptimizerConfig, fused: bool, momentum: float = 0.95, ns_steps: int = 5
) -> Optimizer:
    """Make Muon (Jordan et al., 2024) for the projections of layers, and AdamW for all else.

    Updates of Muon have the root mean square of AdamW's (arXiv 2502.16982), so that both take the
    learning rate and the weight decay that AdamW had.
    """
    projections = {module.weight for module in model.backbone.layers.modules() if isinstance(module, nn.Linear)}
    rest = []
    for group in model.weight_decay_groups(config.weight_decay):
        # Of all other parameters; norms, biases, embedding and head among them.
        rest.append(group | {"params": [weight for weight in group["params"] if weight not in projections]})
    # In the model's order, since a set has none: checkpoints number parameters.
    in_order = [weight for weight in model.parameters() if weight in projections]
    of_muon: Any = {"momentum": momentum, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
    matrices = torch.optim.Muon(in_order, lr=config.lr, weight_decay=config.weight_decay, **of_muon)
    return Joint(matrices, torch.optim.AdamW(rest, lr=config.lr, betas=(config.betas[0], config.betas[1])))


# Values of ``optimizer.name``: functions (model, config, fused, **optimizer.options) -> optimizer.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "muon": muon}


def make_optimizer(model: MambaLM, config: OptimizerConfig, fused: bool) -> Optimizer:
    """Make the configured optimizer, which clips gradients when it steps."""
    with refusing(TypeError, ValueError, prefix="optimizer.options: "):
        optimizer = OPTIMIZERS[config.name](model, config, fused, **config.options)
    if (limit := config.grad_clip) is not None:  # after a loss scale is removed
        optimizer.register_step_pre_hook(lambda optimizer, *_: clip(optimizer, limit))
    return optimizer


def clip(optimizer: Optimizer, limit: float) -> None:
    """Scale gradients to a norm of at most ``limit``; keep it as ``gradient_norm``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.gradient_norm = clip_grad_norm_(parameters, limit)  # type: ignore[attr-defined]


# Values of ``optimizer.schedule``: functions (config, progress after the warm-up, step from 1) ->
# height.
#
# Progress and height go from 0 to 1; a height of 0 is ``final_lr_fraction`` of the peak.
SCHEDULES: dict[str, Callable[[OptimizerConfig, float, int], float]] = {
    "cosine": lambda config, progress, step: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda config, progress, step: 1 - progress,
    "constant": lambda config, progress, step: 1.0,
    # At the peak, then along a line in the last ``decay_fraction`` of the steps after the warm-up
    # (warm-up, stable, decay: arXiv 2404.06395).
    "wsd": lambda config, progress, step: min(1.0, (1 - progress) / max(config.decay_fraction, 1e-9)),
    # In units of the warm-up (arXiv 1706.03762).
    "inverse_sqrt": lambda config, progress, step: math.sqrt(max(config.warmup_steps, 1) / max(step, 1)),
}


def learning_rate(config: OptimizerConfig, step: int, steps: float) -> float:
    """Return the learning rate of a step, from 0: linear warm-up, then ``optimizer.schedule``."""
    if step < config.warmup_steps:
        # The first step already has a rate above zero; warm-up ends at the peak.
        return config.lr * (step + 1) / config.warmup_steps
    # The last step has progress 1.
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    height = SCHEDULES[config.schedule](config, min(progress, 1.0), step + 1)
    last = config.final_lr_fraction
    return config.lr * (last + (1 - last) * height)
