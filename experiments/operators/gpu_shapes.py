"""Operators on a GPU: the arms that tables compare, by shape, and what the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.old_arms import records_of
from experiments.operators.arms import GPU_ARMS, GpuArm
from packmamba.report.aggregate import Record, natural

SCAN, SCAN_STATES, SCAN_INDICES, UNPACKED, BY_DOCUMENT, PADDED, SSD, CONV, CONV_INDICES, CAUSAL_CONV, PROJECTIONS = (
    GPU_ARMS[name]
    for name in (
        "scan", "scan-states", "scan-indices", "mamba-ssm-unpacked", "mamba-ssm-by-document", "mamba-ssm-padded",
        "mamba2-ssd", "conv1d", "conv1d-indices", "causal-conv1d", "projections",
    )
)  # fmt: skip
# config: tokens, channels, documents (their distribution or length), states, dtype. Seconds are medians of interleaved rounds,
# spreads interquartile ranges, activations bfloat16 tensors of tokens x channels, errors relative to float64, position bytes
# what all warps read together; null where it was not measured or has no meaning.
METRICS = (
    "forward_seconds", "forward_spread", "backward_seconds", "backward_spread", "total_seconds", "total_spread",
    "kept_activations", "workspace_activations", "output_error", "gradient_error", "position_bytes_forward",
    "position_bytes_backward", "copy_bytes_per_second", "multiprocessors", "clock_hz",
)  # fmt: skip
# What the hardware allows, per token and channel. The scan forward: of its exponentials, one a state, three quarters on the
# special-function units (16 a clock), the rest as polynomials; or u, delta, z read and y, kept states written. Backward:
# instruction slots (128 a clock) a state: 18 multiply-adds, 2 exponentials, 1.5 exchanges; or 14 bytes, u, delta, z, dy and
# three gradients. The convolution: bytes alone.
EXPONENTIALS, FORWARD_BYTES = 0.75, 10
BACKWARD_SLOTS, BACKWARD_BYTES = 21.5, 14
CONV_BYTES = (4, 6)


class Shape(NamedTuple):
    tokens: int
    channels: int
    documents: str

    def __str__(self) -> str:
        documents = {"one": "one document"}.get(self.documents, self.documents)
        documents = f"documents of {documents}" if documents.isdecimal() else documents
        return f"{self.tokens} x {self.channels}, {documents}"


Arms = Mapping[GpuArm, Record]
Shapes = Mapping[Shape, Arms]


def by_shape(records: Sequence[Record]) -> dict[Shape, dict[GpuArm, Record]]:
    """Arms of each shape, which were timed in turns; of equal ones the latest."""
    groups: dict[Shape, dict[GpuArm, Record]] = {}
    for record in sorted(records_of(records, "gpu_operators"), key=lambda record: record["time"]):
        config = record["config"]
        shape = Shape(config["tokens"], config["channels"], config["documents"])
        groups.setdefault(shape, {})[GpuArm.of(record)] = record

    def order(shape: Shape) -> tuple:
        return shape.documents != "documents-2k", shape.channels, shape.tokens, natural(shape.documents)

    return {shape: groups[shape] for shape in sorted(groups, key=order)}


def seconds(arms: Arms, arm: GpuArm) -> float | None:
    """Forward and backward."""
    return arms[arm]["metrics"]["total_seconds"] if arm in arms else None


def over(arms: Arms, arm: GpuArm, ours: GpuArm) -> float | None:
    """An arm's time over ours."""
    times = seconds(arms, arm), seconds(arms, ours)
    return times[0] / times[1] if times[0] and times[1] else None


def scan_limit(record: Record) -> tuple[float, float]:
    """Seconds that the hardware needs at least, forward and backward."""
    config, metrics = record["config"], record["metrics"]
    elements = config["tokens"] * config["channels"]
    cycles = metrics["multiprocessors"] * metrics["clock_hz"] / (elements * config["states"])
    moved = elements / metrics["copy_bytes_per_second"]
    forward = max(EXPONENTIALS / (16 * cycles), FORWARD_BYTES * moved)
    return forward, max(BACKWARD_SLOTS / (128 * cycles), BACKWARD_BYTES * moved)


def copy_shares(record: Record) -> tuple[float, float]:
    """What a convolution's bytes would take at the rate of copying over what it takes, forward and backward."""
    config, metrics = record["config"], record["metrics"]
    moved = config["tokens"] * config["channels"] / metrics["copy_bytes_per_second"]
    return CONV_BYTES[0] * moved / metrics["forward_seconds"], CONV_BYTES[1] * moved / metrics["backward_seconds"]
