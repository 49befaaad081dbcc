"""The arms of the experiment, as data: the fields that their records hold, what tables call them, and what each does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Self = TypeVar("Self", bound="_Fields")


@dataclass(frozen=True)
class _Fields:
    label: str = field(default="", compare=False, kw_only=True)
    does: str = field(default="", compare=False, kw_only=True)

    def fields(self) -> dict[str, Any]:
        """Return the fields of its records' configurations."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.compare}

    @classmethod
    def of(cls: type[Self], record: Mapping[str, Any]) -> Self:
        """A record's arm. Raises ValueError where its configuration lacks a field."""
        config, names = record["config"], [entry.name for entry in fields(cls) if entry.compare]
        if missing := [name for name in names if name not in config]:
            raise ValueError(f"config of the record of {record['arm']} lacks {', '.join(missing)}")
        arm = cls(**{name: config[name] for name in names})
        return next((known for known in (*GPU_ARMS.values(), *CPU_ARMS.values()) if known == arm), arm)

    def __str__(self) -> str:
        """As tables show it: by a name of its own, or by its fields."""
        values = [name if value is True else value for name, value in self.fields().items()]
        return self.label or ", ".join(str(value) for value in values if value)


@dataclass(frozen=True)
class GpuArm(_Fields):
    """On a GPU."""

    operator: str
    """scan, conv, projections (the block's matrix products) or schedule (making it, once a batch)."""
    implementation: str = "packmamba"
    """A name in gpu_implementations.BUILDERS."""
    packing: str = "packed"
    """packed: rows with boundaries; unpacked: the row as one document; by-document: each alone; padded: one batch."""
    boundaries: str | None = "schedule"
    """Source of boundaries in kernels: schedule; indices, one for each token; null where there are none."""
    with_states: bool = False
    """An initial state goes in, the final one comes out."""

    @property
    def slow(self) -> bool:
        return self.packing in ("by-document", "padded")

    @property
    def per_token(self) -> bool:
        """Return whether this is an earlier build of our kernels, in the committed records alone."""
        return self.implementation == "packmamba" and self.boundaries == "indices"


def _gpu(label: str, does: str, *fields: Any, **more: Any) -> GpuArm:
    return GpuArm(*fields, **more, label=label, does=does)


GPU_ARMS = {
    "scan": _gpu(
        "ssm_pack", "our scan with z, D, bias and softplus; where documents start is in the batch's schedule", "scan"
    ),
    "scan-states": _gpu(
        "ssm_pack, states in and out",
        "the same with a state to start from and the last state of each document, and their gradients",
        *("scan", "packmamba", "packed", "schedule", True),
    ),
    "scan-indices": _gpu(
        "ssm_pack, an index per token",
        "the same, with an index per token instead of the schedule: the paper's mechanism",
        *("scan", "packmamba", "packed", "indices"),
    ),
    "mamba-ssm-unpacked": _gpu(
        "mamba-ssm, not packed",
        "mamba-ssm's scan on the row as one document, so it leaks",
        *("scan", "mamba-ssm", "unpacked", None),
    ),
    "mamba-ssm-by-document": _gpu(
        "mamba-ssm, document by document",
        "mamba-ssm's scan, one call for each document",
        *("scan", "mamba-ssm", "by-document", None),
    ),
    "mamba-ssm-padded": _gpu(
        "mamba-ssm, padded",
        "mamba-ssm's scan, each document in a row of its own, filled up",
        *("scan", "mamba-ssm", "padded", None),
    ),
    "ssd": _gpu(
        "ssd_pack",
        "our Mamba-2 scan, heads of 64 channels and 128 states",
        *("scan", "packmamba-ssd"),
    ),
    "mamba2-ssd": _gpu(
        "Mamba-2 SSD with seq_idx",
        "Mamba-2's scan (state space duality), which keeps packed documents apart",
        *("scan", "mamba2-ssd", "packed", "indices"),
    ),
    "conv1d": _gpu(
        "conv1d_pack", "our convolution with SiLU; where documents start is in the batch's schedule", "conv"
    ),
    "conv1d-indices": _gpu(
        "conv1d_pack, an index per token",
        "the same, with an index per token instead of the schedule",
        *("conv", "packmamba", "packed", "indices"),
    ),
    "causal-conv1d": _gpu(
        "causal-conv1d with seq_idx",
        "causal-conv1d's kernel, which keeps packed documents apart",
        *("conv", "causal-conv1d", "packed", "indices"),
    ),
    "projections": _gpu(
        "matrix products of the block",
        "the four projections of a block, for scale",
        "projections",
        "torch",
        boundaries=None,
    ),
    "schedule": _gpu("the batch's schedule, once", "made once for a batch, used by all layers", "schedule"),
}


@dataclass(frozen=True)
class CpuArm(_Fields):
    """On a CPU, for both operators."""

    implementation: str
    """packmamba, compiled; reference, vectorised PyTorch; or transformers, its slow path."""
    packing: str = "packed"
    """packed, or by-document: each alone."""
    memory: str = "new"
    """new: through the public operator, which allocates its results; at_hand: packmamba's kernels into memory that is there."""

    @property
    def slow(self) -> bool:
        return self.implementation != "packmamba"


CPU_ARMS = {
    "cpu": CpuArm(
        "packmamba",
        label="compiled, public operator",
        does="our kernels as they are called; their outputs are new memory",
    ),
    "cpu-kernels": CpuArm(
        "packmamba",
        memory="at_hand",
        label="compiled, memory at hand",
        does="our kernels, writing into memory that was used before",
    ),
    "reference": CpuArm("reference", label="vectorised reference", does="our path in plain PyTorch"),
    "transformers": CpuArm(
        "transformers",
        "by-document",
        label="transformers, slow path",
        does="what transformers runs without CUDA kernels",
    ),
}
