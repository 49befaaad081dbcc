"""The host's time for one call of an operator: checks, dispatch, autograd, launch.

Wall time of 1000 calls in a row on inputs so small, (1, 64, 64) with 16 states, that a GPU waits for the host; on a CPU the
kernels' own time is in it. Activations are bfloat16 on a GPU and float32 on a CPU, parameters float32. The columns:

    forward      without gradients
    recorded     forward, with what a backward needs
    backward     a call's share of one pass back through all recorded calls, each with inputs of its own, as in training
    floor        the same for an empty torch.autograd.Function of as many inputs, which saves and returns them
    one by one   torch.autograd.grad of one call at a time: starting PyTorch's engine is in it, and changing threads on a GPU

The package is the one that Python finds, so another checkout's is measured by

    PYTHONPATH=<checkout> python experiments/operators/host_time.py
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import packmamba
from packmamba import SequenceLayout, ops

LENGTH, CHANNELS, STATES = 64, 64, 16
COLUMNS = ("forward", "recorded", "backward", "floor", "one by one")


class Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


def arguments(device: str) -> dict[str, dict]:
    """Of both operators: all that a Mamba block gives them, and as little as they take."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layout = SequenceLayout.from_lengths([[LENGTH - 24, 24]], row_length=LENGTH).to(device)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    x, delta, z = (draw(1, LENGTH, CHANNELS, dtype=dtype) for _ in range(3))
    B, C = (draw(1, LENGTH, STATES, dtype=dtype) for _ in range(2))
    A = (-torch.rand(CHANNELS, STATES, device=device)).requires_grad_()
    weight, conv_bias, skip, bias = draw(CHANNELS, 4), draw(CHANNELS), draw(CHANNELS), draw(CHANNELS)
    conv = {"x": x, "weight": weight}
    scan = {"u": x, "delta": delta, "A": A, "B": B, "C": C}
    return {
        "conv1d_pack": conv | {"bias": conv_bias, "activation": "silu", "layout": layout},
        "conv1d_pack, plain": conv,
        "ssm_pack": scan | {"D": skip, "z": z, "delta_bias": bias, "delta_softplus": True, "layout": layout},
        "ssm_pack, plain": scan,
    }


def seconds(work: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    gc.collect()
    gc.disable()
    wait()
    start = time.perf_counter()
    work()
    wait()
    taken = time.perf_counter() - start
    gc.enable()
    return taken


def many(call: Callable[[], object], calls: int) -> float:
    def work() -> None:
        for _ in range(calls):
            call()

    return seconds(work)


def one_pass(operator: Callable[..., Tensor], given: dict, calls: int) -> float:
    outputs, leaves = [], []
    for _ in range(calls):
        own = {n: v.detach().requires_grad_() if isinstance(v, Tensor) else v for n, v in given.items()}
        outputs.append(operator(**own))
        leaves += [v for v in own.values() if isinstance(v, Tensor)]
    grads = [torch.ones_like(outputs[0])] * calls
    return seconds(lambda: torch.autograd.grad(outputs, leaves, grads))


def measure(name: str, given: dict, calls: int, repeats: int) -> list[float]:
    """Microseconds a call, by COLUMNS: medians over repeats, after one that does not count."""
    operator = getattr(ops, name.split(",")[0])
    leaves = [value for value in given.values() if isinstance(value, Tensor)]
    y = operator(**given)
    dy = torch.ones_like(y)

    def call() -> Tensor:
        return operator(**given)

    works: list[Callable[[], float]] = [
        lambda: torch.no_grad()(many)(call, calls),
        lambda: many(call, calls),
        lambda: one_pass(operator, given, calls),
        lambda: one_pass(lambda **own: Floor.apply(*(v for v in own.values() if isinstance(v, Tensor))), given, calls),
        lambda: many(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), calls),
    ]
    rounds = [[work() / calls * 1e6 for work in works] for _ in range(repeats + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's time for one call of an operator.")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"us per call, median of {options.repeats} times {options.calls} calls; {where}; {packmamba.__file__}")
    print(f"{'':20}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, given in arguments(device).items():
        times = measure(name, given, options.calls, options.repeats)
        print(f"{name:20}" + "".join(f"{value:12.1f}" for value in times), flush=True)


if __name__ == "__main__":
    main()
