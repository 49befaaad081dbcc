"""The host's time for one eager call of an operator: checks, dispatch, autograd, launch.

Inputs are so small, (1, 64, 64) with 16 states, that a GPU waits for the host; on a CPU the kernels' own time is in it.
Activations are bfloat16 on a GPU and float32 on a CPU, parameters float32. Of many calls in a row, a call's share:

    forward      without gradients
    recorded     forward, with what a backward needs
    backward     one pass back through all recorded calls, each with inputs of its own, as in training
    floor        the same for an empty torch.autograd.Function of as many inputs, which saves and returns them
    one_by_one   torch.autograd.grad of one call at a time: starting PyTorch's engine is in it, and changing threads on a GPU
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from packmamba import SequenceLayout, ops, timing
from packmamba.config import at_least, key
from packmamba.ops.mamba_ssm import _peer as find_peer
from packmamba.records import append_record, make_record, provenance

LENGTH = CHANNELS = 64  # so that channels first or last is one shape
STATES = 16
PHASES = ("forward", "recorded", "backward", "floor", "one_by_one")


@dataclass(frozen=True)
class Arm:
    """What the table compares; its records hold these fields."""

    operator: str
    """scan or conv."""
    arguments: str = "all"
    """all that a Mamba block gives the operator, or as few as it takes."""
    implementation: str = "packmamba"


PEERS = {"conv": "causal-conv1d", "scan": "mamba-ssm"}
OURS = {"conv": Arm("conv"), "conv-few": Arm("conv", "few"), "scan": Arm("scan"), "scan-few": Arm("scan", "few")}
ARMS = OURS | {
    f"{name}-{PEERS[arm.operator]}": replace(arm, implementation=PEERS[arm.operator]) for name, arm in OURS.items()
}
"""Ours, and the peers' functions where they are installed, without documents, which they do not know."""


@dataclass
class Config:
    experiment: str = key("operators", "The question, which the records name.")
    calls: int = key(1000, "Calls in a row that are timed as one.", at_least(1))
    rounds: int = key(5, "How often they are timed, arms in turns.", at_least(1))
    seed: int = key(0, "Of the inputs.", at_least(0))


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Appends one record for each arm: seconds of one call, medians and interquartile ranges, of each of ``PHASES``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    provenance()
    arms = {name: arm for name, arm in ARMS.items() if _is_here(arm, device)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(c.seed)
    try:
        turns = {
            f"{name} {phase}": (lambda turn, measure=measure: measure() / c.calls)
            for name, arm in arms.items()
            for phase, measure in _phases(arm, c.calls, device).items()
        }
        times = timing.take_turns(turns, c.rounds, bar="host time" if progress else None)
    finally:
        torch.set_num_threads(threads)
    for name, arm in arms.items():
        metrics: dict[str, float] = {}
        for phase in PHASES:
            found = times[f"{name} {phase}"]
            metrics |= {f"{phase}_seconds": timing.median(found), f"{phase}_spread": timing.spread(found)}
        record = make_record(
            kind="host_time",
            experiment=c.experiment,
            arm=name,
            config={**asdict(arm), "device": device.type, "calls": c.calls, "rounds": c.rounds},
            seed=c.seed,
            corpus_hash=f"one row of {LENGTH} tokens, {CHANNELS} channels, {STATES} states",
            metrics=metrics,
            wall_seconds=sum(map(sum, times.values())),
        )
        append_record(records_path, record)


def _is_here(arm: Arm, device: torch.device) -> bool:
    """Whether an arm can run; a peer that is missing on a GPU is named."""
    if arm in OURS.values():
        return True
    try:
        return device.type == "cuda" and bool(_peer(arm.operator))
    except ValueError as error:
        print(f"left out: {arm.implementation} ({arm.arguments} arguments): {error}", file=sys.stderr)
        return False


def _peer(operator: str) -> Callable[..., Tensor]:
    if operator == "conv":
        return find_peer("causal_conv1d", "causal_conv1d_interface", "causal_conv1d_fn")
    return find_peer("mamba_ssm", "ops.selective_scan_interface", "selective_scan_fn")


class Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def _phases(arm: Arm, calls: int, device: torch.device) -> dict[str, Callable[[], float]]:
    """What measures each phase: seconds of all calls."""
    operator, given = _operator(arm, device)
    leaves = [value for value in given.values() if isinstance(value, Tensor)]
    y = operator(**given)
    dy = torch.ones_like(y)

    def seconds(work: Callable[[], Any]) -> float:
        gc.disable()
        try:
            return timing.seconds(work, device)
        finally:
            gc.enable()

    def many(call: Callable[[], Any], gradients: bool = True) -> float:
        def work() -> None:
            with torch.set_grad_enabled(gradients):
                for _ in range(calls):
                    call()

        return seconds(work)

    def one_pass(function: Callable[..., Tensor]) -> float:
        outputs, inputs = [], []
        for _ in range(calls):
            own = {n: v.detach().requires_grad_() if isinstance(v, Tensor) else v for n, v in given.items()}
            outputs.append(function(**own))
            inputs += [v for v in own.values() if isinstance(v, Tensor)]
        return seconds(lambda: torch.autograd.grad(outputs, inputs, [dy] * calls))

    def floor(**own: Any) -> Tensor:
        return Floor.apply(*(v for v in own.values() if isinstance(v, Tensor)))

    return {
        "forward": lambda: many(lambda: operator(**given), gradients=False),
        "recorded": lambda: many(lambda: operator(**given)),
        "backward": lambda: one_pass(operator),
        "floor": lambda: one_pass(floor),
        "one_by_one": lambda: many(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)),
    }


def _operator(arm: Arm, device: torch.device) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The public operator and its arguments."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    ours = arm.implementation == "packmamba"
    wide = torch.float32 if ours else dtype  # the peer's convolution takes a weight of the activations' dtype
    x, delta, z = (draw(1, LENGTH, CHANNELS, dtype=dtype) for _ in range(3))
    few: dict[str, Any]
    more: dict[str, Any]
    if arm.operator == "conv":
        few = {"x": x, "weight": draw(CHANNELS, 4, dtype=wide)}
        more = {"bias": draw(CHANNELS, dtype=wide), "activation": "silu"}
    else:
        B, C = (draw(1, *((LENGTH, STATES) if ours else (STATES, LENGTH)), dtype=dtype) for _ in range(2))
        A = (-torch.rand(CHANNELS, STATES, device=device)).requires_grad_()
        few = {"u": x, "delta": delta, "A": A, "B": B, "C": C}
        more = {"D": draw(CHANNELS), "z": z, "delta_bias": draw(CHANNELS), "delta_softplus": True}
    if not ours:
        return _peer(arm.operator), few if arm.arguments == "few" else few | more
    layout = SequenceLayout.from_lengths([[LENGTH - 24, 24]], row_length=LENGTH).to(device)
    operator = ops.conv1d_pack if arm.operator == "conv" else ops.ssm_pack
    return operator, few if arm.arguments == "few" else few | more | {"layout": layout}
