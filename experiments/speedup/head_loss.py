"""Time the loss of a 130M model's head, forward and both gradients, in three forms; write one JSON
file.

python -m experiments.speedup.head_loss FILE TOKENS...      needs a GPU

The forms are PyTorch's operators, the same compiled, and the kernel. They run in turns, each held
against float64 first.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import timing
from experiments.operators.gpu_implementations import relative_error
from packmamba.lab.records import provenance
from packmamba.nn import loss, loss_triton

D_MODEL, VOCABULARY, ROUNDS = 768, 50280, 15
CHECKED, TOLERANCE = 256, 1e-2
FORMS = {
    "operators": loss._chunk,
    "compiled": torch.compile(loss._chunk, dynamic=True),
    "kernel": loss_triton.chunk_losses_and_gradient,
}


def draw(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw hidden states, the head's weights and targets, rounded to bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, tokens, D_MODEL, generator=generator, device="cuda")
    weight = torch.randn(VOCABULARY, D_MODEL, generator=generator, device="cuda") / 30
    leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (hidden, weight)]
    return [*leaves, torch.randint(VOCABULARY, (1, tokens), generator=generator, device="cuda")]


def results(form: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return the losses and both gradients."""
    loss._compute_on = lambda *_: FORMS[form]
    hidden, weight, targets = inputs
    has_target = torch.ones_like(targets, dtype=torch.bool)
    total, losses = loss.linear_cross_entropy(hidden, weight, targets, mask=has_target)
    return [losses, *torch.autograd.grad(total, [hidden, weight])]


def main(path: str, *lengths: str) -> None:
    expected = results("operators", draw(CHECKED, torch.float64))
    found: dict[str, Any] = {"what": __doc__, **provenance()}
    for form in FORMS:
        errors = list(map(relative_error, results(form, draw(CHECKED, torch.bfloat16)), expected))
        if not max(errors) <= TOLERANCE:
            raise RuntimeError(f"{form}: losses and gradients are off by {errors}; nothing is timed")
        found[f"errors of {form}"] = errors
    for tokens in map(int, lengths):
        inputs = draw(tokens, torch.bfloat16)
        calls = {form: partial(results, form, inputs) for form in FORMS}
        arms = {form: lambda _, call=call: timing.seconds(call, "cuda") * 1e3 for form, call in calls.items()}
        times = timing.take_turns(arms, ROUNDS, warm_up=3)
        row = {form: [timing.median(taken), timing.spread(taken)] for form, taken in times.items()}
        found[f"{tokens} tokens, milliseconds and interquartile range"] = row
        print(tokens, row, flush=True)
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
