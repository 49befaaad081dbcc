"""Tables of the packed operators on a GPU: the bars, every shape, which operator takes the time, position data."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.operators.arms import GPU_ARMS
from experiments.operators.gpu_bars import bars_table
from experiments.operators.gpu_shapes import (
    BACKWARD_BYTES,
    BY_DOCUMENT,
    CAUSAL_CONV,
    CONV,
    CONV_BYTES,
    CONV_INDICES,
    FORWARD_BYTES,
    PADDED,
    PROJECTIONS,
    SCAN,
    SCAN_INDICES,
    SCAN_STATES,
    SSD,
    UNPACKED,
    Shape,
    Shapes,
    by_shape,
    copy_shares,
    over,
    scan_limit,
    seconds,
)
from packmamba.report.aggregate import Record
from packmamba.report.tables import Cell, Column, Table, number, percent, word


def gpu_operators_tables(records: Sequence[Record]) -> list[Table]:
    """The bars, then what stands behind them."""
    found = by_shape(records)
    if not found:
        return []
    first = next(iter(next(iter(found.values())).values()))
    tables = [bars_table(found), _scan(found), _conv(found), _bottleneck(found), _positions(found), _times(found)]
    layouts = max(record["config"]["layouts"] for arms in found.values() for record in arms.values())
    for table in tables:
        table.notes.append(
            f"{', '.join(first['hardware']['gpus'])}; bfloat16, {first['config']['states']} states; medians of "
            f"{first['config']['rounds']} rounds in turns, each a mean over {layouts} rows of different documents."
        )
    return tables


def _scan(found: Shapes) -> Table:
    others = {
        UNPACKED: "mamba_ssm_unpacked",
        BY_DOCUMENT: "mamba_ssm_by_document",
        PADDED: "mamba_ssm_padded",
        SSD: "mamba2_ssd",
        SCAN_STATES: "scan_states",
        SCAN_INDICES: "scan_indices",
    }
    table = Table(
        "gpu-scan",
        "ssm_pack: time, what the hardware allows, and the other arms' time over it",
        [
            *_shape_columns(),
            Column("forward (ms)", ("forward_ms",)),
            Column("backward (ms)", ("backward_ms",)),
            Column("limit (ms)", ("limit_ms",)),
            Column("times the limit", ("times_limit",)),
            *(Column(arm.label, (column,)) for arm, column in others.items()),
            Column("kept, workspace (activations)", ("kept", "workspace")),
        ],
    )
    for shape, arms in found.items():
        if SCAN not in arms:
            continue
        metrics, limit = arms[SCAN]["metrics"], sum(scan_limit(arms[SCAN]))
        memory = (metrics["kept_activations"], metrics["workspace_activations"])
        table.rows.append(
            [
                *_shape_cells(shape, arms[SCAN]),
                number(1e3 * metrics["forward_seconds"], ".3f"),
                number(1e3 * metrics["backward_seconds"], ".3f"),
                number(1e3 * limit, ".3f"),
                number(metrics["total_seconds"] / limit, ".2f"),
                *(
                    number(over(arms, arm, SCAN), ".3f" if arm.implementation == "packmamba" else ".2f")
                    for arm in others
                ),
                Cell(f"{memory[0]:.3f}, {memory[1]:.2f}", memory),
            ]
        )
    table.notes = [
        "Limit: three quarters of an exponential per token, channel and state on the special-function units, forward; 21.5 "
        "instruction slots, backward; or the bytes at the copy rate measured in the same run, where that is more.",
        "mamba-ssm at its own binding, channels first and contiguous, without transposes. Padded: to the distribution's longest "
        "document up to 2048, else to the row's.",
    ]
    return table


def _conv(found: Shapes) -> Table:
    table = Table(
        "gpu-conv",
        "conv1d_pack: time and share of copy bandwidth",
        [
            *_shape_columns(),
            Column("forward (ms)", ("forward_ms",)),
            Column("backward (ms)", ("backward_ms",)),
            Column("share of copy, forward", ("forward_share",)),
            Column("backward", ("backward_share",)),
            Column("causal-conv1d's shares", ("peer_forward_share", "peer_backward_share")),
            Column("causal-conv1d over ours", ("causal_conv1d",)),
            Column("an index per token", ("conv1d_indices",)),
            Column("copy (TB/s)", ("copy_bytes_per_second",)),
        ],
    )
    for shape, arms in found.items():
        if CONV not in arms:
            continue
        metrics, shares = arms[CONV]["metrics"], copy_shares(arms[CONV])
        peer = copy_shares(arms[CAUSAL_CONV]) if CAUSAL_CONV in arms else (None, None)
        copy = metrics["copy_bytes_per_second"]
        table.rows.append(
            [
                *_shape_cells(shape, arms[CONV]),
                number(1e3 * metrics["forward_seconds"], ".4f"),
                number(1e3 * metrics["backward_seconds"], ".4f"),
                percent(shares[0]),
                percent(shares[1]),
                Cell("-" if peer[0] is None else f"{peer[0]:.0%}, {peer[1]:.0%}", peer),
                number(over(arms, CAUSAL_CONV, CONV), ".2f"),
                number(over(arms, CONV_INDICES, CONV), ".3f"),
                Cell(f"{copy / 1e12:.2f}", (copy,)),
            ]
        )
    table.notes = ["Bytes: x and y forward; x, dy and dx backward."]
    return table


def _bottleneck(found: Shapes) -> Table:
    table = Table(
        "gpu-bottleneck",
        "Which operator takes the time: a block's matrix products, scan and convolution, forward and backward",
        [
            *_shape_columns(),
            Column("matrix products (ms)", ("projections_ms",)),
            Column("ours: scan (ms, share)", ("scan_ms", "scan_share")),
            Column("convolution", ("conv_ms", "conv_share")),
            Column("most", ("most",), False),
            Column("peers: scan", ("peer_scan_ms", "peer_scan_share")),
            Column("convolution", ("peer_conv_ms", "peer_conv_share")),
            Column("most", ("peer_most",), False),
        ],
    )
    for shape, arms in found.items():
        products = seconds(arms, PROJECTIONS)
        if products is None:
            continue
        cells = [*_shape_cells(shape, arms[PROJECTIONS]), number(1e3 * products, ".3f")]
        for scan, conv in ((SCAN, CONV), (UNPACKED, CAUSAL_CONV)):
            parts = {"matrix products": products, "scan": seconds(arms, scan), "convolution": seconds(arms, conv)}
            known = {name: value for name, value in parts.items() if value is not None}
            whole = sum(known.values())
            for name in ("scan", "convolution"):
                t = parts[name]
                values = (None, None) if t is None else (1e3 * t, t / whole)
                cells.append(Cell("-" if t is None else f"{1e3 * t:.3f} ({t / whole:.0%})", values))
            cells.append(word(max(known, key=lambda name: known[name]) if len(known) == 3 else "-"))
        table.rows.append(cells)
    table.notes = [
        "Matrix products: the block's four projections (d_model = channels / 2) with all gradients. Shares are of the three "
        "together. Peers: mamba-ssm's scan not packed and causal-conv1d with seq_idx."
    ]
    return table


def _positions(found: Shapes) -> Table:
    table = Table(
        "gpu-positions",
        "Position data that the kernels read, counted, and the activations they move",
        [
            *_shape_columns(),
            Column("operator", ("operator",), False),
            Column("read forward (KiB)", ("forward_bytes",)),
            Column("read backward (KiB)", ("backward_bytes",)),
            Column("activations (MiB)", ("activation_bytes",)),
            Column("share", ("share",)),
        ],
    )
    for shape, arms in found.items():
        for arm in (SCAN, SCAN_INDICES, CONV, CONV_INDICES):
            read = (
                [arms[arm]["metrics"][f"position_bytes_{way}"] for way in ("forward", "backward")]
                if arm in arms
                else []
            )
            if not read or None in read:
                continue
            moved = sum(CONV_BYTES) if arm.operator == "conv" else FORWARD_BYTES + BACKWARD_BYTES
            activations = moved * shape.tokens * shape.channels
            table.rows.append(
                [
                    *_shape_cells(shape, arms[arm]),
                    word(arm.label),
                    *(Cell(f"{count / 1024:,.0f}", (count,)) for count in read),
                    Cell(f"{activations / 2**20:,.0f}", (activations,)),
                    percent(sum(read) / activations),
                ]
            )
    table.notes = [
        "Read: what all warps ask for together, most of it from caches; the lanes of a warp that ask for one address count once."
    ]
    return table


def _times(found: Shapes) -> Table:
    table = Table(
        "gpu-times",
        "Every arm: medians and interquartile ranges (ms), and the correctness gate's largest errors",
        [
            *_shape_columns(),
            Column("arm", ("arm",), False),
            Column("forward", ("forward_ms", "forward_spread_ms")),
            Column("backward", ("backward_ms", "backward_spread_ms")),
            Column("together", ("total_ms", "total_spread_ms")),
            Column("error of outputs", ("output_error",)),
            Column("of gradients", ("gradient_error",)),
        ],
    )
    known = list(GPU_ARMS.values())
    for shape, arms in found.items():
        for arm in sorted(arms, key=lambda arm: known.index(arm) if arm in known else len(known)):
            metrics = arms[arm]["metrics"]
            cells = [*_shape_cells(shape, arms[arm]), word(str(arm))]
            for what in ("forward", "backward", "total"):
                values = [None if (v := metrics[f"{what}_{key}"]) is None else 1e3 * v for key in ("seconds", "spread")]
                cells.append(Cell("-" if values[0] is None else f"{values[0]:.4g} ± {values[1]:.2g}", tuple(values)))
            table.rows.append([*cells, *(number(metrics[key], ".1e") for key in ("output_error", "gradient_error"))])
    table.notes = [
        "Errors are relative, against float64 on the first layout; of peers the output alone; of matrix products none."
    ]
    return table


def _shape_columns() -> list[Column]:
    return [
        Column("tokens", ("tokens",)),
        Column("channels", ("channels",)),
        Column("documents (mean length)", ("documents", "mean_length"), False),
    ]


def _shape_cells(shape: Shape, record: Record) -> list[Cell]:
    length = shape.tokens / record["config"]["mean_documents"]
    documents = Cell(f"{shape.documents} ({length:.0f})", (shape.documents, length))
    return [number(shape.tokens, "d"), number(shape.channels, "d"), documents]
