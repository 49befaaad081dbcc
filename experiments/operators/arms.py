"""The arms of the experiment, as data: the fields that their records hold, and what tables call
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Self = TypeVar("Self", bound="_Fields")


@dataclass(frozen=True)
class _Fields:
    label: str = field(default="", compare=False, kw_only=True)

    def fields(self) -> dict[str, Any]:
        """Return the fields of its records' configurations."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.compare}

    @classmethod
    def of(cls: type[Self], record: Mapping[str, Any]) -> Self:
        """Return a record's arm. Raises KeyError where its configuration lacks a field."""
        arm = cls(**{entry.name: record["config"][entry.name] for entry in fields(cls) if entry.compare})
        return next((known for known in (*GPU_ARMS.values(), *CPU_ARMS.values()) if known == arm), arm)

    def __str__(self) -> str:
        """As tables show it: by a name of its own, or by its fields."""
        values = [name if value is True else value for name, value in self.fields().items()]
        return self.label or ", ".join(str(value) for value in values if value)


@dataclass(frozen=True)
class GpuArm(_Fields):
    """On a GPU."""

    # scan, conv, projections (the block's matrix products) or schedule (making it, once a batch)
    operator: str
    implementation: str = "packmamba"  # A name in gpu_implementations._implementation
    # packed: rows with boundaries; unpacked: the row as one document; by-document: each alone;
    # padded: one batch.
    packing: str = "packed"
    # Source of boundaries in kernels: schedule; indices, one for each token; null where there are
    # none.
    boundaries: str | None = "schedule"
    with_states: bool = False  # an initial state goes in, the final one comes out

    @property
    def slow(self) -> bool:
        return self.packing in ("by-document", "padded")

    @property
    def per_token(self) -> bool:
        """Return whether this is an earlier build of our kernels, in the committed records alone."""
        return self.implementation == "packmamba" and self.boundaries == "indices"


GPU_ARMS = {
    "scan": GpuArm("scan", label="ssm_pack"),
    "scan-states": GpuArm("scan", with_states=True, label="ssm_pack, states in and out"),
    # the paper's mechanism
    "scan-indices": GpuArm("scan", boundaries="indices", label="ssm_pack, an index per token"),
    "mamba-ssm-unpacked": GpuArm("scan", "mamba-ssm", "unpacked", None, label="mamba-ssm, not packed"),  # leaks
    "mamba-ssm-by-document": GpuArm("scan", "mamba-ssm", "by-document", None, label="mamba-ssm, document by document"),
    "mamba-ssm-padded": GpuArm("scan", "mamba-ssm", "padded", None, label="mamba-ssm, padded"),
    "ssd": GpuArm("scan", "packmamba-ssd", label="ssd_pack"),
    "mamba2-ssd": GpuArm("scan", "mamba2-ssd", boundaries="indices", label="Mamba-2 SSD with seq_idx"),
    "conv1d": GpuArm("conv", label="conv1d_pack"),
    "conv1d-indices": GpuArm("conv", boundaries="indices", label="conv1d_pack, an index per token"),
    "causal-conv1d": GpuArm("conv", "causal-conv1d", boundaries="indices", label="causal-conv1d with seq_idx"),
    "projections": GpuArm("projections", "torch", boundaries=None, label="matrix products of the block"),
    "schedule": GpuArm("schedule", label="the batch's schedule, once"),
}


@dataclass(frozen=True)
class CpuArm(_Fields):
    """On a CPU, for both operators."""

    # packmamba, compiled; reference, vectorised PyTorch; or transformers, its slow path
    implementation: str
    packing: str = "packed"  # packed, or by-document: each alone
    # new: through the public operator, which allocates its results; at_hand: packmamba's kernels
    # into memory that is there.
    memory: str = "new"

    @property
    def slow(self) -> bool:
        return self.implementation != "packmamba"


CPU_ARMS = {
    "cpu": CpuArm("packmamba", label="compiled, public operator"),
    "cpu-kernels": CpuArm("packmamba", memory="at_hand", label="compiled, memory at hand"),
    "reference": CpuArm("reference", label="vectorised reference"),
    "transformers": CpuArm("transformers", "by-document", label="transformers, slow path"),
}
