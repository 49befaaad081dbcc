"""Tables and figures of the operators on a GPU, and what the hardware allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes

from experiments.common import records_of
from experiments.operators.arms import GPU_ARMS, GpuArm
from packmamba.lab.report.aggregate import Record, natural
from packmamba.lab.report.figures import MUTED, Figure, axes, finish, legend_below
from packmamba.lab.report.tables import Cell, Table, make_table

SCAN, SCAN_STATES, SCAN_INDICES = (GPU_ARMS[name] for name in ("scan", "scan-states", "scan-indices"))
UNPACKED, BY_DOCUMENT, PADDED = (GPU_ARMS[f"mamba-ssm-{name}"] for name in ("unpacked", "by-document", "padded"))
BESIDE_SCAN = (*(f"mamba-ssm-{name}" for name in ("unpacked", "by-document", "padded")), "mamba2-ssd", "scan-states")
CONV, CONV_INDICES, CAUSAL_CONV = (GPU_ARMS[name] for name in ("conv1d", "conv1d-indices", "causal-conv1d"))
SSD, PEER_SSD, PROJECTIONS = GPU_ARMS["ssd"], GPU_ARMS["mamba2-ssd"], GPU_ARMS["projections"]
# config: tokens, channels, documents (their distribution or length), states, dtype. Seconds are
# medians of interleaved rounds, spreads interquartile ranges, activations bfloat16 tensors of
# tokens x channels, errors relative to float64, position bytes what all warps read together; null
# where it was not measured or has no meaning. What the hardware allows, per token and channel. The
# scan forward: of its exponentials, one a state, three quarters on the special-function units (16 a
# clock), the rest as polynomials; or u, delta, z read and y, kept states written. Backward:
# instruction slots (128 a clock) a state: 18 multiply-adds, 2 exponentials, 1.5 exchanges; or 14
# bytes, u, delta, z, dy and three gradients. The convolution: bytes alone. Mamba-2's scan, heads of
# 64 channels, 128 states: products on tensor cores (4096 operations a clock in bfloat16; float32
# takes three products for one) in chunks of 128 tokens. Forward: states, outputs from them, and
# scores, of which a mask leaves half. Backward: five products of states, and scores twice. Or 6 and
# 10 bytes. In other dtypes bytes grow with an element's.
EXPONENTIALS, FORWARD_BYTES = 0.75, 10
BACKWARD_SLOTS, BACKWARD_BYTES = 21.5, 14
SSD_OPERATIONS, SSD_BYTES = (4 * 128 + 128, 10 * 128 + 2 * 128), (6, 10)
SSD_PRODUCTS = {"bfloat16": 1, "float16": 1, "float32": 3}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CONV_BYTES = (4, 6)


class Shape(NamedTuple):
    tokens: int
    channels: int
    documents: str


Arms = Mapping[GpuArm, Record]
Shapes = Mapping[Shape, Arms]


def by_shape(
    records: Sequence[Record], dtype: str = "bfloat16", holding: GpuArm | None = None
) -> dict[Shape, dict[GpuArm, Record]]:
    """Arms of each shape, which were timed in turns: those of its latest commit, or of the latest
    that timed ``holding``.
    """
    runs: dict[tuple[Shape, str], dict[GpuArm, Record]] = {}
    for record in sorted(records_of(records, "gpu_operators"), key=lambda record: record["time"]):
        config = record["config"]
        if config["dtype"] != dtype:
            continue
        shape = Shape(config["tokens"], config["channels"], config["documents"])
        runs.setdefault((shape, record["commit"]), {})[GpuArm.of(record)] = record
    groups = {shape: arms for (shape, _), arms in runs.items() if holding is None or holding in arms}

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
    moved = elements * ELEMENT_BYTES[config["dtype"]] / ELEMENT_BYTES["bfloat16"] / metrics["copy_bytes_per_second"]
    forward = max(EXPONENTIALS / (16 * cycles), FORWARD_BYTES * moved)
    return forward, max(BACKWARD_SLOTS / (128 * cycles), BACKWARD_BYTES * moved)


def ssd_limit(record: Record) -> tuple[float, ...]:
    """Seconds that the hardware needs at least for Mamba-2's scan, forward and backward."""
    config, metrics = record["config"], record["metrics"]
    elements = config["tokens"] * config["channels"]
    seconds_a_product = SSD_PRODUCTS[config["dtype"]] / (4096 * metrics["multiprocessors"] * metrics["clock_hz"])
    seconds_a_byte = ELEMENT_BYTES[config["dtype"]] / ELEMENT_BYTES["bfloat16"] / metrics["copy_bytes_per_second"]
    counts = zip(SSD_OPERATIONS, SSD_BYTES)
    return tuple(elements * max(products * seconds_a_product, moved * seconds_a_byte) for products, moved in counts)


def copy_shares(record: Record) -> tuple[float, float]:
    """Divide the time to copy a convolution's bytes by the time that it takes, forward and
    backward.
    """
    config, metrics = record["config"], record["metrics"]
    moved = config["tokens"] * config["channels"] / metrics["copy_bytes_per_second"]
    return CONV_BYTES[0] * moved / metrics["forward_seconds"], CONV_BYTES[1] * moved / metrics["backward_seconds"]


def gpu_operators_tables(records: Sequence[Record]) -> list[Table]:
    """Make the tables of each dtype; names of all but bfloat16's end with it."""
    makers = (_scan, _ssd, _conv, _bottleneck, _times)
    tables = [table for dtype in ELEMENT_BYTES for table in _tables(makers, by_shape(records, dtype), dtype)]
    # An earlier build of the kernels, beside the schedules of its own run.
    return tables + _tables([_indices], by_shape(records, holding=SCAN_INDICES), "bfloat16")


def _tables(makers: Sequence[Callable[[Shapes], Table]], found: Shapes, dtype: str) -> list[Table]:
    tables = [table for make in makers if (table := make(found)).rows]
    if not tables:
        return []
    first = next(iter(next(iter(found.values())).values()))
    layouts = max(record["config"]["layouts"] for arms in found.values() for record in arms.values())
    for table in tables:
        if dtype != "bfloat16":
            table.name += f"-{dtype}"
        table.notes.append(
            f"{', '.join(first['hardware']['gpus'])}; {dtype}, {first['config']['states']} states; medians of "
            f"{first['config']['rounds']} rounds in turns, each a mean over {layouts} rows of different documents."
        )
    return tables


def _scan(found: Shapes) -> Table:
    others = {GPU_ARMS[name]: name.replace("-", "_") for name in BESIDE_SCAN}
    rows = []
    for shape, arms in found.items():
        if SCAN not in arms:
            continue
        metrics, limit = arms[SCAN]["metrics"], sum(scan_limit(arms[SCAN]))
        memory = (metrics["kept_activations"], metrics["workspace_activations"])
        rows.append(
            _shape_values(shape, arms[SCAN])
            | {"limit_ms": 1e3 * limit, "times_limit": metrics["total_seconds"] / limit}
            | {"kept": Cell(f"{memory[0]:.3f}, {memory[1]:.2f}", memory)}
            | {column: over(arms, arm, SCAN) for arm, column in others.items()}
        )
    digits = {arm: 3 if arm.implementation == "packmamba" else 2 for arm in others}
    columns = " | ".join(f"{arm.label} = {column}:.{digits[arm]}f" for arm, column in others.items())
    return make_table(
        "gpu-scan",
        "ssm_pack: time, what the hardware allows, and the other arms' time over it",
        f"{SHAPE} | forward (ms) = forward_ms:.3f | backward (ms) = backward_ms:.3f | limit (ms) = limit_ms:.3f | "
        f"times the limit = times_limit:.2f | {columns} | kept, workspace (activations) = kept workspace",
        rows,
        "Limit: three quarters of an exponential per token, channel and state on the special-function units, forward; 21.5 "
        "instruction slots, backward; or the bytes at the copy rate measured in the same run, where that is more.",
        "mamba-ssm at its own binding, channels first and contiguous, without transposes. Padded: to the distribution's longest "
        "document up to 2048, else to the row's.",
    )


def _ssd(found: Shapes) -> Table:
    rows = []
    for shape, arms in found.items():
        if SSD not in arms:
            continue
        limit = sum(ssd_limit(arms[SSD]))
        rows.append(
            _shape_values(shape, arms[SSD])
            | {"limit_ms": 1e3 * limit, "times_limit": arms[SSD]["metrics"]["total_seconds"] / limit}
            | {"mamba_ssm": over(arms, PEER_SSD, SSD), "scan": over(arms, SCAN, SSD)}
        )
    return make_table(
        "gpu-ssd",
        "ssd_pack with a gate: time, what the hardware allows, and the other scans' time over it",
        f"{SHAPE} | forward (ms) = forward_ms:.3f | backward (ms) = backward_ms:.3f | limit (ms) = limit_ms:.3f | "
        "times the limit = times_limit:.2f | mamba-ssm's with seq_idx = mamba_ssm:.2f | ssm_pack of as many channels = scan:.2f",
        rows,
        "Limit: bytes at the copy rate measured in the same run, 6 and 10 a channel in bfloat16; or 640 and 1536 operations at "
        "4096 a clock, three times as many in float32, where that is more. Heads of 64 channels, 128 states, one group. The "
        "gate z is part of it here, and its backward computes y again; Mamba-2's models gate in their norm.",
    )


def _indices(found: Shapes) -> Table:
    rows = [
        _shape_values(shape, arms[SCAN])
        | {"scan_indices": over(arms, SCAN_INDICES, SCAN), "conv1d_indices": over(arms, CONV_INDICES, CONV)}
        for shape, arms in found.items()
    ]
    return make_table(
        "gpu-indices",
        "An index per token, the paper's mechanism: time over that with a schedule",
        f"{SHAPE} | ssm_pack = scan_indices:.3f | conv1d_pack = conv1d_indices:.3f",
        rows,
        "An earlier build of the kernels, which read an index for each token, beside the schedules of its own run.",
    )


def _conv(found: Shapes) -> Table:
    rows = []
    for shape, arms in found.items():
        if CONV not in arms:
            continue
        shares = copy_shares(arms[CONV])
        peer = copy_shares(arms[CAUSAL_CONV]) if CAUSAL_CONV in arms else (None, None)
        copy = arms[CONV]["metrics"]["copy_bytes_per_second"]
        rows.append(
            _shape_values(shape, arms[CONV])
            | {"forward_share": shares[0], "backward_share": shares[1]}
            | {"peer_forward_share": Cell("-" if peer[0] is None else f"{peer[0]:.0%}, {peer[1]:.0%}", peer)}
            | {"causal_conv1d": over(arms, CAUSAL_CONV, CONV)}
            | {"copy_bytes_per_second": Cell(f"{copy / 1e12:.2f}", (copy,))}
        )
    return make_table(
        "gpu-conv",
        "conv1d_pack: time and share of copy bandwidth",
        f"{SHAPE} | forward (ms) = forward_ms:.4f | backward (ms) = backward_ms:.4f | "
        "share of copy, forward = forward_share:% | backward = backward_share:% | "
        "causal-conv1d's shares = peer_forward_share peer_backward_share | causal-conv1d over ours = causal_conv1d:.2f | "
        "copy (TB/s) = copy_bytes_per_second",
        rows,
        "Bytes: x and y forward; x, dy and dx backward.",
    )


def _bottleneck(found: Shapes) -> Table:
    rows = []
    for shape, arms in found.items():
        products = seconds(arms, PROJECTIONS)
        if products is None:
            continue
        row = _shape_values(shape, arms[PROJECTIONS]) | {"projections_ms": 1e3 * products}
        for who, scan, conv in (("", SCAN, CONV), ("peer_", UNPACKED, CAUSAL_CONV)):
            parts = {"matrix products": products, "scan": seconds(arms, scan), "convolution": seconds(arms, conv)}
            known = {name: value for name, value in parts.items() if value is not None}
            for name in ("scan", "convolution"):
                t = parts[name]
                values = (None, None) if t is None else (1e3 * t, t / sum(known.values()))
                row[f"{who}{name[:4]}_ms"] = Cell("-" if t is None else f"{values[0]:.3f} ({values[1]:.0%})", values)
            row[f"{who}most"] = max(known, key=lambda name: known[name]) if len(known) == 3 else "-"
        rows.append(row)
    return make_table(
        "gpu-bottleneck",
        "Which operator takes the time: a block's matrix products, scan and convolution, forward and backward",
        f"{SHAPE} | matrix products (ms) = projections_ms:.3f | ours: scan (ms, share) = scan_ms scan_share | "
        "convolution = conv_ms conv_share | !most | mamba-ssm: scan = peer_scan_ms peer_scan_share | "
        "causal-conv1d = peer_conv_ms peer_conv_share | !most = peer_most",
        rows,
        "Matrix products: the block's four projections (d_model = channels / 2) with all gradients. Shares are of the three "
        "together. Peers: mamba-ssm's scan not packed and causal-conv1d with seq_idx.",
    )


def _times(found: Shapes) -> Table:
    known, rows = list(GPU_ARMS.values()), []
    for shape, arms in found.items():
        ordered = sorted(arms, key=lambda arm: known.index(arm) if arm in known else len(known))
        rows += [_shape_values(shape, arms[arm]) | {"arm": arm} for arm in ordered]
    phases = {"forward": "forward", "backward": "backward", "total": "together"}
    columns = " | ".join(f"{title} = {what}_ms {what}_spread_ms:.4g ± .2g" for what, title in phases.items())
    return make_table(
        "gpu-times",
        "Every arm: medians and interquartile ranges (ms), and the correctness gate's largest errors",
        f"{SHAPE} | !arm | {columns} | error of outputs = output_error:.1e | of gradients = gradient_error:.1e",
        rows,
        "Errors are relative, against float64 on the first layout; of other libraries the output alone; of matrix products none.",
    )


SHAPE = "tokens:d | channels:d | !documents (mean length) = documents mean_length"


def _shape_values(shape: Shape, record: Record) -> dict[str, Any]:
    """Return a row's shape, its times in milliseconds, and the record's metrics."""
    metrics, length = record["metrics"], shape.tokens / record["config"]["mean_documents"]
    documents = Cell(f"{shape.documents} ({length:.0f})", (shape.documents, length))
    times = {
        f"{what}{end}_ms": None if (value := metrics[f"{what}_{key}"]) is None else 1e3 * value
        for what in ("forward", "backward", "total")
        for end, key in (("", "seconds"), ("_spread", "spread"))
    }
    return metrics | times | {"tokens": shape.tokens, "channels": shape.channels, "documents": documents}


_SCANS: dict[GpuArm, dict[str, Any]] = {
    PADDED: {"color": "#E69F00", "marker": "v"},
    BY_DOCUMENT: {"color": "#7A4B9A", "marker": "^"},
    UNPACKED: {"color": "#D55E00", "marker": "s"},
    PEER_SSD: {"color": "#009E73", "marker": "D"},
    SSD: {"color": "#56B4E9", "marker": "x"},
    SCAN_STATES: {"color": "#9aa0a8", "linewidth": 5.0},
    SCAN: {"color": "#0072B2", "marker": "o"},
}
_CONVS: dict[GpuArm, dict[str, Any]] = {
    CONV: {"color": "#0072B2", "marker": "o"},
    CAUSAL_CONV: {"color": "#D55E00", "marker": "s"},
}
Points = Sequence[tuple[float, Arms]]


def gpu_operators_figures(records: Sequence[Record]) -> list[Figure]:
    """Against tokens, channels and the documents' mean length; only axes along which there are
    points.
    """
    found = by_shape(records)
    one_length = [shape for shape in found if shape.documents.isdecimal() or shape.documents == "one"]
    by_tokens = _along(found, lambda s: s.tokens, lambda s: (s.channels, s.documents) == (4096, "documents-2k"))
    by_channels = _along(found, lambda s: s.channels, lambda s: (s.tokens, s.documents) == (16384, "documents-2k"))
    by_length = _along(found, lambda s: _mean_length(found[s]), lambda s: s[:2] == (16384, 4096) and s in one_length)
    mixed = _along(found, lambda s: _mean_length(found[s]), lambda s: s[:2] == (16384, 4096) and s not in one_length)
    where = "at 16384 tokens, 4096 channels; lines: documents of one length; hollow: short, documents-2k, heavy"
    drawn = [
        _figure("gpu-tokens", "tokens of the row", "at 4096 channels, documents-2k", by_tokens),
        _figure("gpu-channels", "channels (d_inner)", "at 16384 tokens, documents-2k", by_channels),
        _figure("gpu-documents", "mean document length (tokens)", where, by_length, mixed),
    ]
    return [figure for figure in drawn if figure is not None]


def _mean_length(arms: Arms) -> float:
    return _tokens(arms) / next(iter(arms.values()))["config"]["mean_documents"]


def _along(found: Shapes, axis: Callable[[Shape], float], on: Callable[[Shape], bool]) -> Points:
    return sorted(((axis(shape), arms) for shape, arms in found.items() if on(shape)), key=lambda point: point[0])


def _figure(name: str, label: str, where: str, points: Points, apart: Points = ()) -> Figure | None:
    if len(points) < 2:
        return None
    fig, (left, right) = axes(2, width=11.0, height=5.4)
    for arm, style in _SCANS.items():
        _draw(left, points, apart, partial(_per_token, arm), arm.label, style)
    limits = [(x, 1e9 * sum(scan_limit(arms[SCAN])) / _tokens(arms)) for x, arms in points if SCAN in arms]
    left.plot(*zip(*limits), color=MUTED, linestyle=(0, (2, 1.5)), linewidth=1.6, label="the hardware's limit")
    for arm, style in _CONVS.items():
        for direction, dashes in ((0, "-"), (1, (0, (4, 1.5)))):
            way = ("forward", "backward")[direction]
            what = f"{arm.label}, {way}"
            _draw(right, points, apart, partial(_share, arm, direction), what, style | {"linestyle": dashes})
    right.axhline(100, color=MUTED, linestyle=(0, (2, 1.5)), linewidth=1.6, label="copying")
    left.set(title="Scan, forward and backward", ylabel="nanoseconds per token", yscale="log")
    right.set(title="Convolution", ylabel="share of copy bandwidth (%)", ylim=(0, None))
    left.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    left.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if str(y)[0] in "25" else "")
    ticks = sorted({x for x, _ in points})
    for ax in (left, right):
        ax.set(xscale="log", xlabel=label)
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=30)
        ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    legend_below(fig, columns=4)
    return finish(
        fig,
        name,
        f"The packed operators, mamba-ssm's and causal-conv1d's, {where}. Left: time per token, forward and backward, with what "
        "exponentials, instruction slots or bytes take at least. Right: the convolution's bytes at the measured copy rate, over "
        "its time.",
    )


def _draw(
    ax: Axes, points: Points, apart: Points, value: Callable[[Arms], float | None], label: str, style: dict[str, Any]
) -> None:
    def known(some: Points) -> list[tuple[float, float]]:
        return [(x, y) for x, arms in some if (y := value(arms)) is not None]

    line, others = known(points), known(apart)
    if line:
        ax.plot(*zip(*line), label=label, **({"linewidth": 1.8} | style))
    if others:
        hollow = {"linestyle": "", "marker": style.get("marker", "o"), "markerfacecolor": "white"}
        ax.plot(*zip(*others), color=style["color"], **hollow)


def _per_token(arm: GpuArm, arms: Arms) -> float | None:
    time = seconds(arms, arm)
    return None if time is None else 1e9 * time / _tokens(arms)


def _share(arm: GpuArm, direction: int, arms: Arms) -> float | None:
    return 100 * copy_shares(arms[arm])[direction] if arm in arms else None


def _tokens(arms: Arms) -> int:
    return next(iter(arms.values()))["config"]["tokens"]
