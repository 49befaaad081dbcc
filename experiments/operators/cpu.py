"""The packed operators, forward and backward: ours, the reference and transformers' slow path, beside the machine's rates."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from packmamba import SequenceLayout, ops
from packmamba.config import ConfigError
from packmamba.ops import build
from packmamba.ops.registered import room_like
from packmamba.ops.scan.compiled import scan_room
from packmamba.records import append_record, make_record, provenance

ARMS = ("cpu", "cpu-kernels", "reference", "transformers")
SLOW_ARMS = ARMS[2:]
# ||a - b|| / ||b|| against float64, of outputs and of gradients.
TOLERANCES = {"float32": (1e-5, 5e-5), "bfloat16": (2e-3, 5e-3), "float64": (1e-9, 1e-9)}
# Per token, channel and state. Forward: delta A, delta u B, the step, y. Backward: the first three again, y for the gate,
# and dC, dh, dB, sum dh B, carry, carry h, sum A, dA.
MULTIPLY_ADDS, EXPONENTIALS = 4 + 4 + 8, 2

Arm = Callable[[], dict[str, Tensor]]


@dataclass
class OperatorsBenchConfig:
    bench: str = "operators"
    """Which benchmark this is."""
    experiment: str = "operators"
    """The question, which the records name."""
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    """cpu: compiled, through the public operators; cpu-kernels: the same into memory that is there; reference; transformers."""
    tokens: int = 4096
    """Tokens of the scan's one row, all real."""
    shortest: int = 16
    """Shortest document; lengths are drawn log-uniformly."""
    longest: int = 1024
    """Longest document."""
    channels: int = 512
    """Channels of the scan (d_inner)."""
    states: int = 16
    """States per channel (d_state)."""
    conv_tokens: int = 8192
    """Tokens of the convolution's row; its tensors should be larger than the last-level cache."""
    conv_channels: int = 2048
    """Channels of the convolution."""
    dtype: str = "float32"
    """Type of the activations: float32, bfloat16 or float64."""
    threads: int = 2
    """CPU threads of every arm."""
    rounds: int = 11
    """Timings of each compiled arm, in turns."""
    slow_rounds: int = 2
    """Timings of the reference and of transformers, which take seconds to minutes, within the first rounds."""
    seed: int = 0
    """Seed of lengths and values."""


Config = OperatorsBenchConfig


def run(config: OperatorsBenchConfig | Mapping[str, Any], records_path: Path, progress: bool = True) -> None:
    """Appends one record for each operator and arm: forward and backward, gradients of every input.

    metrics: seconds_median, seconds_spread (interquartile range), seconds_fastest, rounds, bound_seconds (the scan: what its
    multiply-adds and exponentials take at the measured vector rates; the convolution: its bytes at the measured rate of
    copying, into new memory except for cpu-kernels), and the rates.

    Raises:
        ConfigError: a value is refused; nothing has been measured.
        RuntimeError: an arm is wrong, or faster than the measured rates allow; nothing of that operator is recorded.
    """
    c = config if isinstance(config, OperatorsBenchConfig) else OperatorsBenchConfig(**config)
    _check_config(c)
    build.load("cpu")
    provenance()
    threads = torch.get_num_threads()
    torch.set_num_threads(c.threads)
    try:
        for operator, prepare in (("ssm_pack", _scan), ("conv1d_pack", _convolution)):
            _run_operator(c, operator, prepare, records_path, progress)
    finally:
        torch.set_num_threads(threads)


def _run_operator(
    c: OperatorsBenchConfig,
    operator: str,
    prepare: Callable[[OperatorsBenchConfig], tuple[dict[str, Arm], dict[str, Tensor]]],
    records_path: Path,
    progress: bool,
) -> None:
    arms, expected = prepare(c)
    for name, arm in arms.items():
        _check_results(f"{operator}, {name}", arm(), expected, c.dtype)
    rates: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with tqdm(total=c.rounds, desc=operator, disable=not progress) as bar:
        for turn in range(c.rounds):
            # What the machine can do is the best of all turns: measured once, it may be what other processes left of it.
            rates = {name: max(rate, rates.get(name, 0)) for name, rate in machine_rates().items()}
            for name, arm in arms.items():
                if turn >= c.slow_rounds and name in SLOW_ARMS:
                    continue
                began = time.perf_counter()
                arm()
                seconds[name].append(time.perf_counter() - began)
            bar.update()
    for name, times in seconds.items():
        if min(times) < _bound(c, operator, name, rates):
            raise RuntimeError(
                f"{operator}, {name}: faster than the machine's measured rates allow, so these were disturbed; "
                "nothing is recorded: run it again on an idle machine"
            )
    for name, times in seconds.items():
        quartiles = statistics.quantiles(times, n=4, method="inclusive")
        metrics = {
            "seconds_median": statistics.median(times),
            "seconds_spread": quartiles[2] - quartiles[0],
            "seconds_fastest": min(times),
            "rounds": len(times),
            "bound_seconds": _bound(c, operator, name, rates),
            **rates,
        }
        settings = {
            key: value for key, value in asdict(c).items() if key not in ("bench", "experiment", "arms", "seed")
        }
        record = make_record(
            kind="operators",
            experiment=c.experiment,
            arm=name,
            config={"operator": operator, **settings},
            seed=c.seed,
            corpus_hash=f"log-uniform lengths in [{c.shortest}, {c.longest}]",
            metrics=metrics,
            wall_seconds=sum(times),
        )
        append_record(records_path, record)


def machine_rates(rounds: int = 3) -> dict[str, float]:
    """What this machine does with the current number of threads, each the best of ``rounds``.

    float32 multiply-adds and exponentials per second from registers; bytes read and written per second by copying 64 MiB
    into memory that is there and into new memory (whose pages the system must first find and clear).
    """
    kernels = torch.ops.packmamba_cpu
    threads, lanes, repeats = torch.get_num_threads(), kernels.float32_lanes(), 50_000
    sink = torch.zeros(threads * lanes)
    source = torch.randn(2**24)
    there = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()

    def fastest(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return min(times)

    def best_rate(operation: Callable[[int, int, Tensor], None]) -> float:
        # How many chains are best depends on the registers.
        done = threads * lanes * repeats
        return max(n * done / fastest(partial(operation, repeats, n, sink)) for n in (4, 8, 12, 16))

    return {
        "multiply_adds_per_second": best_rate(kernels.multiply_adds),
        "exponentials_per_second": best_rate(kernels.exponentials),
        "copy_bytes_per_second": moved / fastest(lambda: there.copy_(source)),
        "copy_to_new_bytes_per_second": moved / fastest(source.clone),
    }


def _bound(c: OperatorsBenchConfig, operator: str, arm: str, rates: dict[str, float]) -> float:
    if operator == "ssm_pack":
        elements = c.tokens * c.channels * c.states
        multiply_adds = MULTIPLY_ADDS / rates["multiply_adds_per_second"]
        return elements * (multiply_adds + EXPONENTIALS / rates["exponentials_per_second"])
    # Forward reads x and writes y; backward reads x and dy and writes dx.
    moved = 5 * c.conv_tokens * c.conv_channels * getattr(torch, c.dtype).itemsize
    return moved / rates["copy_bytes_per_second" if arm == "cpu-kernels" else "copy_to_new_bytes_per_second"]


def draw_documents(c: OperatorsBenchConfig, tokens: int) -> SequenceLayout:
    """One full row of documents, log-uniform between the shortest and the longest; the last is cut to fit."""
    generator = np.random.Generator(np.random.PCG64(c.seed))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(np.exp(generator.uniform(np.log(c.shortest), np.log(c.longest + 1))))
        lengths.append(min(length, tokens - sum(lengths)))
    return SequenceLayout.from_lengths([lengths], row_length=tokens)


def _scan(c: OperatorsBenchConfig) -> tuple[dict[str, Arm], dict[str, Tensor]]:
    layout = draw_documents(c, c.tokens)
    normal = _normal(c)
    wide = torch.float64 if c.dtype == "float64" else torch.float32
    u, z = normal(1, c.tokens, 2 * c.channels).split(c.channels, dim=-1)
    B, C = normal(1, c.tokens, 2 * c.states).split(c.states, dim=-1)
    leaves = {
        "u": u,
        "delta": normal(1, c.tokens, c.channels),
        "A": -torch.arange(1, c.states + 1, dtype=wide).repeat(c.channels, 1),
        "B": B,
        "C": C,
        "D": torch.ones(c.channels, dtype=wide),
        "z": z,
        "delta_bias": normal(c.channels).to(wide) - 3,
    }
    dy = normal(1, c.tokens, c.channels)

    def kernels() -> Arm:
        t, options = leaves, (True, layout.starts, layout.ends, None)
        inputs = (*(t[n] for n in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")), *options)
        y, _, kept = scan_room(t["u"], t["A"], layout.starts, False, True)
        gradients = [room_like(tensor) for tensor in inputs[:8]]

        def call() -> dict[str, Tensor]:
            torch.ops.packmamba_cpu.ssm_forward(*inputs, y, None, kept)
            torch.ops.packmamba_cpu.ssm_backward(dy, None, *inputs, kept, *gradients, None)
            return {"y": y} | {f"grad {n}": g for n, g in zip(t, gradients)}

        return call

    def public(backend: str) -> Arm:
        return _differentiated(
            lambda t: ops.ssm_pack(**t, delta_softplus=True, layout=layout, backend=backend), leaves, dy
        )

    arms = {"cpu": public("cpu"), "cpu-kernels": kernels(), "reference": public("reference")}
    if "transformers" in c.arms:
        scan = _transformers("mamba_selective_scan")

        def one(t: dict[str, Tensor], s: slice) -> Tensor:
            rows = {n: t[n][:, s].transpose(1, 2) for n in ("u", "delta", "B", "C", "z")}
            first = (rows["u"], rows["delta"], t["A"], rows["B"], rows["C"])
            return scan(*first, D=t["D"], z=rows["z"], delta_bias=t["delta_bias"], delta_softplus=True)

        arms["transformers"] = _differentiated(lambda t: _by_document(layout, one, t), leaves, dy)
    exact = {name: tensor.double() for name, tensor in leaves.items()}
    reference = _differentiated(
        lambda t: ops.ssm_pack(**t, delta_softplus=True, layout=layout, backend="reference"), exact, dy.double()
    )
    return {name: arms[name] for name in c.arms}, reference()


def _convolution(c: OperatorsBenchConfig) -> tuple[dict[str, Arm], dict[str, Tensor]]:
    layout = draw_documents(c, c.conv_tokens)
    normal = _normal(c)
    x, dy = (normal(1, c.conv_tokens, c.conv_channels) for _ in range(2))
    leaves = {"x": x, "weight": normal(c.conv_channels, 4), "bias": normal(c.conv_channels)}

    def kernels() -> Arm:
        weight, bias = (leaves[n].to(torch.promote_types(x.dtype, torch.float32)) for n in ("weight", "bias"))
        inputs = (x, weight, bias, layout.starts, layout.ends, None, True)
        y = torch.empty_like(x)
        gradients = [room_like(tensor) for tensor in inputs[:3]]

        def call() -> dict[str, Tensor]:
            torch.ops.packmamba_cpu.conv1d_forward(*inputs, y, None)
            torch.ops.packmamba_cpu.conv1d_backward(dy, None, *inputs, *gradients, None)
            return {"y": y} | {f"grad {n}": g for n, g in zip(leaves, gradients)}

        return call

    def public(backend: str) -> Arm:
        return _differentiated(
            lambda t: ops.conv1d_pack(**t, activation="silu", layout=layout, backend=backend), leaves, dy
        )

    arms = {"cpu": public("cpu"), "cpu-kernels": kernels(), "reference": public("reference")}
    if "transformers" in c.arms:
        convolve = _transformers("causal_conv1d_fn")

        def one(t: dict[str, Tensor], s: slice) -> Tensor:
            return convolve(t["x"][:, s].transpose(1, 2), t["weight"], t["bias"], activation="silu")

        arms["transformers"] = _differentiated(lambda t: _by_document(layout, one, t), leaves, dy)
    # Channels are independent: the first ones stand for all.
    some = min(64, c.conv_channels)
    exact = {
        "x": x[..., :some].double(),
        "weight": leaves["weight"][:some].double(),
        "bias": leaves["bias"][:some].double(),
    }
    reference = _differentiated(
        lambda t: ops.conv1d_pack(**t, activation="silu", layout=layout, backend="reference"),
        exact,
        dy[..., :some].double(),
    )
    return {name: arms[name] for name in c.arms}, reference()


def _differentiated(function: Callable[[dict[str, Any]], Tensor], leaves: dict[str, Tensor], dy: Tensor) -> Arm:
    def call() -> dict[str, Tensor]:
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        y = function(tensors)
        gradients = torch.autograd.grad(y, list(tensors.values()), dy)
        return {"y": y.detach()} | {f"grad {name}": gradient for name, gradient in zip(tensors, gradients)}

    return call


def _by_document(
    layout: SequenceLayout, one: Callable[[dict[str, Tensor], slice], Tensor], tensors: dict[str, Tensor]
) -> Tensor:
    spans = zip(layout.starts.tolist(), layout.ends.tolist())
    return torch.cat([one(tensors, slice(start, end)) for start, end in spans], dim=-1).transpose(1, 2)


def _check_results(what: str, results: dict[str, Tensor], expected: dict[str, Tensor], dtype: str) -> None:
    """RuntimeError unless every result agrees with the float64 reference, which may be of the first channels only."""
    for name, value in expected.items():
        got = results[name].double()
        for dim, size in enumerate(value.shape):
            got = got.narrow(dim, 0, size)
        error = float((got - value).norm() / value.norm())
        if not error <= TOLERANCES[dtype][name.startswith("grad")]:
            raise RuntimeError(f"{what}: {name} is off by {error:.1e}; nothing is timed")


def _normal(c: OperatorsBenchConfig) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(c.seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(getattr(torch, c.dtype))


def _transformers(name: str) -> Callable[..., Tensor]:
    try:
        from transformers.models.mamba import modeling_mamba

        return inspect.unwrap(getattr(modeling_mamba, name))  # not the peers' kernel, where that is installed
    except (ImportError, AttributeError):
        raise ConfigError(f"arms: transformers needs a version of transformers that has Mamba's {name}") from None


def _check_config(c: OperatorsBenchConfig) -> None:
    if unknown := [name for name in c.arms if name not in ARMS]:
        raise ConfigError(f"arms: expected some of {', '.join(ARMS)}, got {unknown[0]!r}")
    if c.dtype not in TOLERANCES:
        raise ConfigError(f"dtype: expected one of {', '.join(TOLERANCES)}, got {c.dtype!r}")
    for name in ("tokens", "shortest", "channels", "states", "conv_tokens", "conv_channels", "threads"):
        if getattr(c, name) < 1:
            raise ConfigError(f"{name}: expected at least 1, got {getattr(c, name)}")
    if c.longest < c.shortest:
        raise ConfigError(f"longest: expected at least shortest={c.shortest}, got {c.longest}")
    if not 2 <= c.slow_rounds <= c.rounds:
        raise ConfigError(f"slow_rounds: expected 2 to rounds={c.rounds}, got {c.slow_rounds}")
