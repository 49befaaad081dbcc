"""Time ops.ssd_pack beside mamba-ssm's Mamba-2 scan, and write one JSON file (logs/ssd-*.json).

python -m experiments.operators.ssd_peer FILE DTYPE...      needs a GPU and mamba-ssm

Both are captured as CUDA graphs of four passes, so that no launch counts, and replayed in turns.
Each is held against float64 first, with few heads: ours must be within the tests' tolerances,
mamba-ssm's errors are written beside its times.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from experiments import timing
from experiments.operators.gpu import TOLERANCES, draw_rows
from experiments.operators.gpu_implementations import relative_error
from packmamba import SequenceLayout, ops
from packmamba.lab.records import provenance

TOKENS, HEADS, CHANNELS, STATES = 16384, 64, 64, 128
CHECKED_HEADS = 2
PASSES, REPLAYS = 4, 15
NAMES = ("x", "delta", "A", "B", "C", "D")


def draw(dtype: torch.dtype, heads: int) -> tuple[list[Tensor], Tensor]:
    """Draw the operators' tensors and the outputs' gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    x, delta = normal(1, TOKENS, heads, CHANNELS), normal(1, TOKENS, heads) - 3
    A, D = -normal(heads).exp() - 1, normal(heads)
    B, C = normal(1, TOKENS, 1, STATES), normal(1, TOKENS, 1, STATES)
    tensors = [x.to(dtype), delta.to(dtype), A, B.to(dtype), C.to(dtype), D]
    return [tensor.requires_grad_() for tensor in tensors], normal(*x.shape).to(dtype)


def ours(tensors: list[Tensor], layout: SequenceLayout) -> Tensor:
    return ops.ssd_pack(*tensors, layout=layout, delta_softplus=True)


def peer(tensors: list[Tensor], layout: SequenceLayout) -> Tensor:
    *scanned, D = tensors
    seq_idx = None if layout.num_documents == 1 else layout.seq_idx
    return mamba_chunk_scan_combined(*scanned, chunk_size=256, D=D, seq_idx=seq_idx, dt_softplus=True)


Scan = Callable[[list[Tensor], SequenceLayout], Tensor]
SCANS: dict[str, Scan] = {"ours": ours, "mamba-ssm": peer}


def results(scan: Scan, tensors: list[Tensor], layout: SequenceLayout, grad: Tensor) -> dict[str, Tensor]:
    y = scan(tensors, layout)
    return {"y": y, **dict(zip(NAMES, torch.autograd.grad(y, tensors, grad)))}


def errors(dtype: torch.dtype, layout: SequenceLayout) -> dict[str, dict[str, float]]:
    """Hold both scans against float64 on the CPU. RuntimeError if ours is wrong."""
    tensors, grad = draw(dtype, CHECKED_HEADS)
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    expected = results(ours, wide, layout.to("cpu"), grad.cpu().double())
    found = {}
    for name, scan in SCANS.items():
        values = results(scan, tensors, layout, grad)
        found[name] = {of: relative_error(values[of].cpu().double(), value) for of, value in expected.items()}
    output, gradients, _ = TOLERANCES[str(dtype).removeprefix("torch.")]
    for of, error in found["ours"].items():
        # In bfloat16 the GPU's kernels round the masked scores, too.
        limit = gradients if of != "y" else 2.5e-3 if dtype == torch.bfloat16 else output
        if not error <= limit:
            raise RuntimeError(f"{of} is off by {error:.1e}; nothing is timed")
    return found


def captured(scan: Scan, tensors: list[Tensor], layout: SequenceLayout, grad: Tensor | None) -> torch.cuda.CUDAGraph:
    """Capture PASSES passes, forward or (with ``grad``) both ways."""

    def run() -> None:
        for _ in range(PASSES):
            if grad is None:
                with torch.no_grad():
                    scan(tensors, layout)
            else:
                results(scan, tensors, layout, grad)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles and tunes what a capture may not
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Return milliseconds of a pass."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / PASSES


def host_time(scan: Scan, tensors: list[Tensor], layout: SequenceLayout, grad: Tensor) -> float:
    """Return the milliseconds that the host takes to launch one eager pass both ways, with an idle
    GPU before it.
    """
    torch.cuda.synchronize()
    begin = time.perf_counter()
    results(scan, tensors, layout, grad)
    return (time.perf_counter() - begin) * 1e3


def measure(dtype: torch.dtype, documents: str) -> dict[str, Any]:
    layout = SequenceLayout.from_lengths(draw_rows(documents, TOKENS, 1, 0), TOKENS).to("cuda")
    wrong_by = errors(dtype, layout)
    tensors, grad = draw(dtype, HEADS)
    graphs = {
        f"{name} {phase}": captured(scan, tensors, layout, of)
        for name, scan in SCANS.items()
        for phase, of in (("forward", None), ("both", grad))
    }
    turns = {name: lambda _, graph=graph: replayed(graph) for name, graph in graphs.items()}
    # On tensors of their own: a capture must not meet the gradients' nodes of another stream.
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    for name, scan in SCANS.items():
        turns[f"{name} host"] = lambda _, scan=scan: host_time(scan, tensors, layout, grad)
    times = timing.take_turns(turns, REPLAYS, warm_up=2)
    milliseconds = {name: [timing.median(values), timing.spread(values)] for name, values in times.items()}
    speed = {
        phase: milliseconds[f"mamba-ssm {phase}"][0] / milliseconds[f"ours {phase}"][0] for phase in ("forward", "both")
    }
    return {"documents": layout.num_documents, "milliseconds": milliseconds, "speed": speed, "errors": wrong_by}


def main(path: str, *dtypes: str) -> None:
    what = f"ops.ssd_pack beside mamba_chunk_scan_combined(chunk_size=256); {TOKENS} tokens, H {HEADS}, P {CHANNELS}, "
    what += f"N {STATES}, G 1, D; milliseconds of the GPU, CUDA graphs of {PASSES} passes replayed {REPLAYS} times in turns: "
    what += "median and interquartile range; host: of launching both passes of an eager call"
    found: dict[str, Any] = {"what": what, **provenance()}
    for dtype in dtypes:
        for documents in ("documents-2k", "one"):
            found[f"{documents}, {dtype}"] = row = measure(getattr(torch, dtype), documents)
            print(documents, dtype, row["speed"], row["milliseconds"], row["errors"]["ours"], flush=True)
            Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
