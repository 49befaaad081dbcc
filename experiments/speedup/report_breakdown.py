"""Tables and figures of where a whole model's time goes, by family of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.speedup.report_models import Arm, by_model, name_bars
from packmamba.report.aggregate import Record
from packmamba.report.figures import Figure, axes, finish, legend_below
from packmamba.report.tables import Cell, Column, Table, number, percent, word

FAMILIES = (
    "matrix products",
    "scan",
    "conv",
    "norm and elementwise",
    "loss",
    "optimizer",
    "communication",
    "other",
    "idle",
)
"""Metrics of a record, seconds of one call each; experiments.speedup.breakdown measures them."""
_PALETTE = ("#0072B2", "#009E73", "#56B4E9", "#E69F00", "#CC79A7", "#7A4B9A", "#8C6D1F", "#9aa0a8", "#e6e8eb")
_COLOURS = dict(zip(FAMILIES, _PALETTE))
_PARTS = {"forward_backward": "forward, backward", "steps": "optimizer step"}


def breakdown_tables(records: Sequence[Record]) -> list[Table]:
    """Where the time goes, for each model size, part and arm."""
    table = Table(
        "breakdown",
        "Time by family of kernels",
        [
            Column("model", ("model",), False),
            Column("arm", ("arm",), False),
            Column("what", ("part",), False),
            Column("ms", ("ms",)),
            *(Column(f"{family} (%)", (family.replace(" ", "_"),)) for family in FAMILIES),
            Column("outside matrix products, scan and conv", ("outside",)),
        ],
        notes=[
            "One batch, or one optimizer step, by torch.profiler, kernels that overlap counted once; idle: no kernel runs (no "
            "more than the time without the profiler, which slows the host, leaves, but all gaps below 10 us)."
        ],
    )
    for model, part, arm, record in _breakdowns(records):
        metrics = record["metrics"]
        shares = {family: metrics[family] / metrics["seconds"] for family in FAMILIES}
        inside = sum(shares[family] for family in ("matrix products", "scan", "conv"))
        cells = [Cell(f"{100 * share:.1f}", (share,)) for share in shares.values()]
        head = [word(model), word(str(arm)), word(_PARTS[part]), number(1e3 * metrics["seconds"], ".4g")]
        table.rows.append([*head, *cells, percent(1 - inside)])
    return [table] if table.rows else []


def breakdown_figures(records: Sequence[Record]) -> list[Figure]:
    """Stacked bars: microseconds for each real token, a panel for each model size."""
    tokens = {(model, part, arm): record["metrics"]["real_tokens_per_batch"] for part in _PARTS
              for model, arms in by_model(records, "speedup", part).items() for arm, record in arms.items()}  # fmt: skip
    found = [breakdown for breakdown in _breakdowns(records) if breakdown[:3] in tokens]
    if not found:
        return []
    models = list(dict.fromkeys(model for model, *_ in found))
    places = {key: y for y, key in enumerate(dict.fromkeys((part, arm) for _, part, arm, _ in found))}
    fig, panels = axes(len(models), width=3.6 * len(models) + 3.2, height=1.9 + 0.36 * len(places))
    for ax, name in zip(panels, models):
        for model, part, arm, record in found:
            if model != name:
                continue
            left, scale = 0.0, 1e6 / tokens[name, part, arm]
            for family in FAMILIES:
                width = scale * record["metrics"][family]
                ax.barh(places[part, arm], width, left=left, color=_COLOURS[family], height=0.7)
                left += width
        labels = [f"{arm}, step" if part == "steps" else str(arm) for part, arm in places]
        name_bars(ax, labels, ax is panels[0])
        ax.set(title=name, xlabel="microseconds per real token")
    for family in FAMILIES:
        panels[0].barh(0, 0, color=_COLOURS[family], label=family)
    legend_below(fig)
    caption = (
        "Device time of a batch (forward and backward, bare loop; 'step': whole optimizer step through Lightning) over its real "
        "tokens, by family of kernels; idle, in light grey, is waiting for the host."
    )
    return [finish(fig, "breakdown", caption)]


def _breakdowns(records: Sequence[Record]) -> list[tuple[str, str, Arm, Record]]:
    parts = {part: by_model(records, "breakdown", part) for part in _PARTS}
    models = list(dict.fromkeys(model for found in parts.values() for model in found))
    return [
        (model, part, arm, record)
        for model in models for part, found in parts.items() for arm, record in found.get(model, {}).items()
    ]  # fmt: skip
