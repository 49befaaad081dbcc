"""The host's time for one call of an operator: checks, dispatch, autograd, launch.

Wall time of many calls in a row on inputs so small, (1, 64, 64) with 16 states, that a GPU waits for the host; on a CPU the
kernels' own time is in it. The package is the one that Python finds, so another checkout's is measured by

    PYTHONPATH=<checkout> python experiments/operators/host_time.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import packmamba
from packmamba import SequenceLayout, ops

LENGTH, CHANNELS, STATES = 64, 64, 16
COLUMNS = ("without gradients", "gradients recorded", "backward")


def arguments(device: str) -> dict[str, dict]:
    """Of both operators, all that a Mamba block gives them, and as little as they take."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layout = SequenceLayout.from_lengths([[LENGTH - 24, 24]], row_length=LENGTH).to(device)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    x, delta, z = (draw(1, LENGTH, CHANNELS) for _ in range(3))
    B, C = (draw(1, LENGTH, STATES) for _ in range(2))
    A = (-torch.rand(CHANNELS, STATES, device=device)).requires_grad_()
    skip, bias = (draw(CHANNELS, dtype=torch.float32) for _ in range(2))
    weight, conv_bias = draw(CHANNELS, 4), draw(CHANNELS)
    conv = {"x": x, "weight": weight}
    scan = {"u": x, "delta": delta, "A": A, "B": B, "C": C}
    return {
        "conv1d_pack": conv | {"bias": conv_bias, "activation": "silu", "layout": layout},
        "conv1d_pack, plain": conv,
        "ssm_pack": scan | {"D": skip, "z": z, "delta_bias": bias, "delta_softplus": True, "layout": layout},
        "ssm_pack, plain": scan,
    }


def microseconds(call: Callable[[], object], calls: int, repeats: int) -> float:
    """The median over repeats of a call's share of the wall time of ``calls`` of them."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(50):
        call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def measure(name: str, given: dict, calls: int, repeats: int) -> list[float]:
    operator = getattr(ops, name.split(",")[0])

    def run() -> torch.Tensor:
        return operator(**given)

    with torch.no_grad():
        without = microseconds(run, calls, repeats)
    recorded = microseconds(run, calls, repeats)
    y = run()
    dy = torch.randn_like(y)
    leaves = [value for value in given.values() if isinstance(value, torch.Tensor)]
    backward = microseconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), calls, repeats)
    return [without, recorded, backward]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, one thread"
    print(f"us per call, median of {options.repeats} times {options.calls} calls; {where}; {packmamba.__file__}")
    print(f"{'':20}" + "".join(f"{column:>20}" for column in COLUMNS))
    for name, given in arguments(device).items():
        times = measure(name, given, options.calls, options.repeats)
        print(f"{name:20}" + "".join(f"{value:20.1f}" for value in times), flush=True)


if __name__ == "__main__":
    main()
