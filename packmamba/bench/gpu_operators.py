"""Time and memory of the packed operators on a GPU, beside the peers', against tokens, channels and documents."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packmamba import SequenceLayout, ops
from packmamba.config import ConfigError
from packmamba.data.lengths import draw_lengths
from packmamba.ops import cuda
from packmamba.results.record import append_record, make_record, provenance

STATES = 16
COPY_BYTES = 2**31


@dataclass
class OperatorBenchConfig:
    bench: str = "gpu_operators"
    """Which benchmark this is."""
    experiment: str = "gpu_operators"
    """Records go to experiments/<experiment>/records."""
    shapes: list[str] = field(default_factory=lambda: ["16384,4096,documents-2k"])
    """tokens,channels,documents each; documents: documents-2k, short, heavy, or one."""
    layouts: int = 20
    """Rows of different documents that a time is a mean over."""
    rounds: int = 7
    """How often each arm is timed, in turns."""
    seed: int = 0
    """Of the documents' lengths and of the tensors."""


Config = OperatorBenchConfig


def run(config: OperatorBenchConfig | Mapping[str, Any], records_path: Path, progress: bool = True) -> None:
    """Appends one record per shape and arm.

    Arms of a shape are timed in turns, each time over all layouts, inputs larger than the L2 cache, outputs poisoned by
    what other arms left. metrics: forward_seconds, backward_seconds (medians over rounds), their spreads (interquartile
    ranges), kept_activations and workspace_activations (bfloat16 tensors of tokens x channels; of ours), relative_error
    (output against float64 on 64 channels), copy_bytes_per_second.

    Raises:
        ConfigError: no GPU, or a shape that is none.
        RuntimeError: an output is wrong; nothing of that shape is recorded.
    """
    c = config if isinstance(config, OperatorBenchConfig) else OperatorBenchConfig(**config)
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu_operators: needs a GPU")
    provenance()  # of the code as it is now, not as it may be after minutes
    for shape in c.shapes:
        try:
            tokens, channels, documents = shape.split(",")
            rows = [_lengths(documents, int(tokens), c.seed + i) for i in range(c.layouts)]
        except (KeyError, ValueError):
            raise ConfigError(f"shapes: expected tokens,channels,documents, got {shape!r}") from None
        began = time.perf_counter()
        results = _measure(c, int(tokens), int(channels), rows)
        for arm, metrics in results.items():
            if progress:
                print(
                    shape,
                    arm,
                    {name: None if v is None else float(f"{v:.4g}") for name, v in metrics.items()},
                    flush=True,
                )
            record = make_record(
                kind="gpu_operators",
                experiment=c.experiment,
                arm=arm,
                config={
                    "tokens": int(tokens), "channels": int(channels), "documents": documents, "states": STATES,
                    "dtype": "bfloat16", "layouts": c.layouts, "rounds": c.rounds,
                    "mean_documents": statistics.mean(map(len, rows)),
                },
                seed=c.seed,
                corpus_hash=f"{documents}, rows of {tokens}",
                metrics=metrics,
                wall_seconds=time.perf_counter() - began,
            )  # fmt: skip
            append_record(records_path, record)


def _lengths(documents: str, tokens: int, seed: int) -> list[int]:
    """Documents in order, the last one cut to fill the row."""
    if documents == "one":
        return [tokens]
    drawn = draw_lengths(documents, tokens, seed).tolist()
    ends = np.minimum(np.cumsum(drawn), tokens)
    return [int(n) for n in np.diff(ends, prepend=0) if n]


@dataclass
class Arm:
    """forward() gives outputs that backward(outputs) takes to gradients."""

    forward: Callable[[SequenceLayout], Any]
    backward: Callable[[Any, SequenceLayout], Any] | None


def _measure(
    c: OperatorBenchConfig, tokens: int, channels: int, rows: list[list[int]]
) -> dict[str, dict[str, float | None]]:
    layouts = [SequenceLayout.from_lengths([row], row_length=tokens).to("cuda") for row in rows]
    inputs, dy = _inputs(tokens, channels, c.seed)
    arms = {"scan": _scan(inputs, dy), "scan-states": _scan_states(inputs, dy), "conv1d": _conv1d(inputs, dy)}
    arms["schedule"] = Arm(
        lambda layout: cuda.schedule(layout.starts.clone(), layout.ends, 1, tokens, channels, True), None
    )
    arms |= _peers(inputs, dy)
    error = _relative_error(inputs, layouts[0])
    if not error <= 2e-3:
        raise RuntimeError(f"the scan is wrong: relative error {error:.1e}; nothing is timed")
    kept, workspace = _memory(arms["scan"], layouts[0], tokens * channels * 2)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in arms}
    copied: list[float] = []
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    for turn in range(c.rounds + 1):
        copy = _seconds(lambda: target.copy_(source))
        for name, arm in arms.items():
            forward = statistics.mean(_forward_seconds(arm, layout) for layout in layouts)
            each = [0.0]
            if arm.backward is not None:
                # One layout's outputs at a time: twenty graphs would not fit.
                each = [_backward_seconds(arm, layout) for layout in layouts]
            if turn:  # the first is a warm-up
                times[name][0].append(forward)
                times[name][1].append(statistics.mean(each))
        if turn:
            copied.append(copy)
    results: dict[str, dict[str, float | None]] = {}
    for name, (forwards, backwards) in times.items():
        ours, both = name == "scan", arms[name].backward is not None
        results[name] = {
            "forward_seconds": statistics.median(forwards),
            "forward_spread": _spread(forwards),
            "backward_seconds": statistics.median(backwards) if both else None,
            "backward_spread": _spread(backwards) if both else None,
            "kept_activations": kept if ours else None,
            "workspace_activations": workspace if ours else None,
            "relative_error": error if ours else None,
            "copy_bytes_per_second": 2 * COPY_BYTES / statistics.median(copied),
        }
    return results


def _spread(values: list[float]) -> float:
    return float(np.subtract(*np.percentile(values, [75, 25])))


def _forward_seconds(arm: Arm, layout: SequenceLayout) -> float:
    return _seconds(lambda: arm.forward(layout))


def _backward_seconds(arm: Arm, layout: SequenceLayout) -> float:
    outputs = arm.forward(layout)
    assert arm.backward is not None
    return _seconds(lambda: arm.backward(outputs, layout))  # type: ignore[misc]


def _seconds(call: Callable[[], Any]) -> float:
    """Device time of a call, which is queued behind a wait so that the host's launches do not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(5_000_000)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _inputs(tokens: int, channels: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """As a Mamba block's projections give them: u and z, B and C are slices of wider tensors."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    u, z = normal(1, tokens, 2 * channels).chunk(2, dim=-1)
    _, B, C = normal(1, tokens, channels // 32 + 2 * STATES).split([channels // 32, STATES, STATES], dim=-1)
    A = -torch.arange(1, STATES + 1, device="cuda").float().repeat(channels, 1)
    D, bias = normal(channels, dtype=torch.float32), normal(channels, dtype=torch.float32) / 2 - 3
    inputs = {
        "u": u,
        "delta": normal(1, tokens, channels) / 2,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "delta_bias": bias,
    }
    return {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}, normal(1, tokens, channels)


def _scan(inputs: dict[str, Any], dy: Tensor) -> Arm:
    def backward(y: Tensor, _: SequenceLayout) -> Any:
        return torch.autograd.grad(y, list(inputs.values()), dy)

    return Arm(lambda layout: ops.ssm_pack(**inputs, delta_softplus=True, layout=layout), backward)


def _scan_states(inputs: dict[str, Any], dy: Tensor) -> Arm:
    states: dict[int, Tensor] = {}

    def state(layout: SequenceLayout) -> Tensor:
        if layout.num_documents not in states:
            shape = (layout.num_documents, *inputs["A"].shape)
            states[layout.num_documents] = torch.randn(shape, device="cuda").requires_grad_()
        return states[layout.num_documents]

    def forward(layout: SequenceLayout) -> Any:
        return ops.ssm_pack(
            **inputs, delta_softplus=True, layout=layout, initial_state=state(layout), return_final_state=True
        )

    def backward(outputs: Any, layout: SequenceLayout) -> Any:
        return torch.autograd.grad(outputs, [*inputs.values(), state(layout)], [dy, state(layout).detach()])

    return Arm(forward, backward)


def _conv1d(inputs: dict[str, Any], dy: Tensor) -> Arm:
    weight = torch.randn(dy.shape[2], 4, device="cuda").requires_grad_()
    bias = torch.randn(dy.shape[2], device="cuda").requires_grad_()

    def backward(y: Tensor, _: SequenceLayout) -> Any:
        return torch.autograd.grad(y, [inputs["u"], weight, bias], dy)

    return Arm(lambda layout: ops.conv1d_pack(inputs["u"], weight, bias, layout=layout, activation="silu"), backward)


def _peers(inputs: dict[str, Any], dy: Tensor) -> dict[str, Arm]:
    """Those that are installed: mamba-ssm's scan without packing, Mamba-2's SSD and causal-conv1d with seq_idx."""
    arms: dict[str, Arm] = {}
    held: dict[str, Any] = {name: tensor.detach() for name, tensor in inputs.items()}
    channels = dy.shape[2]
    try:
        import selective_scan_cuda as peer

        u, delta, z, B, C, g = (
            t.transpose(1, 2).contiguous() for t in (*(held[n] for n in ("u", "delta", "z", "B", "C")), dy)
        )
        arguments = (u, delta, held["A"], B[:, None], C[:, None], held["D"], z, held["delta_bias"])
        arms["mamba-ssm-unpacked"] = Arm(
            lambda _: peer.fwd(*arguments, True),
            lambda out, _: peer.bwd(*arguments, g, out[1], out[0], None, True, False),
        )
    except ImportError:
        pass
    try:
        from packmamba.ops.mamba_ssm import _peer

        chunk_scan = _peer("mamba_ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined")
        heads, width = channels // 64, 128
        x = held["u"].reshape(1, -1, heads, 64).contiguous().requires_grad_()
        steps = held["delta"][..., :heads].contiguous().requires_grad_()
        rates = (-torch.rand(heads, device="cuda") - 1).requires_grad_()
        wide = [torch.randn(1, dy.shape[1], 1, width, device="cuda", dtype=dy.dtype).requires_grad_() for _ in range(2)]

        def forward(layout: SequenceLayout) -> Tensor:
            return chunk_scan(
                x, steps, rates, *wide, chunk_size=256, seq_idx=layout.seq_idx, dt_softplus=True,
                z=held["z"].reshape(x.shape),
            )  # fmt: skip

        arms["mamba2-ssd"] = Arm(
            forward, lambda y, _: torch.autograd.grad(y, [x, steps, rates, *wide], dy.view(x.shape))
        )
    except (ImportError, ValueError) as error:
        print(f"no SSD: {error}", file=sys.stderr)
    try:
        from causal_conv1d import causal_conv1d_fn

        weight = torch.randn(channels, 4, device="cuda", dtype=dy.dtype).requires_grad_()
        bias = torch.randn(channels, device="cuda", dtype=dy.dtype).requires_grad_()

        def convolve(layout: SequenceLayout) -> Tensor:
            return causal_conv1d_fn(
                inputs["u"].transpose(1, 2), weight, bias, seq_idx=layout.seq_idx, activation="silu"
            )

        arms["causal-conv1d"] = Arm(
            convolve, lambda y, _: torch.autograd.grad(y, [inputs["u"], weight, bias], dy.transpose(1, 2))
        )
    except ImportError:
        pass
    return arms


def _relative_error(inputs: dict[str, Any], layout: SequenceLayout) -> float:
    some = slice(0, 64)
    with torch.no_grad():
        y = ops.ssm_pack(**inputs, delta_softplus=True, layout=layout)[..., some].double()
        wide = {
            n: (t if n in ("B", "C") else t[some] if n in ("A", "D", "delta_bias") else t[..., some]).double()
            for n, t in inputs.items()
        }
        expected = ops.ssm_pack(**wide, delta_softplus=True, layout=layout, backend="reference")
    return float((y - expected).norm() / expected.norm())


def _memory(arm: Arm, layout: SequenceLayout, activation: int) -> tuple[float, float]:
    """What the forward keeps besides its output, and the backward's peak besides its results, in activations."""
    arm.forward(layout)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = arm.forward(layout)
    kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert arm.backward is not None
    gradients = arm.backward(y, layout)
    peak = torch.cuda.max_memory_allocated() - before
    return kept / activation, (peak - sum(g.numel() * g.element_size() for g in gradients)) / activation
