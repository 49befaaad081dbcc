"""Tables of the packed operators on a GPU: the bars, every shape, which operator takes the time, position data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from packmamba.report import summary
from packmamba.report.summary import Record
from packmamba.report.tables import Cell, Column, Table, number, percent, word

NAMES = {
    "scan": "ssm_pack",
    "scan-states": "ssm_pack, states in and out",
    "scan-indices": "ssm_pack, an index per token",
    "mamba-ssm-unpacked": "mamba-ssm, not packed",
    "mamba-ssm-by-document": "mamba-ssm, document by document",
    "mamba-ssm-padded": "mamba-ssm, padded",
    "mamba2-ssd": "Mamba-2 SSD with seq_idx",
    "conv1d": "conv1d_pack",
    "conv1d-indices": "conv1d_pack, an index per token",
    "causal-conv1d": "causal-conv1d with seq_idx",
    "projections": "matrix products of the block",
    "schedule": "the batch's schedule, once",
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


Arms = Mapping[str, Record]
Shapes = Mapping[Shape, Arms]


def by_shape(records: Sequence[Record]) -> dict[Shape, dict[str, Record]]:
    """Arms of each shape, which were timed in turns; of equal ones the latest."""
    groups: dict[Shape, dict[str, Record]] = {}
    for record in sorted(summary.of_kind(records, "gpu_operators"), key=lambda record: record["time"]):
        config = record["config"]
        shape = Shape(config["tokens"], config["channels"], config["documents"])
        groups.setdefault(shape, {})[record["arm"]] = record

    def order(shape: Shape) -> tuple:
        return shape.documents != "documents-2k", shape.channels, shape.tokens, summary.natural(shape.documents)

    return {shape: groups[shape] for shape in sorted(groups, key=order)}


def seconds(arms: Arms, name: str) -> float | None:
    """Forward and backward."""
    return arms[name]["metrics"]["total_seconds"] if name in arms else None


def over(arms: Arms, name: str, ours: str) -> float | None:
    """An arm's time over ours."""
    times = seconds(arms, name), seconds(arms, ours)
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


class Bar(NamedTuple):
    what: str
    bar: float
    stretch: float
    measure: Callable[[Shapes], float | None]
    at_most: bool = False
    percent: bool = False


def _ratio(name: str, *shapes: Shape) -> Callable[[Shapes], float | None]:
    """The smallest over the shapes; None if one is missing."""

    def measure(found: Shapes) -> float | None:
        ratios = [over(found.get(shape, {}), name, "scan") for shape in shapes]
        known = [ratio for ratio in ratios if ratio is not None]
        return min(known) if len(known) == len(ratios) else None

    return measure


def _largest(metric: str) -> Callable[[Shapes], float | None]:
    return lambda found: max(
        (arms["scan"]["metrics"][metric] for arms in found.values() if "scan" in arms), default=None
    )


def _per_token(found: Shapes) -> float | None:
    times = [seconds(found.get(_documents(tokens), {}), "scan") for tokens in (131072, 16384)]
    return times[0] / times[1] / 8 if times[0] and times[1] else None


def _states(found: Shapes) -> float | None:
    ratios = [over(arms, "scan-states", "scan") for arms in found.values()]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _share(direction: int) -> Callable[[Shapes], float | None]:
    def measure(found: Shapes) -> float | None:
        arms = found.get(_documents(16384), {})
        return copy_shares(arms["conv1d"])[direction] if "conv1d" in arms else None

    return measure


def _documents(tokens: int, channels: int = 4096, documents: str = "documents-2k") -> Shape:
    return Shape(tokens, channels, documents)


_UNPACKED, _SSD = "mamba-ssm-unpacked", "mamba2-ssd"
BARS = (
    Bar("mamba-ssm not packed over ours: 16384 tokens, 4096 channels", 3.5, 5, _ratio(_UNPACKED, _documents(16384))),
    Bar("the same, 65536 tokens", 3.5, 5, _ratio(_UNPACKED, _documents(65536))),
    Bar("the same, 16384 tokens, 5120 channels", 3.5, 5, _ratio(_UNPACKED, _documents(16384, 5120))),
    Bar("the same, 16384 tokens, 1536 channels", 3.1, 4.5, _ratio(_UNPACKED, _documents(16384, 1536))),
    Bar("the same, 4096 tokens", 2.6, 4, _ratio(_UNPACKED, _documents(4096))),
    Bar("the same, one document of 16384 tokens", 2.4, 4, _ratio(_UNPACKED, _documents(16384, documents="one"))),
    Bar("the same, short documents, 16384 tokens", 3.2, 4.5, _ratio(_UNPACKED, _documents(16384, documents="short"))),
    Bar("Mamba-2 SSD over ours, 16384 tokens", 1.35, 2, _ratio(_SSD, _documents(16384))),
    Bar("Mamba-2 SSD over ours, 65536 tokens", 1.35, 2, _ratio(_SSD, _documents(65536))),
    Bar("time per token at 131072 tokens over 16384", 1.05, 1, _per_token, True),
    Bar("kept for the backward, activations (largest of all shapes)", 0.5, 0.125, _largest("kept_activations"), True),
    Bar("workspace of the backward, activations (largest)", 2, 1, _largest("workspace_activations"), True),
    Bar("with states in and out over without (largest)", 1.05, 1.02, _states, True),
    Bar("conv1d_pack forward, share of copy bandwidth, 16384 tokens", 0.8, 0.9, _share(0), percent=True),
    Bar("conv1d_pack backward, share of copy bandwidth, 16384 tokens", 0.7, 0.85, _share(1), percent=True),
)


def gpu_operators_tables(records: Sequence[Record]) -> list[Table]:
    """The bars, then what stands behind them."""
    found = by_shape(records)
    if not found:
        return []
    first = next(iter(next(iter(found.values())).values()))
    tables = [_bars(found), _scan(found), _conv(found), _bottleneck(found), _positions(found), _times(found)]
    layouts = max(record["config"]["layouts"] for arms in found.values() for record in arms.values())
    for table in tables:
        table.notes.append(
            f"{', '.join(first['hardware']['gpus'])}; bfloat16, {first['config']['states']} states; medians of "
            f"{first['config']['rounds']} rounds in turns, each a mean over {layouts} rows of different documents."
        )
    return tables


def _bars(found: Shapes) -> Table:
    columns = [
        Column("forward and backward", ("what",), False),
        Column("bar", ("bar",)),
        Column("stretch", ("stretch",)),
        Column("measured", ("measured",)),
        Column("", ("verdict",), False),
    ]
    table = Table("gpu-bars", "The packed operators on a GPU, against the bars that were set beforehand", columns)
    for bar in BARS:
        value, sign = bar.measure(found), -1 if bar.at_most else 1
        reached = [value is not None and sign * value >= sign * goal for goal in (bar.bar, bar.stretch)]
        verdict = "-" if value is None else "stretch met" if reached[1] else "met" if reached[0] else "missed"
        goals = [percent(goal) if bar.percent else number(goal, "g") for goal in (bar.bar, bar.stretch)]
        measured = percent(value) if bar.percent else number(value, ".3f")
        table.rows.append([word(bar.what), *goals, measured, word(verdict)])
    indices = [(shape, over(arms, "scan-indices", "scan")) for shape, arms in found.items()]
    known = [ratio for _, ratio in indices if ratio is not None]
    if known:
        span = f"{min(known):.3f} to {max(known):.3f}"
        row = [word("an index per token over the schedule, every shape"), number(None, ""), number(None, "")]
        table.rows.append([*row, Cell(span, (span,)), word("measured")])
    table.notes = ["The first ratios want to be large; times per token, memory and the price of states small."]
    return table


def _scan(found: Shapes) -> Table:
    others = (
        "mamba-ssm-unpacked",
        "mamba-ssm-by-document",
        "mamba-ssm-padded",
        "mamba2-ssd",
        "scan-states",
        "scan-indices",
    )
    table = Table(
        "gpu-scan",
        "ssm_pack: time, what the hardware allows, and the other arms' time over it",
        [
            *_shape_columns(),
            Column("forward (ms)", ("forward_ms",)),
            Column("backward (ms)", ("backward_ms",)),
            Column("limit (ms)", ("limit_ms",)),
            Column("times the limit", ("times_limit",)),
            *(Column(NAMES[name], (name.replace("-", "_"),)) for name in others),
            Column("kept, workspace (activations)", ("kept", "workspace")),
        ],
    )
    for shape, arms in found.items():
        if "scan" not in arms:
            continue
        metrics, limit = arms["scan"]["metrics"], sum(scan_limit(arms["scan"]))
        memory = (metrics["kept_activations"], metrics["workspace_activations"])
        table.rows.append(
            [
                *_shape_cells(shape, arms["scan"]),
                number(1e3 * metrics["forward_seconds"], ".3f"),
                number(1e3 * metrics["backward_seconds"], ".3f"),
                number(1e3 * limit, ".3f"),
                number(metrics["total_seconds"] / limit, ".2f"),
                *(number(over(arms, name, "scan"), ".3f" if "scan" in name else ".2f") for name in others),
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
        if "conv1d" not in arms:
            continue
        metrics, shares = arms["conv1d"]["metrics"], copy_shares(arms["conv1d"])
        peer = copy_shares(arms["causal-conv1d"]) if "causal-conv1d" in arms else (None, None)
        copy = metrics["copy_bytes_per_second"]
        table.rows.append(
            [
                *_shape_cells(shape, arms["conv1d"]),
                number(1e3 * metrics["forward_seconds"], ".4f"),
                number(1e3 * metrics["backward_seconds"], ".4f"),
                percent(shares[0]),
                percent(shares[1]),
                Cell("-" if peer[0] is None else f"{peer[0]:.0%}, {peer[1]:.0%}", peer),
                number(over(arms, "causal-conv1d", "conv1d"), ".2f"),
                number(over(arms, "conv1d-indices", "conv1d"), ".3f"),
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
        products = seconds(arms, "projections")
        if products is None:
            continue
        cells = [*_shape_cells(shape, arms["projections"]), number(1e3 * products, ".3f")]
        for scan, conv in (("scan", "conv1d"), ("mamba-ssm-unpacked", "causal-conv1d")):
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
        for name, moved in (
            ("scan", FORWARD_BYTES + BACKWARD_BYTES),
            ("scan-indices", FORWARD_BYTES + BACKWARD_BYTES),
            ("conv1d", sum(CONV_BYTES)),
            ("conv1d-indices", sum(CONV_BYTES)),
        ):
            read = (
                [arms[name]["metrics"][f"position_bytes_{way}"] for way in ("forward", "backward")]
                if name in arms
                else []
            )
            if not read or None in read:
                continue
            activations = moved * shape.tokens * shape.channels
            table.rows.append(
                [
                    *_shape_cells(shape, arms[name]),
                    word(NAMES[name]),
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
    for shape, arms in found.items():
        for name in (name for name in NAMES if name in arms):
            metrics = arms[name]["metrics"]
            cells = [*_shape_cells(shape, arms[name]), word(NAMES[name])]
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
