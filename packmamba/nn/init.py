"""Modules that know how their parameters start, so that ``reset_parameters`` is right in any order.

Trainers make large models on the device ``meta``, empty them onto GPUs and call
``reset_parameters`` of each module, Lightning and FSDP1 of parents first, ``Module.apply`` of
children first. A parent that corrected its children would be undone by the first. So a projection
knows the depth of its stack, delta's projection its range, and a tied head its embedding.

Draws keep their order and number, those of torch's defaults that are overwritten too: a seed gives
the weights that it gave.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from packmamba.errors import expect

STD = 0.02  # of embeddings and heads (Mamba follows GPT-2)


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Lend a module whole parameters of the default dtype; copy them to its own at the end.

    Without gradients inside. A shard (DTensor) cannot draw what a whole parameter would: on a CPU
    all ranks draw the same numbers, on a GPU others than one process. So each rank draws the whole
    and keeps its part of what rank 0 drew, even if the ranks' seeds differ. A parameter of another
    dtype gets what ``model.to(dtype)`` makes of a fresh one. Costs the module's whole parameters in
    memory.
    """
    lent = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if _is_shard(parameter) or parameter.dtype != torch.get_default_dtype():
                lent.append((part._parameters, name, parameter))
    for parameters, name, parameter in lent:
        parameters[name] = nn.Parameter(torch.empty(parameter.shape, device=parameter.device))
    try:
        with torch.no_grad():
            yield
            for parameters, name, parameter in lent:
                _copy(parameters[name], parameter)
    finally:
        for parameters, name, parameter in lent:
            parameters[name] = parameter


def _is_shard(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")


def _copy(whole: Any, parameter: Any) -> None:
    """Copy values, distributed as the parameter is, and marks such as ``_no_weight_decay``."""
    vars(parameter).update(vars(whole))
    if _is_shard(parameter):
        from torch.distributed.tensor import distribute_tensor  # slow to import

        whole = distribute_tensor(whole.data, parameter.device_mesh, parameter.placements)
    parameter.copy_(whole)


@torch.no_grad()
def dt_bias_(bias: Tensor, dt_min: float, dt_max: float, dt_init_floor: float) -> None:
    """Draw biases that softplus makes log-uniform in [dt_min, dt_max].

    They are at least what it makes dt_init_floor.
    """
    bias.uniform_().mul_(math.log(dt_max) - math.log(dt_min)).add_(math.log(dt_min))
    bias.exp_().clamp_(min=dt_init_floor)
    bias.add_(torch.log(-torch.expm1(-bias)))  # the inverse of softplus


class Embedding(nn.Embedding):
    """Embed tokens; start normal."""

    def reset_parameters(self) -> None:
        """Draw the weight as a new model does."""
        with whole_parameters(self):
            super().reset_parameters()
            nn.init.normal_(self.weight, std=STD)


class Head(nn.Linear):
    """Compute logits; start normal, or as the weight of the embedding that it is tied to."""

    tied_to: tuple[nn.Embedding, ...] = ()  # in a tuple, since a module would become a child

    def tie(self, embedding: nn.Embedding) -> None:
        """Share the embedding's weight, now and at each ``reset_parameters``."""
        self.tied_to = (embedding,)
        self.weight = embedding.weight

    def tie_again(self, *_: Any) -> None:
        """Share the embedding's weight again, where loading made two of it."""
        self.tie(*self.tied_to)

    def reset_parameters(self) -> None:
        """Draw the weight; a tied one, which ``to_empty`` separates, is the embedding's again."""
        if self.tied_to:
            # For the draws of a head alone: a seed gives the weights that it gave.
            Head(self.in_features, self.out_features, bias=False, device=self.weight.device)
            self.tie(*self.tied_to)
            return
        with whole_parameters(self):
            super().reset_parameters()
            nn.init.normal_(self.weight, std=STD)


def check_tied(weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Raise ValueError if a tied model's weights hold another head than the embedding."""
    embedding: Any = weights.get(f"{prefix}backbone.embedding.weight")
    head: Any = weights.get(f"{prefix}lm_head.weight", embedding)
    # One tensor is the same with NaN in it, too, or without values, as on meta.
    same = embedding is None or head.data_ptr() == embedding.data_ptr() or torch.equal(head, embedding)
    expect(same, "lm_head.weight", "the embedding's, to which it is tied", "another; set tie_embeddings=False")


class Projection(nn.Linear):
    """Project between the residual stream and a mixer; alone it starts as nn.Linear."""

    divisor: float | None = None  # of the weight in a stack

    def place_in_stack(self, divisor: float = 1.0) -> None:
        """Zero the bias and divide the weight, now (once) and at each ``reset_parameters``."""
        before = self.divisor or 1.0
        self.divisor = divisor
        self._adapt(before)

    def reset_parameters(self) -> None:
        """Draw the weight as a new model does."""
        with whole_parameters(self):
            super().reset_parameters()
            self._adapt(before=1.0)

    @torch.no_grad()
    def _adapt(self, before: float) -> None:
        if self.divisor is None:
            return
        if self.bias is not None:
            self.bias.zero_()
        self.weight.div_(self.divisor / before)


class DeltaProjection(nn.Linear):
    """Project (..., dt_rank) to delta (..., D), which starts where ``dt_bias_`` says.

    dt: (dt_min, dt_max, dt_init_floor).
    """

    def __init__(self, dt_rank: int, channels: int, dt: tuple[float, float, float]) -> None:
        self.dt = dt  # nn.Linear draws
        super().__init__(dt_rank, channels)

    def reset_parameters(self) -> None:
        """Draw weight and bias so that step sizes lie between dt_min and dt_max."""
        with whole_parameters(self):
            super().reset_parameters()
            bound = self.in_features**-0.5
            nn.init.uniform_(self.weight, -bound, bound)
            dt_bias_(self.bias, *self.dt)
