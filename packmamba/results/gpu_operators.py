"""Table of the packed operators on a GPU beside the peers', from records of one shape's arms timed in turns."""

from __future__ import annotations

from collections.abc import Sequence

from packmamba.results import summary
from packmamba.results.plots import Figure
from packmamba.results.summary import Record
from packmamba.results.tables import Cell, Column, Table, number, word

# Arms, the arm each is compared with, and the bytes a convolution must move per token and channel (forward, backward).
_NAMES = {
    "scan": "ssm_pack",
    "scan-states": "ssm_pack, states in and out",
    "mamba-ssm-unpacked": "mamba-ssm, not packed",
    "mamba2-ssd": "Mamba-2 SSD with seq_idx",
    "conv1d": "conv1d_pack",
    "causal-conv1d": "causal-conv1d with seq_idx",
    "schedule": "the batch's schedule, once",
}
_OURS = {"scan-states": "scan", "mamba-ssm-unpacked": "scan", "mamba2-ssd": "scan", "causal-conv1d": "conv1d"}
_BYTES = (4, 6)


def gpu_operators_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each number of channels: of equal arms the latest record counts."""
    groups: dict[int, dict[str, Record]] = {}
    for record in summary.of_kind(records, "gpu_operators"):
        groups.setdefault(record["config"]["channels"], {})[record["arm"]] = record
    return [_table(channels, arms) for channels, arms in sorted(groups.items())]


def gpu_operators_figures(records: Sequence[Record]) -> list[Figure]:
    return []


def gpu_operators_label(records: Sequence[Record]) -> str:
    return records[0]["corpus_hash"].replace(", rows of ", "-")


def _table(channels: int, arms: dict[str, Record]) -> Table:
    config = next(iter(arms.values()))["config"]
    table = Table(
        f"gpu-operators-{channels}",
        f"{config['tokens']} tokens in {config['mean_documents']:.4g} documents on average, {channels} channels",
        [
            Column("operator", ("operator",), False),
            Column("forward (ms)", ("forward_ms",)),
            Column("backward (ms)", ("backward_ms",)),
            Column("time over ours", ("over_ours",)),
            Column("share of copy bandwidth, forward, backward", ("forward_share", "backward_share")),
            Column("kept, workspace (activations)", ("kept", "workspace")),
        ],
    )
    for name in _NAMES:
        if name not in arms:
            continue
        metrics = arms[name]["metrics"]
        forward, backward = metrics["forward_seconds"], metrics["backward_seconds"]
        over = None
        if _OURS.get(name) in arms and backward is not None:
            over = (forward + backward) / _total(arms[_OURS[name]])
        shares = (None, None)
        if name in ("conv1d", "causal-conv1d"):
            moved = [count * config["tokens"] * channels / metrics["copy_bytes_per_second"] for count in _BYTES]
            shares = (moved[0] / forward, moved[1] / backward)
        memory = (metrics["kept_activations"], metrics["workspace_activations"])
        table.rows.append(
            [
                word(_NAMES[name]),
                number(1e3 * forward, ".3g"),
                number(None if backward is None else 1e3 * backward, ".4g"),
                number(over, ".3g"),
                Cell("-" if shares[0] is None else f"{shares[0]:.0%}, {shares[1]:.0%}", shares),
                Cell("-" if memory[0] is None else f"{memory[0]:.2f}, {memory[1]:.2f}", memory),
            ]
        )
    table.notes = [
        f"bfloat16, {config['states']} states, medians of {config['rounds']} rounds in turns, each a mean over "
        f"{config['layouts']} layouts; {', '.join(arms['scan']['hardware']['gpus'])}."
    ]
    return table


def _total(record: Record) -> float:
    return record["metrics"]["forward_seconds"] + record["metrics"]["backward_seconds"]
