"""One table of the paper's numbers beside those of this machine, and time against a sequence's length."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common import make_columns
from packmamba.report.aggregate import Record
from packmamba.report.figures import Figure, axes, finish, legend_below
from packmamba.report.html import Kind
from packmamba.report.tables import Cell, Table, number, percent, word

# arXiv 2408.03865, A100. 3.91x, 19.1 %, 0.41 % and 5.05x (the largest ratio over the sizes) as a summary of it reports them.
PAPER = {"1.4b": 3.06, "2.8b": 2.62}
LARGEST, KERNELS, PADDING = 5.05, 3.91, {"next_fit": 0.191, "greedy": 0.0041}
# Dense bfloat16 FLOP/s, bytes/s, special-function operations per second (16 a clock and multiprocessor): data sheets.
CARDS = {
    "A100": (312e12, 2.04e12, 108 * 16 * 1.41e9),
    "H100": (989e12, 3.35e12, 132 * 16 * 1.755e9),
    "H200": (989e12, 4.8e12, 132 * 16 * 1.755e9),
}
SINGLE, PACKED = "mamba-ssm-single", "packed"
OTHERS = "our distribution of lengths; the packed arm has our kernels"


def scaled_seconds(record: Record) -> float | None:
    """Return a breakdown's seconds scaled to an A100 by the bound of each family of kernels; None for an unknown card."""
    gpus = record["hardware"]["gpus"] or [""]
    card = next((name for name in ("H100", "H200") if name in str(gpus[0])), None)
    if card is None or record["config"]["dtype"] != "bfloat16":
        return None
    flops, memory, special = (here / there for here, there in zip(CARDS[card], CARDS["A100"]))
    factors = {"matrix products": flops, "scan": special, "idle": 1.0, "seconds": 0.0}
    return sum(value * factors.get(family, memory) for family, value in record["metrics"].items())


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the paper's claims, one a row, beside what these records say."""
    columns = make_columns(
        "!claim | !the paper, A100 = paper | here | here over the paper = ratio | an A100 by scaled bounds, a model = model | "
        "!what is not alike = unlike"
    )
    table = Table("paper", "The paper's numbers and ours", columns)

    def add(
        claim: str, theirs: float | None, here: float, unlike: str, fmt: str = "x", model: float | None = None
    ) -> None:
        show = {"x": lambda v: number(v, ".2f", "x"), "%": percent}.get(fmt, lambda v: number(v, ",.0f"))
        shown = show(theirs).text if theirs is not None else "-"
        table.rows.append(
            [
                word(claim), word(shown), show(here), number(None if theirs is None else here / theirs, ".2f"),
                number(model, ".2f", "x"), word(unlike),
            ]
        )  # fmt: skip

    parts: dict[tuple, dict[str, Record]] = {}
    for record in records:
        config = record["config"]
        parts.setdefault((config.get("model"), config.get("dtype"), config["part"]), {})[record["arm"]] = record
    speeds = {}
    for (size, dtype, part), arms in parts.items():
        if part != "forward_backward" or PACKED not in arms:
            continue
        name = f"{size}, {dtype}"
        packed, single = arms[PACKED], arms.get(SINGLE) or arms["single"]
        unlike = OTHERS + ("" if SINGLE in arms else "; single has our kernels") + "; dtype of the paper unknown"
        broken = parts.get((size, dtype, "breakdown"), {})
        b_packed, b_single = broken.get(PACKED), broken.get(single["arm"])
        tokens = [record["metrics"]["real_tokens_per_batch"] for record in (single, packed)]
        ratio = packed["metrics"]["real_tokens_per_second"] / single["metrics"]["real_tokens_per_second"]
        speeds[name] = ratio
        model = None
        if b_packed and b_single:
            there = [scaled_seconds(record) for record in (b_single, b_packed)]
            model = there[0] / there[1] * tokens[1] / tokens[0] if there[0] and there[1] else None
        add(f"{name}: packed over one document at a time", PAPER.get(size), ratio, unlike, model=model)
        if b_packed and b_single:
            busy = [r["metrics"]["seconds"] - r["metrics"]["idle"] for r in (b_single, b_packed)]
            kernels = [r["metrics"]["conv"] + r["metrics"]["scan"] for r in (b_single, b_packed)]
            scale = tokens[1] / tokens[0]
            add(f"{name}: all kernels, without waiting for the host", None, busy[0] / busy[1] * scale, unlike)
            both = f"{name}: convolution and scan, forward and backward"
            add(both, KERNELS if size == "1.4b" else None, kernels[0] / kernels[1] * scale, unlike)
        add(f"{name}: packed, tokens/s", None, packed["metrics"]["real_tokens_per_second"], "", "n")
    if speeds:
        largest = max(speeds, key=lambda name: speeds[name])
        add(f"largest over the sizes ({largest})", LARGEST, speeds[largest], OTHERS + "; the sizes")
    claims = {"next_fit": "padding, documents as received", "greedy": "padding, greedy packing"}
    for strategy, record in parts.get((None, None, "padding"), {}).items():
        here = record["metrics"]["padding_fraction"]
        add(claims[strategy], PADDING[strategy], here, "our distribution of lengths, rows of 2048", "%")
    table.notes = [
        "Forward and backward, medians of rounds in turns. float32: products without TF32. 3.91x, 5.05x, 19.1 % and 0.41 % as a "
        "summary of the paper reports them. The model scales matrix products by peak FLOP/s, the scan by special-function "
        "rates, everything else by memory bandwidth, and leaves the waiting of the host as it is: it was not measured."
    ]
    return [table, *_lengths(records)]


FAMILIES = {"conv": "convolution", "scan": "scan", "matrix_products": "matrix products"}


def _lengths(records: Sequence[Record]) -> list[Table]:
    """Return microseconds against a sequence's length, batch 1."""
    rows = [record for record in records if record["config"]["part"] == "length"]
    names = " | ".join(f"{title} (us) = {name}" for name, title in FAMILIES.items())
    table = Table(
        "lengths",
        "One sequence at a time: a block's forward and backward",
        make_columns(f"!layers | !dtype | tokens | {names}"),
    )
    for record in rows:
        config, metrics = record["config"], record["metrics"]
        times = [number(1e6 * metrics[f"{name}_seconds"], ",.0f") for name in FAMILIES]
        table.rows.append(
            [word(config["layers"]), word(config["dtype"]), Cell(str(config["tokens"]), (config["tokens"],)), *times]
        )
    return [table] if rows else []


def figures(records: Sequence[Record]) -> list[Figure]:
    """Draw time a token against length, and the rate beside that of the longest sequence."""
    rows = [record for record in records if record["config"]["part"] == "length"]
    if not rows:
        return []
    dtype = rows[0]["config"]["dtype"]
    fig, (left, right) = axes(2, width=9, height=3.6)
    for layers, line in (("mamba-ssm", "-"), ("packmamba", "--")):
        some = [r for r in rows if (r["config"]["layers"], r["config"]["dtype"]) == (layers, dtype)]
        tokens = [r["config"]["tokens"] for r in some]
        for colour, (name, title) in zip(("#0072B2", "#D55E00", "#009E73"), FAMILIES.items()):
            each = [r["metrics"][f"{name}_seconds"] / r["config"]["tokens"] for r in some]
            if each and min(each) > 0:
                left.plot(tokens, [1e6 * value for value in each], line, color=colour, label=f"{title}, {layers}")
                right.plot(tokens, [each[-1] / value for value in each], line, color=colour)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xlabel("tokens of the sequence")
    left.set(yscale="log", ylabel="microseconds a token")
    right.set(ylim=(0, None), ylabel="rate over that of the longest")
    legend_below(fig)
    caption = (
        f"A block of the 1.4B model, {dtype}, batch 1, forward and backward: short sequences leave the device idle."
    )
    return [finish(fig, "lengths", caption)]


KINDS = {"paper": Kind(tables, figures)}
