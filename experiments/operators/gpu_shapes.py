"""Operators on a GPU: the arms that tables compare, by shape, and what the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.old_arms import records_of
from packmamba.report.summary import Record, natural


class Arm(NamedTuple):
    """What a table compares, by the fields of a record's configuration."""

    operator: str
    implementation: str = "packmamba"
    packing: str = "packed"
    boundaries: str | None = "schedule"
    with_states: bool = False

    @classmethod
    def of(cls, record: Record) -> Arm:
        config = record["config"]
        if missing := [name for name in cls._fields if name not in config]:
            raise ValueError(f"config of the record of {record['arm']} lacks {', '.join(missing)}")
        return cls(*(config[name] for name in cls._fields))

    def __str__(self) -> str:
        """As tables show it: by a name of its own, or by its fields."""
        fields = (self.implementation, self.operator, self.packing, self.boundaries, "with states" * self.with_states)
        return NAMES.get(self, ", ".join(field for field in fields if field))


SCAN, CONV = Arm("scan"), Arm("conv")
SCAN_STATES = Arm("scan", with_states=True)
SCAN_INDICES, CONV_INDICES = (arm._replace(boundaries="indices") for arm in (SCAN, CONV))
UNPACKED, BY_DOCUMENT, PADDED = (
    Arm("scan", "mamba-ssm", packing, None) for packing in ("unpacked", "by-document", "padded")
)
SSD = Arm("scan", "mamba2-ssd", boundaries="indices")
CAUSAL_CONV = Arm("conv", "causal-conv1d", boundaries="indices")
PROJECTIONS, SCHEDULE = Arm("projections", "torch", boundaries=None), Arm("schedule")
NAMES = {
    SCAN: "ssm_pack",
    SCAN_STATES: "ssm_pack, states in and out",
    SCAN_INDICES: "ssm_pack, an index per token",
    UNPACKED: "mamba-ssm, not packed",
    BY_DOCUMENT: "mamba-ssm, document by document",
    PADDED: "mamba-ssm, padded",
    SSD: "Mamba-2 SSD with seq_idx",
    CONV: "conv1d_pack",
    CONV_INDICES: "conv1d_pack, an index per token",
    CAUSAL_CONV: "causal-conv1d with seq_idx",
    PROJECTIONS: "matrix products of the block",
    SCHEDULE: "the batch's schedule, once",
}
DESCRIPTIONS = {
    SCAN: "our scan with z, D, bias and softplus; where documents start is in the batch's schedule",
    SCAN_STATES: "the same with a state to start from and the last state of each document, and their gradients",
    SCAN_INDICES: "the same, with an index per token instead of the schedule: the paper's mechanism",
    UNPACKED: "mamba-ssm's scan on the row as one document, so it leaks",
    BY_DOCUMENT: "mamba-ssm's scan, one call for each document",
    PADDED: "mamba-ssm's scan, each document in a row of its own, filled up",
    SSD: "Mamba-2's scan (state space duality), which keeps packed documents apart",
    CONV: "our convolution with SiLU; where documents start is in the batch's schedule",
    CONV_INDICES: "the same, with an index per token instead of the schedule",
    CAUSAL_CONV: "causal-conv1d's kernel, which keeps packed documents apart",
    PROJECTIONS: "the four projections of a block, for scale",
    SCHEDULE: "made once for a batch, used by all layers",
}
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


Arms = Mapping[Arm, Record]
Shapes = Mapping[Shape, Arms]


def by_shape(records: Sequence[Record]) -> dict[Shape, dict[Arm, Record]]:
    """Arms of each shape, which were timed in turns; of equal ones the latest."""
    groups: dict[Shape, dict[Arm, Record]] = {}
    for record in sorted(records_of(records, "gpu_operators"), key=lambda record: record["time"]):
        config = record["config"]
        shape = Shape(config["tokens"], config["channels"], config["documents"])
        groups.setdefault(shape, {})[Arm.of(record)] = record

    def order(shape: Shape) -> tuple:
        return shape.documents != "documents-2k", shape.channels, shape.tokens, natural(shape.documents)

    return {shape: groups[shape] for shape in sorted(groups, key=order)}


def seconds(arms: Arms, arm: Arm) -> float | None:
    """Forward and backward."""
    return arms[arm]["metrics"]["total_seconds"] if arm in arms else None


def over(arms: Arms, arm: Arm, ours: Arm) -> float | None:
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
