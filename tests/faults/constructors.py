"""Public constructors and functions with wrong arguments: a good call, one argument of which becomes something else."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packmamba import MambaLM, PackedMamba, SequenceLayout, leakcheck, ops
from packmamba.data.packing import plan_rows
from packmamba.errors import ConfigError, of_machine
from packmamba.evaluation import generate, score
from packmamba.evaluation.tasks import TASKS

LAYOUT = SequenceLayout.from_lengths([[3, 2], [4]], row_length=6)
OTHER = SequenceLayout.from_lengths([[1]], row_length=3)
MODEL = MambaLM(16, 8, 1, d_state=2).eval()
B, L, D, N, W, S = 2, 6, 4, 3, 4, 3


@dataclass(frozen=True)
class Target:
    call: Callable[..., Any]
    good: dict[str, Any]
    also: tuple[str, ...] = ()
    """Other names in its refusals."""


@functools.cache
def targets(backends: tuple[str, ...] = ("reference",)) -> dict[str, Target]:
    """By name. Operators once for each backend."""
    draw = torch.Generator().manual_seed(0)
    device = "cuda" if "cuda" in backends else "cpu"

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    made = {
        "from_lengths": Target(
            SequenceLayout.from_lengths, {"lengths": [[3, 2], [4]], "row_length": 6, "offsets": [[1, 0], [0]]}
        ),
        "from_rows": Target(SequenceLayout.from_rows, {"num_rows": 2, "row_length": 3}),
        "from_position_indices": Target(
            SequenceLayout.from_position_indices, {"position_indices": LAYOUT.position_indices}
        ),
        "from_seq_idx": Target(SequenceLayout.from_seq_idx, {"seq_idx": LAYOUT.seq_idx}),
        "from_cu_seqlens": Target(
            SequenceLayout.from_cu_seqlens,
            {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), "rows": 1, "row_length": 6},
        ),
        "plan_rows": Target(
            plan_rows,
            {
                "lengths": [3, 1, 4],
                "row_length": 8,
                "strategy": "greedy",
                "overlong": "error",
                "buffer": 4,
                "streams": 1,
            },
        ),
        "MambaLM": Target(
            MambaLM, {"vocab_size": 8, "d_model": 8, "n_layer": 1, "d_state": 2, "d_conv": 2, "expand": 2, "dt_rank": 1}
        ),
        "MambaLM options": Target(
            MambaLM,
            {
                "vocab_size": 8,
                "d_model": 8,
                "n_layer": 1,
                "tie_embeddings": True,
                "recompute": "none",
                "mixer": "mamba1",
                "backend": "reference",
            },
        ),
        "PackedMamba": Target(
            PackedMamba,
            {
                "d_model": 8,
                "d_state": 2,
                "dt_min": 0.001,
                "dt_max": 0.1,
                "dt_init_floor": 1e-4,
                "bias": False,
                "conv_bias": True,
            },
        ),
        "model": Target(
            MODEL,
            {
                "tokens": torch.ones(2, 6, dtype=torch.int64),
                "layout": LAYOUT,
                "conv_layout": LAYOUT,
                "ssm_layout": LAYOUT,
                "states": None,
            },
            ("state", "conv_state", "ssm_state"),
        ),
        "score": Target(score, {"model": MODEL, "requests": [([1, 2], [3])], "max_slots": 8, "begin_token": 0}),
        "generate": Target(
            generate,
            {
                "model": MODEL,
                "prompts": [[1, 2]],
                "max_new_tokens": 2,
                "temperature": 0.5,
                "top_p": 0.9,
                "stop_token": None,
                "seed": 0,
            },
        ),
        "leakcheck": Target(
            leakcheck,
            {"model_or_callable": _flat, "boundaries": "position_ids", "vocab_size": 4},
            ("logits", "documents"),
        ),
    }
    for backend in backends:
        made[f"conv1d_pack {backend}"] = Target(
            ops.conv1d_pack,
            {
                "x": random(B, L, D),
                "weight": random(D, W),
                "bias": random(D),
                "activation": "silu",
                "layout": LAYOUT.to(device),
                "initial_state": random(S, D, W - 1),
                "return_final_state": True,
                "backend": backend,
            },
        )
        made[f"ssm_pack {backend}"] = Target(
            ops.ssm_pack,
            {
                "u": random(B, L, D),
                "delta": random(B, L, D),
                "A": -random(D, N).exp(),
                "B": random(B, L, N),
                "C": random(B, L, N),
                "D": random(D),
                "z": random(B, L, D),
                "delta_bias": random(D),
                "delta_softplus": True,
                "layout": LAYOUT.to(device),
                "initial_state": random(S, D, N),
                "return_final_state": True,
                "backend": backend,
            },
        )
    for name, task in TASKS.items():
        if name == "next_line":
            continue  # the standard library takes seconds to read
        defaults = {
            key: value for key, value in _defaults(task).items() if not (name == "next_line" and key == "documents")
        }
        made[f"task {name}"] = Target(lambda task=task, **options: task(**options).example(0, 0), defaults)
        made[f"example of {name}"] = Target(task().example, {"seed": 0, "index": 0})
    return made


def _flat(tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens % 4, 4).float()


def _defaults(task: type) -> dict[str, Any]:
    import inspect

    found = inspect.signature(task).parameters.items()
    return {name: one.default for name, one in found if one.default is not one.empty}


NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**31 - 1,
    2**31,
    2**63,
    10**12,
    10**30,
    0.0,
    0.5,
    -0.5,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
]
THINGS = [
    None,
    True,
    False,
    "",
    "a",
    "auto",
    "cpu",
    "none",
    b"bytes",
    "\0",
    "x" * 300,
    [],
    (),
    {},
    [[]],
    [[[]]],
    [None],
    ["a"],
    [1],
    [[1]],
    [[0]],
    [[-1]],
    [[1.5]],
    [[True]],
    [[10**30]],
    [([], [])],
    [([1], [])],
    [([1], [10**30])],
    [([1], ["a"])],
    [([1], [-1])],
    [(None, [1])],
    [(1, 2)],
    [([1], [2], [3])],
    {"a": 1},
    {1},
    object(),
    ...,
    range(3),
    range(0),
    float("nan"),
    1j,
    iter([1]),
    np.zeros(0),
    np.zeros((2, 3)),
    np.array([1, 2]),
    np.array("a"),
    np.int64(3),
    np.float32(2),
    np.array([1, None], dtype=object),
    OTHER,
    MODEL,
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(0, 0),
    torch.zeros(2, 6),
    torch.zeros(2, 6, dtype=torch.int64),
    torch.full((2, 6), -1),
    torch.full((2, 6), 2**40),
    torch.full((2, 6), 99),
    torch.zeros(2, 6, dtype=torch.bool),
    torch.zeros(2, 6, dtype=torch.complex64),
    torch.zeros(2, 6, 4, dtype=torch.float16),
    torch.zeros(2, 6, 4, dtype=torch.int32),
    torch.zeros(1, 1, 1, 1),
    torch.empty(2, 6, 4, device="meta"),
    torch.zeros(2, 6, 4).to_sparse(),
    torch.zeros(2, 6, 5),
    torch.zeros(3, 6, 4),
    torch.zeros(2, 5, 4),
    torch.zeros(4, 6, 2).transpose(0, 2),
    torch.zeros(4),
    torch.zeros(4, dtype=torch.float64),
    torch.zeros(4, 4),
    torch.zeros(4, 5),
    torch.zeros(4, 1),
    torch.zeros(4, 3),
    torch.zeros(3, 4, 3),
    torch.zeros(3, 4, 2),
    torch.zeros(1).expand(2, 6, 4),
    torch.zeros(4, 300),
    torch.tensor([0, 6, 2]),
    torch.tensor([0, 7]),
    torch.tensor([1, 6]),
    torch.tensor([0, 0, 6]),
]


def changed(value: Any) -> list[Any]:
    """What a good tensor may wrongly become: other shapes, dtypes, strides and devices."""
    if not isinstance(value, torch.Tensor):
        return []
    found = [
        value[:0],
        value[..., :0],
        value[..., :-1],
        value[:1],
        value.unsqueeze(0),
        value.double(),
        value.half(),
        value.to("meta"),
        value.cpu().numpy(),
        value.tolist(),
        torch.cat([value, value]),
        torch.cat([value, value], -1),
        torch.stack([value, value], -1)[..., 0],
        value.to(torch.int32),
        value.bool(),
        value.cfloat(),
        value.flatten(),
        value.unsqueeze(-1),
    ]
    if value.dim() > 1:
        found += [value.transpose(0, -1), value.flip(-1)]
    return found


def problem(target: Target, wrong: Mapping[str, Any]) -> str | None:
    """None, or how the refusal of wrong arguments is none: only ValueError and TypeError that name one are."""
    arguments = {**target.good, **wrong}
    try:
        target.call(**arguments)
    except (ValueError, TypeError) as error:
        text = str(error)
        named = re.search(
            rf"\b({'|'.join([*target.good, *target.also])})\b", text
        )  # a relation may name the other argument
        if not named or isinstance(error, UnicodeError) or type(error) not in (ValueError, TypeError, ConfigError):
            return f"{type(error).__name__}: {text[:200]}"
    except Exception as error:
        if of_machine(error) is not None:
            return None  # there is no such memory
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def every(target: Target) -> list[tuple[str, Any]]:
    """Each argument with each other value; how many tokens to write may be any number."""
    return [
        (name, value)
        for name, good in target.good.items()
        if name != "max_new_tokens"
        for value in [*NUMBERS, *THINGS, *changed(good)]
    ]
