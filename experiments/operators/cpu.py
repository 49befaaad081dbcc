"""The packed operators, forward and backward: ours, the reference and transformers' slow path,
beside the machine's rates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import timing
from experiments.operators.arms import CPU_ARMS, CpuArm
from packmamba import SequenceLayout, ops
from packmamba.config import ConfigError, key
from packmamba.lab.records import append_record, make_record, provenance
from packmamba.ops import build
from packmamba.ops.custom_op import empty_grad_like
from packmamba.ops.scan import ScanArguments, allocate_scan

# ||a - b|| / ||b|| against float64, of outputs and of gradients.
TOLERANCES = {"float32": (1e-5, 5e-5), "bfloat16": (2e-3, 5e-3), "float64": (1e-9, 1e-9)}
# Per token, channel and state. Forward: delta A, delta u B, the step, y. Backward: the first three
# again, y for the gate, and dC, dh, dB, sum dh B, carry, carry h, sum A, dA.
MULTIPLY_ADDS, EXPONENTIALS = 4 + 4 + 8, 2
# Take a turn with the arms: what the machine can do is the best of all turns, as other processes
# may slow one.
RATES = "rates"

# forward and backward: the output y and the gradient of each input
Call = Callable[[], dict[str, Tensor]]


@dataclass
class Config:
    experiment: str = key("operators", "The question, which the records name.")
    arms: list[str] = key(list(CPU_ARMS), "Arms of arms.CPU_ARMS.", choices=CPU_ARMS, check=("at least one arm", bool))
    tokens: int = key(4096, "Tokens of the scan's one row, all real.", low=1)
    shortest: int = key(16, "Shortest document; lengths are drawn log-uniformly.", low=1)
    longest: int = key(1024, "Longest document.", low=1)
    channels: int = key(512, "Channels of the scan (d_inner).", low=1)
    states: int = key(16, "States per channel (d_state).", low=1)
    conv_tokens: int = key(8192, "Tokens of the convolution's row, larger than the last-level cache.", low=1)
    conv_channels: int = key(2048, "Channels of the convolution.", low=1)
    dtype: str = key("float32", "Type of the activations: float32, bfloat16 or float64.", choices=TOLERANCES)
    threads: int = key(2, "CPU threads of every arm.", low=1)
    rounds: int = key(11, "Timings of each compiled arm, in turns.", low=2)
    slow_rounds: int = key(2, "Timings of the reference and of transformers, which take minutes.", low=2)
    seed: int = key(0, "Seed of lengths and values.", low=0)


def run(c: Config, records_path: Path, progress: bool = True) -> None:
    """Append one record per operator and arm: forward and backward; RuntimeError if one is wrong,
    or faster than the rates allow.

    bound_seconds: what the scan's multiply-adds and exponentials take at the measured rates; the
    convolution's bytes, copied.
    """
    build.load("cpu")
    provenance()
    threads = torch.get_num_threads()
    torch.set_num_threads(c.threads)
    try:
        for prepare in (_scan, _convolution):
            _run_operator(c, prepare(c), records_path, progress)
    finally:
        torch.set_num_threads(threads)


def _run_operator(c: Config, operator: Operator, records_path: Path, progress: bool) -> None:
    arms = {name: CPU_ARMS[name] for name in c.arms}
    calls = {name: operator.call(arm) for name, arm in arms.items()}
    expected = operator.expected()

    def gate(name: str) -> None:
        if name != RATES:
            _check_results(f"{operator.name}, {name}", calls[name](), expected, c.dtype)

    turns: dict[str, Callable[[int], Any]] = {RATES: lambda _: machine_rates()}
    turns |= {name: lambda _, call=call: timing.seconds(call) for name, call in calls.items()}  # type: ignore[misc]
    samples = timing.take_turns(
        turns,
        c.rounds,
        warm_up=0,
        at_most={name: c.slow_rounds for name, arm in arms.items() if arm.slow},
        gate=gate,
        bar=operator.name if progress else None,
    )
    turns_of_rates = samples.pop(RATES)
    rates = {rate: max(turn[rate] for turn in turns_of_rates) for rate in turns_of_rates[0]}
    bounds = {name: _bound(c, operator.name, arm, rates) for name, arm in arms.items()}
    if fast := [name for name, times in samples.items() if min(times) < bounds[name]]:
        raise RuntimeError(
            f"{operator.name}, {fast[0]}: faster than the machine's measured rates allow, so these were disturbed; "
            "nothing is recorded: run it again on an idle machine"
        )
    settings = {key: value for key, value in asdict(c).items() if key not in ("experiment", "arms", "seed")}
    for name, times in samples.items():
        config = {"operator": operator.name, **arms[name].fields(), **settings}
        metrics = {"seconds_median": timing.median(times), "seconds_spread": timing.spread(times)}
        metrics |= {"seconds_fastest": min(times), "rounds": len(times), "bound_seconds": bounds[name], **rates}
        corpus = f"log-uniform lengths in [{c.shortest}, {c.longest}]"
        record = make_record("operators", c.experiment, name, config, c.seed, corpus, metrics, sum(times))
        append_record(records_path, record)


def machine_rates(rounds: int = 3) -> dict[str, float]:
    """Measure float32 multiply-adds and exponentials a second from registers, and bytes a second by
    copying 64 MiB into memory that is there and into new memory; the best of ``rounds`` each.
    """
    kernels = torch.ops.packmamba_cpu
    threads, lanes, repeats = torch.get_num_threads(), kernels.float32_lanes(), 50_000
    sink = torch.zeros(threads * lanes)
    source = torch.randn(2**24)
    there = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()

    def fastest(function: Callable[[], Any]) -> float:
        return min(timing.seconds(function) for _ in range(rounds))

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


def _bound(c: Config, operator: str, arm: CpuArm, rates: dict[str, float]) -> float:
    if operator == "scan":
        elements = c.tokens * c.channels * c.states
        multiply_adds = MULTIPLY_ADDS / rates["multiply_adds_per_second"]
        return elements * (multiply_adds + EXPONENTIALS / rates["exponentials_per_second"])
    # Forward reads x and writes y; backward reads x and dy and writes dx.
    moved = 5 * c.conv_tokens * c.conv_channels * getattr(torch, c.dtype).itemsize
    return moved / rates["copy_bytes_per_second" if arm.memory == "at_hand" else "copy_to_new_bytes_per_second"]


def draw_documents(c: Config, tokens: int) -> SequenceLayout:
    """One full row of documents, log-uniform between the shortest and the longest; the last is cut
    to fit.
    """
    generator = np.random.Generator(np.random.PCG64(c.seed))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(np.exp(generator.uniform(np.log(c.shortest), np.log(c.longest + 1))))
        lengths.append(min(length, tokens - sum(lengths)))
    return SequenceLayout.from_lengths([lengths], row_length=tokens)


@dataclass(frozen=True)
class Operator:
    """One operator on its inputs, and how each implementation is called."""

    name: str  # scan or conv
    public: Callable[..., Tensor]
    options: dict[str, Any]
    layout: SequenceLayout
    leaves: dict[str, Tensor]
    dy: Tensor
    kernels: Callable[[], Call]  # ours, into memory that is there
    theirs: str  # name of transformers' implementation of one document, channels first
    alone: Callable[[Callable[..., Tensor], dict[str, Tensor], slice], Tensor]
    # the leaves in float64; where channels are independent, the first ones stand for all
    checked: dict[str, Tensor]

    def call(self, arm: CpuArm) -> Call:
        if arm.memory == "at_hand":
            return self.kernels()
        if arm.implementation == "transformers":
            return _differentiated(partial(self._by_document, _transformers(self.theirs)), self.leaves, self.dy)
        backend = "cpu" if arm.implementation == "packmamba" else arm.implementation
        return _differentiated(partial(self._public, backend), self.leaves, self.dy)

    def expected(self) -> dict[str, Tensor]:
        """By the float64 reference."""
        channels = next(iter(self.checked.values())).shape[-1]
        return _differentiated(partial(self._public, "reference"), self.checked, self.dy[..., :channels].double())()

    def _public(self, backend: str, tensors: dict[str, Tensor]) -> Tensor:
        return self.public(**tensors, **self.options, layout=self.layout, backend=backend)

    def _by_document(self, function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> Tensor:
        spans = zip(self.layout.starts.tolist(), self.layout.ends.tolist())
        outputs = [self.alone(function, tensors, slice(start, end)) for start, end in spans]
        return torch.cat(outputs, dim=-1).transpose(1, 2)


def _scan(c: Config) -> Operator:
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

    def kernels() -> Call:
        t, options = leaves, (True, layout.starts, layout.ends, None)
        inputs = (*(t[n] for n in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")), *options)
        named: Any = {"initial_state": None, "layout": layout}
        named |= {"delta_softplus": True, "return_final_state": False}
        (y, _), (saved,) = allocate_scan(ScanArguments(**t, **named), True)
        gradients = [empty_grad_like(tensor) for tensor in inputs[:8]]

        def call() -> dict[str, Tensor]:
            torch.ops.packmamba_cpu.ssm_forward(*inputs, y, None, saved)
            torch.ops.packmamba_cpu.ssm_backward(dy, None, *inputs, saved, *gradients, None)
            return {"y": y} | {f"grad {n}": g for n, g in zip(t, gradients)}

        return call

    def alone(scan: Callable[..., Tensor], t: dict[str, Tensor], s: slice) -> Tensor:
        rows = {n: t[n][:, s].transpose(1, 2) for n in ("u", "delta", "B", "C", "z")}
        first = (rows["u"], rows["delta"], t["A"], rows["B"], rows["C"])
        return scan(*first, D=t["D"], z=rows["z"], delta_bias=t["delta_bias"], delta_softplus=True)

    return Operator(
        "scan", ops.ssm_pack, {"delta_softplus": True}, layout, leaves, dy, kernels, "mamba_selective_scan", alone,
        {name: tensor.double() for name, tensor in leaves.items()},
    )  # fmt: skip


def _convolution(c: Config) -> Operator:
    layout = draw_documents(c, c.conv_tokens)
    normal = _normal(c)
    x, dy = (normal(1, c.conv_tokens, c.conv_channels) for _ in range(2))
    leaves = {"x": x, "weight": normal(c.conv_channels, 4), "bias": normal(c.conv_channels)}

    def kernels() -> Call:
        weight, bias = (leaves[n].to(torch.promote_types(x.dtype, torch.float32)) for n in ("weight", "bias"))
        inputs = (x, weight, bias, layout.starts, layout.ends, None, True)
        y = torch.empty_like(x)
        gradients = [empty_grad_like(tensor) for tensor in inputs[:3]]

        def call() -> dict[str, Tensor]:
            torch.ops.packmamba_cpu.conv1d_forward(*inputs, y, None)
            torch.ops.packmamba_cpu.conv1d_backward(dy, None, *inputs, *gradients, None)
            return {"y": y} | {f"grad {n}": g for n, g in zip(leaves, gradients)}

        return call

    def alone(convolve: Callable[..., Tensor], t: dict[str, Tensor], s: slice) -> Tensor:
        return convolve(t["x"][:, s].transpose(1, 2), t["weight"], t["bias"], activation="silu")

    few = min(64, c.conv_channels)
    checked = {"x": x[..., :few], "weight": leaves["weight"][:few], "bias": leaves["bias"][:few]}
    return Operator(
        "conv", ops.conv1d_pack, {"activation": "silu"}, layout, leaves, dy, kernels, "causal_conv1d_fn", alone,
        {name: tensor.double() for name, tensor in checked.items()},
    )  # fmt: skip


def _differentiated(function: Callable[[dict[str, Any]], Tensor], leaves: dict[str, Tensor], dy: Tensor) -> Call:
    def call() -> dict[str, Tensor]:
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        y = function(tensors)
        gradients = torch.autograd.grad(y, list(tensors.values()), dy)
        return {"y": y.detach()} | {f"grad {name}": gradient for name, gradient in zip(tensors, gradients)}

    return call


def _check_results(what: str, results: dict[str, Tensor], expected: dict[str, Tensor], dtype: str) -> None:
    """RuntimeError unless every result agrees with the float64 reference, which may be of the first
    channels only.
    """
    for name, value in expected.items():
        got = results[name].double()
        for dim, size in enumerate(value.shape):
            got = got.narrow(dim, 0, size)
        error = float((got - value).norm() / value.norm())
        if not error <= TOLERANCES[dtype][name.startswith("grad")]:
            raise RuntimeError(f"{what}: {name} is off by {error:.1e}; nothing is timed")


def _normal(c: Config) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(c.seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(getattr(torch, c.dtype))


def _transformers(name: str) -> Callable[..., Tensor]:
    try:
        from transformers.models.mamba import modeling_mamba

        # not the peers' kernel, where that is installed
        return inspect.unwrap(getattr(modeling_mamba, name))
    except (ImportError, AttributeError):
        raise ConfigError(f"arms: transformers needs a version of transformers that has Mamba's {name}") from None
