"""One table of the paper's numbers beside those of this machine, and time against a sequence's
length.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.speedup.report import PAPER
from packmamba.lab.report.aggregate import Record
from packmamba.lab.report.figures import Figure, axes, finish, legend_below
from packmamba.lab.report.html import Kind
from packmamba.lab.report.tables import Table, make_columns, make_table, number, word

# arXiv 2408.03865, A100. 3.91x, 19.1 %, 0.41 % and 5.05x (the largest ratio over the sizes) as a
# summary of it reports them.
LARGEST, KERNELS = 5.05, 3.91
PADDING = {"next_fit": ("padding, documents as received", 0.191), "greedy": ("padding, greedy packing", 0.0041)}
SINGLE, PACKED = "mamba-ssm-single", "packed"
OTHERS = {
    "mamba-ssm-padded-2048": "packed over padding to 2048, mamba-ssm's layers",
    "padded-2048": "packed over padding to 2048, our layers",
    "mamba-ssm-single-8": "packed over one document at a time, lengths rounded up to multiples of 8",
    "padded-sorted": "packed over batches sorted by length and padded",
}


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the paper's numbers, one a row, beside what these records say."""
    columns = make_columns("!what | !size | !dtype | the paper, A100 = paper | here | here over the paper = ratio")
    table = Table("paper", "The paper's numbers and ours", columns)

    def add(
        what: str, size: str, dtype: str, here: float, theirs: float | None = None, form: str = ".2f", unit: str = "x"
    ) -> None:
        ratio = None if theirs is None else here / theirs
        numbers = number(theirs, form, unit), number(here, form, unit), number(ratio, ".2f")
        table.rows.append([*map(word, (what, size, dtype)), *numbers])

    parts: dict[tuple, dict[str, Record]] = {}
    for record in records:
        config = record["config"]
        parts.setdefault((config.get("model"), config.get("dtype"), config["part"]), {})[record["arm"]] = record
    speeds = {}
    for (size, dtype, part), arms in parts.items():
        if part != "forward_backward" or PACKED not in arms:
            continue
        packed = arms[PACKED]
        arms = {arm: record for arm, record in arms.items() if record["commit"] == packed["commit"]}
        single = arms.get(SINGLE) or arms["single"]
        timed = parts.get((size, dtype, "breakdown"), {})
        pair = [timed[arm]["metrics"] for arm in (single["arm"], PACKED) if arm in timed]
        tokens = [record["metrics"]["real_tokens_per_batch"] for record in (single, packed)]

        def ratio_of(seconds: Sequence[float], tokens: Sequence[float] = tokens) -> float:
            return seconds[0] / seconds[1] * tokens[1] / tokens[0]

        speeds[size, dtype] = ratio_of([record["metrics"]["seconds_per_batch"] for record in (single, packed)])
        add("packed over one document at a time", size, dtype, speeds[size, dtype], PAPER.get(size))
        if len(pair) == 2:
            kernels = ratio_of([m["seconds"] - m["idle"] for m in pair])
            add("all kernels, the host never waited for", size, dtype, kernels, KERNELS if size == "1.4b" else None)
            add("convolution and scan", size, dtype, ratio_of([m["conv"] + m["scan"] for m in pair]))
        for other, what in OTHERS.items():
            if other in arms:
                rates = [record["metrics"]["real_tokens_per_second"] for record in (packed, arms[other])]
                add(what, size, dtype, rates[0] / rates[1])
        add("packed, tokens/s", size, dtype, packed["metrics"]["real_tokens_per_second"], form=",.0f", unit="")
    if speeds:
        largest = max(speeds, key=lambda name: speeds[name])
        add("largest over the sizes", *largest, speeds[largest], LARGEST)
    for strategy, record in parts.get((None, None, "padding"), {}).items():
        what, theirs = PADDING[strategy]
        add(what, "", "", record["metrics"]["padding_fraction"], theirs, "%", "")
    table.notes = [
        "Forward and backward, medians of rounds in turns; packed: our kernels. float32: products without TF32. Not alike: the "
        "paper's documents, sizes, dtype and software are not known; lengths are our distribution's, rows of 2048 in the "
        "padding. 3.91x, 5.05x, 19.1 % and 0.41 % as a summary of the paper reports them; they stand beside both dtypes, since "
        "the paper's is not known. A size's rows are of one run."
    ]  # fmt: skip
    if any(SINGLE not in arms for (_, _, part), arms in parts.items() if part == "forward_backward"):
        table.notes.append("mamba-ssm is not installed here: single has our kernels.")
    return [table, *_lengths(records)]


FAMILIES = {"conv": "convolution", "scan": "scan", "matrix_products": "matrix products"}


def _lengths(records: Sequence[Record]) -> list[Table]:
    """Return microseconds against a sequence's length, batch 1."""
    rows = [record for record in records if record["config"]["part"] == "length"]
    times = " | ".join(f"{title} (us) = {name}:,.0f" for name, title in FAMILIES.items())
    table = make_table(
        "lengths",
        "One sequence at a time: a block's forward and backward",
        f"!layers | !dtype | tokens:d | {times}",
        [one["config"] | {name: 1e6 * one["metrics"][f"{name}_seconds"] for name in FAMILIES} for one in rows],
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
    caption = f"A block of the 1.4B model, {dtype}, batch 1, forward and backward: short ones leave the device idle."
    return [finish(fig, "lengths", caption)]


KINDS = {"paper": Kind(tables, figures)}
