"""Time the Mamba-3 mixer beside mamba-ssm's, and write one JSON file.

python -m experiments.operators.mamba3_peer FILE      needs a GPU and mamba-ssm

SISO, one row of 16,384 tokens, float32 weights under bfloat16 autocast, forward and backward,
projections included. Small mixers of the same weights are first held against ours in float64,
mamba-ssm's on one document alone.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mamba_ssm.modules.mamba3 import Mamba3
from torch import Tensor

from experiments import timing
from experiments.operators.gpu import draw_rows
from experiments.operators.gpu_implementations import relative_error
from packmamba import PackedMamba3, SequenceLayout
from packmamba.lab.records import provenance

TOKENS, D_MODEL, ROUNDS = 16384, 2048, 10
CHECKED, WIDTH = 2048, 512
TOLERANCE = 5e-2  # mamba-ssm approximates sines, and sums angles in chunks


def passes(mixer: Any, u: Tensor, **documents: Any) -> list[Tensor]:
    """Return the output, and the gradients of the input and of in_proj's weight."""
    with torch.autocast("cuda", torch.bfloat16, enabled=u.is_cuda):
        y = mixer(u, **documents)
    return [y, *torch.autograd.grad(y.float().square().sum(), [u, mixer.in_proj.weight])]


def draw(tokens: int, width: int) -> Tensor:
    return torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))


def check(found: dict[str, Any]) -> None:
    """Hold small mixers against ours in float64 on the CPU. RuntimeError if one is wrong."""
    ours, peer, wide = PackedMamba3(WIDTH, decay="softplus"), Mamba3(WIDTH), PackedMamba3(WIDTH, decay="softplus")
    for mixer in (peer, wide):
        mixer.load_state_dict(ours.state_dict())
    wide.double()
    u = draw(CHECKED, WIDTH)
    for documents in ("one", "300"):
        layout = SequenceLayout.from_lengths(draw_rows(documents, CHECKED, 1, 0), CHECKED)
        expected = passes(wide, u.double().requires_grad_(), layout=layout)
        arms = {"ours": partial(passes, ours.cuda(), layout=layout.to("cuda"))}
        if documents == "one":
            arms["mamba-ssm"] = partial(passes, peer.cuda())
        for name, call in arms.items():
            results = [result.cpu() for result in call(u.cuda().requires_grad_())]
            found[f"errors of {name}, {documents}"] = errors = list(map(relative_error, results, expected))
            if not max(errors) <= TOLERANCE:
                raise RuntimeError(f"{name}, {documents}: output and gradients are off by {errors}; nothing is timed")


def main(path: str) -> None:
    found: dict[str, Any] = {"what": __doc__, **provenance()}
    check(found)
    ours, peer = PackedMamba3(D_MODEL, decay="softplus").cuda(), Mamba3(D_MODEL).cuda()
    one, packed = (
        SequenceLayout.from_lengths(draw_rows(of, TOKENS, 1, 0), TOKENS).to("cuda") for of in ("one", "documents-2k")
    )
    u = draw(TOKENS, D_MODEL).cuda().requires_grad_()
    calls = {
        "ours, packed": partial(passes, ours, u, layout=packed),
        "ours compiled, packed": partial(passes, torch.compile(ours), u, layout=packed),
        "ours compiled, one document": partial(passes, torch.compile(ours), u, layout=one),
        "mamba-ssm, one document": partial(passes, peer, u),
        "mamba-ssm, packed": partial(passes, peer, u, cu_seqlens=packed.cu_seqlens),
    }
    arms = {name: lambda _, call=call: timing.seconds(call, "cuda") * 1e3 for name, call in calls.items()}
    for name, taken in timing.take_turns(arms, ROUNDS, warm_up=3).items():
        found[f"{name}, milliseconds and interquartile range"] = [timing.median(taken), timing.spread(taken)]
    found["documents"] = packed.num_documents
    print(json.dumps(found, indent=1))
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
